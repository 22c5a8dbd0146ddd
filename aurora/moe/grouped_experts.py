"""Computes all experts of a rank with one grouped matrix product per projection, over rows that are sorted by expert.

The numbers of rows per expert stay on the GPU, so the host need not wait for them.
"""

from typing import Any

import torch

from aurora.moe.layouts import apply_experts


def compute_experts(experts: Any, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the experts' unweighted outputs (X, H) for rows (X, H) that are sorted by expert.

    On a CUDA device, gated experts without biases take one `torch._grouped_mm` per projection and, for SiLU, one kernel between
    them. In bfloat16 the host does not synchronize; with other dtypes torch copies `ends_E` to the host. On other devices, and
    for other experts, `experts` itself is called, and the host waits for `ends_E`.

    Args:
        experts: an experts module of transformers.
        rows: (X, H). Rows after the last expert's are ignored, and their outputs are undefined or missing.
        ends_E: (E,) int32, the end of each expert's rows: expert e has rows ends_E[e - 1] to ends_E[e] - 1.
    """
    if rows.is_cuda and len(ends_E) and is_grouped(experts):
        return grouped_products(experts, rows, ends_E)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
    slots = torch.arange(len(ends_E), device=rows.device).repeat_interleave(counts_E)
    return apply_experts(experts, rows[: len(slots)], slots)


def is_grouped(experts: Any) -> bool:
    """Returns whether `grouped_products` supports an experts module.

    Its experts must be gated, have neither biases nor norms, and weights whose dimensions are multiples of 16 bytes.
    """
    if not getattr(experts, "has_gate", False) or experts.has_bias or experts.has_post_expert_norm:
        return False
    sizes = (*experts.gate_up_proj.shape[1:], *experts.down_proj.shape[1:])
    return hasattr(torch, "_grouped_mm") and not any(size * experts.down_proj.element_size() % 16 for size in sizes)


def grouped_products(experts: Any, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the experts' outputs (X, H) by grouped matrix products; arguments as in `compute_experts`."""
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
