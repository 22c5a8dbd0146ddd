"""Ranks are lost while requests are served: no request is, and answers stay the same."""

import os
import shutil
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.schedule import order_exchanges
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.recovery import program_among
from aurora.elastic import serving as running
from aurora.elastic.serving import RequestJournal, fewest_first, run_elastic
from aurora.errors import BadInput, RankFailed
from aurora.io.journals import load_journal
from aurora.models.decoding import greedy_decode
from aurora.models.loading import load_model
from aurora.runtime import live_placement
from aurora.runtime.run import verify
from aurora.types import ControlOptions, PlanOptions, RunOptions
from tests.conftest import cluster
from tests.runtime.test_run import plan_for, prompts_for

NEW_TOKENS = 6


class Blows:
    """Does things to a run when so many tokens were told."""

    def __init__(self, monkeypatch, blows):
        self.pids = {}
        left, told, pids = dict(blows), [0], self.pids

        class Struck(RequestJournal):
            def on_progress(self, rank, fresh):
                got_on = super().on_progress(rank, fresh)
                told[0] += len(fresh.tokens) if got_on else 0
                for moment in [moment for moment in left if moment <= told[0]]:
                    left.pop(moment)(pids)
                return got_on

        monkeypatch.setattr(running, "RequestJournal", Struck)

    def watch(self, epoch, pids):
        self.pids |= pids


def kill(*ranks):
    def strike(pids):
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)

    return strike


def served(monkeypatch, plan, paths, blows, count=9, **options):
    prompts = [prompts_for(path, count, seed) for seed, path in enumerate(paths)]
    options = RunOptions(NEW_TOKENS, 2, "gloo", 60.0, keep_logits=True, survive=True, **options)
    struck = Blows(monkeypatch, blows)
    result = run_elastic(plan, paths, prompts, options, watch=struck.watch)
    return result, verify(result, paths, prompts, options)


@pytest.mark.parametrize(
    ("moment", "victims"),
    [pytest.param(1, (0,), marks=pytest.mark.full), (20, (2,)), pytest.param(40, (1, 3), marks=pytest.mark.full)],
)
def test_answers_stay_the_same(monkeypatch, mixtral, qwen, moment, victims):
    plan = plan_for([mixtral, qwen], 4)
    result, different = served(monkeypatch, plan, [mixtral, qwen], {moment: kill(*victims)})
    assert not different
    assert result.failure is None
    lost = [rank for change in result.changes for rank in change.lost]
    assert sorted(lost) == sorted(victims)
    assert all(change.from_checkpoint > 0 for change in result.changes if change.lost)
    epochs = set(result.trace.epoch_X.tolist())
    assert epochs <= set(range(1, len(result.changes) + 2))


@pytest.mark.full
def test_replicas_spare_the_checkpoint(monkeypatch, mixtral):
    plan = plan_for([mixtral], 4, PlanOptions(min_replicas=2, slots_per_gpu=5))
    result, different = served(monkeypatch, plan, [mixtral], {10: kill(1)})
    assert not different
    assert [change.from_checkpoint for change in result.changes] == [0] * len(result.changes)


@pytest.mark.full
def test_a_rank_is_lost_while_all_wait_for_requests(monkeypatch, mixtral):
    """The others go on at once, in an epoch that begins before the next request arrives, and answer it."""
    epochs_s = {}

    class Timed(Blows):
        def watch(self, epoch, pids):
            super().watch(epoch, pids)
            epochs_s[epoch] = time.perf_counter()

    plan, prompts, later_s = plan_for([mixtral], 3), [prompts_for(mixtral, 6)], 4.0
    options = RunOptions(2, 2, "gloo", 60.0, keep_logits=True, survive=True)
    struck = Timed(monkeypatch, {6: kill(1)})  # the last token of the first three
    result = run_elastic(plan, [mixtral], prompts, options, watch=struck.watch, arrivals=[[0.0] * 3 + [later_s] * 3])
    assert not verify(result, [mixtral], prompts, options)
    (change,) = result.changes
    assert change.lost.keys() == {1}
    assert epochs_s[2] < epochs_s[1] + later_s
    (answers,) = result.answers_M
    assert answers.times_R.keys() == {0, 1, 2}
    assert (len(answers.ttft_s), len(answers.tpot_s)) == (6, 6)
    assert min(answers.ttft_s) > 0 < min(answers.tpot_s)


