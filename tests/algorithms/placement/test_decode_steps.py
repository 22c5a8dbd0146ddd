"""Placements for steps of few tokens, whose experts take the weights that are read: against all placements and drawn steps."""

from dataclasses import replace
from itertools import product
from math import comb

import numpy as np
import pytest

import aurora
from aurora.algorithms.placement.cost_model import aimed_costs
from aurora.algorithms.workload.step_traffic import drawn_steps
from aurora.errors import BadInput
from aurora.io import load_plan, save
from aurora.types import Cluster, Curve, Gpu, PlanOptions, Profile

GPUS, TOP_K = 3, 2
KERNEL_S, WEIGHTS_S, TOKEN_S = 30e-6, 20e-6, 1e-6  # a, b and c of t = a + b * active + c * tokens


def straight(fixed_s, token_s):
    return Curve(np.array([1.0, 1e6]), np.array([fixed_s + token_s, fixed_s + token_s * 1e6]))


NOTHING = straight(0.0, 0.0)
CURVES = {
    "cpu": {"gate": NOTHING, "expert": straight(WEIGHTS_S, TOKEN_S), "aggregate": NOTHING, "overhead": straight(KERNEL_S, 0.0)}
}


def profile(load_E):
    tokens_TLSE = np.repeat(np.array(load_E)[None, None, None] // GPUS, GPUS, axis=2)
    return Profile("m", "", tokens_TLSE, TOP_K, 1, 1, 1000, 0, CURVES)


def cluster(slots):
    return Cluster("three", tuple(Gpu(f"{g}", "cpu", g, 1e15, 1e15, slots * 1000) for g in range(GPUS)))


def expert_s(load_E, tokens):
    """(E,) seconds of each expert in a step, by the definition of a mean over binomial counts."""
    p_E = np.array(load_E) / (sum(load_E) / TOP_K)
    return np.array([WEIGHTS_S * (1 - (1 - p) ** tokens) + TOKEN_S * tokens * p for p in p_E])


def longest_s(gpu_E, cost_E):
    return KERNEL_S + np.bincount(gpu_E, weights=cost_E, minlength=GPUS).max()


def best_s(cost_E, slots):
    every = (np.array(gpu_E) for gpu_E in product(range(GPUS), repeat=len(cost_E)))
    return min(longest_s(gpu_E, cost_E) for gpu_E in every if np.bincount(gpu_E, minlength=GPUS).max() <= slots)


def planned(load_E, slots, tokens_per_step):
    options = PlanOptions(place="swap-search", aim="own", tokens_per_step=tokens_per_step)
    return aurora.plan(cluster(slots), profile(load_E), options)


@pytest.mark.parametrize("tokens", [2, 8, 64])
@pytest.mark.parametrize("slots", [2, 3])
def test_six_experts_on_three_gpus_take_the_shortest_step_of_all_placements(tokens, slots):
    for seed in range(4):
        load_E = np.random.default_rng(seed).integers(1, 300, 6) * GPUS
        cost_E = expert_s(load_E, tokens)
        plan, steps = planned(load_E, slots, (tokens, tokens)), load_E.sum() / TOP_K / tokens
        assert longest_s(plan.models[0].placement.gpu_E(0), cost_E) == pytest.approx(best_s(cost_E, slots))
        assert plan.objective_s / steps == pytest.approx(best_s(cost_E, slots), rel=1e-4)  # but for bytes on fast ports
        assert plan.bound_s <= plan.objective_s


def test_a_hot_expert_has_a_gpu_to_itself_at_prefill_and_company_at_decode():
    """Its weights are read once a step, however many tokens choose it, while active experts limit the other GPUs."""
    load_E, slots = np.array([900, 180, 180, 180, 180, 180]), 3
    by_tokens, by_steps = (planned(load_E, slots, tokens).models[0].placement.gpu_E(0) for tokens in (None, (8, 8)))
    assert sorted(np.bincount(by_tokens, minlength=GPUS)) == [1, 2, 3]
    assert sorted(np.bincount(by_steps, minlength=GPUS)) == [2, 2, 2]
    cost_E = expert_s(load_E, 8)
    assert longest_s(by_steps, cost_E) == pytest.approx(best_s(cost_E, slots))
    assert longest_s(by_tokens, cost_E) > 1.1 * best_s(cost_E, slots)


def test_expected_seconds_are_the_mean_over_drawn_steps():
    load_E, tokens = np.array([900, 180, 12, 600, 180, 300]), 8
    steps = np.random.default_rng(0).binomial(tokens, load_E / (load_E.sum() / TOP_K), (200_000, 6))
    drawn_E = (WEIGHTS_S * (steps > 0) + TOKEN_S * steps).mean(axis=0)
    costs = aimed_costs(cluster(2), profile(load_E).in_steps((tokens, tokens)), (), 0, "own")
    found_E = costs.expert_s_WGE[0, 0] / (load_E.sum() / TOP_K / tokens)
    assert found_E == pytest.approx(drawn_E, rel=0.01)
    assert found_E == pytest.approx(expert_s(load_E, tokens))


def test_a_range_counts_each_size_alike():
    load_E = np.array([900, 180, 12, 600, 180, 300])
    of = [
        aimed_costs(cluster(2), profile(load_E).in_steps(size), (), 0, "own") for size in ((8, 8), (16, 16), (32, 32), (8, 32))
    ]
    assert of[3].expert_s_WGE == pytest.approx(np.mean([each.expert_s_WGE for each in of[:3]], axis=0))


def test_replicas_read_their_weights_in_every_step_that_uses_them():
    """An expert of 6 tokens of 8 in a step, on two GPUs: each reads it if one of 3 tokens comes, not for half of the time."""
    load_E, tokens = np.array([600, 201, 201, 201, 201, 201]), 8
    costs = aimed_costs(cluster(3), profile(load_E).in_steps((tokens, tokens)), (), 0, "own")
    split_EG = np.zeros((6, GPUS))
    split_EG[0, :2] = 0.5
    split_EG[1:, 2] = 1
    p = 0.5 * load_E[0] / (load_E.sum() / TOP_K)
    each_s = sum(comb(tokens, n) * p**n * (1 - p) ** (tokens - n) * (WEIGHTS_S + TOKEN_S * n) for n in range(1, tokens + 1))
    steps = load_E.sum() / TOP_K / tokens
    assert costs.phase_times(split_EG).expert_G[:2] / steps == pytest.approx([each_s] * 2)
    assert each_s > 0.6 * (costs.expert_s_WGE[0, 0, 0] / steps)
    windows = aimed_costs(cluster(3), profile(load_E), (), 0, "own")  # each window a step: a share takes its share
    assert windows.phase_times(split_EG).expert_G[0] == pytest.approx(windows.expert_s_WGE[0, 0, 0] / 2)


def test_a_plan_keeps_its_steps_and_prices_by_them(tmp_path):
    load_E = np.array([900, 180, 180, 180, 180, 180])
    plan = planned(load_E, 3, (4, 16))
    save(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.options.tokens_per_step == (4, 16)
    assert PlanOptions(tokens_per_step=8).tokens_per_step == (8, 8)
    assert aurora.evaluate(loaded, [profile(load_E)]).slowdown == pytest.approx(0, abs=1e-6)
    for wrong in ((16, 4), (0, 4), (4,), ("4", "16")):
        with pytest.raises(BadInput, match="tokens_per_step"):
            replace(plan.options, tokens_per_step=wrong)


def test_steps_are_drawn_for_the_simulator():
    drawn = drawn_steps(profile(np.array([900, 180, 12, 600, 180, 300])), (4, 16), 0)
    assert drawn.tokens_TLSE.sum(axis=(1, 2, 3)).tolist() == [4 * TOP_K, 8 * TOP_K, 16 * TOP_K]
    assert (drawn.tokens_TLSE.sum(axis=(1, 2)) <= np.array([4, 8, 16])[:, None]).all()
