"""Experts change their ranks while requests are served: answers stay the same, slices stay short, no expert is lost."""

import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import aurora
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.alltoall.schedule import order_exchanges
from aurora.algorithms.control.controller import Controller, Decision, plan_controller
from aurora.algorithms.control.move_rounds import move_sequence
from aurora.errors import BadInput
from aurora.models.loading import load_model
from aurora.runtime import run as running
from aurora.runtime import serving_rank
from aurora.runtime.between_steps import Moved, MovesFailed, MovesGivenUp
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.distributed_experts import DistributedExperts
from aurora.runtime.follower import Follower
from aurora.runtime.live_placement import FIRST_BYTES, WARM_UPS, LivePlacement, reordered
from aurora.runtime.result import merge_results
from aurora.runtime.run import verify
from aurora.runtime.serving_rank import serve_rank
from aurora.types import (
    TRACE_PHASES,
    ControlOptions,
    Curve,
    Exchange,
    Hierarchy,
    Network,
    Placement,
    PlanOptions,
    Profile,
    RunOptions,
)
from aurora.types.network import Cut, servers
from aurora.types.options import LENGTHENED
from tests.runtime.test_run import FLAT, differences, hierarchical, plan_for, prompts_for

EAGER = ControlOptions(loss=0.0, period_s=0.005)


def placed(plan, slots_G):
    """The plan with these slots in every layer of its first model."""
    model = plan.models[0]
    first = replace(model, placement=Placement.evenly((slots_G,) * len(model.dispatch_L)))
    return replace(plan, models=(first, *plan.models[1:]))


def patient(add):
    """Follower.add that returns when its window is decided on, so that few steps have many decisions."""

    def add_and_wait(loop, load_LE, *more):
        last, until_s = loop.last, time.monotonic() + 60
        add(loop, load_LE, *more)
        while (last is None or last.action == "keep") and loop.last is last and time.monotonic() < until_s:
            time.sleep(0.001)

    return add_and_wait


def serve_patiently(rank_info, *args):
    Follower.add = patient(Follower.add)
    return serve_rank(rank_info, *args)


def check_moved(mixtral, result, found):
    assert found == []
    report = result.control_M[0]
    done = [change for change in report.changes if change.took_s is not None]
    assert done[0].action == "move"
    assert done[0].bytes == done[0].moves * load_model(mixtral).expert_bytes > 0
    assert report.windows > 3
    assert report.decisions["gain"] >= 1
    moves_X = result.trace.phase_X == TRACE_PHASES.index("moves")
    assert result.trace.bytes_X[moves_X & result.trace.sent_X].sum() >= sum(change.bytes for change in done)
    assert (moves_X & (result.trace.peer_X < 0)).any()  # layers that change over


@pytest.mark.parametrize(
    ("slots_G", "options"),
    [
        pytest.param(((0, 1, 2), (2, 3), (4, 5, 6), (6, 7)), {"local_first": True}, marks=pytest.mark.full),
        (((0, 1, 2, 3), (), (4, 5), (6, 7)), {"deduplicate": True}),
    ],
)
def test_answers_are_the_same_while_experts_move(monkeypatch, mixtral, slots_G, options):
    """Replicas appear and vanish, and a rank without experts gets some."""
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    plan = placed(plan_for([mixtral], 4), slots_G)
    asked = {"transport": "memory", "adapt": EAGER, "max_new_tokens": 40, "batch": 1, **options}
    check_moved(mixtral, *differences(plan, [mixtral], [prompts_for(mixtral, 4)], **asked))


@pytest.mark.full
def test_min_replicas_are_kept_while_experts_move(monkeypatch, mixtral):
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    changed, seen = LivePlacement._change_layers, []

    def change(live, *given):
        changed(live, *given)
        seen.append((live._held_LGP[..., None] == np.arange(8)).any(axis=2).sum(axis=1).min())

    monkeypatch.setattr(LivePlacement, "_change_layers", change)
    plan = plan_for([mixtral], 4, PlanOptions(min_replicas=2, slots_per_gpu=5))
    asked = {"transport": "memory", "adapt": EAGER, "max_new_tokens": 40, "batch": 1}
    check_moved(mixtral, *differences(plan, [mixtral], [prompts_for(mixtral, 4)], **asked))
    assert min(seen) == 2


