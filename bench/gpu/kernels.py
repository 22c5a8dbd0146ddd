"""Token kernels on one GPU: their values against torch's, and their bandwidth over that of a copy; the aim is 0.7.

Usage: python -m bench.gpu.kernels.
"""

from collections.abc import Callable

import torch

from aurora.moe.expert_map import LocalFirst
from bench.gpu.device import Cuda, chosen, report

SHAPE = (8192, 7168, 8)  # rows, width, choices of a token
DRY_SHAPE = (16, 40, 4)


def check_values(device: Cuda) -> int:
    """Compares all kernels with torch, for each dtype and several widths. Returns how many."""
    from aurora.moe import permutation_triton, push_layout_triton

    torch.manual_seed(0)
    checked = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (40,) if device.dry else (1024, 1030, 7168):
            rows = torch.randint(-8, 9, (24, width), device=device.name).to(dtype)
            place_NK = torch.randint(-1, 24, (12, 3), device=device.name)
            weights = torch.randint(1, 5, (12, 3), device=device.name) / 4  # sums are exact
            out = torch.empty(12, width, dtype=dtype, device=device.name)
            permutation_triton.gather_rows(rows, place_NK[:, 0].clamp(0), out)
            assert torch.equal(out, rows[place_NK[:, 0].clamp(0)]), f"gather of {dtype}, {width} wide"
            wanted = (rows[place_NK.clamp(0)].float() * (weights * (place_NK >= 0))[..., None]).sum(1).to(dtype)
            assert torch.equal(permutation_triton.weighted_sum(rows, place_NK, weights), wanted), f"sum of {dtype}, {width}"
            checked += 2
    rank_NK = torch.randint(-1, 5, (50, 3), device=device.name)
    row_of_RX, count, place_NK = push_layout_triton.lay_out(rank_NK, 4, 150)
    for rank in range(4):
        goes_NK = rank_NK == rank
        goes_NK &= goes_NK.cumsum(1) == 1
        choices = goes_NK.flatten().nonzero()[:, 0]
        assert int(count.view(4, -1)[rank, 0]) == len(choices)
        assert torch.equal(row_of_RX[rank, : len(choices)].long(), choices)
        assert torch.equal(place_NK.flatten()[choices], 150 * rank + torch.arange(len(choices), device=device.name))
        checked += 1
    tokens_SE = torch.randint(0, 9, (3, 3), device=device.name)
    rule = LocalFirst(((0, 1), (0,), (1, 2)), 1)
    on_host = rule(tokens_SE.cpu())
    assert torch.equal(rule.to(device.name)(tokens_SE).cpu(), on_host), "local first"
    return checked + 1


def bandwidths(device: Cuda) -> dict[str, float]:
    """Bytes read and written a second over those of a copy; a sum reads top k rows for each one that it writes."""
    from aurora.moe import permutation_triton

    count, width, top_k = DRY_SHAPE if device.dry else SHAPE
    rows = torch.randn(count, width, device=device.name).bfloat16()
    index = torch.randperm(count, device=device.name)
    out, row_bytes = torch.empty_like(rows), 2 * width
    place, weights = index.view(-1, top_k), torch.rand(count // top_k, top_k, device=device.name)
    token = torch.arange(count // top_k, device=device.name).repeat_interleave(top_k)
    summed = torch.zeros(count // top_k, width, device=device.name)
    copied, reduced = 2 * count * row_bytes, (count + count // top_k) * row_bytes
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "gather": (copied, lambda: permutation_triton.gather_rows(rows, index, out)),
        "gather_by_torch": (copied, lambda: torch.index_select(rows, 0, index, out=out)),
        "sum": (reduced, lambda: permutation_triton.weighted_sum(rows, place, weights)),
        "sum_by_torch": (reduced, lambda: summed.zero_().index_add_(0, token, rows[index] * weights.view(-1, 1))),
    }
    copy_Bpms = copied / device.milliseconds(lambda: out.copy_(rows))
    return {"copy_GBps": copy_Bpms / 1e6} | {
        name: size / device.milliseconds(call) / copy_Bpms for name, (size, call) in ways.items()
    }


if __name__ == "__main__":
    found = chosen()
    report(compared=check_values(found), **bandwidths(found))
