"""Models on the same GPUs: the optimum <= every method, against all assignments."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.algorithms.placement.cost_model import LayerCosts, layer_costs
from aurora.algorithms.search.slot_search import slot_search
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions
from tests.conftest import cluster
from tests.planner.test_plan import profile
from tests.strategies import clusters, profiles


@st.composite
def problems(draw):
    models = draw(st.integers(2, 3))
    n = draw(st.integers(1, 3))
    machines = draw(clusters(n))
    sources = [draw(profiles(n, max_layers=1)) for _ in range(models)]
    costs = tuple(layer_costs(machines, source, 0).grouped(np.arange(source.experts) % n) for source in sources)
    held = {draw(st.integers(0, models - 1)): np.array(draw(st.permutations(range(n))))}
    return ColocationProblem(costs, held, draw(st.booleans()))


def random_problem(seed, n):
    """Ports and speeds 100/80/50/40, lognormal token counts, compute and traffic of one size."""
    rng = np.random.default_rng(seed)
    speed_G = np.array([1.0, 0.8, 0.5, 0.4])[np.arange(n) * 4 // n]
    costs = []
    for _ in range(2):
        tokens_SJ = (rng.lognormal(size=(n, n)) * 1000).astype(np.int64)
        compute = tokens_SJ.sum(axis=0) / speed_G[:, None] * rng.choice([0.25, 1.0, 4.0])
        costs.append(
            LayerCosts(
                own_WGE=tokens_SJ[None], dispatch_bytes=1, combine_bytes=1, expert_s_WGE=compute[None],
                gate_s_WG=1000 / speed_G[None], aggregate_s_WG=300 / speed_G[None], out_Bps=speed_G, in_Bps=speed_G,
            )
        )  # fmt: skip
    return ColocationProblem(tuple(costs), {0: np.arange(n)})


def assignments(problem):
    """Every (M, G) groups on GPUs that the problem allows."""
    every = [np.array(p) for p in permutations(range(problem.gpus))]
    models, movers = range(len(problem.costs_M)), problem.movers_M.tolist()
    return map(np.stack, product(*(every if model in movers else [problem.held[model]] for model in models)))


def optimum(problem):
    return min(map(problem.value_s, assignments(problem)))


@given(problems())
def test_the_slot_search_prices_the_objective(problem):
    group_MG = next(iter(assignments(problem)))
    held_GM = group_MG[problem.movers_M].T + np.arange(len(problem.movers_M)) * problem.gpus
    _, found_s = slot_search(problem.layer, held_GM, np.random.default_rng(0), 0, replicas=False, effort=0)
    assert found_s == pytest.approx(problem.value_s(group_MG))


@given(problems(), st.sampled_from(sorted(COLOCATE)))
def test_every_method_places_each_group_once_and_moves_a_model_only_where_it_may(problem, name):
    group_MG = COLOCATE[name](problem, np.random.default_rng(1))
    assert (np.sort(group_MG, axis=1) == np.arange(problem.gpus)).all()
    assert group_MG.shape == (len(problem.costs_M), problem.gpus)
    for model, held_G in problem.held.items():
        assert problem.movable or group_MG[model].tolist() == held_G.tolist()
    assert problem.value_s(group_MG) >= optimum(problem) * (1 - 1e-12)
    assert COLOCATE[name](problem, np.random.default_rng(1)).tolist() == group_MG.tolist()


@given(problems())
def test_local_search_is_never_worse_than_where_it_starts(problem):
    priced = {}
    for name in ("matching", "local-search"):
        group_MG = COLOCATE[name](problem, np.random.default_rng(0))
        priced[name] = (problem.value_s(group_MG), problem.sequential_s(group_MG))
    assert priced["local-search"] <= priced["matching"]


def test_of_assignments_that_one_port_decides_the_one_is_taken_whose_models_take_least():
    """Rank 0 of model a sends so much that nothing else counts; the other models' groups still go where they send least."""
    rng = np.random.default_rng(0)
    machines = cluster(1.0, 1.0, 1.0)
    busy = profile([[[[0, 0, 500], [0, 0, 500], [500, 500, 0]]]], name="a")
    others = [profile(rng.integers(0, 9, (1, 1, 3, 3))) for _ in range(2)]
    costs = tuple(layer_costs(machines, source, 0).grouped(np.arange(3)) for source in (busy, *others))
    problem = ColocationProblem(costs, {0: np.arange(3)})
    found = COLOCATE["local-search"](problem, np.random.default_rng(0))
    least = min((problem.value_s(each), problem.sequential_s(each)) for each in assignments(problem))
    own = COLOCATE["matching"](problem, np.random.default_rng(0))
    assert problem.value_s(found) == least[0]
    assert least[1] <= problem.sequential_s(found) <= problem.sequential_s(own)


def test_on_five_mixed_gpus_local_search_is_near_the_best():
    gaps, theirs = [], []
    for seed in range(8):
        problem = random_problem(seed, 5)
        best_s = optimum(problem)
        for name, values in (("local-search", gaps), ("matching", theirs)):
            values.append(problem.value_s(COLOCATE[name](problem, np.random.default_rng(0))) / best_s)
    assert np.mean(gaps) <= 1.005
    assert max(gaps) <= 1.03
    assert np.mean(theirs) > np.mean(gaps)


@given(st.integers(2, 3).flatmap(lambda n: st.tuples(clusters(n, equal=True), profiles(n, max_experts=3, max_layers=1),
                                                     profiles(n, max_experts=9, max_layers=1))))  # fmt: skip
def test_matching_holds_for_unequal_numbers_of_experts_and_many_a_gpu(case):
    """What sends and receives is counted anew from the placement of single experts."""
    machines, few, many = case
    n = len(machines)
    plan = make_plan(machines, [few, many], PlanOptions(assign="contiguous", colocate="matching"))
    layout = [model.placement.gpu_E(0) for model in plan.models]
    sizes = {len(held) for held in plan.models[1].placement.slots_LG[0]}
    assert max(sizes) - min(sizes) <= 1

    def port_bytes(*gpu_E):
        send, recv = np.zeros(n), np.zeros(n)
        for source, where in zip((few, many), gpu_E, strict=True):
            for rank in range(n):
                for expert, gpu in enumerate(where):
                    if gpu != rank:
                        moved = source.tokens_TLSE[:, 0, rank, expert].sum() * source.dispatch_bytes
                        send[rank] += moved
                        recv[gpu] += moved
        return max(send.max(), recv.max())

    every = [port_bytes(layout[0], np.array(p)[layout[1]]) for p in permutations(range(n))]
    assert port_bytes(*layout) == min(every)
