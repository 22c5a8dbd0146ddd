"""Adapts the placement to traffic through EPLB: rank 0 decides after each of EPLB's windows, and broadcasts expert maps.

EPLB applies one expert map per rebalance window. With synchronous moves a rebalance is split by layers; between two forward
passes, as many layers change as lengthen a pass by at most a tenth, but at least one.

Example: one layer of 4 experts, whose slots (physical experts) are on 2 ranks, 3 on each.

    physical_LP                 [[0, 1, 2, 3, 0, 1]]    rank 0 holds experts 0, 1, 2; rank 1 holds 3, 0, 1
    load_LE of the window       [[100, 100, 100, 900]]  rank 0: 50 + 50 + 100 = 200; rank 1: 900 + 50 + 50 = 1000

1. `next_map`, after the window: rank 0 hands the loads to the controller, in a thread: Phase.DECIDES. Until it has decided,
   `next_piece` returns the map in force, on all ranks.
2. The controller wants [[3, 1, 2, 3, 0, 1]], a replica of expert 3 on rank 0: each rank then has 450 + 100 + 50 = 600.
   Phase.MOVES: each `next_piece` returns the map after the next layers have changed, here the only one.
3. `next_map`, after the next window: what vLLM holds is compared with what was wanted, and the controller decides again.
"""

import logging
import threading
import time
from collections import deque
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
from aurora.types.options import LENGTHENED
from aurora.types.placement import EMPTY
from aurora_vllm.plugin_status import ControlMetrics, HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts

if TYPE_CHECKING:
    from aurora.algorithms.control.controller import Controller, Decision

LOG = logging.getLogger("vllm.aurora")
MOST_PASSES = 1000  # whose times are kept for a window
RECENT = 8  # passes, of which the shortest tells how long moves between two of them may take
PATIENCE_S = 2.0  # after which a decision is too late; one takes less than 0.1 s
MARGIN = 0.7  # of the time that moves may take that they are meant to take
GROWTH = 2  # times the last number of layers that the next one is at most


class Phase(Enum):
    """What rank 0 waits for."""

    RESTS = "the next window"
    DECIDES = "a decision"
    LATE = "a decision that will not be carried out"
    MOVES = "the moves of a decision"


