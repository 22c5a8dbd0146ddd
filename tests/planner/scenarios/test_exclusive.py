"""One model's experts placed by every method: what the plan says it takes, the slots it may fill, and what it must serve."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.placement.cost_model import SUMMED, aimed_costs
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.registry import REPLICAS
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.evaluate import evaluate
from aurora.planner.plan import make_plan
from aurora.types import OVERHEAD, PHASES, Curve, Placement, PlanOptions, Profile
from tests.conftest import cluster
from tests.strategies import clusters, profiles

LINEAR = Curve(np.array([1.0, 1001.0]), np.array([0.01, 10.01]))
NOTHING = Curve(np.array([1.0]), np.array([0.0]))
ONE = st.integers(1, 4).flatmap(lambda n: st.tuples(clusters(n), profiles(n)))


def profile(tokens, *, expert=LINEAR, expert_bytes=10, other_bytes=0, name="m"):
    curves = {"reference": {"gate": NOTHING, "expert": expert, "aggregate": NOTHING}}
    return Profile(name, "print", np.array(tokens), 1, 1, 1, expert_bytes, other_bytes, curves)


def drawn(seed, *, windows=1, sources=4, experts=8, **fields):
    rng = np.random.default_rng(seed)
    popular = rng.permutation(40 // np.arange(1, experts + 1) ** 1.2) + 1
    return profile(rng.poisson(popular, (windows, 1, sources, experts)), **fields)


def equation_1(machines, source, layer, split_EG, windows):
    """max(gate + dispatch) + max(experts + combine) + max(aggregation) from the tokens, one rank after the other.

    What a grouped kernel takes whatever it holds counts with the aggregation, as no placement changes it.
    """
    tokens_TSE = source.tokens_TLSE[windows, layer]
    tokens_SE = tokens_TSE.sum(axis=0)
    first, second, third = [], [], []
    for g, gpu in enumerate(machines.gpus):
        mine_E = split_EG[:, g]
        sent = sum(tokens_SE[g] * (1 - mine_E))
        received = sum(tokens_SE[s] @ mine_E for s in range(len(machines)) if s != g)
        own_T = tokens_TSE[:, g].sum(axis=1) // source.top_k
        gate, aggregate = (sum(float(source.seconds(phase, gpu, own)) for own in own_T) for phase in ("gate", "aggregate"))
        expert = sum(float(source.seconds("expert", gpu, each) @ mine_E) for each in tokens_TSE.sum(axis=1))
        first.append(gate + source.dispatch_bytes * max(sent / gpu.out_Bps, received / gpu.in_Bps))
        second.append(expert + source.combine_bytes * max(received / gpu.out_Bps, sent / gpu.in_Bps))
        third.append(aggregate + sum(float(source.seconds(OVERHEAD, gpu, pairs)) for pairs in tokens_TSE.sum(axis=(1, 2))))
    return max(first) + max(second) + max(third)


def priced(plan, source):
    split = plan.models[0].placement.split_EG
    return sum(equation_1(plan.cluster, source, layer, split(layer), slice(None)) for layer in range(source.layers))


@pytest.mark.full
@given(ONE, st.sampled_from([*PLACE, "swap-search", *REPLICAS]), st.integers(0, 2))
@settings(max_examples=100)
def test_every_method_gives_a_plan_that_takes_what_equation_1_says(case, place, spare):
    machines, source = case
    slots = -(-source.experts // len(machines)) + spare
    plan = make_plan(machines, [source], PlanOptions(place, aim="own", slots_per_gpu=slots))
    check_plan(plan)
    assert plan.objective_s == pytest.approx(priced(plan, source))
    assert plan.objective_s * (1 + 1e-9) >= plan.bound_s
    if plan.assignment_bound_s is not None:
        assert plan.objective_s * (1 + 1e-9) >= plan.assignment_bound_s >= plan.bound_s * (1 - 1e-9)
    placement = plan.models[0].placement
    assert max(len(held) for layer in placement.slots_LG for held in layer) <= slots
    if place == "equal-split":
        for layer in range(source.layers):
            split_EG = placement.split_EG(layer)
            assert all(len(set(np.round(row[row > 0], 9))) == 1 for row in split_EG)
    again = make_plan(machines, [source], PlanOptions(place, aim="own", slots_per_gpu=slots))
    assert again.models[0].placement == placement


@pytest.mark.full
@given(ONE, st.integers(0, 3))
def test_refined_is_never_worse_than_the_best_assignment_of_balanced_groups(case, seed):
    machines, source = case
    grouped, refined = (
        make_plan(machines, [source], PlanOptions(p, aim="own", seed=seed)) for p in ("balanced", "swap-search")
    )
    assert refined.objective_s <= grouped.objective_s * (1 + 1e-9)
    assert make_plan(machines, [source], PlanOptions(aim="own", seed=seed)).models[0].placement == refined.models[0].placement


@pytest.mark.full
@given(ONE, st.integers(0, 2))
def test_replicas_are_worse_than_none_by_a_hundredth_at_most_in_the_same_slots(case, spare):
    machines, source = case
    slots = -(-source.experts // len(machines)) + spare
    alone, copies = (
        make_plan(machines, [source], PlanOptions(p, aim="own", slots_per_gpu=slots)) for p in ("swap-search", "equal-split")
    )
    assert copies.objective_s * 0.99 <= alone.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_replicas_fill_all_slots_that_cost_nothing(windows, seed):
    source = profile(np.random.default_rng(seed).integers(0, 9, (windows, 1, 4, 10)))
    machines = cluster(1e6, 1e6, 1e6, 1e6)
    plan = make_plan(machines, [source], PlanOptions("equal-split", aim="own", slots_per_gpu=4))
    held_G = plan.models[0].placement.slots_LG[0]
    costs = aimed_costs(machines, source, [], 0, "own")
    for gpu, held in enumerate(held_G):
        for expert in set(range(10)) - set(held) if len(held) < 4 else ():
            more_G = (*held_G[:gpu], (*held, expert), *held_G[gpu + 1 :])
            assert costs.value_s(Placement.evenly((more_G,)).split_EG(0)) > plan.objective_s * 1.01


@pytest.mark.parametrize("aim", ["own", "mean"])
def test_a_slot_that_costs_time_stays_empty(aim):
    """The last expert fills a GPU: a replica beside it, which takes an even part of its expert's tokens, makes it the slowest."""
    load_E = np.array([1153, 1933, 2314, 2085, 1321, 2145, 1822, 1625])
    source = profile(np.repeat((load_E[[0, 1, 2, 3, 4, 5, 7, 6]] * 8)[None, None, None], 8, axis=2))
    machines = cluster(*[1e12] * 8)
    plan, eplb = (
        make_plan(machines, [source], PlanOptions(place, aim=aim, slots_per_gpu=2)) for place in ("equal-split", "eplb")
    )
    assert plan.objective_s <= eplb.objective_s * (1 + 1e-9)


