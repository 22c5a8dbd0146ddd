"""Steps' seconds: those of aurora.simulate where traffic leaves no choice, and near them between the grid's points."""

from dataclasses import replace

import numpy as np
import pytest

import aurora
from aurora.algorithms.workload.step_traffic import drawn_windows
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.simulator.requests import StepPrices, drawn_requests, grid, simulate_requests
from aurora.types import Curve, PlanOptions, Profile, RequestOptions, SyntheticOptions
from tests.conftest import cluster

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}


def one_expert_each(gate=(1.0, 2.0)):
    """Rank 0 sends all its tokens to the expert of rank 1, and the other way round: no draw changes that."""
    line = Curve(np.array([1.0, 2.0]), np.array(gate))
    curves = {"reference": {"gate": line, "expert": Curve(np.array([1.0, 2.0]), np.array([3.0, 6.0])), "aggregate": line}}
    return Profile("m", "print", np.array([[[[0, 5], [5, 0]]]]), 1, 1, 1, 1, 1, curves)


CONTIGUOUS = PlanOptions("contiguous", "contiguous", "contiguous", "openshop")


def test_a_step_of_the_profiles_own_tokens_takes_what_simulate_says():
    profile = one_expert_each()
    plan = make_plan(cluster(2.0, 2.0), [profile], CONTIGUOUS)
    prices = StepPrices(plan, profile, 64)
    assert prices(np.array([5, 5])) == pytest.approx(aurora.simulate(plan, profile).seconds)


def test_steps_of_plans_with_micro_batches_are_cut():
    """Two halves of five tokens or more overlap; a single token cannot be cut."""
    profile = one_expert_each()
    plan = make_plan(cluster(2.0, 2.0), [profile], CONTIGUOUS)
    whole, halves = (StepPrices(each, profile, 64) for each in (plan, plan.with_micro_batches(2)))
    assert halves(np.array([5, 5])) == pytest.approx(aurora.simulate(plan.with_micro_batches(2), profile).seconds)
    assert halves(np.array([64, 64])) < 0.9 * whole(np.array([64, 64]))
    assert halves(np.array([1, 1])) == whole(np.array([1, 1]))
    assert halves.transfers == 2 * whole.transfers


@pytest.mark.parametrize("tokens", [(1, 1), (7, 7), (64, 1), (5, 50), (33, 31), (17, 2)])
def test_where_all_costs_are_in_proportion_to_tokens_interpolation_is_exact(tokens, monkeypatch):
    """A token of the busier rank takes 1 s at the gate, half a second each way, 3 s at its expert and 1 s to be aggregated."""
    monkeypatch.setattr("aurora.simulator.requests.DRAWN_LAYERS", 1)  # no draw differs from another
    profile, tokens_G = one_expert_each(), np.array(tokens)
    prices = StepPrices(make_plan(cluster(2.0, 2.0), [profile], CONTIGUOUS), profile, 64)
    assert prices.simulated(tokens_G[None], (0,)) == pytest.approx(6 * max(tokens))
    assert prices(tokens_G) == pytest.approx(6 * max(tokens))


@pytest.fixture(scope="module")
def mixed():
    """A plan of a skewed model on four GPUs, one of which is slow, and its traffic."""
    traffic = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=200))
    demo = aurora.load("demo-4")
    gpus = (*demo.gpus[:3], replace(demo.gpus[3], speed=0.25))
    machines = replace(demo, gpus=gpus)
    return make_plan(machines, [traffic]), traffic


@pytest.mark.full
def test_interpolated_steps_are_near_simulated_ones(mixed):
    """Of 12 steps as they come, with prompts on some ranks and not on others: 5 % in the median, 20 % at most."""
    prices, rng = StepPrices(*mixed, most_tokens=512), np.random.default_rng(0)
    off = []
    for number in range(12):
        tokens_G = np.where(rng.random(4) < 0.4, rng.integers(100, 513, 4), rng.integers(1, 40, 4))
        off.append(prices(tokens_G) / prices.simulated(tokens_G[None], (number,)) - 1)
    assert np.median(np.abs(off)) < 0.05
    assert np.abs(off).max() < 0.2
    assert prices.points < 200


def test_the_rank_that_takes_longest_counts_as_the_busy_one(mixed):
    """A prompt on the slow GPU takes longer than one on a fast one; both beside prompts elsewhere are near what is simulated."""
    prices = StepPrices(*mixed, most_tokens=512)
    slow, fast = (prices(np.array(tokens)) for tokens in ([10, 10, 10, 512], [512, 10, 10, 10]))
    assert slow > fast
    both = np.array([512, 10, 10, 512])
    assert prices(both) == pytest.approx(prices.simulated(both[None], (0,)), rel=0.1)


def test_the_same_seed_gives_the_same_seconds_in_any_sequence(mixed):
    steps = [np.array([1, 2, 3, 4]), np.array([512, 1, 1, 1])]
    one, other = (StepPrices(*mixed, most_tokens=512, seed=3) for _ in range(2))
    assert [one(step) for step in steps] == [other(step) for step in reversed(steps)][::-1]


def test_layers_that_stand_for_all_are_near_all(mixed, monkeypatch):
    whole = StepPrices(*mixed, most_tokens=64)(np.array([32, 32, 32, 32]))
    monkeypatch.setattr("aurora.simulator.requests.TRANSFERS", 2 * 2 * 12)  # two of the four layers
    assert StepPrices(*mixed, most_tokens=64)(np.array([32, 32, 32, 32])) == pytest.approx(whole, rel=0.25)


def test_the_grid_ends_at_the_most_tokens():
    assert grid(20).tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert grid(1).tolist() == [1]


def test_drawn_steps_have_the_ranks_tokens_and_no_expert_twice():
    traffic = draw_profile("zipf:1.2", CONFIG, SyntheticOptions(sources=4, window_tokens=200, token_level=True))
    tokens_S = np.array([0, 1, 7, 300])
    for token_level in (False, True):
        drawn = drawn_windows(traffic, tokens_S[None], np.random.default_rng(0), token_level)
        assert (drawn.tokens_TLSE.sum(axis=3) == 2 * tokens_S).all()
        assert (drawn.tokens_TLSE <= tokens_S[:, None]).all()
        assert (drawn.routing is not None) == token_level
    many = drawn_windows(traffic, np.full((1, 4), 50_000), np.random.default_rng(0)).tokens_TLSE[0] / 100_000
    assert np.abs(many - traffic.tokens_TLSE[0] / 400).max() < 0.01


def test_a_source_that_was_never_seen_routes_as_the_others():
    silent = replace(one_expert_each(), tokens_TLSE=np.array([[[[0, 5], [0, 0]]]]))
    assert drawn_windows(silent, np.array([[3, 3]]), np.random.default_rng(0)).tokens_TLSE.tolist() == [[[[0, 3], [0, 3]]]]


def test_a_run_says_how_far_its_steps_are_off_and_what_it_leaves_out(mixed):
    options = RequestOptions(rate=3, isl=100, osl=8, duration_s=20, max_num_batched_tokens=256)
    found = simulate_requests(*mixed, drawn_requests(options), options)
    assert len(found.off_C) == 8
    assert np.abs(found.off_C).max() < 0.2
    assert "whatever a request's context" in found.assumptions[0]


def test_two_models_are_refused(mixed):
    plan, traffic = mixed
    both = make_plan(plan.cluster, [traffic, replace(traffic, model="other")])
    with pytest.raises(BadInput, match="expected one model, whose requests are simulated, found 2"):
        StepPrices(both, traffic, 64)
