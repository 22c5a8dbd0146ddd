"""Groups of a rank's experts, whose rows travel in stages while the experts of other groups compute."""

import numpy as np

from aurora.types.arrays import IntArray


def expert_groups(load_P: IntArray, gpu_P: IntArray, groups: int) -> IntArray:
    """Divides the experts of each GPU into groups of nearly equal loads.

    The experts of a GPU, the largest load first, are dealt to the groups forwards, then backwards, and so on. So the stages of
    all GPUs are about equally long, and no port waits for the busiest port of each stage. Ranks that know all loads make the
    same groups.

    Args:
        load_P: (P,) int64, the rows of each physical expert.
        gpu_P: (P,) int64, its GPU.
        groups: number of groups of each GPU.

    Returns:
        (P,) int64, the group of each physical expert.

    Example:
        >>> expert_groups(np.array([9, 5, 4, 1, 7]), np.array([0, 0, 0, 0, 1]), 2)
        array([0, 1, 1, 0, 0])
    """
    by_load = np.lexsort((-load_P, gpu_P))
    held_G = np.bincount(gpu_P)
    nth_P = np.arange(len(gpu_P)) - np.repeat(held_G.cumsum() - held_G, held_G)
    turn_P, place_P = np.divmod(nth_P, groups)
    group_P = np.empty_like(nth_P)
    group_P[by_load] = np.where(turn_P % 2, groups - 1 - place_P, place_P)
    return group_P


def stage_rows(rows_SP: IntArray, gpu_P: IntArray, groups: int) -> tuple[IntArray, IntArray]:
    """Divides a dispatch into stages, one for each group of experts.

    Args:
        rows_SP: (S, P) int64, the rows that each rank sends to each physical expert.
        gpu_P, groups: as in `expert_groups`.

    Returns:
        (K, S, S) int64, the rows from each rank (second axis) to each rank in each stage, and (P,) each expert's stage.
    """
    group_P = expert_groups(rows_SP.sum(axis=0), gpu_P, groups)
    rows_KGS = np.zeros((groups, len(rows_SP), len(rows_SP)), dtype=np.int64)
    np.add.at(rows_KGS, (group_P, gpu_P), rows_SP.T)
    return rows_KGS.swapaxes(1, 2), group_P