def test_seconds_on_unseen_windows_are_those_of_windows_drawn_alike():
    """Halves of one traffic: what a plan of the first expects of unseen windows is what it takes on the second."""
    rng = np.random.default_rng(2)
    share_E = rng.dirichlet(np.ones(16))
    expected, found = [], []
    for _ in range(12):
        recorded, unseen = (profile(rng.multinomial(60, share_E, (6, 1, 4))) for _ in range(2))
        plan = make_plan(cluster(1e6, 1e6, 1e6, 1e6), [recorded], PlanOptions(aim="mean"))
        expected.append(plan.unseen_s)
        found.append(evaluate(plan, [unseen]).served_s_L.sum())
        assert plan.unseen_loss == pytest.approx(plan.unseen_s / plan.objective_s - 1)
    assert np.mean(expected) == pytest.approx(np.mean(found), rel=0.06)
    assert make_plan(cluster(*[1e6] * 4), [recorded], domains=[unseen]).unseen_s is None


def test_the_gain_of_one_more_slot_is_told_where_memory_has_one():
    source = profile([[[[90, 5, 5, 5]] * 4]])
    machines = cluster(1e6, 1e6, 1e6, 1e6)
    assert make_plan(machines, [source]).slot_gain > 0.3
    full = replace(
        machines, gpus=tuple(replace(gpu, memory_bytes=source.other_bytes + source.expert_bytes) for gpu in machines.gpus)
    )
    assert make_plan(full, [source]).slot_gain is None


