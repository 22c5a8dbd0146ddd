"""Plans with hierarchical all-to-alls: when they are made, what they say, and that everything works with them."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import aurora
from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.gpu_slots import memory_slots_G
from aurora.errors import BadInput, BrokenPlan
from aurora.planner import choice
from aurora.planner.evaluate import evaluate
from aurora.planner.plan import make_plan
from aurora.reports.formatting import percent, seconds
from aurora.reports.numbers import planned_rows
from aurora.reports.plan_tables import bound_lines, gap_line, gap_text
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TIME_SLICES, Hierarchy, Placement, PlanOptions, SyntheticOptions
from tests.conftest import cluster
from tests.simulator.test_hierarchical import machines, routed

CONFIG = {"num_local_experts": 16, "num_hidden_layers": 2, "num_experts_per_tok": 6, "hidden_size": 64, "intermediate_size": 8}
Options = partial(PlanOptions, slots_per_gpu=None)  # every expert once, unless slots are said
HIERARCHICAL = Options(all_to_all="hierarchical")


def traffic(seed=0, routed=True, sources=4):
    options = SyntheticOptions(sources, window_tokens=24, windows=2, seed=seed, token_level=routed)
    return aurora.synthetic_profile("zipf:0.5", CONFIG, options)


def slow_nics(**changed):
    """Two servers of two GPUs, which are a thousand times as fast inside."""
    return machines(**{"server_G": [0, 0, 1, 1], "nic_Bps": 1e6, "inside_Bps": 1e9, **changed})


def test_top_6_over_slow_nics_is_sent_once_to_a_server():
    """Of six choices in sixteen experts, three are on the other server in the mean: flat, three rows go by the NIC."""
    plan = aurora.plan(slow_nics(), traffic(), Options())
    (model,) = plan.models
    assert model.hierarchy is not None
    assert model.hierarchy.server_G.tolist() == [0, 0, 1, 1]
    assert model.deduplicated
    assert plan.gap >= 0
    assert plan.strategies["all_to_all"] == plan.options.all_to_all == "hierarchical"
    (note,) = plan.notes
    flat = aurora.plan(slow_nics(), traffic(), Options(all_to_all="flat"))
    seconds = [f"{simulate_plan(each, [traffic()]).seconds:.4g} s" for each in (plan, flat)]
    assert note == f"all-to-alls are hierarchical: {seconds[0]} in the simulator, flat {seconds[1]}"
    assert simulate_plan(plan, [traffic()]).seconds < simulate_plan(flat, [traffic()]).seconds / 2
    assert flat.notes == ()
    assert "all_to_all" not in flat.strategies


def test_all_to_alls_of_large_models_are_chosen_on_some_layers(monkeypatch):
    """The plan is that of the chosen all-to-alls on all layers, and the layers have the memory of the whole model's."""
    whole = traffic()
    memory_bytes = whole.other_bytes + 9 * whole.layers * whole.expert_bytes
    cluster = replace(slow_nics(), gpus=tuple(replace(gpu, memory_bytes=memory_bytes) for gpu in slow_nics().gpus))
    monkeypatch.setattr(choice, "FEW_TRANSFERS", 1)
    monkeypatch.setattr(choice, "LEAST_LAYERS", 1)
    some, (first,) = choice.few_layers(cluster, [whole])
    assert first.layers == 1
    assert memory_slots_G(some, [first]).tolist() == memory_slots_G(cluster, [whole]).tolist() == [9] * 4
    plan = aurora.plan(cluster, whole, Options())
    assert " in the simulator on 1 of 2 layers, flat " in plan.notes[0]
    (model,), (asked,) = plan.models, aurora.plan(cluster, whole, HIERARCHICAL).models
    assert model.hierarchy == asked.hierarchy
    assert model.placement.slots_LG == asked.placement.slots_LG


