"""Grouped experts by (active experts, rows): two predictions of a kernel's time against its measured one.

Usage: python -m bench.gpu.experts. One is a sum of one-expert curves; the other the overhead and expert curves of
`aurora measure compute`, fitted to equal rows for all experts. Errors are |predicted / measured - 1|.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from aurora.algorithms.workload.curve_fit import BalancedPoints, fit_curve, grouped_curves
from bench.gpu.device import Cuda, chosen, report

EXPERTS, HIDDEN, INNER, MOST_ROWS = 16, 4096, 2048, 8192


def made_experts(device: Cuda, hidden: int, inner: int, count: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns an experts module of Mixtral with drawn weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=count)
    config._experts_implementation = "eager" if device.dry or dtype != torch.bfloat16 else "grouped_mm"
    experts = MixtralExperts(config).to(device.name, dtype).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.02)
    return experts


def measure(device: Cuda) -> list[tuple[int, int, float]]:
    """Returns (active experts, rows, seconds) of a grid; the active experts have equal rows, as nearly as can be."""
    count, hidden, inner, most = (4, 32, 16, 16) if device.dry else (EXPERTS, HIDDEN, INNER, MOST_ROWS)
    experts = made_experts(device, hidden, inner, count)
    flushed = torch.empty(1 << 10 if device.dry else 1 << 28, dtype=torch.uint8, device=device.name)  # caches are as in a run
    cold_ms = device.milliseconds(flushed.zero_)
    found = []
    for active in (1 << power for power in range(count.bit_length())):
        for rows in (1 << power for power in range(most.bit_length())):
            if rows >= active:
                states = torch.randn(rows, hidden, device=device.name).bfloat16()
                index = (torch.arange(rows, device=device.name) % active)[:, None]
                call = partial(experts, states, index, torch.ones(rows, 1, dtype=torch.bfloat16, device=device.name))
                took_ms = device.milliseconds(lambda call=call: (flushed.zero_(), call()), 10) - cold_ms  # type: ignore[misc]
                found.append((active, rows, max(took_ms, 1e-3) / 1e3))
    return found


def main() -> None:
    """Prints the grid and both predictions' errors."""
    points = measure(chosen())
    active_X, rows_X, seconds_X = map(np.array, zip(*points, strict=True))
    alone_X, most = active_X == 1, active_X.max()
    equal_X = active_X == np.minimum(rows_X, most)
    one = fit_curve(rows_X[alone_X], seconds_X[alone_X])
    balanced = BalancedPoints(rows_X[equal_X].astype(float), seconds_X[equal_X], int(most), int(most))
    expert, overhead = grouped_curves(balanced)
    said = {"sums": active_X * one(rows_X / active_X), "grouped": overhead(rows_X) + active_X * expert(rows_X / active_X)}
    left_X = ~alone_X & ~equal_X  # what neither is fitted to
    errors = {name: np.abs(seconds / seconds_X - 1)[left_X] for name, seconds in said.items()}
    for row in zip(active_X, rows_X, 1e6 * seconds_X, *(1e6 * seconds for seconds in said.values()), strict=True):
        print("{} active, {} rows: {:.1f} us, sum of one-expert curves {:.1f}, grouped {:.1f}".format(*row))
    figures = {f"{name}_{which}_error": float(of(error)) for name, error in errors.items() for which, of in
               (("median", np.median), ("worst", np.max))}  # fmt: skip
    report(**figures, active_rows_us=[[int(a), int(r), round(1e6 * s, 2)] for a, r, s in points])


if __name__ == "__main__":
    main()