def test_replicas_of_tokens_that_cost_nothing():
    free = Profile("m", "", np.array([[[[3, 1], [2, 2]]]]), 1, 1, 0, 1, 1, {"reference": dict.fromkeys(PHASES, NOTHING)})
    for place in REPLICAS:
        assert make_plan(cluster(1e12, 2e12), [free], PlanOptions(place, slots_per_gpu=2)).objective_s < 1e-9


def test_larger_memory_holds_more_experts():
    source = drawn(0, expert_bytes=100, other_bytes=50)
    machines = cluster(1e3, 1e3, 1e3, 1e3)
    sizes = (250, 250, 650, 250)
    gpus = tuple(replace(gpu, memory_bytes=size) for gpu, size in zip(machines.gpus, sizes, strict=True))
    machines = replace(machines, gpus=gpus)
    held = make_plan(machines, [source]).models[0].placement.slots_LG[0]
    assert all(len(own) <= most for own, most in zip(held, (2, 2, 6, 2), strict=True))
    with_less = replace(
        machines, gpus=tuple(replace(gpu, memory_bytes=b) for gpu, b in zip(gpus, (150, 150, 550, 150), strict=True))
    )
    assert [len(own) for own in make_plan(with_less, [source]).models[0].placement.slots_LG[0]] == [1, 1, 5, 1]
    with pytest.raises(
        InfeasiblePlan, match=r"`place` balanced: an equal share .* does not fit on every GPU; `place` swap-search"
    ):
        make_plan(with_less, [source], PlanOptions("balanced"))
    too_small = replace(machines, gpus=tuple(replace(gpu, memory_bytes=240) for gpu in gpus))
    with pytest.raises(InfeasiblePlan, match="has 4 expert slots a layer for 'm', its 8 experts need 8"):
        make_plan(too_small, [source])


def test_replicas_fill_the_memory_of_gpus_that_differ():
    machines, source = cluster(1e3, 1e3, 1e3, 1e3), drawn(1, expert_bytes=100, other_bytes=50)
    sizes = (250, 350, 350, 450)  # of two, three, three and four experts
    machines = replace(
        machines, gpus=tuple(replace(gpu, memory_bytes=size) for gpu, size in zip(machines.gpus, sizes, strict=True))
    )
    placement = make_plan(machines, [source], PlanOptions("equal-split")).models[0].placement
    assert [len(held) for held in placement.slots_LG[0]] == [2, 3, 3, 4]


