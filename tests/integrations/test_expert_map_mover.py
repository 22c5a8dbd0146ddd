"""Experts that follow the traffic without EPLB: they move between forward passes, and answers stay the same."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aurora_vllm.expert_map_mover import ExpertMapMover, ExpertSlots
from aurora_vllm.plugin_status import STUCK_S, ControlMetrics
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import ChoiceCounter, EngineFacts
from aurora_vllm.worker_integration import WorkerIntegration
from prometheus_client import CollectorRegistry

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.control.controller import Controller
from aurora.runtime.follower import Follower
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Network, Placement
from tests.runtime.test_live_placement import patient

RANKS, LAYERS, EXPERTS, TOP_K, WIDTH = 3, 2, 6, 2, 2000
FIRST = Placement((((0, 1), (2, 3), (4, 5)),) * LAYERS)
PLANNED = ORDER["openshop"](1 - np.eye(RANKS, dtype=np.int64), Network.equal(RANKS), rng=np.random.default_rng(0))
HOT = ((0, 1), (2, 3))  # by layer, the experts that most tokens choose


class Rank:
    """One rank of an engine whose experts multiply a row by their number plus one, as their weights say."""

    def __init__(self, rank, memory, planned, **settings):
        self.rank, self.memory = rank, memory
        self.integration = WorkerIntegration(Settings(adapt=True, period_s=0.002, **settings), rank, RANKS, None, None)
        orders = (PLANNED, PLANNED.reversed) if planned else None
        self.integration.served.order = "plan" if planned else "online"
        self.integration.served.planned_orders = lambda _: orders
        self.integration.connect(self.transport)
        self.chosen_NLK = torch.zeros(8, LAYERS, TOP_K, dtype=torch.int32)
        self.weight_LP = [torch.tensor(held_G[rank]).add(1.0)[:, None].repeat(1, WIDTH) for held_G in FIRST.slots_LG]
        self.slot_LE = [torch.full((EXPERTS,), -1, dtype=torch.int32) for _ in range(LAYERS)]
        for slot_E, held_G in zip(self.slot_LE, FIRST.slots_LG, strict=True):
            slot_E[list(held_G[rank])] = torch.arange(2, dtype=torch.int32)
        self.memory_of = [each.data_ptr() for each in (*self.weight_LP, *self.slot_LE)]
        layers = [
            ExpertSlots(
                FIRST.slots_LG[layer][rank], [self.weight_LP[layer]], [self.slot_LE[layer]], orders, self.alltoalls(layer)
            )
            for layer in range(LAYERS)
        ]
        facts = EngineFacts("m", "", "vllm", "cpu", rank, RANKS, TOP_K, LAYERS, EXPERTS, 4, 4, 4 * WIDTH, 0)
        counter = ChoiceCounter(self.chosen_NLK, dict(enumerate(range(LAYERS))), LAYERS, EXPERTS)
        self.registry = CollectorRegistry()
        metrics = ControlMetrics("m", rank, self.registry)
        self.integration.moving = ExpertMapMover(
            self.integration.settings, facts, None, layers, FIRST, counter, self.transport(), self.integration.time_slices, metrics
        )  # fmt: skip

    def transport(self):
        return MemoryTransport(self.memory, self.rank)

    def alltoalls(self, layer):
        return lambda: self.integration.alltoalls(layer)

    def forward(self, tokens, rng):
        """A forward pass: real tokens, or the dummy batch of an idle rank."""
        rows = max(tokens, 1)
        for layer, hot in enumerate(HOT):
            score_NE = rng.random((rows, EXPERTS))
            score_NE[:, hot] += 0.7
            self.chosen_NLK[:rows, layer] = torch.from_numpy(score_NE.argsort(axis=1)[:, -TOP_K:])
        hidden, ones = torch.arange(rows, dtype=torch.float32)[:, None].add(1).repeat(1, 4), torch.ones(rows, TOP_K)
        with self.integration.forward_pass(tokens):
            for layer in range(LAYERS):
                index = self.chosen_NLK[:rows, layer].clone()
                with self.integration.moe_layer(layer, index, False):
                    arrived, weights, index_PK = self.integration.dispatch(hidden, ones, index, self.slots)
                    factor_PK = self.weight_LP[layer][
                        self.slot_LE[layer][index_PK.long()].long(), -1
                    ]  # slot -1 has weight zero
                    sums = self.integration.combine(arrived * (weights * factor_PK).sum(dim=1, keepdim=True))
                torch.testing.assert_close(sums, hidden * (index + 1).sum(dim=1, keepdim=True), rtol=0, atol=0)

    def slots(self, layer):
        return FIRST.slots_LG[layer]

    def serve(self, passes, idle=()):
        """Warm-up, and forward passes; ranks in `idle` have no requests."""
        rng = np.random.default_rng(self.rank)
        self.forward(0, rng)
        self.integration.moving.begin()
        for _ in range(passes):
            self.forward(0 if self.rank in idle else int(rng.integers(1, 9)), rng)
        self.integration.moving.close()
        return self

    def held_L(self):
        return [[int(row[0]) - 1 for row in weight_P] for weight_P in self.weight_LP]


def served(planned=False, idle=(), passes=100, **settings):
    memory = Memory(RANKS, 120.0)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: Rank(rank, memory, planned, **settings).serve(passes, idle), range(RANKS)))


@pytest.mark.parametrize(("planned", "idle"), [(False, ()), (True, (2,))])
def test_experts_follow_the_traffic_between_passes(monkeypatch, caplog, planned, idle):
    """Every pass's answers are right, whoever holds an expert; weights and maps stay where they are in memory."""
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    caplog.set_level(logging.INFO, "vllm.aurora")
    monkeypatch.setattr("aurora_vllm.layer_alltoall.SMALL_BYTES", 0)
    ranks = served(planned, idle, loss=0.0)
    for layer, hot in enumerate(HOT):
        held_R = [rank.held_L()[layer] for rank in ranks]
        assert sorted(expert for held in held_R for expert in held) == list(range(EXPERTS))
        assert all(len(held) == 2 and not set(hot) <= set(held) for held in held_R)
        for rank, held in zip(ranks, held_R, strict=True):
            assert [rank.slot_LE[layer].tolist().index(slot) for slot in range(2)] == held
            assert sum(slot >= 0 for slot in rank.slot_LE[layer].tolist()) == 2
    for rank in ranks:
        assert [each.data_ptr() for each in (*rank.weight_LP, *rank.slot_LE)] == rank.memory_of
        orders_L = [rank.integration.alltoalls(layer)[0].planned_orders for layer in range(LAYERS)]
        assert all(orders == ranks[0].integration.alltoalls(layer)[0].planned_orders for layer, orders in enumerate(orders_L))
        assert all((orders is None) is not planned and orders != (PLANNED, PLANNED.reversed) for orders in orders_L)
    value = ranks[0].registry.get_sample_value
    labels = {"model_name": "m", "ep_rank": "0"}
    moves = value("aurora_control_decisions_total", labels | {"kind": "gain"})
    assert moves >= 1
    assert value("aurora_control_moved_bytes_total", labels) >= 2 * 4 * WIDTH * LAYERS
    assert value("aurora_control_failures_total", labels) == 0
    assert len([line for line in caplog.messages if line.startswith("aurora: move (gain): ")]) == moves


