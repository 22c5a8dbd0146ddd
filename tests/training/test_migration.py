"""Moves of experts between ranks."""

from aurora.training.migration import ExpertTransfer, expert_transfers
from aurora.types import Placement


def test_experts_come_from_the_holder_that_sent_least_or_from_the_files():
    wanted = Placement.evenly((((0, 1), (2, 3), (0, 1, 4)),))
    held_R = [((0, 1),), ((0, 1, 2),), ((),)]
    assert expert_transfers(wanted, held_R) == [
        ExpertTransfer(0, 3, None, 1),
        ExpertTransfer(0, 0, 0, 2),
        ExpertTransfer(0, 1, 1, 2),
        ExpertTransfer(0, 4, None, 2),
    ]
