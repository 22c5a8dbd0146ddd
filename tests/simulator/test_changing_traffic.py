"""Replays of traffic that changes."""

import numpy as np
import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.simulator.changing_traffic import CHANGES, RECORDED, ChangingTraffic, changing_traffic, follow_traffic
from aurora.types import GpuSlots, Placement, SyntheticOptions

CONFIG = {
    "model_type": "mixtral", "num_local_experts": 16, "num_hidden_layers": 3, "num_experts_per_tok": 2, "hidden_size": 8,
    "intermediate_size": 8,
}  # fmt: skip
WINDOWS, TOKENS, GPUS, SLOTS = 40, 200_000, 4, 6


@pytest.fixture(scope="module")
def domains():
    """Profiles of two domains with other hot experts."""
    return [draw_profile("zipf:1", CONFIG, SyntheticOptions(windows=4, seed=seed)) for seed in (0, 1)]


def start():
    """Experts in sequence, and two spare slots on each GPU."""
    held_LGP = np.full((3, GPUS, SLOTS), -1)
    held_LGP[:, :, :4] = np.arange(16).reshape(GPUS, 4)
    return held_LGP


def followed(traffic):
    return {each.name: each for each in follow_traffic(traffic, start(), GpuSlots.equal(GPUS, SLOTS), 1000, 1e6)}


@pytest.mark.parametrize("change", CHANGES)
def test_windows_are_full_and_the_same_for_a_seed(change, domains):
    traffic = changing_traffic(domains, change, WINDOWS, 5, TOKENS, seed=3)
    load_WLE, part_WD = traffic.load_WLE, traffic.part_WD
    assert abs(load_WLE.sum(axis=2) - TOKENS).max() <= 1  # rounded by domain
    np.testing.assert_allclose(part_WD.sum(axis=1), 1)
    again = changing_traffic(domains, change, WINDOWS, 5, TOKENS, seed=3)
    np.testing.assert_array_equal(load_WLE, again.load_WLE)
    assert 0 < abs(load_WLE - traffic.mean_WLE).max() < 0.1 * TOKENS  # chance, and what recorded windows differ by
    assert {0, 1} == set(part_WD.argmax(axis=1).tolist())  # both domains come


def test_domains_follow_each_other_as_said(domains):
    traffic = changing_traffic(domains, "alternating", 25, 10)
    assert traffic.part_WD.argmax(axis=1).tolist() == [0] * 10 + [1] * 10 + [0] * 5
    assert np.flatnonzero(~traffic.known_W).tolist() == [0, 10, 20]
    np.testing.assert_allclose(changing_traffic(domains, "drift", 11, 10).part_WD[:, 1], np.arange(11) / 10)
    crowd = changing_traffic(domains, "flash-crowd", 50, 10)
    np.testing.assert_allclose(crowd.part_WD[:, 1], [0.0] * 40 + [0.9] * 10)


def test_a_plan_as_it_is_counts_by_its_parts_of_replicas():
    """Expert 0 sends three quarters of its tokens to the first GPU, so that both have 40; by even parts they would have 30, 50."""
    placement = Placement((((0, 1), (0, 2)),), (((0.75, 1.0), (0.25, 1.0)),))
    load_WLE = np.tile([40.0, 10.0, 30.0], (4, 1, 1))
    traffic = ChangingTraffic(load_WLE, np.ones((4, 1)), load_WLE[:1] / 80)
    for held, slowest in ((placement, 1.0), (placement.held_LGP(), 1.25)):
        ways = {each.name: each for each in follow_traffic(traffic, held, GpuSlots.equal(2, 2), 1, 1.0, every=())}
        assert ways["as it is"].slowest_W.tolist() == [slowest] * 4


def test_recorded_windows_come_in_sequence(domains):
    traffic = changing_traffic(domains, RECORDED)
    np.testing.assert_array_equal(traffic.load_WLE[5], domains[1].tokens_TLSE[1].sum(axis=1))
    assert traffic.part_WD.argmax(axis=1).tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize("change", ["alternating", "steps"])
def test_the_controller_is_near_clairvoyant_and_moves_a_fraction_of_what_eplb_moves(change, domains):
    traffic = changing_traffic(domains, change, WINDOWS, 10, TOKENS, seed=1)
    ways, known_W = followed(traffic), traffic.known_W
    slowest = {name: each.slowest_W[known_W].mean() for name, each in ways.items()}
    assert slowest["controller"] <= 1.03 * slowest["clairvoyant"]
    assert slowest["controller"] < slowest["EPLB every 1"] + 0.02  # the loss up to which a placement is kept
    assert ways["controller"].bytes_W.sum() <= ways["EPLB every 1"].bytes_W.sum() / 4
    assert ways["controller"].worst() <= ways["as it is"].worst()
    assert (ways["as it is"].bytes_W.sum(), ways["as it is"].changes, ways["controller"].stall_s) == (0, 0, 0.0)
    assert ways["EPLB every 1"].stall_s > ways["controller"].lengthened_s


def test_what_cannot_be_replayed_is_refused(domains):
    for arguments, sentence in (
        (("sudden",), "`change`: expected one of alternating, steps, drift, diurnal, flash-crowd, recorded, found 'sudden'"),
        (("steps", 0), "`windows`: expected one or more, found 0"),
        (("steps", 5, 0), "`lasting`: expected one or more, found 0"),
    ):
        with pytest.raises(BadInput, match=sentence):
            changing_traffic(domains, *arguments)
    for change in CHANGES:  # nothing would change
        with pytest.raises(BadInput, match="`profile`: expected two or more, between which traffic changes, found 1"):
            changing_traffic(domains[:1], change)
    other = draw_profile("zipf:1", {**CONFIG, "num_local_experts": 8})
    with pytest.raises(BadInput, match="expected profiles of one model, found different layers or experts"):
        changing_traffic([domains[0], other], "steps")


def test_over_servers_only_eplb_takes_experts_to_other_servers(domains):
    traffic = changing_traffic(domains, "alternating", WINDOWS, 10, TOKENS)
    flat, inside = (
        {
            each.name: each
            for each in follow_traffic(traffic, start(), GpuSlots.equal(GPUS, SLOTS), 1000, 1e6, server_G=server_G)
        }
        for server_G in (None, np.array([0, 0, 1, 1]))
    )
    for way in ("as it is", "EPLB every 1"):
        assert np.array_equal(flat[way].slowest_W, inside[way].slowest_W)
    for way in ("controller", "clairvoyant"):  # servers as a whole stay unequal
        assert flat[way].slowest_W.mean() < inside[way].slowest_W.mean() < inside["as it is"].slowest_W.mean()