@pytest.mark.parametrize(("tokens_G", "levelled"), [((36, 4, 4, 4), True), ((12, 12, 12, 12), False)])
def test_nics_are_levelled_where_it_pays(tokens_G, levelled):
    """One rank has a prompt and the others decode, or all have as many tokens."""
    source_U, rng = np.repeat(np.arange(4), tokens_G), np.random.default_rng(4)  # no placement keeps the prompt on its server
    chosen_UK = np.argsort(rng.random((len(source_U), 16)), axis=1)[:, :4]
    p = routed(chosen_UK, source_U, experts=16)
    p = replace(p, tokens_TLSE=p.tokens_TLSE[:, :, :4])
    plan = make_plan(slow_nics(), [p], HIERARCHICAL)
    check_plan(plan)
    (model,) = plan.models
    assert (model.hierarchy.level_from is not None) == levelled
    plain = replace(plan, models=(replace(model, hierarchy=replace(model.hierarchy, level_from=None)),))
    seconds, plain_s = (simulate_plan(each, [p]).seconds for each in (plan, plain))
    assert seconds < 0.7 * plain_s if levelled else seconds == plain_s
    shared = make_plan(slow_nics(shared_nic=True), [p], HIERARCHICAL)
    assert shared.models[0].hierarchy.level_from is None


def test_equal_networks_are_left_flat():
    """Where a NIC is as fast as the ports inside, a second hop costs more than it saves at one expert a token."""
    one = aurora.synthetic_profile("zipf:0.5", {**CONFIG, "num_experts_per_tok": 1}, SyntheticOptions(token_level=True))
    plan = aurora.plan(slow_nics(nic_Bps=1e9, startup_s=1e-3), one, Options())
    assert plan.models[0].hierarchy is None
    assert plan.notes[0].startswith("all-to-alls are flat")


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (cluster(1e6, 1e6, 1e6, 1e6), r"whose \[fabric\] has two servers or more, found no servers in 'test'"),
        (slow_nics(server_G=[0] * 4), "two servers or more, found 1 servers in 'servers'"),
    ],
)
def test_what_hierarchical_all_to_alls_need(on, message):
    with pytest.raises(BadInput, match=f"`all_to_all` hierarchical: expected .*{message}"):
        make_plan(on, [traffic()], HIERARCHICAL)
    assert aurora.plan(on, traffic(), Options()).models[0].hierarchy is None  # by itself it stays flat


def test_counts_alone_make_a_plan_whose_seconds_are_estimated(tmp_path):
    known, counted, later = traffic(), traffic(routed=False), traffic(1, routed=False)
    plan = aurora.plan(slow_nics(), counted, Options())
    assert plan.models[0].hierarchy is not None
    exact = aurora.price(slow_nics(), known, plan.models[0].placement, HIERARCHICAL)
    assert (plan.estimated, exact.estimated) == (True, False)
    assert plan.objective_s == pytest.approx(exact.objective_s, rel=0.1)
    assert plan.bound_s <= exact.bound_s
    assert " s (estimated from counts)" in plan.notes[0]
    aurora.save(plan, tmp_path / "plan.json")
    assert aurora.load(tmp_path / "plan.json") == plan
    found = evaluate(plan, [later])
    assert found.estimated
    drifted = aurora.drift(counted, later, plan)
    assert drifted.estimated
    assert " (estimated from counts)" in replace(drifted, noise=-1.0).reason
    assert " (estimated from counts)" in gap_line(plan)
    assert aurora.simulate(plan, counted).kind == "predicted"
    assert found.replanned.estimated
    assert aurora.plan(slow_nics(), counted, Options(all_to_all="flat")).estimated is False


def test_replicas_and_two_models_are_planned_from_counts():
    assert aurora.plan(slow_nics(), traffic(routed=False), replace(HIERARCHICAL, slots_per_gpu=5)).estimated
    assert aurora.plan(slow_nics(), [traffic(), traffic(1, routed=False)], HIERARCHICAL).estimated


def test_a_server_of_one_gpu_each_is_not_tried():
    plan = aurora.plan(slow_nics(server_G=[0, 1, 2, 3]), traffic(), Options())
    assert plan.models[0].hierarchy is None
    assert plan.notes == ()