@pytest.mark.parametrize(
    ("options", "expert_bytes", "error", "message"),
    [
        (PlanOptions(slots_per_gpu=1), 10, InfeasiblePlan, "has 4 expert slots a layer for 'm', its 8 experts need 8"),
        (
            PlanOptions("eplb", slots_per_gpu=3), 4 * 10**8, InfeasiblePlan,
            "gpu 'g0': `slots_per_gpu` 3, but its memory holds 2 experts of 'm' in every layer",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit(options, expert_bytes, error, message):
    with pytest.raises(error, match=message):
        make_plan(cluster(1.0, 1.0, 1.0, 1.0), [drawn(0, expert_bytes=expert_bytes)], options)


def test_more_slots_than_experts_are_as_many():
    source = drawn(0, experts=4)
    plans = [make_plan(cluster(*[1e3] * 4), [source], PlanOptions(slots_per_gpu=slots)) for slots in (4, 100)]
    assert plans[0].models[0].placement == plans[1].models[0].placement


@pytest.mark.parametrize("options", [PlanOptions(slots_per_gpu=4), PlanOptions(aim="cvar"), PlanOptions("swap-search"),
                                     PlanOptions("equal-split")])  # fmt: skip
def test_two_models_are_placed_in_groups(options):
    pair = [drawn(seed) for seed in (0, 1)]
    named = {4: "`slots_per_gpu`: is for a plan of one model"}.get(options.slots_per_gpu, "`aim`: is for a plan of one model")
    message = named if options.place == "auto" else f"`place`: expected one of auto, balanced.*, found '{options.place}'"
    with pytest.raises(BadInput, match=message):
        make_plan(cluster(1.0, 1.0, 1.0, 1.0), pair, options)


def test_aims_by_hand():
    """Two experts on two GPUs, two windows; only experts take time: 1 s a token. Whatever sits where, GPU 0 or 1 takes 8 and 2
    tokens in the first window, and 1 and 3 in the second; together 9 and 5."""
    second_a_token = Curve(np.array([1.0, 11.0]), np.array([1.0, 11.0]))
    source = profile([[[[8, 2], [0, 0]]], [[[1, 3], [0, 0]]]], expert=second_a_token)
    machines = cluster(1e9, 1e9)
    for aim, expected in (("sum", 9), ("mean", (8 + 3) / 2), ("cvar", 8), ("worst", 8)):
        plan = make_plan(machines, [source], PlanOptions("contiguous", aim=aim))
        assert plan.objective_s == pytest.approx(expected, rel=1e-6)
        assert plan.options.aim == aim
        assert plan.bound_s <= plan.objective_s


def test_windows_that_peak_apart_are_kept_apart_by_the_worst_case():
    """Each window has two popular experts; a sum that is even cannot tell which must not share a GPU."""
    a_window, b_window = [9, 9, 1, 1], [1, 1, 9, 9]
    source = profile([[[a_window, [0] * 4]], [[b_window, [0] * 4]]])
    for aim in ("worst", "cvar", "mean"):
        plan = make_plan(cluster(1e9, 1e9), [source], PlanOptions(aim=aim))
        held = plan.models[0].placement.slots_LG[0]
        assert all(len({0, 1} & set(own)) == len({2, 3} & set(own)) == 1 for own in held)


@given(st.integers(2, 3).flatmap(lambda n: st.tuples(clusters(n), st.lists(profiles(n, 3, 1), min_size=2, max_size=3))),
       st.sampled_from(["own", "sum", "mean", "cvar", "worst"]))  # fmt: skip
def test_domains_count_as_the_aim_says(case, aim):
    machines, found = case
    experts = min(p.experts for p in found)
    assume(all(p.tokens_TLSE[..., :experts].any(axis=(1, 2, 3)).all() for p in found))
    alike = [replace(found[0], tokens_TLSE=p.tokens_TLSE[..., :experts], dispatch_bytes=2, combine_bytes=1) for p in found]
    plan = make_plan(machines, alike[:1], PlanOptions(aim=aim), domains=alike[1:])
    split_EG = plan.models[0].placement.split_EG(0)
    if aim in SUMMED:
        everything = np.concatenate([p.tokens_TLSE for p in alike])
        expected = equation_1(machines, replace(alike[0], tokens_TLSE=everything), 0, split_EG, slice(None))
    else:
        each = sorted(equation_1(machines, p, 0, split_EG, slice(None)) for p in alike)
        expected = np.mean(each[-{"mean": len(each), "cvar": -(-len(each) // 2), "worst": 1}[aim] :])
    assert plan.objective_s == pytest.approx(expected)
    assert plan.bound_s <= plan.objective_s * (1 + 1e-9)
    there = sum(layer_traffic(p, 0, split_EG) for p in alike) * 2
    assert plan.models[0].fluid_bound_s_L[0] == pytest.approx(
        max((there.sum(axis=1) / machines.out_Bps_G).max(), (there.sum(axis=0) / machines.in_Bps_G).max())
    )


def test_domains_of_another_model_are_refused():
    machines, source = cluster(1.0, 1.0, 1.0, 1.0), drawn(0)
    for other in (drawn(1, experts=4), replace(drawn(1), fingerprint="other")):
        with pytest.raises(BadInput, match="`domain`: expected another profile of the one model 'm'"):
            make_plan(machines, [source], domains=[other])
    with pytest.raises(BadInput, match="`domain`: is for a plan of one model, found 2 models"):
        make_plan(machines, [source, source], domains=[source])
    with pytest.raises(BadInput, match="come from 2 source ranks"):
        make_plan(machines, [source], domains=[drawn(1, sources=2)])