def test_a_dry_run_moves_nothing(monkeypatch, caplog):
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    caplog.set_level(logging.INFO, "vllm.aurora")
    ranks = served(passes=30, loss=0.0, dry_run=True)
    assert [rank.held_L() for rank in ranks] == [[list(held_G[rank]) for held_G in FIRST.slots_LG] for rank in range(RANKS)]
    assert any(line.startswith("aurora: dry run: move (gain): ") for line in caplog.messages)


def test_moves_that_wait_for_requests_are_not_stuck(monkeypatch):
    """An idle engine makes no passes. A loop that is stuck while it makes some gives no sign of life."""
    moving = Rank(0, Memory(RANKS, 10.0), False).integration.moving
    monkeypatch.setattr(moving, "_follower", SimpleNamespace(stuck=True, close=lambda: None))
    assert not moving.heartbeat.well
    monkeypatch.setattr(moving, "_passed_s", moving._passed_s - STUCK_S - 1)
    assert moving.heartbeat.well


def test_an_error_in_planning_is_said_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(Follower, "add", patient(Follower.add))
    window, calls = Controller.window, []
    monkeypatch.setattr(Controller, "window", lambda *given: calls.append(0) or (window(*given) if len(calls) != 2 else 1 / 0))
    ranks = served(passes=60, loss=0.0)
    assert ranks[0].registry.get_sample_value("aurora_control_failures_total", {"model_name": "m", "ep_rank": "0"}) == 1
    assert ranks[0].held_L() != [list(held_G[0]) for held_G in FIRST.slots_LG]
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
        "aurora: experts stay where they are: ZeroDivisionError: division by zero"
    ]
