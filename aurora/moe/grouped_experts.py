"""Experts of a rank as one grouped matrix product for each projection, over rows sorted by expert; the host knows no counts."""

from typing import Any

import torch

from aurora.moe.layouts import apply_experts


def compute_experts(experts: Any, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the answers (X, H) of an experts module to rows (X, H) sorted by expert, unweighted.

    On a CUDA device gated experts without biases take one `torch._grouped_mm` for each projection and, with SiLU, one launch
    between them. The host waits for nothing if they are bfloat16; of other dtypes torch reads the ends on the host. Elsewhere,
    and for other experts, the module itself answers, and the host waits for the ends.

    Args:
        experts: the module, as transformers' are.
        rows: (X, H); those behind the last expert's are not read, and their answers may be anything, or missing.
        ends_E: (E,) int32, where the rows of each expert end.
    """
    if rows.is_cuda and len(ends_E) and is_grouped(experts):
        return grouped_products(experts, rows, ends_E)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
    slots = torch.arange(len(ends_E), device=rows.device).repeat_interleave(counts_E)
    return apply_experts(experts, rows[: len(slots)], slots)


def is_grouped(experts: Any) -> bool:
    """Returns whether `grouped_products` knows an experts module: gated, without biases and norms, of whole 16 bytes a row."""
    if not getattr(experts, "has_gate", False) or experts.has_bias or experts.has_post_expert_norm:
        return False
    sizes = (*experts.gate_up_proj.shape[1:], *experts.down_proj.shape[1:])
    return hasattr(torch, "_grouped_mm") and not any(size * experts.down_proj.element_size() % 16 for size in sizes)


def grouped_products(experts: Any, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the answers (X, H) by grouped matrix products; see `compute_experts`."""
    transposed = experts.is_transposed
    up, down = (each if transposed else each.transpose(1, 2) for each in (experts.gate_up_proj, experts.down_proj))
    gate_up = torch._grouped_mm(rows, up, offs=ends_E)
    if rows.is_cuda and _has_silu_gate(experts):
        from aurora.moe import permutation_triton

        gated = permutation_triton.silu_gate(gate_up, ends_E)
    else:
        gated = experts._apply_gate(gate_up)
    return torch._grouped_mm(gated, down, offs=ends_E)


def _has_silu_gate(experts: Any) -> bool:
    """Returns whether an experts module's gate is silu(first half) * second half."""
    usual = getattr(experts._apply_gate, "__name__", "") == "_default_apply_gate"
    return usual and type(experts.act_fn).__name__ in ("SiLU", "SiLUActivation")