@pytest.mark.full
def test_over_servers_experts_move_inside_them(monkeypatch, mixtral):
    """One expert is on both servers, others are twice on one."""
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    changed, server_G, seen = LivePlacement._change_layers, np.array([0, 1, 0, 1]), set()

    def change(live, *given):
        changed(live, *given)
        seen.update(tuple(sorted(set(held_GP[server_G == 1].flat) - {-1})) for held_GP in live._held_LGP)

    monkeypatch.setattr(LivePlacement, "_change_layers", change)
    plan = hierarchical(plan_for([mixtral], 4), Hierarchy(server_G, 2))
    plan = placed(plan, ((0, 1, 2, 3), (4, 5, 6, 3), (0, 7), (5,)))
    asked = {"transport": "memory", "adapt": EAGER, "max_new_tokens": 40, "batch": 1}
    check_moved(mixtral, *differences(plan, [mixtral], [prompts_for(mixtral, 4)], **asked))
    assert seen == {(3, 4, 5, 6)}


@pytest.mark.full
def test_experts_move_between_processes(mixtral):
    plan, prompts = placed(plan_for([mixtral], 2), ((0, 1, 2, 3), (4, 5, 6, 7))), [prompts_for(mixtral, 4)]
    options = RunOptions(max_new_tokens=40, batch=2, transport="gloo", keep_logits=True, adapt=EAGER)
    shares = launch(serve_patiently, 2, plan, [mixtral], prompts, options, timeout_s=60)
    result = merge_results([result for results in shares for result in results], ("mixtral-topics",))
    check_moved(mixtral, result, verify(result, [mixtral], prompts, options))


@pytest.mark.full
def test_each_of_two_models_follows_its_own_traffic(monkeypatch, mixtral, qwen):
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    paths = [mixtral, qwen]
    plan = placed(plan_for(paths, 2), ((0, 1, 2, 3, 4, 5), (6, 7)))
    prompts = [prompts_for(mixtral, 2), prompts_for(qwen, 2, seed=1)]
    result, found = differences(plan, paths, prompts, transport="memory", adapt=EAGER, max_new_tokens=30, batch=1)
    check_moved(mixtral, result, found)
    assert [report.model for report in result.control_M] == ["mixtral-topics", "qwen3moe-stdlib"]


@pytest.mark.full
def test_requests_arrive_while_experts_follow_them(monkeypatch, mixtral):
    """Between two bursts no rank makes steps; windows go on after it, and the pause is in no step's time."""
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    steps_s = []
    learn = LivePlacement._learn
    monkeypatch.setattr(LivePlacement, "_learn", lambda live, step_s: steps_s.append(step_s) or learn(live, step_s))
    plan = placed(plan_for([mixtral], 2), ((0, 1, 2, 3, 4, 5), (6, 7)))
    prompts, options = [prompts_for(mixtral, 4)], RunOptions(20, 2, "memory", 120, keep_logits=True, adapt=EAGER)
    result = aurora.run(plan, [mixtral], prompts, options, arrivals=[[0.0, 0.0, 8.0, 8.0]])
    check_moved(mixtral, result, verify(result, [mixtral], prompts, options))
    (report,) = result.control_M
    assert report.series[0].at_s < 8 < report.series[-1].at_s
    assert steps_s.count(0.0) == 4  # no step's: on two ranks at the beginning, and after the pause


def test_a_dry_run_only_says_what_it_would_do(monkeypatch, mixtral):
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    plan = placed(plan_for([mixtral], 2), ((0, 1, 2, 3, 4, 5), (6, 7)))
    options = RunOptions(max_new_tokens=20, batch=2, transport="memory", adapt=EAGER, dry_run=True)
    (report,) = aurora.run(plan, [mixtral], [prompts_for(mixtral, 4)], options).control_M
    assert report.dry_run
    assert report.changes
    assert all(change.bytes > 0 and change.took_s is None for change in report.changes)


