"""Plans with their traces and traffic, small and as large as reports must stand."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.plan import make_plan
from aurora.reports.inputs import ReportInputs
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Placement, PlanOptions, Profile, SyntheticOptions
from tests.conftest import cluster

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}


def profile(seed=0, sources=4, skew="zipf:1", layers=2, name="one", windows=2):
    options = SyntheticOptions(sources=sources, window_tokens=64, windows=windows, seed=seed)
    return replace(draw_profile(skew, CONFIG | {"num_hidden_layers": layers}, options), model=name)


def measured(trace, slower=1.25):
    """As if run: everything takes longer by one factor."""
    return replace(trace, kind="measured", start_s_X=trace.start_s_X * slower, end_s_X=trace.end_s_X * slower)


@pytest.fixture(scope="session")
def alone():
    """One model on four GPUs with a predicted and a measured trace."""
    given = profile()
    plan = make_plan(cluster(*[1e6] * 4), [given])
    trace = simulate_plan(plan, [given])
    return ReportInputs(plan, (("a.npz", trace), ("b.npz", measured(trace))), (given,))


@pytest.fixture(scope="session")
def together():
    """Two models of different depth."""
    given = profile(0, name="one"), profile(1, layers=3, name="two")
    plan = make_plan(cluster(*[1e6] * 4), given)
    trace = simulate_plan(plan, given)
    return ReportInputs(plan, (("a.npz", trace),), given)


@pytest.fixture(scope="session")
def replicated(alone):
    """Expert 0 sits on two GPUs."""
    slots, split = ((0, 1), (0, 2, 3), (4, 5), (6, 7)), ((0.25, 1.0), (0.75, 1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    model = replace(alone.plan.models[0], placement=Placement((slots,) * 2, (split,) * 2))
    return ReportInputs(replace(alone.plan, models=(model,)), (), alone.profiles)


@pytest.fixture(scope="session")
def large():
    """64 GPUs and 58 layers of 256 experts: two layers planned, and repeated."""
    rng = np.random.default_rng(0)
    layers, own = 58, 2
    share_LE = np.stack([rng.permutation((1.0 + np.arange(256)) ** -0.8) for _ in range(own)])
    tokens_LSE = rng.poisson(2000 * share_LE[:, None] / share_LE.sum(axis=1)[:, None, None], (own, 64, 256))
    few = Profile("large", "", tokens_LSE[None], 1, 7168, 14336, 10, 10, profile().curves)
    plan = make_plan(cluster(*[50e9] * 64), [few], PlanOptions(place="balanced", assign="contiguous"))
    (model,) = plan.models
    times = layers // own
    whole = replace(
        model,
        load_LE=np.tile(model.load_LE, (times, 1)),
        placement=Placement(model.placement.slots_LG * times),
        dispatch_L=model.dispatch_L * times,
        combine_L=model.combine_L * times,
        **{name: np.tile(getattr(model, name), times) for name in ("dispatch_s_L", "fluid_bound_s_L", "one_to_one_bound_s_L")},
    )
    many = replace(few, tokens_TLSE=np.tile(few.tokens_TLSE, (1, times, 1, 1)))
    return ReportInputs(replace(plan, models=(whole,)), (), (many,))
