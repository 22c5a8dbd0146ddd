"""Adapts the placement to traffic through EPLB: rank 0 decides after each of EPLB's windows, and broadcasts expert maps.

EPLB makes the moves of a map itself: in the background, beside forward passes, or at once, while serving waits.

Example: one layer of 4 experts, whose slots (physical experts) are on 2 ranks, 3 on each.

    physical_LP                 [[0, 1, 2, 3, 0, 1]]    rank 0 holds experts 0, 1, 2; rank 1 holds 3, 0, 1
    load_LE of the window       [[100, 100, 100, 900]]  rank 0: 50 + 50 + 100 = 200; rank 1: 900 + 50 + 50 = 1000

1. Decide: `next_map`, after the window, hands the loads to rank 0's controller. It wants [[3, 1, 2, 3, 0, 1]], a replica of
   expert 3 on rank 0: each rank then has 450 + 100 + 50 = 600. `next_map` returns this on all ranks: Phase.MOVES.
2. Move: EPLB copies expert 3 to rank 0, inside `moving`, which measures the seconds.
3. Settle: `next_map`, after the next window, compares what vLLM holds with what was wanted. If they are equal, the controller
   learns what the moves took, else that they failed. Then it decides again.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from aurora.types import Cluster, ControlOptions, GpuSlots, Profile
from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY
from aurora_vllm.plugin_status import ControlMetrics, HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts

if TYPE_CHECKING:
    from aurora.algorithms.control.controller import Controller, Decision

LOG = logging.getLogger("vllm.aurora")
PATIENCE_S = 2.0  # after which a decision is too late; one takes less than 0.1 s


class Phase(Enum):
    """What rank 0 waits for between two windows."""

    RESTS = "the next window"
    LATE = "a decision that will not be carried out"
    MOVES = "the moves of a decision"


class EplbMover:
    """Computes the expert maps with which EPLB adapts to the traffic: one object per rank.

    Only rank 0 runs the controller, and broadcasts its decisions as expert maps. So all ranks apply the same maps, although
    their clocks differ. Neither an error nor a late decision stops serving: the experts stay where they are, and the failure is
    logged and counted.

    Args:
        settings: the controller's options, and `dry_run`.
        facts: facts about the model and this rank.
        cluster: the ranks' GPUs and ports; None: equal GPUs, and moves count as free until one has been measured.
        stalls: True: serving waits while experts move.
        broadcast: overwrites a tensor with rank 0's values on all ranks; a collective call.
        metrics: counts decisions, moves and failures.
        alive: returns True while EPLB's thread that moves experts runs.
        clock: returns the present time in seconds.
        profile: its compute curves give the cost of load on each kind of GPU; None: the cluster's speeds give it.

    Attributes:
        layers: number of MoE layers of the model.
        heartbeat: HeartbeatThread that beats while no decision or move is stuck.
        phase: what rank 0 waits for; RESTS on other ranks.
    """

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        cluster: Cluster | None,
        stalls: bool,
        broadcast: Callable[[torch.Tensor], None],
        metrics: ControlMetrics,
        alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        profile: Profile | None = None,
    ) -> None:
        self.layers, self.phase = facts.layers, Phase.RESTS
        self._settings, self._facts, self._cluster, self._profile = settings, facts, cluster, profile
        self._broadcast, self._metrics, self._clock, self._stalls = broadcast, metrics, clock, stalls
        self.heartbeat = HeartbeatThread(self._beat, alive)
        self._controller: Controller | None = None  # on rank 0, from the first window on
        self._deciding: Future[Decision] = Future()  # of the last window
        self._move_s, self._began_s = 0.0, clock()  # seconds of moves in this window, and when it began

    def change_ranks(self, rank: int, ranks: int) -> None:
        """Continues as rank `rank` of `ranks` remaining ranks.

        A new controller starts from the experts that EPLB holds now, and assumes equal GPUs.
        """
        self._facts, self._cluster = replace(self._facts, rank=rank, ranks=ranks), None
        self._controller, self.phase = None, Phase.RESTS

    def next_map(self, load_LE: torch.Tensor, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns the next expert map, (L, P) int64: the expert that each slot must hold. Call it after each window.

        A collective call with the same result on all ranks. Rank 0 waits PATIENCE_S at most for its controller's thread.

        Args:
            load_LE: (L, E) tokens of each expert in the window, the same on all ranks.
            physical_LP: (L, P) the expert that each slot (physical expert) holds now, rank by rank.
        """
        with self.heartbeat.step():
            now_LP = physical_LP.to("cpu", torch.int64, copy=True)
            next_LP = now_LP.clone()
            if self._facts.rank == 0:
                held_LGP = now_LP.numpy().reshape(len(now_LP), self._facts.ranks, -1)
                try:
                    next_LP.copy_(torch.from_numpy(self._end_window(load_LE.numpy(), held_LGP)).view_as(next_LP))
                except Exception as error:
                    self._fail(error, held_LGP)
            try:
                self._broadcast(next_LP)
            except Exception as error:  # the group is broken, so the engine will say more
                self._fail(error, None)
                return now_LP
            return next_LP

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager that times moves, which run inside it."""
        began_s = self._clock()
        with self.heartbeat.step():
            yield
        self._move_s += self._clock() - began_s

    def _end_window(self, load_LE: IntArray, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the map after a window: the one in force, if experts stay, the decision is late, or this is a dry run."""
        if self.phase is Phase.LATE and not self._deciding.done():
            self._metrics.failed()
            return held_LGP
        controller, now_s = self._settle(held_LGP), self._clock()
        period_s, self._began_s = max(now_s - self._began_s, 1e-3), now_s
        self._deciding = _in_thread(lambda: controller.window(load_LE, period_s))
        wait([self._deciding], PATIENCE_S)
        if not self._deciding.done():
            self.phase = Phase.LATE
            self._metrics.failed()
            LOG.warning("aurora: experts stay where they are: no decision within %g s; vLLM serves on", PATIENCE_S)
            return held_LGP
        decision = self._deciding.result()
        self._metrics.tell(decision, self._settings.dry_run)
        if decision.action == "keep":
            return held_LGP
        if self._settings.dry_run:
            controller.moved()
            return held_LGP
        next_LGP = _filled(decision.held_LGP, held_LGP)
        _check_all_held(next_LGP, self._facts.experts)
        self.phase = Phase.MOVES
        return next_LGP

    def _settle(self, held_LGP: IntArray) -> "Controller":
        """Returns the controller, which has been told what became of its last decision: what EPLB holds is in force."""
        controller, phase, self.phase = self._controller, self.phase, Phase.RESTS
        if controller is None:
            controller = self._controller = self._make_controller(held_LGP)
        decision = self._deciding.result() if phase is Phase.MOVES else None
        wanted_LGP = controller.held_LGP if decision is None else decision.held_LGP
        if phase is Phase.LATE or (self._settings.dry_run and decision is None):
            if phase is Phase.LATE:
                controller.failed(held_LGP)
        elif not np.array_equal(_filled(wanted_LGP, held_LGP), held_LGP):
            LOG.warning("aurora: vLLM has other experts in place than were decided on")
            controller.failed(held_LGP)
        elif decision is not None:
            controller.moved(self._move_s)
            self._metrics.moved(decision.bytes, self._move_s)
        self._move_s = 0.0
        return controller

    def _make_controller(self, held_LGP: IntArray) -> "Controller":
        from aurora.algorithms.control.controller import Controller, load_cost_G, slowest_port_Bps

        options, slots, move_Bps = ControlOptions(self._settings.loss), None, None
        if (cluster := self._cluster) is not None:
            width_G = np.full(self._facts.ranks, held_LGP.shape[2])
            slots = GpuSlots(width_G, load_cost_G(cluster, self._profile))
            move_Bps = slowest_port_Bps(cluster) * len(cluster)
        inputs = held_LGP, self._facts.expert_bytes, options, slots, move_Bps, self._clock
        return Controller(*inputs, stalls=self._stalls)

    def _fail(self, error: Exception, held_LGP: IntArray | None) -> None:
        """Gives up a decision or its moves, and says so; experts stay in `held_LGP`, None: where they were before the moves."""
        if self._controller is not None and (self.phase is not Phase.LATE or self._deciding.done()):
            self._controller.failed(held_LGP)
            self.phase, self._move_s = Phase.RESTS, 0.0
        self._metrics.failed()
        LOG.warning("aurora: experts stay where they are: %s: %s", type(error).__name__, error)

    def _beat(self) -> None:
        """Says that what moves experts is well, unless a decision is late."""
        if self.phase is not Phase.LATE or self._deciding.done():
            self._metrics.beat()


def _in_thread(decide: "Callable[[], Decision]") -> "Future[Decision]":
    """Calls a function in a thread that does not outlive the process. Returns its result to come."""
    decided: Future[Decision] = Future()

    def run() -> None:
        try:
            decided.set_result(decide())
        except Exception as error:
            decided.set_exception(error)

    threading.Thread(target=run, name="aurora-control", daemon=True).start()
    return decided


def _filled(table_LGP: IntArray, held_LGP: IntArray) -> IntArray:
    """A table of slots in which those that are empty hold what they held."""
    return np.where(table_LGP == EMPTY, held_LGP, table_LGP)


def _check_all_held(table_LGP: IntArray, experts: int) -> None:
    """Raises RuntimeError if a layer of a table of slots lacks an expert, or has one that the model has not."""
    for layer, table_GP in enumerate(table_LGP):
        if set(table_GP.flat) != set(range(experts)):
            raise RuntimeError(f"the controller's table of layer {layer} has {sorted(set(table_GP.flat))} of {experts} experts")