@pytest.mark.full
def test_lost_replicas_are_restored_while_serving_goes_on(monkeypatch, mixtral):
    """With room for two of each on those left, a second loss needs no checkpoint either."""
    plan = plan_for([mixtral], 4, PlanOptions(min_replicas=2, slots_per_gpu=6))

    class Watched(Blows):
        def watch(self, epoch, pids):
            super().watch(epoch, pids)
            if epoch == 3:  # replicas are where they should be
                kill(2)(pids)

    prompts = [prompts_for(mixtral, 60)]
    options = RunOptions(NEW_TOKENS, 2, "gloo", 60.0, survive=True)
    result = run_elastic(plan, [mixtral], prompts, options, watch=Watched(monkeypatch, {3: kill(1)}).watch)
    assert not verify(result, [mixtral], prompts, options)
    restored = result.changes[1]
    assert (restored.lost, restored.joined) == ({}, ())
    assert restored.moved > 0
    assert sum(change.from_checkpoint for change in result.changes) == 0
    assert {rank for change in result.changes for rank in change.lost} == {1, 2}


@pytest.mark.full
def test_weights_that_travel_are_predicted_and_timed(monkeypatch, mixtral):
    plan = plan_for([mixtral], 4, PlanOptions(min_replicas=2, slots_per_gpu=6))
    result, different = served(monkeypatch, plan, [mixtral], {3: kill(1)}, count=60)
    assert not different
    lost, restored = result.changes[0], next(change for change in result.changes if change.moved)
    assert (lost.moved, lost.moved_bytes, lost.predicted_s, lost.took_s) == (0, 0, 0, 0)
    assert restored.moved_bytes == restored.moved * load_model(mixtral).expert_bytes > 0
    assert restored.took_s > 0 < restored.predicted_s


def test_what_makes_orders_is_compiled_before_a_rank_joins(monkeypatch, mixtral):
    """Those that are left have orders of the same method: in no epoch is anything compiled."""
    compiled, made = set(), []
    monkeypatch.setattr(live_placement, "_compiled", compiled)
    monkeypatch.setattr(
        "aurora.algorithms.alltoall.schedule.order_exchanges",
        lambda *args, **more: made.append(len(args[0][0])) or order_exchanges(*args, **more),
    )
    plan = plan_for([mixtral], 4)
    live_placement.compile_orders(plan)
    assert compiled == {plan.models[0].dispatch_L[0].method}
    assert made == [4] * live_placement.WARM_UPS
    placement = plan.models[0].placement
    held_ML = [[[layer[rank] for layer in placement.slots_LG]] for rank in (0, 2, 3)]
    left = program_among(compile_plan(plan), (0, 2, 3), [np.ones((len(placement.slots_LG), placement.experts))], held_ML)
    network = cluster(1e9, 1e9, 1e9).network
    live_placement.warm_up(left.ops_ML[0], left.placements_M[0], network)
    assert made == [4] * live_placement.WARM_UPS


@pytest.mark.parametrize("adapt", [None, ControlOptions()])
def test_what_all_ranks_need_is_compiled_once_before_they_start(monkeypatch, mixtral, adapt):
    done = []

    def start():
        done.append("ranks")
        raise RankFailed("enough")

    monkeypatch.setattr("aurora.runtime.run.compile_decisions", lambda: done.append("decisions"))
    monkeypatch.setattr("aurora.runtime.run.compile_orders", lambda plan: done.append("orders"))
    monkeypatch.setattr(running, "CoordinatedRanks", lambda *args, **named: SimpleNamespace(run=start))
    with pytest.raises(RankFailed, match="enough"):
        run_elastic(plan_for([mixtral], 2), [mixtral], [[[1]]], RunOptions(transport="gloo", survive=True, adapt=adapt))
    assert done == (["ranks"] if adapt is None else ["decisions", "orders", "ranks"])


@pytest.mark.full
def test_one_after_the_other_and_the_last_does_the_rest(monkeypatch, mixtral):
    plan = plan_for([mixtral], 3)
    result, different = served(monkeypatch, plan, [mixtral], {5: kill(2), 20: kill(0)})
    assert not different
    assert {rank for change in result.changes for rank in change.lost} == {0, 2}


@pytest.mark.full
def test_the_pause_is_between_tokens_and_before_the_first_there_is_none(monkeypatch, mixtral):
    class Watched(Blows):
        def watch(self, epoch, pids):
            super().watch(epoch, pids)
            if epoch == 1:
                kill(1)(pids)

    prompts = [prompts_for(mixtral, 9)]
    options = RunOptions(NEW_TOKENS, 2, "gloo", 60.0, survive=True)
    result = run_elastic(plan_for([mixtral], 4), [mixtral], prompts, options, watch=Watched(monkeypatch, {20: kill(2)}).watch)
    assert not verify(result, [mixtral], prompts, options)
    (first,), (second,) = ([c for c in result.changes if rank in c.lost] for rank in (1, 2))
    assert first.stopped_s is None
    assert 0 < first.resumed_s <= second.stopped_s < second.resumed_s <= result.start_s + result.answers_M[0].seconds


