"""The controller on batches of requests, as a server of few requests has them: each begins with its prompts.

All windows of a batch are of the same requests, whose tokens choose alike. So they differ little from each other, but much from
those of the next batch; and prompts choose other experts than what is generated.
"""

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller
from aurora.algorithms.gpu_slots import gpu_loads
from aurora.algorithms.replicas.rebalance import rebalance
from aurora.types import ControlOptions

EXPERTS, GPUS, LAYERS = 16, 4, 4
BATCH, REQUESTS, TOKENS = 6, 32, 500  # windows of a batch after its prompts; its requests; tokens of a window
MOVING_S = 0.5  # of a window of one second


def kinds(number, rng):
    """Shares (number, 2, L, E) of kinds of text: in prompts, and in what is generated."""
    text = rng.dirichlet(np.full(EXPERTS, 1.0), (number, 1, LAYERS))
    return 0.6 * text + 0.4 * rng.dirichlet(np.full(EXPERTS, 1.0), (number, 2, LAYERS))


def batch(share_2LE, rng):
    """Loads of the windows of one batch."""
    request_RLE = rng.gamma(share_2LE[1] * EXPERTS * 2, size=(REQUESTS, LAYERS, EXPERTS))
    own_LE = (request_RLE / request_RLE.sum(axis=2, keepdims=True)).mean(axis=0)
    return [rng.multinomial(4 * TOKENS, share_2LE[0]), *(rng.multinomial(TOKENS, own_LE) for _ in range(BATCH))]


def served(control, windows):
    """The windows after which experts moved, and how much load the slowest GPUs had.

    Every change is performed. The load is that from the second batch on, over that of one placement for all windows, known before.
    """
    known = rebalance(sum(windows), control.held_LGP, enough=0.001)
    moved, slowest, slowest_known = [], 0.0, 0.0
    for window, load_LE in enumerate(windows):
        if window > BATCH:
            loads = (gpu_loads(load_LE[None], table_LGP, np.ones(GPUS)) for table_LGP in (control.held_LGP, known.held_LGP))
            slowest, slowest_known = (
                sum_s + each.max(axis=2).sum() for sum_s, each in zip((slowest, slowest_known), loads, strict=True)
            )
        if control.window(load_LE).action != "keep":
            moved.append(window)
            control.moved(MOVING_S)
    return moved, slowest / slowest_known


@pytest.mark.full
def test_batches_of_the_same_traffic_are_served_as_by_one_placement_for_all_and_other_traffic_is_followed():
    """Prompts and what is generated take turns faster than changes for either would pay: one placement serves both."""
    length, moves, over_known = BATCH + 1, [], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        held_LGP = np.tile(np.arange(EXPERTS).reshape(GPUS, -1), (LAYERS, 1, 1))
        control = Controller(held_LGP, 40_000, ControlOptions(period_s=1.0), move_Bps=1e8, clock=lambda: 0.0)
        for share_2LE in kinds(2, rng):
            moved, over = served(control, [each for _ in range(10) for each in batch(share_2LE, rng)])
            assert moved[0] <= 2
            assert over <= 1.04
            over_known.append(over)
            moves.append(len([window for window in moved if window >= 3 * length]))
    assert np.mean(moves) <= 16, "of 49 windows"
    assert np.mean(over_known) <= 1.02
