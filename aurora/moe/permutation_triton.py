"""Triton versions of `aurora.moe.permutation` and of local-first replica selection. Imported only if Triton is installed."""

import torch
import triton
import triton.language as tl

from aurora.moe.local_first import LocalFirst

BLOCK = 1024  # columns a program


@triton.jit
def _gather(rows, index, out, width, row_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(index + row)
    tl.store(out + row * out_stride + column, tl.load(rows + source * row_stride + column, mask=inside), mask=inside)


@triton.jit
def _weighted_sum(
    rows, row_of, weights, out, width, row_stride, weight_stride, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for k in tl.static_range(K):
        source = tl.load(row_of + token * K + k)
        row = tl.load(rows + source * row_stride + column, mask=column < tl.where(source >= 0, width, 0), other=0.0).to(
            tl.float32
        )
        if WEIGHTED:
            row *= tl.where(source >= 0, tl.load(weights + token * weight_stride + k).to(tl.float32), 0.0)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_gate(gate_up, out, ends, experts, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + experts - 1):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, begin = column < width, gate_up + row * stride
        gate = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)  # as rounded as torch's
        up = tl.load(begin + width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _local_first(
    tokens, ranks, begins, ends, wholes, phases, out, sources, experts, most, rank, S: tl.constexpr, M: tl.constexpr
):
    expert = tl.program_id(0)
    source, replica = tl.arange(0, S), tl.arange(0, M)
    there, at = replica < most, expert * most + replica
    count = tl.load(tokens + source * experts + expert, mask=source < sources, other=0)
    load, whole, phase = tl.reduce(count, 0, _plus), tl.load(wholes + expert), tl.load(phases + expert)
    holder = tl.load(ranks + at, mask=there, other=0)
    end = (load * tl.load(ends + at, mask=there, other=0) + phase) // whole
    capacity = end - (load * tl.load(begins + at, mask=there, other=0) + phase) // whole
    local = tl.minimum(capacity, tl.load(tokens + holder * experts + expert, mask=there, other=0))
    capacity -= local
    until = tl.associative_scan(capacity, 0, _plus)
    own = tl.where(holder == rank, local, 0)
    before = tl.reduce(tl.where(source < rank, count, 0), 0, _plus) - tl.reduce(tl.where(holder < rank, local, 0), 0, _plus)
    upto = before + tl.reduce(tl.where(source == rank, count, 0), 0, _plus) - tl.reduce(own, 0, _plus)
    shared = tl.minimum(until, upto) - tl.maximum(until - capacity, before)
    tl.store(out + at, tl.associative_scan(own + tl.maximum(shared, 0), 0, _plus), mask=there)


def local_first(tokens_SE: torch.Tensor, rule: LocalFirst) -> torch.Tensor:
    """Divides one rank's tokens over replicas by the local-first rule, on a CUDA device; see `LocalFirst.forward`."""
    sources, experts = tokens_SE.shape
    most = rule.rank_EM.shape[1]
    out_EM = torch.empty_like(rule.rank_EM)
    _local_first[(experts,)](
        tokens_SE.contiguous(), rule.rank_EM, rule.from_EM, rule.upto_EM, rule.whole_E, rule.phase_E, out_EM,
        sources, experts, most, rule.rank,
        S=triton.next_power_of_2(sources), M=triton.next_power_of_2(most),
    )  # fmt: skip
    return out_EM


def gather_rows(rows: torch.Tensor, index_X: torch.Tensor, out: torch.Tensor) -> None:
    """As `aurora.moe.permutation.gather_rows`, for tensors on a CUDA device."""
    if out.numel():
        grid = (len(index_X), triton.cdiv(rows.shape[1], BLOCK))
        _gather[grid](rows, index_X.contiguous(), out, rows.shape[1], rows.stride(0), out.stride(0), BLOCK=BLOCK)


def weighted_sum(rows: torch.Tensor, row_NK: torch.Tensor, weights_NK: torch.Tensor | None) -> torch.Tensor:
    """As `aurora.moe.permutation.weighted_sum`, in float32, for tensors on a CUDA device."""
    tokens, top_k = row_NK.shape
    out = rows.new_empty(tokens, rows.shape[1])
    if out.numel():
        weights = row_NK if weights_NK is None else weights_NK
        for each in (rows, *([] if weights_NK is None else [weights_NK])):
            assert each.stride(1) == 1 or each.shape[1] == 1, "expected rows that are contiguous"
        strides = (rows.stride(0), weights.stride(0))
        grid = (tokens, triton.cdiv(rows.shape[1], BLOCK))
        _weighted_sum[grid](
            rows, row_NK.contiguous(), weights, out, rows.shape[1], *strides,
            K=top_k, WEIGHTED=weights_NK is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def silu_gate(gate_up: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up (X, F); each row of gate_up (X, 2 F) holds gate, then up.

    Rows from ends_E[-1] on, after the last expert's rows, are left uninitialised.
    """
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), width)
    grid = (len(out), triton.cdiv(width, BLOCK))
    _silu_gate[grid](gate_up, out, ends_E, len(ends_E), width, gate_up.stride(0), BLOCK=BLOCK)
    return out