@pytest.mark.parametrize("adapt", [None, EAGER])
def test_all_that_decisions_and_orders_need_is_compiled_before_the_first_step(monkeypatch, mixtral, adapt):
    done, began_s = [], serving_rank._began_s
    monkeypatch.setattr(running, "compile_decisions", lambda: done.append("once"))
    monkeypatch.setattr(running, "compile_orders", lambda plan: done.append("once"))
    monkeypatch.setattr(serving_rank, "compile_decisions", lambda: done.append("rank 0"))
    monkeypatch.setattr(serving_rank, "compile_orders", lambda plan: done.append("each rank"))
    monkeypatch.setattr(serving_rank, "_began_s", lambda *given: done.append("serving") or began_s(*given))
    aurora.run(plan_for([mixtral], 2), [mixtral], [[[1]]], RunOptions(max_new_tokens=2, transport="memory", adapt=adapt))
    assert done[:2] == (["serving"] * 2 if adapt is None else ["once"] * 2)
    compiled = [] if adapt is None else ["each rank", "each rank", "rank 0"]
    assert sorted(done[2 if adapt else 0 :]) == [*compiled, "serving", "serving"]
    assert adapt is None or done.index("serving") > done.index("each rank")


def test_load_costs_what_the_profiles_of_the_run_say(monkeypatch, mixtral):
    plan, seen = plan_for([mixtral], 2), []
    monkeypatch.setattr(serving_rank, "plan_controller", lambda *given: seen.append(given[6]) or plan_controller(*given))
    kinds = [replace(gpu, kind=kind) for gpu, kind in zip(plan.cluster.gpus, ("slow", "fast"), strict=True)]
    plan = replace(plan, cluster=replace(plan.cluster, gpus=tuple(kinds)))
    curves = {kind: dict.fromkeys(FLAT, Curve(np.array([1.0]), np.array([s]))) for kind, s in (("slow", 3e-3), ("fast", 1e-3))}
    model, shape = load_model(mixtral), (1, 4, 2, 8)
    sizes = model.top_k, 1, 1, model.expert_bytes, model.other_bytes
    traffic = Profile(model.name, model.fingerprint(), np.full(shape, 100), *sizes, curves)
    options = RunOptions(max_new_tokens=2, transport="memory", adapt=EAGER, dry_run=True)
    for profiles in ([traffic], []):
        aurora.run(plan, [mixtral], [[[1]]], options, profiles=profiles)
    assert seen[0].tolist() == pytest.approx([3e-3, 1e-3])
    assert seen[1] is None  # the GPUs' speeds tell
    with pytest.raises(BadInput, match="expected 1 profiles as in the plan, found 2"):
        aurora.run(plan, [mixtral], [[[1]]], options, profiles=[traffic] * 2)


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(BadInput, match="`adapt`: moves experts, expected no `compare`"):
        RunOptions(adapt=EAGER, predictable=True)
    with pytest.raises(BadInput, match="`dry_run`: expected with `adapt`"):
        RunOptions(dry_run=True)


def test_all_to_alls_stay_flat_where_experts_move(monkeypatch, mixtral):
    """Although such tokens may go over servers in a run whose experts stay."""
    monkeypatch.setattr("aurora.runtime.order_calibration.SIZES", (1 << 10,))
    plan = plan_for([mixtral], 4)
    machines = replace(plan.cluster, fabric=servers([0, 0, 1, 1], [50e6] * 4, [50e6] * 4, 50e6))
    model = replace(plan.models[0], cut_L=(Cut(0.0, 0, ()),) * len(plan.models[0].dispatch_L))
    plan = replace(plan, cluster=machines, models=(model,))
    options = RunOptions(max_new_tokens=2, transport="memory", order="auto", deduplicate=True, adapt=EAGER)
    (used,) = aurora.run(plan, [mixtral], [prompts_for(mixtral, 4)], options).orders_M
    assert used.servers == ""
    assert not any("over servers" in method for method in used.exchanges)


