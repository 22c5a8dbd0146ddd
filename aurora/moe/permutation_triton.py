"""Triton versions of `aurora.moe.permutation`. Imported only if Triton is installed."""

import torch
import triton
import triton.language as tl

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
        for tensor in (rows, *([] if weights_NK is None else [weights_NK])):
            assert tensor.stride(1) == 1 or tensor.shape[1] == 1, "expected rows that are contiguous"
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