@pytest.mark.full
@pytest.mark.parametrize("barriers", ["gpu", "global", "none"])
def test_two_models_share_the_servers(barriers):
    sources = [traffic(), traffic(1)]
    plan = aurora.plan(slow_nics(), sources, HIERARCHICAL)
    assert [model.hierarchy is not None for model in plan.models] == [True, True]
    assert plan.options.time_slice in TIME_SLICES
    flat = aurora.plan(slow_nics(), sources, Options(all_to_all="flat"))
    assert plan.bound_s <= plan.assignment_bound_s <= plan.objective_s < flat.objective_s
    seconds = [simulate_plan(each, sources, barriers).seconds for each in (plan, flat)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("shared_nic", [False, True])
@pytest.mark.parametrize("options", [Options(), Options(slots_per_gpu=6)])
def test_flat_plans_take_at_least_what_their_nics_take(options, shared_nic):
    """Their dispatch, as it is timed on the NICs, is part of their objective, so that it compares with hierarchical plans."""
    plan = make_plan(slow_nics(shared_nic=shared_nic), [traffic()], options)
    dispatch_s = plan.models[0].bound_s_L.sum()
    assert 0.98 * dispatch_s < plan.objective_s < 4 * dispatch_s  # of whole tokens; the objective divides those of replicas
    assert evaluate(plan, [traffic()]).served_s_L.sum() == pytest.approx(plan.objective_s)
    assert plan.bound_s <= plan.objective_s
    assert plan.bound_s > 0.5 * plan.objective_s  # it counts NICs too


@pytest.mark.parametrize("all_to_all", ["flat", "hierarchical"])
def test_several_models_take_at_least_what_their_nics_take(all_to_all):
    sources = [traffic(), traffic(1)]
    plan = make_plan(slow_nics(), sources, Options(all_to_all=all_to_all))
    single_s = max(make_plan(slow_nics(), [each], Options(all_to_all=all_to_all)).bound_s for each in sources)
    assert plan.bound_s <= plan.objective_s
    assert single_s < plan.objective_s
    cuts_s = sum(cut.bound_s for model in plan.models for cut in model.cut_L)
    assert cuts_s / 2 < plan.objective_s
    placements = [model.placement for model in plan.models]
    given = aurora.price(slow_nics(), sources, placements, Options(all_to_all=all_to_all))
    assert given.objective_s == pytest.approx(plan.objective_s, rel=0.05)  # it may take other chunks
    assert given.bound_s == pytest.approx(plan.bound_s)


def test_a_bound_that_tells_nothing_is_not_printed_as_a_gap():
    """Where each server may hold every expert, no token needs to leave it; only placements without replicas have a bound then."""
    ample, tight = (make_plan(slow_nics(), [traffic()], replace(HIERARCHICAL, slots_per_gpu=slots)) for slots in (None, 4))
    known = f"no placement without replicas below {seconds(ample.assignment_bound_s)}"
    assert gap_line(ample).endswith(f", {known}")
    assert gap_text(ample) == f"{percent(ample.objective_s / ample.assignment_bound_s - 1)} without replicas"
    assert gap_line(tight).endswith(f", no placement within 4 slots per GPU below {seconds(tight.bound_s)}")
    (line, *_), none = bound_lines(tight), [each for each in bound_lines(ample) if "below" in each]
    assert line.startswith(f"no placement without replicas below {seconds(tight.assignment_bound_s)}, gap ")
    assert not none
    assert gap_text(tight) == percent(tight.gap)
    assert tight.gap < 1 < ample.gap


def test_experts_in_index_order_stay_in_index_order_on_equal_servers():
    """Matched to ports, neighbours came to different servers."""
    for sources in ([traffic()], [traffic(), traffic(1)]):
        for all_to_all in ("flat", "hierarchical"):
            plan = make_plan(slow_nics(), sources, Options("contiguous", all_to_all=all_to_all))
            assert all(
                layer == tuple(tuple(range(g, g + 4)) for g in range(0, 16, 4))
                for model in plan.models
                for layer in model.placement.slots_LG
            )
    on_ports = make_plan(cluster(1e6, 1e6, 1e6, 1e6), [traffic()], Options("contiguous"))
    assert on_ports.options.assign == "exact"


@pytest.mark.full
def test_hierarchical_plans_are_saved_evaluated_and_reported(tmp_path):
    now, later = traffic(), traffic(1)
    plan = aurora.plan(slow_nics(), now, HIERARCHICAL)
    aurora.save(plan, tmp_path / "plan.json")
    back = aurora.load(tmp_path / "plan.json", aurora.Plan)
    assert back == plan
    assert plan.bound_s <= plan.objective_s
    assert evaluate(plan, [now]).slowdown == pytest.approx(0)
    found = evaluate(plan, [later])
    assert found.replanned.models[0].hierarchy is not None
    assert found.dispatch_s_ML[0].shape == (2,)
    traces = {orders: aurora.simulate(plan, now, orders=orders) for orders in ("plan", "batch")}
    aurora.report(plan, traces, [now], output=tmp_path / "page.html")
    aurora.report(plan, traces, [now], output=tmp_path / "page.perfetto", format="perfetto")
    assert "hierarchical" in (tmp_path / "page.html").read_text()


def nic_rows(plan, profile):
    """Rows between servers of all layers, with the plan's replicas."""
    (model,) = plan.models
    server_G, rows = model.hierarchy.server_G, 0
    for layer in range(profile.layers):
        steps_SGG = planned_rows(profile, layer, model, model.placement)
        rows += steps_SGG[:, server_G[:, None] != server_G].sum()
    return rows


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"place": "eplb"}])
def test_spare_slots_hold_replicas_of_what_a_servers_tokens_choose(tmp_path, options):
    now = traffic()
    once, spare = (
        aurora.plan(slow_nics(), now, replace(HIERARCHICAL, slots_per_gpu=slots, **kept))
        for slots, kept in ((4, {}), (6, options))
    )
    assert spare.models[0].placement.split_LG is not None
    assert spare.bound_s <= spare.objective_s
    if options.get("place") != "eplb":  # which is kept as it is
        assert nic_rows(spare, now) < 0.9 * nic_rows(once, now)
        assert spare.objective_s < 0.95 * once.objective_s
    aurora.save(spare, tmp_path / "plan.json")
    assert aurora.load(tmp_path / "plan.json", aurora.Plan) == spare
    assert evaluate(spare, [now]).slowdown == pytest.approx(0)
    assert simulate_plan(spare, [now]).seconds > 0
    aurora.report(spare, {"plan": aurora.simulate(spare, now)}, [now], output=tmp_path / "page.html")