class Numbered(nn.Module):
    """Experts whose weights tell their numbers."""

    def __init__(self, experts):
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.arange(experts).repeat_interleave(30_000).view(experts, -1).float(), False)


class Ranks:
    """All ranks in one thread each, over a network and with steps of simulated time."""

    def __init__(self, placement, step_s, Bps, startup_s, monkeypatch):
        self.ranks, self.step_s, self.Bps, self.startup_s = placement.gpus, step_s, Bps, startup_s
        self.meeting, self.told = threading.Barrier(self.ranks, timeout=120), [None] * self.ranks
        self.now_R, self.slices_s, self.patience_s = threading.local(), [], 120
        self.rests_s = []
        self.change_s, self.changes_s = 0.0, []  # of a layer, and of all layers that changed over between two steps
        self.pauses_s, self.pieces = (
            [],
            [],
        )  # between two steps, on rank 0: their seconds, and slices (s) and changes (c) in them
        monkeypatch.setattr("aurora.runtime.live_placement.time", self)
        order = ORDER["openshop"](1 - np.eye(self.ranks, dtype=np.int64), Network.equal(self.ranks), rng=None)
        self.live_R, self.layers_R = [], []
        for rank in range(self.ranks):
            layers = [DistributedExperts(Numbered(placement.experts)) for _ in placement.slots_LG]
            for number, layer in enumerate(layers):
                layer.hold(placement.slots_LG[number][rank])
            context = type("Context", (), {"transport": type("T", (), {"rank": rank, "ranks": self.ranks})})()
            context.gather_between_steps = partial(self.gather, rank)
            context.exchange_between_steps, context.work_between_steps = partial(self.exchange, rank), partial(self.work, rank)
            ops = (Exchange("dispatch", order), Exchange("combine", order.reversed))
            live = LivePlacement(
                layers, placement, [ops] * len(layers), context, 2, Network.equal(self.ranks, startup_s=1.0), False, 10**9
            )
            self.live_R.append(live)
            self.layers_R.append(layers)
            for number, layer in enumerate(layers):
                layer._rank, layer._layer, layer.ops, layer.expert_map = rank, number, ops, None

    def perf_counter(self):
        return getattr(self.now_R, "s", 0.0)

    def thread_time(self):  # what is prepared takes a millisecond a piece
        self.now_R.worked_s = getattr(self.now_R, "worked_s", 0.0) + 1e-3
        return self.now_R.worked_s

    def sleep(self, seconds):
        self.rests_s.append(seconds)

    def meet(self, rank, value):
        self.told[rank] = value
        self.meeting.wait()
        told = list(self.told)
        self.meeting.wait()
        return told

    def gather(self, rank, row):
        return torch.stack(self.meet(rank, row))

    def work(self, rank, work):
        maps = [layer.expert_map for layer in self.layers_R[rank]]
        work()
        changed = sum(layer.expert_map is not before for layer, before in zip(self.layers_R[rank], maps, strict=True))
        seconds = changed * self.change_s
        self.now_R.s = self.perf_counter() + seconds
        if rank == 0:
            self.changes_s.append(seconds)
            self.pieces[-1] += "c"
        return seconds

    def exchange(self, rank, order, sends, recvs):
        sends_R = self.meet(rank, sends)
        for source, sent in enumerate(sends_R):
            assert len(sent[rank]) == len(recvs[source])
            recvs[source].copy_(sent[rank])
        size = max(len(each) for sent in sends_R for each in sent)
        seconds = self.startup_s + size / self.Bps
        self.now_R.s = self.perf_counter() + seconds
        if rank == 0:
            self.slices_s.append((size, seconds))
            self.pieces[-1] += "s"
        return seconds

    def serve(self, steps, perform):
        """Serves; `perform` asks for moves at the third step, in a thread of its own."""
        asking = threading.Thread(target=perform)

        def rank_steps(rank):
            try:
                steps_of(rank)
            except threading.BrokenBarrierError:  # a rank is lost
                self.live_R[rank].close()

        def steps_of(rank):
            for step in range(steps):
                began_s = self.perf_counter()
                if rank == 0:
                    self.pieces.append("")
                assert self.live_R[rank].next_step(True)
                if rank == 0:
                    self.pauses_s.append(self.perf_counter() - began_s)
                self.now_R.s = self.perf_counter() + self.step_s
                if (moves := self.live_R[rank]._moves) is not None:
                    wait([moves.preparing], timeout=self.patience_s)
                if step == 3 and rank == 0:
                    asking.start()
                    while self.live_R[0].handover.decision is None:
                        time.sleep(0.001)
            assert not self.live_R[rank].next_step(False)
            self.live_R[rank].close()

        threads = [threading.Thread(target=rank_steps, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in (*threads, asking):
            thread.join()

    def held_L(self):
        """By layer, the experts whose weights the ranks have, as the weights themselves tell."""
        return [
            [layers[number].local.weight[:, 0].int().tolist() for layers in self.layers_R]
            for number in range(len(self.layers_R[0]))
        ]


def decision_for(placement, load_LE):
    controller = Controller(placement, 120_000, ControlOptions(loss=0.0))
    return next(decision for _ in range(3) if (decision := controller.window(load_LE)).action == "move")


LOADS_LE = [[900, 800, 700, 600, 1, 1, 1, 1], [1, 900, 1, 800, 1, 700, 1, 600]]
CONTIGUOUS = Placement((((0, 1), (2, 3), (4, 5), (6, 7)),) * 2)


def test_slices_lengthen_a_step_by_a_tenth_at_most(monkeypatch):
    ranks = Ranks(CONTIGUOUS, step_s=0.02, Bps=50e6, startup_s=2e-4, monkeypatch=monkeypatch)
    decision = decision_for(CONTIGUOUS, LOADS_LE)
    outcome = []

    def perform():
        outcome.append(ranks.live_R[0].handover.perform(decision))

    ranks.serve(60, perform)
    waited_s = sum(seconds for _, seconds in ranks.slices_s) + sum(ranks.changes_s)
    assert outcome == [Moved(pytest.approx(waited_s, rel=0.1))]
    assert max(ranks.pauses_s) <= LENGTHENED * ranks.step_s
    assert sum(size for size, _ in ranks.slices_s) >= 120_000
    pieces = len({(move.round, move.layer) for move in decision.moves}) + len(decision.layers)
    assert ranks.rests_s == pytest.approx([1e-3 * (1 / LENGTHENED - 1)] * 4 * pieces)  # each rank's thread rests after a piece
    sizes = [size for size, _ in ranks.slices_s]
    assert max(sizes) > 2 * FIRST_BYTES  # they have grown to what fits
    assert sizes.count(FIRST_BYTES) == 1  # a round begins with slices as large as those before
    assert ranks.held_L() == [[[e for e in row if e >= 0] for row in layer] for layer in decision.held_LGP.tolist()]
    assert len(ranks.live_R[0]._steps_s) < 60 - len(ranks.slices_s)  # steps before the change are not timed for it
    for live, layers in zip(ranks.live_R, ranks.layers_R, strict=True):
        assert np.array_equal(live._held_LGP, decision.held_LGP)
        assert all(layer.ops[1].order == layer.ops[0].order.reversed for layer in layers)


def replicas_in_each_layer(Bps, monkeypatch):
    """Twelve layers, and a decision whose rounds change two layers each: in each, a rank with an empty slot gets a replica."""
    placement = Placement.evenly((((0, 1, 2), (2, 3), (4, 5, 6), (6, 7)),) * 12)
    wanted_LGP = placement.held_LGP().copy()
    wanted_LGP[::2, 1, 2], wanted_LGP[1::2, 3, 2] = 0, 4
    moves, held_LGP = move_sequence(placement.held_LGP(), wanted_LGP)
    decision = Decision("move", "gain", "", held_LGP, moves, 0, (), 0.0, 1.0, 1.0, 0.0)
    return Ranks(placement, step_s=0.02, Bps=Bps, startup_s=2e-4, monkeypatch=monkeypatch), decision


@pytest.mark.parametrize(("change_s", "most"), [(8e-4, 1), (3e-4, 2)])
def test_as_many_layers_change_over_as_a_step_waits_for(monkeypatch, change_s, most):
    ranks, decision = replicas_in_each_layer(5e9, monkeypatch)
    ranks.change_s = change_s
    ranks.serve(80, lambda: ranks.live_R[0].handover.perform(decision))
    assert max(ranks.changes_s) == pytest.approx(most * change_s)
    assert max(ranks.pauses_s) <= LENGTHENED * ranks.step_s
    assert ranks.held_L() == [[[e for e in row if e >= 0] for row in layer] for layer in decision.held_LGP.tolist()]


@pytest.mark.parametrize(("change_s", "together"), [(1e-4, True), (1.2e-3, False)])
def test_a_rounds_last_slice_and_its_layers_share_a_pause_that_has_time_for_both(monkeypatch, change_s, together):
    """An expert takes 0.32 ms, and 1.4 ms of 2 are meant to be used."""
    ranks, decision = replicas_in_each_layer(1e9, monkeypatch)
    ranks.change_s = change_s
    ranks.serve(80, lambda: ranks.live_R[0].handover.perform(decision))
    assert any("sc" in pieces for pieces in ranks.pieces) == together
    assert max(ranks.pauses_s) <= LENGTHENED * ranks.step_s
    assert ranks.held_L() == [[[e for e in row if e >= 0] for row in layer] for layer in decision.held_LGP.tolist()]


def made_by(ops, method):
    return tuple(replace(op, order=replace(op.order, method=method)) for op in ops)


def test_orders_are_made_for_bytes(monkeypatch):
    """A row counts by its size beside the start-up of a transfer. The first order is made, and compiled, before serving."""
    asked = []
    monkeypatch.setattr("aurora.runtime.live_placement._compiled", set())
    monkeypatch.setattr(
        "aurora.algorithms.alltoall.schedule.order_exchanges",
        lambda there, *rest, **more: asked.append(there[0].tolist()) or order_exchanges(there, *rest, **more),
    )
    ranks = Ranks(CONTIGUOUS, step_s=0.02, Bps=50e6, startup_s=2e-4, monkeypatch=monkeypatch)
    assert len(asked) == WARM_UPS  # by the first rank of this process
    for bytes_GG in asked:  # with something to order: all pairs of ranks have unequal bytes
        assert len({bytes_GG[src][dst] for src in range(4) for dst in range(4) if src != dst} - {0}) == 12
    live = ranks.live_R[0]
    tokens = 0, CONTIGUOUS.slots_LG[0], np.full((4, 8), 5), live._row_bytes, live._network
    reordered(live._ops_L[0], *tokens)
    assert reordered(made_by(live._ops_L[0], "openshop-best"), *tokens)[0].order.method == "openshop"
    for method in ("of mine", "paced"):  # is not known here, or is the same for all tokens
        stays = made_by(live._ops_L[0], method)
        assert reordered(stays, *tokens) is stays
    assert asked[-1] == (20 * (1 - np.eye(4, dtype=int))).tolist()  # two experts, five tokens, rows of two bytes


@pytest.mark.parametrize("fault", ["the run ends", "a rank cannot prepare"])
def test_moves_that_are_given_up_lose_no_expert(monkeypatch, caplog, fault):
    """The placement is then one between two rounds, the same on all ranks."""
    ranks = Ranks(CONTIGUOUS, step_s=0.02, Bps=50e6, startup_s=2e-4, monkeypatch=monkeypatch)
    if fault != "the run ends":
        monkeypatch.setattr(ranks.live_R[2], "_prepare", lambda *_: 1 / 0)
    decision, failures = decision_for(CONTIGUOUS, LOADS_LE), []

    def perform():
        with pytest.raises(MovesFailed) as failed:
            ranks.live_R[0].handover.perform(decision)
        failures.append(failed.value)

    ranks.serve(6, perform)
    held_LGP = failures[0].held_LGP
    assert str(failures[0]) == ("serving has ended" if fault == "the run ends" else "a rank cannot change over")
    assert ("ZeroDivisionError" in caplog.text) == (fault != "the run ends")  # the rank says why
    assert ranks.held_L() == [[[e for e in row if e >= 0] for row in layer] for layer in held_LGP.tolist()]
    assert all(np.array_equal(live._held_LGP, held_LGP) for live in ranks.live_R)
    assert all(set(np.unique(layer)) >= set(range(8)) for layer in held_LGP)
    assert not np.array_equal(held_LGP, decision.held_LGP)


def test_moves_that_do_not_get_on_give_no_sign_of_life(monkeypatch):
    """Where one rank's preparation is stuck, the loop's heartbeat becomes stale, and serving goes on."""
    ranks = Ranks(CONTIGUOUS, step_s=0.02, Bps=50e6, startup_s=2e-4, monkeypatch=monkeypatch)
    monkeypatch.setattr(ranks.live_R[2]._pool, "submit", lambda *_: Future())
    beats, decision = [], decision_for(CONTIGUOUS, LOADS_LE)
    control = {"beat": lambda _: beats.append(1), "check": lambda _: None}
    ranks.patience_s, ranks.live_R[0].follower = 0, type("Control", (), control)()

    def perform():
        with pytest.raises(MovesGivenUp):
            ranks.live_R[0].handover.perform(decision)

    ranks.serve(40, perform)
    assert len(beats) == len(ranks.slices_s) < 30


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_lost_at_any_moment_of_moves_leaves_the_experts_of_the_others(monkeypatch, seed):
    """With two replicas of each, the others hold what they say, and every expert that the lost one did not hold.

    Where some change over and others have seen the loss first, an expert on its way may be left only on the lost rank: it is read
    from the model's files then.
    """
    rng = np.random.default_rng(seed)
    rows = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 0), (1, 3, 5, 7))
    placement = Placement.evenly(tuple(tuple(rows[at] for at in rng.permutation(5)) for _ in range(3)))
    wanted_LGP = placement.held_LGP().copy()
    for held_GP in wanted_LGP:
        short_G = np.flatnonzero(held_GP[:, 3] < 0)
        held_GP[short_G] = held_GP[rng.permutation(short_G)]
    moves, held_LGP = move_sequence(placement.held_LGP(), wanted_LGP, 2)
    decision = Decision("move", "gain", "", held_LGP, moves, 0, (), 0.0, 1.0, 1.0, 0.0)
    ranks = Ranks(placement, step_s=0.02, Bps=50e6, startup_s=2e-4, monkeypatch=monkeypatch)
    victim, moment, meet, calls = int(rng.integers(5)), int(rng.integers(8, 60)), ranks.meet, []

    def meet_or_die(rank, value):
        if rank == victim and calls.append(value) is None and len(calls) == moment:
            ranks.meeting.abort()
        return meet(rank, value)

    def perform():
        with suppress(MovesFailed):
            ranks.live_R[0].handover.perform(decision)

    ranks.meet = meet_or_die
    ranks.serve(60, perform)
    left = [rank for rank in range(5) if rank != victim]
    for layer in range(3):
        held_R = [ranks.layers_R[rank][layer].held for rank in left]
        lacking = set(range(8)) - {expert for held in held_R for expert in held}
        moved = {move.expert for move in moves if move.layer == layer}
        assert lacking <= moved & set(ranks.layers_R[victim][layer].held)
        weights_R = [ranks.layers_R[rank][layer].local.weight[:, 0].int().tolist() for rank in left]
        assert weights_R == [list(held) for held in held_R]