class PassTimes:
    """Records start times of forward passes.

    Args:
        clock: returns the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: deque[float] = deque(maxlen=MOST_PASSES)

    def add(self) -> None:
        """Adds a forward pass that begins now."""
        self._began_s.append(self._clock())

    def take_shortest_s(self) -> float:
        """Returns the shortest seconds from start to start of the last RECENT passes, and forgets all; 0 if there are none."""
        began_s_P, self._began_s = np.array(self._began_s), deque(maxlen=MOST_PASSES)
        return float(np.diff(began_s_P)[-RECENT:].min()) if len(began_s_P) > 1 else 0.0


class LayersPerPass:
    """Chooses how many layers change between two passes, so that they lengthen a pass by no more than LENGTHENED.

    Example:
        >>> layers = LayersPerPass()
        >>> layers.next(100, pass_s=1.0)
        1
        >>> layers.record(0.01)
        >>> layers.next(99, pass_s=1.0)
        2
    """

    def __init__(self) -> None:
        self._most, self._last, self._per_s = 1, 1, 0.0

    def next(self, left: int, pass_s: float) -> int:
        """Returns the number of layers to change next, of those that are left; `pass_s`: seconds of a pass."""
        self._most = max(min(int(self._per_s * pass_s * LENGTHENED * MARGIN), GROWTH * self._last), 1)
        self._last = min(self._most, left)
        return self._last

    def record(self, seconds: float) -> None:
        """Records the seconds of the layers that `next` returned last. If few were left, they tell nothing: they start up."""
        if self._last == self._most or not self._per_s:
            self._per_s = self._last / seconds


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
        passes: the forward passes of this window.
        in_pieces: True: EPLB moves experts in pieces and calls `next_piece` between passes. False: the map that `next_map`
            returns contains all moves of a decision.
        under_way: True: a decision is pending, or moves are left for the next pass; the same on all ranks.
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
        self.layers, self.in_pieces, self.under_way, self.phase = facts.layers, False, False, Phase.RESTS
        self._settings, self._facts, self._cluster, self._profile = settings, facts, cluster, profile
        self._broadcast, self._metrics, self._clock, self._stalls = broadcast, metrics, clock, stalls
        self.heartbeat, self.passes = HeartbeatThread(self._beat, alive), PassTimes(clock)
        self._controller: Controller | None = None  # on rank 0, from the first window on
        self._deciding: Future[Decision] = Future()  # in the phases DECIDES and LATE
        self._asked_s = 0.0  # when it began
        self._left: deque[int] = deque()  # layers that are left to change in the phase MOVES
        self._expected_LGP: IntArray | None = None  # what vLLM holds between two pieces
        self._layers_per_pass = LayersPerPass()
        self._pass_s = self._piece_s = 0.0  # what a pass without moves takes, and what the last piece took
        self._move_s, self._began_s = 0.0, clock()

    def change_ranks(self, rank: int, ranks: int) -> None:
        """Continues as rank `rank` of `ranks` remaining ranks.

        A new controller starts from the experts that EPLB holds now, and assumes equal GPUs.
        """
        self._facts, self._cluster = replace(self._facts, rank=rank, ranks=ranks), None
        self._controller, self.phase, self.under_way = None, Phase.RESTS, False
        self._left.clear()

    def next_map(self, load_LE: torch.Tensor, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns the next expert map, (L, P) int64: the expert that each slot must hold. Call it after each window.

        A collective call with the same result on all ranks.

        Args:
            load_LE: (L, E) tokens of each expert in the window, the same on all ranks.
            physical_LP: (L, P) the expert that each slot (physical expert) holds now, rank by rank.
        """
        return self._agreed(lambda held_LGP: self._end_window(load_LE.numpy(), held_LGP), physical_LP)

    def next_piece(self, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns the expert map, (L, P) int64, after the next layers of the last decision have changed.

        A collective call, to be made between passes while `under_way`; argument as in `next_map`.
        """
        return self._agreed(self._next_table, physical_LP)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager that times the moves of one map, which run inside it."""
        began_s = self._clock()
        with self.heartbeat.step():
            yield
        self._piece_s = self._clock() - began_s
        self._move_s += self._piece_s

    def _agreed(self, make: Callable[[IntArray], IntArray], physical_LP: torch.Tensor) -> torch.Tensor:
        """The map that rank 0 makes of (L, G, P), the one in force, on all ranks; and whether more is to come."""
        with self.heartbeat.step():
            now_LP = physical_LP.to("cpu", torch.int64, copy=True)
            message = torch.zeros(now_LP.numel() + 1, dtype=torch.int64)
            if self._facts.rank == 0:
                held_LGP = now_LP.numpy().reshape(len(now_LP), self._facts.ranks, -1)
                try:
                    next_LGP = make(held_LGP)
                except Exception as error:
                    next_LGP = held_LGP
                    self._fail(error, held_LGP)
                message = torch.from_numpy(np.append(next_LGP, len(self._left) + (self.phase is Phase.DECIDES)))
            try:
                self._broadcast(message)
            except Exception as error:  # the group is broken, so the engine will say more
                self._fail(error, None)
                self.under_way = False
                return now_LP
            self.under_way = bool(message[-1])
            return message[:-1].view(now_LP.shape)

    def _end_window(self, load_LE: IntArray, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the first map after a window, about which a thread decides from now on."""
        if self.phase is Phase.DECIDES or self._left:  # vLLM asks for another reason
            return self._next_table(held_LGP)
        if self.phase is Phase.LATE and not self._deciding.done():
            self._metrics.failed()
            return held_LGP
        controller = self._settle(held_LGP)
        self._pass_s = self.passes.take_shortest_s()
        self._asked_s, self._expected_LGP = self._clock(), held_LGP
        period_s, self._began_s = max(self._asked_s - self._began_s, 1e-3), self._asked_s
        self._deciding, self.phase = _in_thread(lambda: controller.window(load_LE, period_s)), Phase.DECIDES
        if not self.in_pieces:
            wait([self._deciding], PATIENCE_S)
        return self._next_table(held_LGP)

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

    def _next_table(self, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the next map, by what rank 0 waits for."""
        if self._expected_LGP is None or not np.array_equal(held_LGP, self._expected_LGP):
            raise RuntimeError("vLLM has other experts in place than were decided on")
        match self.phase:
            case Phase.DECIDES if self._deciding.done():
                return self._begin_moves(self._deciding.result(), held_LGP)
            case Phase.DECIDES if not self.in_pieces or self._clock() - self._asked_s >= PATIENCE_S:
                self.phase = Phase.LATE
                self._metrics.failed()
                LOG.warning("aurora: experts stay where they are: no decision within %g s; vLLM serves on", PATIENCE_S)
                return held_LGP
            case Phase.MOVES:
                return self._next_layers(held_LGP)
            case Phase.DECIDES | Phase.LATE | Phase.RESTS:
                return held_LGP

    def _begin_moves(self, decision: "Decision", held_LGP: IntArray) -> IntArray:
        """(L, G, P) the first map by a decision: the one in force, if experts stay or this is a dry run."""
        self.phase = Phase.RESTS
        self._metrics.tell(decision, self._settings.dry_run)
        if decision.action == "keep":
            return held_LGP
        if self._settings.dry_run:
            assert self._controller is not None
            self._controller.moved()
            return held_LGP
        self.phase = Phase.MOVES
        next_LGP = _filled(decision.held_LGP, held_LGP)
        _check_all_held(next_LGP, self._facts.experts)
        if not self.in_pieces:
            return next_LGP
        self._left.extend(decision.layers)
        self._piece_s = 0.0
        return self._next_layers(held_LGP)

    def _next_layers(self, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the map after as many of the layers that are left have changed as a pass may wait for."""
        if self._piece_s:
            self._layers_per_pass.record(self._piece_s)
            self.passes.take_shortest_s()  # which had moves between them
        next_LGP, wanted_LGP = held_LGP.copy(), self._deciding.result().held_LGP
        for _ in range(self._layers_per_pass.next(len(self._left), self._pass_s)):
            layer = self._left.popleft()
            next_LGP[layer] = _filled(wanted_LGP[layer], held_LGP[layer])
        self._expected_LGP = next_LGP
        return next_LGP

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
        self._left.clear()
        if self.phase in (Phase.DECIDES, Phase.LATE) and not self._deciding.done():
            self.phase = Phase.LATE
        elif self._controller is not None:
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
