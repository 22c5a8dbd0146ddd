"""The replay of tasks that take turns, in which the controller is compared."""

import numpy as np
import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.types import GpuSlots, SyntheticOptions
from bench.following import WHOLE, TakingTurns, follow

CONFIG = {
    "model_type": "mixtral", "num_local_experts": 16, "num_hidden_layers": 3, "num_experts_per_tok": 2, "hidden_size": 8,
    "intermediate_size": 8,
}  # fmt: skip
GPUS, SLOTS, PAIRS = 4, 6, 200_000


@pytest.fixture(scope="module")
def traffic():
    """Two domains with other hot experts, in turns of ten windows."""
    domains = [draw_profile("zipf:1", CONFIG, SyntheticOptions(windows=4, seed=seed)) for seed in (0, 1)]
    return TakingTurns.of(domains, 40, 10, PAIRS, seed=1)


def test_domains_take_turns_and_windows_are_full(traffic):
    assert traffic.domain_W.tolist() == [0] * 10 + [1] * 10 + [0] * 10 + [1] * 10
    assert np.flatnonzero(~traffic.known_W).tolist() == [0, 10, 20, 30]
    assert (traffic.load_WLE.sum(axis=2) == PAIRS).all()
    assert 0 < abs(traffic.load_WLE - traffic.mean_WLE).max() < 0.1 * PAIRS  # chance, and what recorded windows differ by


def test_the_controller_is_near_clairvoyant_and_moves_a_fraction_of_what_eplb_moves(traffic):
    held_LGP = np.full((3, GPUS, SLOTS), -1)
    held_LGP[:, :, :4] = np.arange(16).reshape(GPUS, 4)
    ways = follow(traffic, held_LGP, GpuSlots.equal(GPUS, SLOTS), 1000, 1e6)
    slowest = {name: each.slowest_W[traffic.known_W].mean() for name, each in ways.items()}
    assert slowest["controller"] <= 1.03 * slowest["clairvoyant"]
    assert slowest["controller"] < slowest["EPLB every 1"] + 0.02  # the loss up to which a placement is kept
    assert ways["controller"].bytes_W.sum() <= ways["EPLB every 1"].bytes_W.sum() / 4
    assert ways["as it is"].bytes_W.sum() == 0
    worst = {name: np.convolve(each.slowest_W, np.full(WHOLE, 1 / WHOLE), mode="valid").max() for name, each in ways.items()}
    assert worst["controller"] <= worst["as it is"]
