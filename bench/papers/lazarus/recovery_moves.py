"""Weights that move when experts are placed anew after a change of membership."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.recovery import LayerSlots, holds, moved_bytes
from aurora.types import Placement
from aurora.types.arrays import BoolArray, IntArray


@dataclass(frozen=True)
class RecoveryMoves:
    """Weights that move in a recovery.

    Attributes:
        lost_L: by layer, the experts that no alive node held; their weights come from a checkpoint.
        bytes_NN: (N, N) int64, bytes of expert weights from node to node; nodes have their numbers from before the change.
        moved: number of replicas that nodes get from other nodes.
    """

    lost_L: tuple[tuple[int, ...], ...]
    bytes_NN: IntArray
    moved: int


def recovery_moves(
    old_LN: Sequence[LayerSlots], alive_N: BoolArray, placement: Placement, expert_bytes: int = 1
) -> RecoveryMoves:
    """Returns the weights that move to a placement that `recover` returned.

    Args:
        old_LN, alive_N: as `recover` was given them.
        placement: what it returned.
        expert_bytes: bytes of one expert's weights.
    """
    left, bytes_E = np.flatnonzero(alive_N), np.full(placement.experts, expert_bytes, dtype=np.int64)
    bytes_NN, lost_L, moved = np.zeros((len(alive_N),) * 2, dtype=np.int64), [], 0
    for old_N, slots_G in zip(old_LN, placement.slots_LG, strict=True):
        before_NE = holds([old_N[node] for node in left.tolist()], placement.experts)
        after_NE = holds(slots_G, placement.experts)
        lost_E = before_NE.sum(axis=0) == 0
        bytes_NN[np.ix_(left, left)] += moved_bytes(before_NE, after_NE, bytes_E)
        moved += int((after_NE * (1 - before_NE) * ~lost_E).sum())
        lost_L.append(tuple(np.flatnonzero(lost_E).tolist()))
    return RecoveryMoves(tuple(lost_L), bytes_NN, moved)
