"""A placement that follows its traffic: all ranks take rank 0's map, and an error leaves experts where they are."""

import errno
import logging
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from aurora_vllm import eplb_mover, plugin_status
from aurora_vllm.eplb_mover import EplbMover, Phase
from aurora_vllm.plugin_status import STUCK_S, ControlMetrics, HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts
from prometheus_client import CollectorRegistry

from aurora.algorithms.control.controller import Controller
from aurora.types import Cluster, Curve, Gpu, Profile

LAYERS, EXPERTS, RANKS, SLOTS = 2, 8, 2, 5
FIRST_LP = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]] * LAYERS)
ONE_LE = torch.tensor([[900, 800, 700, 600, 10, 20, 30, 40], [100] * EXPERTS])
OTHER_LE = torch.tensor([[10, 20, 30, 40, 900, 800, 700, 600], [100] * EXPERTS])
CLUSTER = Cluster("c", tuple(Gpu(f"g{rank}", "cpu", rank, 1e6, 1e6, 10**9) for rank in range(RANKS)))


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Ranks:
    """The live placements of all ranks of an EPLB that moves at once; map_LP: what it holds."""

    def __init__(self, monkeypatch, cluster=None, profile=None, **settings):
        self.clock, self.map_LP, self.sent = Clock(), FIRST_LP, None
        monkeypatch.setattr(eplb_mover, "HeartbeatThread", lambda beat, alive: heartbeat(beat))
        self.registries = [CollectorRegistry() for _ in range(RANKS)]
        self.ranks = [
            EplbMover(
                Settings(adapt=True, **settings),
                EngineFacts("m", "", "vllm", "cpu", rank, RANKS, 2, LAYERS, EXPERTS, 1, 1, 1000, 0),
                cluster or CLUSTER, True, self.broadcast, ControlMetrics("m", rank, self.registries[rank]), clock=self.clock,
                profile=profile,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def broadcast(self, tensor):
        """Rank 0 is always first."""
        if self.sent is None:
            self.sent = tensor.clone()
        tensor.copy_(self.sent)

    def window(self, load_LE, arrives=True):
        """A window of 10 s; returns how many physical experts change."""
        self.clock.now_s += 10
        self.sent = None
        maps = [rank.next_map(load_LE, self.map_LP) for rank in self.ranks]
        assert torch.equal(*maps)
        assert all(set(physical_P.tolist()) == set(range(EXPERTS)) for physical_P in maps[0])
        for rank in self.ranks:
            with rank.moving():
                self.clock.now_s += 0.5
        changed = int((maps[0] != self.map_LP).sum())
        if arrives:
            self.map_LP = maps[0]
        return changed

    def decided(self):
        """Waits until the thread has decided, and returns the decision; nobody need take it over."""
        return self.ranks[0]._deciding.result(60)

    def value(self, name, rank=0, **labels):
        return self.registries[rank].get_sample_value(
            f"aurora_control_{name}", {"model_name": "m", "ep_rank": str(rank)} | labels
        )


def heartbeat(beat, **options):
    """One without a thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeartbeatThread, "_run", lambda _: None)
        return HeartbeatThread(beat, **options)


def test_experts_follow_traffic_that_switches(monkeypatch, caplog):
    """Only the layer that gains changes, and each decision is one line."""
    caplog.set_level(logging.INFO, "vllm.aurora")
    ranks = Ranks(monkeypatch)
    for load_LE in (ONE_LE, OTHER_LE):
        before_LP = ranks.map_LP
        changed = [ranks.window(load_LE) for _ in range(4)]
        assert sum(changed) > 0
        assert changed[-1] == 0
        assert torch.equal(ranks.map_LP[1], before_LP[1])
        assert ranks.value("balancedness") > 0.97
    moves = ranks.value("decisions_total", kind="gain")
    assert moves >= 2
    assert ranks.value("decisions_total", kind="balanced") == 8 - moves
    assert ranks.value("moved_bytes_total") % 1000 == 0 < ranks.value("moved_bytes_total")
    assert ranks.value("move_seconds_total") == moves * 0.5
    assert ranks.value("failures_total") == ranks.value("failures_total", rank=1) == 0
    assert ranks.value("decisions_total", rank=1, kind="gain") is None
    assert len([line for line in caplog.messages if line.startswith("aurora: ")]) == 8
    assert any(line.startswith("aurora: move (gain): the placement loses ") for line in caplog.messages)


def test_gpus_get_load_by_the_compute_curves_of_their_kinds(monkeypatch):
    """Their speeds are equal; the profile says that one takes three times as long."""
    kinds = Cluster("c", tuple(replace(gpu, kind=kind) for gpu, kind in zip(CLUSTER.gpus, ("fast", "slow"), strict=True)))
    curves = {
        kind: {phase: Curve(np.array([0.0, 1000.0]), np.array([0.0, most_s])) for phase in ("gate", "expert", "aggregate")}
        for kind, most_s in (("fast", 1.0), ("slow", 3.0))
    }
    profile = Profile("m", "f", np.full((1, LAYERS, RANKS, EXPERTS), 10), 2, 1, 1, 1000, 0, curves)
    share = []
    for known in (None, profile):
        ranks = Ranks(monkeypatch, cluster=kinds, profile=known)
        ranks.window(ONE_LE)
        load_P = ONE_LE[0][ranks.map_LP[0]] / torch.bincount(ranks.map_LP[0])[ranks.map_LP[0]]
        share.append(float(load_P[:SLOTS].sum() / load_P.sum()))
    assert 0.4 < share[0] < 0.6
    assert share[1] > 0.65


def test_a_dry_run_says_what_it_would_do(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "vllm.aurora")
    ranks = Ranks(monkeypatch, dry_run=True)
    assert ranks.window(ONE_LE) == 0
    assert ranks.value("expected_balancedness") > 0.97 > ranks.value("balancedness")
    assert [ranks.window(ONE_LE) for _ in range(2)] == [0, 0]
    assert ranks.value("decisions_total", kind="gain") == 1
    assert ranks.value("decisions_total", kind="balanced") == 2, "it goes on as if experts had moved"
    assert ranks.value("balancedness") > 0.97
    assert ranks.value("moved_bytes_total") is None
    assert [line[:25] for line in caplog.messages] == ["aurora: dry run: move (ga", *["aurora: dry run: keep (ba"] * 2]


@pytest.mark.parametrize("fault", ["planning", "an expert is lost", "broadcast"])
def test_an_error_leaves_experts_where_they_are(fault, monkeypatch, caplog):
    ranks = Ranks(monkeypatch)

    def fails(*_):
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        if fault == "planning":
            patch.setattr(Controller, "window", fails)
        elif fault == "broadcast":
            for rank in ranks.ranks:
                patch.setattr(rank, "_broadcast", fails)
        else:
            patch.setattr(eplb_mover, "_filled", lambda _, held_LGP: np.zeros_like(held_LGP) if held_LGP.any() else held_LGP)
        assert [ranks.window(ONE_LE) for _ in range(2)] == [0, 0]
    assert ranks.value("failures_total") == 2
    assert len([line for line in caplog.messages if line.startswith("aurora: experts stay where they are: ")]) >= 2
    assert sum(ranks.window(ONE_LE) for _ in range(2)) > 0, "the next windows are followed again"


def test_windows_without_tokens_and_loads_that_are_none_change_nothing(monkeypatch, caplog):
    """One line and one count for each."""
    caplog.set_level(logging.INFO, "vllm.aurora")
    ranks = Ranks(monkeypatch)
    assert ranks.window(torch.zeros((LAYERS, EXPERTS))) == 0
    assert ranks.window(torch.full((LAYERS, EXPERTS), math.nan)) == 0
    assert ranks.window(-ONE_LE) == 0
    assert ranks.value("decisions_total", kind="no-tokens") == 1
    assert ranks.value("decisions_total", kind="bad-loads") == 2
    assert ranks.value("balancedness") is None
    starts = [line.split(":")[1].strip() for line in caplog.messages]
    assert starts == ["keep (no-tokens)", "keep (bad-loads)", "keep (bad-loads)"]


def test_metrics_on_a_full_disk_are_told_once_and_experts_follow_all_the_same(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    families = ranks.ranks[0]._metrics._metrics._families
    for name in ("decisions", "moved_bytes", "failures", "heartbeat_timestamp_seconds", "changed_timestamp_seconds"):
        monkeypatch.setattr(families[f"control_{name}"], "labels", full)
    assert ranks.window(ONE_LE) > 0
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "window", full)
        assert ranks.window(ONE_LE) == 0
    assert ranks.window(ONE_LE) == 0
    ranks.ranks[0].heartbeat.look()
    assert ranks.value("balancedness") > 0.97
    told = [line for line in caplog.messages if "metrics" in line]
    assert told == ["aurora: metrics of the placement are not kept: [Errno 28] No space left on device"]


def test_moves_that_vllm_gave_up_are_decided_on_again(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    assert ranks.window(ONE_LE, arrives=False) > 0
    assert ranks.window(ONE_LE) > 0
    assert "aurora: vLLM has other experts in place than were decided on" in caplog.messages
    assert ranks.window(ONE_LE) == 0
    assert ranks.value("decisions_total", kind="gain") == 2
    assert ranks.value("move_seconds_total") == 0.5


def test_a_decision_that_does_not_come_is_not_waited_for(monkeypatch, caplog):
    """One line, a count for each window, and no heartbeat; when it has come, the traffic is followed again."""
    monkeypatch.setattr(eplb_mover, "PATIENCE_S", 0.01)
    ranks, goes_on, window = Ranks(monkeypatch), threading.Event(), Controller.window
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "window", lambda *given: goes_on.wait(60) and window(*given))
        assert [ranks.window(ONE_LE) for _ in range(3)] == [0, 0, 0]
        ranks.ranks[0].heartbeat.look()
        assert ranks.value("heartbeat_timestamp_seconds") is None
        assert ranks.value("failures_total") == 3
        assert [line for line in caplog.messages if "vLLM serves on" in line] == [
            "aurora: experts stay where they are: no decision within 0.01 s; vLLM serves on"
        ]
        with monkeypatch.context() as broken:
            for rank in ranks.ranks:
                broken.setattr(rank, "_broadcast", lambda _: 1 / 0)
            assert ranks.window(ONE_LE) == 0
        assert ranks.ranks[0].phase is Phase.LATE
        goes_on.set()
        assert ranks.decided().action == "move"
    monkeypatch.setattr(eplb_mover, "PATIENCE_S", 60)
    ranks.ranks[0].heartbeat.look()
    assert ranks.value("heartbeat_timestamp_seconds") > 0
    assert ranks.window(ONE_LE) > 0
    assert ranks.window(ONE_LE) == 0


def test_a_heart_beats_unless_a_step_is_stuck_or_what_it_watches_is_gone(caplog):
    """Each time one line says so."""
    clock, lives, beats = Clock(), [True], []
    heart = heartbeat(lambda: beats.append(clock.now_s), alive=lambda: lives[0], clock=clock)
    told = [0]

    def look(seconds, well):
        clock.now_s += seconds
        heart.look()
        assert heart.well is well
        assert (beats[-1:] == [clock.now_s]) is well
        told.append(len(caplog.messages))

    look(1, True)
    with heart.step():
        look(STUCK_S / 2, True)
        for _ in range(3):
            look(STUCK_S, False)
    look(0, True)
    lives[0] = False
    look(1, False)
    look(1, False)
    assert told == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert set(caplog.messages) == {
        "aurora: what moves experts is stuck or gone; vLLM serves on, and experts may stay where they are"
    }


def test_a_heart_beats_in_a_thread(monkeypatch):
    beats = threading.Semaphore(0)
    monkeypatch.setattr(plugin_status, "BEAT_S", 0.001)
    HeartbeatThread(beats.release)
    assert beats.acquire(timeout=60)
    assert beats.acquire(timeout=60)
    monkeypatch.setattr(plugin_status, "BEAT_S", 3600)
