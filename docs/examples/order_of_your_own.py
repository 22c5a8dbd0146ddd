"""Registers an order of your own, and compares it with shipped ones on the same network."""

import numpy as np

import aurora


def rotation(bytes_GG, network, *, rng):
    """In step s every rank sends to the s-th rank after it."""
    ranks = len(bytes_GG)
    return aurora.Order("rotation", [[i, (i + step) % ranks] for step in range(1, ranks) for i in range(ranks)])


aurora.register("order", "rotation", rotation)
bytes_GG = np.random.default_rng(0).integers(0, 10_000_000, (8, 8))
for name in ("rotation", "sjf", "all-at-once", "openshop-best"):
    schedule = aurora.order(bytes_GG, method=name)  # checked by replay
    print(f"{name}: {schedule.makespan_s * 1e3:.2f} ms, {schedule.makespan_s / schedule.fluid_bound_s:.3f} of the bound")
