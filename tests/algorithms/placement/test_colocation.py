"""Models on the same GPUs: the optimum <= every method, against all assignments."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem, search
from aurora.algorithms.placement.cost_model import LayerCosts, layer_costs
from aurora.algorithms.placement.linear_program import PathProgram
from aurora.algorithms.placement.objective import objectives
from aurora.algorithms.search.slot_search import slot_search
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions
from tests.conftest import cluster
from tests.planner.test_plan import profile
from tests.strategies import clusters, profiles

ROUNDED = 2e-6  # relative: what the solver's tolerances may add


@st.composite
def problems(draw):
    models = draw(st.integers(2, 3))
    n = draw(st.integers(1, 3))
    machines = draw(clusters(n))
    sources = [draw(profiles(n, max_layers=1)) for _ in range(models)]
    costs = tuple(layer_costs(machines, source, 0).grouped(np.arange(source.experts) % n) for source in sources)
    held = {draw(st.integers(0, models - 1)): np.array(draw(st.permutations(range(n))))}
    return ColocationProblem(costs, held, draw(st.booleans()), draw(st.sampled_from(objectives(models))))


def random_problem(seed, n, objective="causal", models=2):
    """Ports and speeds 100/80/50/40, lognormal token counts, compute and traffic of one size."""
    rng = np.random.default_rng(seed)
    speed_G = np.array([1.0, 0.8, 0.5, 0.4])[np.arange(n) * 4 // n]
    costs = []
    for _ in range(models):
        tokens_SJ = (rng.lognormal(size=(n, n)) * 1000).astype(np.int64)
        compute = tokens_SJ.sum(axis=0) / speed_G[:, None] * rng.choice([0.25, 1.0, 4.0])
        costs.append(
            LayerCosts(
                own_WGE=tokens_SJ[None], dispatch_bytes=1, combine_bytes=1, expert_s_WGE=compute[None],
                gate_s_WG=1000 / speed_G[None], aggregate_s_WG=300 / speed_G[None], out_Bps=speed_G, in_Bps=speed_G,
            )
        )  # fmt: skip
    return ColocationProblem(tuple(costs), {0: np.arange(n)}, objective=objective)


def assignments(problem):
    """Every (M, G) groups on GPUs that the problem allows."""
    every = [np.array(p) for p in permutations(range(problem.gpus))]
    models, movers = range(len(problem.costs_M)), problem.movers_M.tolist()
    return map(np.stack, product(*(every if model in movers else [problem.held[model]] for model in models)))


def exact(problem):
    """(M, G) groups of the best of all assignments of movable models, by a program of whole shares."""
    layer, n, models = problem.layer, problem.gpus, len(problem.movers_M)
    _, _, sums, columns = layer.part_s_GEXW.shape
    gpu_V, expert_V = (each.ravel() for each in np.indices((n, models * n)))
    slot_V = gpu_V * models + expert_V // n
    once_EV = [at_V == np.arange(models * n)[:, None] for at_V in (expert_V, slot_V)]
    program = PathProgram(
        layer.part_s_GEXW.transpose(2, 3, 0, 1).reshape(sums * columns, -1), gpu_V,
        layer.base_s_GXW.transpose(1, 2, 0).reshape(sums * columns, n),
        (np.arange(2).repeat(2)[:, None] * columns + np.arange(columns)).ravel(),
        layer.paths_ZYW.reshape(len(layer.fixed_s_Z), -1), layer.fixed_s_Z, np.zeros(2 * columns),
        csr_array(np.concatenate(once_EV).astype(np.float64)),
    )  # fmt: skip
    cost_V, at_most_RV, limit_R, sum_EV, lower_V = program._matrices()
    found = milp(
        cost_V,
        integrality=np.arange(len(cost_V)) < len(gpu_V),
        bounds=Bounds(lower_V, np.inf),
        constraints=[LinearConstraint(at_most_RV, -np.inf, limit_R), LinearConstraint(sum_EV, 1.0, 1.0)],
        options={"mip_rel_gap": 0.0},
    )
    group_MG = np.stack([problem.held.get(model, np.zeros(n, dtype=np.int64)) for model in range(len(problem.costs_M))])
    group_MG[problem.movers_M] = found.x[: len(gpu_V)].reshape(n, models, n).argmax(axis=2).T
    return group_MG


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
    problem = ColocationProblem(costs, {0: np.arange(3)}, objective="busiest-resource")
    found = COLOCATE["local-search"](problem, np.random.default_rng(0))
    least = min((problem.value_s(each), problem.sequential_s(each)) for each in assignments(problem))
    own = COLOCATE["matching"](problem, np.random.default_rng(0))
    assert problem.value_s(found) == least[0]
    assert least[1] <= problem.sequential_s(found) <= problem.sequential_s(own)


@pytest.mark.full
@pytest.mark.parametrize(("objective", "models"), [(name, models) for models in (2, 3) for name in objectives(models)])
def test_mixed_gpus_against_all_assignments(objective, models):
    for gpus, seed in ((4, 0), (4, 1), (4, 2), (5, 3)) if models == 2 else ((3, 0), (3, 1), (4, 2)):
        problem = random_problem(seed, gpus, objective, models)
        best = optimum(problem)
        assert problem.value_s(exact(problem)) == pytest.approx(best, rel=ROUNDED)


def test_on_eight_mixed_gpus_local_search_is_near_the_best():
    gaps, theirs = [], []
    for seed in range(8):
        problem = random_problem(seed, 8)
        best_s = problem.value_s(exact(problem))
        for name, values in (("local-search", gaps), ("matching", theirs)):
            values.append(problem.value_s(COLOCATE[name](problem, np.random.default_rng(0))) / best_s)
    assert np.mean(gaps) <= 1.005
    assert max(gaps) <= 1.03
    assert np.mean(theirs) > np.mean(gaps)


def test_a_search_with_nothing_to_gain_stays():
    still = LayerCosts(
        own_WGE=np.zeros((1, 1, 1), dtype=np.int64), dispatch_bytes=1, combine_bytes=1, expert_s_WGE=np.zeros((1, 1, 1)),
        gate_s_WG=np.zeros((1, 1)), aggregate_s_WG=np.zeros((1, 1)), out_Bps=np.ones(1), in_Bps=np.ones(1),
    )  # fmt: skip
    problem = ColocationProblem((still, still), {0: np.arange(1)})
    assert search(problem, np.zeros((2, 1), dtype=np.int64), np.random.default_rng(0)).tolist() == [[0], [0]]


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


def test_the_objective_changes_what_is_planned_for():
    rng = np.random.default_rng(0)
    pair = [profile(rng.integers(1, 99, (1, 1, 4, 4)), rate=1.0) for _ in range(2)]
    machines = cluster(4.0, 3.0, 2.0, 1.0)
    causal, paper = (make_plan(machines, pair, PlanOptions(objective=name)) for name in ("causal", "paper"))
    assert (causal.objective, paper.objective) == ("causal", "paper")
    assert paper.objective_s <= causal.objective_s
    for plan in (causal, paper):
        assert plan.bound_s <= plan.objective_s
        assert plan.assignment_bound_s is None
