"""The price of a migration: the bytes that travel from GPU to GPU, and the schedule of their all-to-all."""

import numpy as np

from aurora.planner.alltoall.schedule import scheduled
from aurora.types import Cluster, Schedule
from aurora.types.arrays import IntArray


def moved_bytes(old_GE: IntArray, new_GE: IntArray, bytes_E: IntArray) -> IntArray:
    """Returns (G, G) int64 bytes of the expert weights that move from rows to columns.

    All GPUs that held an expert send equal parts of it; odd bytes come from the GPUs that have sent the least. Experts that no
    GPU held before come from elsewhere and are not counted.

    Args:
        old_GE: (G, E) int64, 1 where GPU g holds expert e before the migration.
        new_GE: (G, E) int64, 1 where GPU g holds expert e after the migration.
        bytes_E: (E,) int64, bytes of each expert's weights.
    """
    n = len(old_GE)
    moved_GG = np.zeros((n, n), dtype=np.int64)
    for gpu, expert in np.argwhere((new_GE == 1) & (old_GE == 0)).tolist():
        owners = np.flatnonzero(old_GE[:, expert])
        if not len(owners):
            continue
        owners = owners[np.argsort(moved_GG[owners].sum(axis=1), kind="stable")]
        part, odd = divmod(int(bytes_E[expert]), len(owners))
        moved_GG[owners, gpu] += part + (np.arange(len(owners)) < odd)
    return moved_GG


def migration_schedule(bytes_GG: IntArray, cluster: Cluster, rng: np.random.Generator) -> Schedule:
    """Returns the schedule of a migration's bytes (G, G) on the cluster's network."""
    return scheduled(bytes_GG, cluster.network, "openshop", rng=rng)[1]