@pytest.mark.full
def test_a_rank_that_comes_back_holds_experts_again(monkeypatch, mixtral):
    """There are more requests than anybody waits for: the run is over when the newcomer has had its part in some."""
    struck, after = Blows(monkeypatch, {3: kill(1)}), [0]

    class Enough(running.RequestJournal):
        @property
        def finished(self):
            return after[0] >= 40

        def on_progress(self, rank, fresh):
            got_on = super().on_progress(rank, fresh)
            after[0] += got_on and any(change.joined for change in self.changes)
            return got_on

    monkeypatch.setattr(running, "RequestJournal", Enough)
    prompts = prompts_for(mixtral, 2000)
    options = RunOptions(NEW_TOKENS, 2, "gloo", 60.0, survive=True, respawn=1)
    result = run_elastic(plan_for([mixtral], 3), [mixtral], [prompts], options, watch=struck.watch)
    assert [change.joined for change in result.changes if change.joined] == [(1,)]
    late = result.trace.epoch_X == result.trace.epoch_X.max()
    assert set(result.trace.rank_X[late].tolist()) == {0, 1, 2}
    plain = load_model(mixtral)
    found = result.answers_M[0].tokens
    for index in sorted(found)[::20]:
        expected, _ = greedy_decode(plain.model, prompts[index], NEW_TOKENS, plain.tokenizer.eos_token_id)
        assert found[index] == expected[: len(found[index])]
    assert len(found) >= 3


@pytest.mark.full
def test_when_nobody_has_an_expert_any_more_another_run_goes_on_from_the_journal(monkeypatch, mixtral, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(mixtral, copy)

    def gone(pids):
        shutil.rmtree(copy)
        kill(0)(pids)

    prompts, journal = [prompts_for(mixtral, 9)], tmp_path / "answers.journal.jsonl"
    options = RunOptions(NEW_TOKENS, 2, "gloo", 60.0, survive=True)
    struck = Blows(monkeypatch, {20: gone})
    result = run_elastic(plan_for([mixtral], 3), [copy], prompts, options, watch=struck.watch, journal=journal)
    assert "model" in result.failure
    kept = result.answers_M[0]
    assert sum(map(len, kept.tokens.values())) >= 20
    assert {request for request, tokens in kept.tokens.items() if len(tokens) == NEW_TOKENS} == kept.finished
    assert {(0, request): (tokens, request in kept.finished) for request, tokens in kept.tokens.items()} == {
        key: (answer.tokens, answer.finished) for key, answer in load_journal(journal).items()
    }
    other = shutil.copytree(mixtral, tmp_path / "other")
    weights = next(other.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # one bit of one weight
    weights.write_bytes(content)
    with pytest.raises(BadInput, match="expected the journal of this run, found one of a run with other model files"):
        run_elastic(plan_for([mixtral], 2), [other], prompts, options, journal=journal, resume=True)
    options = replace(options, keep_logits=True)
    result = run_elastic(plan_for([mixtral], 2), [mixtral], prompts, options, journal=journal, resume=True)
    answers = result.answers_M[0]
    assert result.failure is None
    assert not verify(result, [mixtral], prompts, options)
    assert answers.resumed == sum(map(len, kept.tokens.values()))
    assert answers.logits.keys() == set(range(9)) - kept.tokens.keys()
    produced = sum(map(len, answers.tokens.values())) - answers.resumed
    assert result.tokens_per_second(0) == produced / answers.seconds
    assert result.tokens_per_second(0, with_start=True) == produced / (answers.seconds + result.start_s)
    assert result.start_s > 0


def test_what_cannot_begin_is_refused(mixtral, monkeypatch):
    plan = plan_for([mixtral], 2)
    with pytest.raises(BadInput, match="`survive`: expected gloo, nccl or the shaped transport"):
        RunOptions(transport="memory", survive=True)
    with pytest.raises(BadInput, match="`survive`: expected no `compare`"):
        RunOptions(survive=True, predictable=True)
    with pytest.raises(BadInput, match="`respawn`: is for a run with `survive`, found 1 without"):
        RunOptions(respawn=1)
    with pytest.raises(BadInput, match="vocabulary"):
        run_elastic(plan, [mixtral], [[[99999]]], RunOptions(survive=True))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="`survive`: starts its ranks by itself"):
        run_elastic(plan, [mixtral], [[[1]]], RunOptions(survive=True))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 40))
def test_whoever_has_fewest_is_next(busy, count):
    expected, left = [], list(busy)
    for _ in range(count):
        expected.append(left.index(min(left)))
        left[expected[-1]] += 1
    assert fewest_first(np.array(busy), count).tolist() == expected