def test_with_min_replicas_on_as_many_servers_nothing_crosses():
    plan = aurora.plan(slow_nics(), traffic(), replace(HIERARCHICAL, min_replicas=2, slots_per_gpu=8))
    assert nic_rows(plan, traffic()) == 0
    assert plan.survival_LK.tolist() == [[1.0]] * 2
    assert aurora.plan(slow_nics(), traffic(), Options(min_replicas=2, slots_per_gpu=8)).models[0].hierarchy is not None


def test_min_replicas_on_nodes_that_are_no_servers_are_as_in_the_flat_plan():
    over = slow_nics()
    racks = replace(over, gpus=tuple(replace(gpu, node=node) for gpu, node in zip(over.gpus, (0, 1, 0, 1), strict=True)))
    options = Options(min_replicas=2, slots_per_gpu=9)
    flat, hierarchical = (aurora.plan(racks, traffic(), replace(options, all_to_all=each)) for each in ("flat", "hierarchical"))
    assert flat.models[0].placement == hierarchical.models[0].placement


def test_a_given_placement_is_priced_with_hierarchical_all_to_alls():
    now = traffic()
    mine = Placement((tuple(tuple(range(4 * gpu, 4 * gpu + 4)) for gpu in range(4)),) * 2)
    plans = [aurora.price(slow_nics(), now, mine, Options(all_to_all=name)) for name in ("flat", "hierarchical")]
    assert [each.models[0].hierarchy is None for each in plans] == [True, False]
    assert plans[1].bound_s <= plans[1].objective_s
    assert evaluate(plans[1], [now]).served_s_L.sum() == pytest.approx(plans[1].objective_s)


def test_a_plan_over_other_servers_than_the_clusters_is_broken():
    plan = make_plan(slow_nics(), [traffic()], HIERARCHICAL)
    elsewhere = replace(plan.models[0], hierarchy=Hierarchy(np.array([0, 1, 0, 1])))
    with pytest.raises(BrokenPlan, match=r"over the cluster's servers \[0, 0, 1, 1\], found \[0, 1, 0, 1\]"):
        check_plan(replace(plan, models=(elsewhere,)))
    renamed = replace(plan.models[0], hierarchy=Hierarchy(np.array([1, 1, 0, 0]), plan.models[0].hierarchy.chunks))
    check_plan(replace(plan, models=(renamed,)))
