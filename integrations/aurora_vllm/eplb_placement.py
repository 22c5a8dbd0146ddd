"""A placement that follows its traffic through EPLB: rank 0 decides after each of its windows, and all ranks take its maps.

EPLB has one map after each of its windows. Where serving waits while experts move, a decision has many: between two forward
passes come as many rounds of its moves as a pass may wait for, so that a pass is lengthened by a tenth, or by one round.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from aurora.planner.control.controller import Controller, Decision
from aurora.planner.control.move_sequence import Move
from aurora.planner.control.plan_controller import compile_decisions, load_cost_G, slowest_port_Bps
from aurora.runtime.work_pieces import WorkPieces
from aurora.types import Cluster, ControlOptions, GpuSlots, Profile
from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY
from aurora_vllm.control_metrics import ControlMetrics
from aurora_vllm.heartbeat import HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts

LOG = logging.getLogger("vllm.aurora")
MOST_PASSES = 1000  # whose times are kept for a window
RECENT = 8  # passes, of which the shortest tells how long moves between two of them may take
PATIENCE_S = 2.0  # after which a decision is too late; one takes less than 0.1 s


class PassTimes:
    """The seconds between forward passes, and their tokens, since they were last asked for.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passes: deque[tuple[float, int]] = deque(maxlen=MOST_PASSES)

    def add(self, tokens: int) -> None:
        """Adds a forward pass, which begins now."""
        self._passes.append((self._clock(), tokens))

    def shortest_s(self) -> float:
        """Returns the seconds from pass to pass, the least of the last RECENT; 0 if there were fewer than two."""
        began_s_P = np.array([began_s for began_s, _ in self._passes])
        return float(np.diff(began_s_P)[-RECENT:].min(initial=np.inf)) if len(began_s_P) > 1 else 0.0

    def take(self) -> tuple[float, float] | None:
        """Returns the median seconds from pass to pass and their median tokens; None if there were fewer than two."""
        passes, self._passes = self._passes, deque(maxlen=MOST_PASSES)
        if len(passes) < 2:
            return None
        began_s_P, tokens_P = np.array(passes).T
        return float(np.median(np.diff(began_s_P))), float(np.median(tokens_P))


class EplbPlacement:
    """What EPLB's physical experts hold, on one rank.

    Rank 0 has the controller; what it decides goes to all ranks as maps, so that their clocks and step times may differ. No
    error leaves this class, and no decision keeps serving waiting for long: experts then stay where they are, and one line and
    a counter say so.

    Args:
        settings: what users set of the controller, and whether it only says what it would do.
        facts: facts about the model and this rank.
        cluster: the ranks' GPUs and ports; None: equal ones, and moves cost nothing until they are measured.
        stalls: whether serving waits while experts move.
        broadcast: gives a tensor rank 0's values on all ranks; a collective call.
        metrics: count what happens.
        alive: returns whether what moves experts still runs.
        clock: returns seconds.
        profile: tells by its compute curves what load costs on each kind of GPU; None: the cluster's speeds tell.

    Attributes:
        layers: number of MoE layers of the model.
        heartbeat: a step of it is a decision, or moves that others wait for.
        passes: the forward passes of this window.
        in_pieces: whether what moves experts asks for `next_piece` between passes; else a decision's moves come at once.
        under_way: whether a decision or moves are left for the next pass, the same on all ranks.
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
        self._profile = profile
        self.layers, self.in_pieces, self.under_way = facts.layers, False, False
        self._settings, self._facts, self._cluster, self._stalls = settings, facts, cluster, stalls
        self._broadcast, self._metrics, self._clock = broadcast, metrics, clock
        self._deciding: Future[Decision] | None = None  # what rank 0's controller is about to decide
        self._asked_s = 0.0  # since when
        self._late: Future[Decision] | None = None  # what it is about to decide too late
        self.heartbeat, self.passes = HeartbeatThread(self._beat, alive), PassTimes(clock)
        self._controller: Controller | None = None
        if facts.rank == 0:
            compile_decisions()
        self._wanted: Decision | None = None  # whose moves are under way
        self._rounds: deque[list[Move]] = deque()  # of these, those that are left
        self._expected_LGP: IntArray | None = None  # what vLLM holds between two pieces
        self._pieces = WorkPieces(1)  # of rounds
        self._pass_s = self._piece_s = 0.0  # what a pass without moves takes, and what the last piece took
        self._move_s, self._began_s = 0.0, clock()

    def next_map(self, load_LE: torch.Tensor, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns (L, P) int64, the expert in each physical expert from now on, the same on all ranks. A collective call.

        Args:
            load_LE: (L, E) tokens of each expert in the window, the same on all ranks.
            physical_LP: (L, P) the expert in each physical expert now, rank by rank.
        """
        return self._agreed(lambda held_LGP: self._decide(load_LE.numpy(), held_LGP), physical_LP)

    def next_piece(self, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns the same as `next_map`, on the way to what was decided on. A collective call, to be made if `under_way`."""
        return self._agreed(self._go_on, physical_LP)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager in which experts of the last decision move."""
        began_s = self._clock()
        with self.heartbeat.step():
            yield
        self._piece_s = self._clock() - began_s
        self._move_s += self._piece_s

    def _agreed(self, make: Callable[[IntArray], IntArray], physical_LP: torch.Tensor) -> torch.Tensor:
        """What rank 0 makes of (L, G, P), the physical experts as they are, on all ranks, and whether more is to come."""
        with self.heartbeat.step():
            now_LP = physical_LP.to("cpu", torch.int64, copy=True)
            told = torch.zeros(now_LP.numel() + 1, dtype=torch.int64)
            if self._facts.rank == 0:
                held_LGP = now_LP.numpy().reshape(len(now_LP), self._facts.ranks, -1)
                try:
                    next_LGP = make(held_LGP)
                except Exception as error:
                    next_LGP = held_LGP
                    self._failed(error, held_LGP)
                told = torch.from_numpy(np.append(next_LGP, len(self._rounds) + (self._deciding is not None)))
            try:
                self._broadcast(told)
            except Exception as error:  # the group is broken, so the engine will say more
                self._failed(error)
                self.under_way = False
                return now_LP
            self.under_way = bool(told[-1])
            return told[:-1].view(now_LP.shape)

    def _decide(self, load_LE: IntArray, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the first map after a window, for which the controller decides from now on."""
        if self._deciding is not None or self._rounds:  # vLLM asks for another reason
            return self._go_on(held_LGP)
        if self._late is not None and not self._late.done():
            self._metrics.failed()
            return held_LGP
        self._pass_s, times = self.passes.shortest_s(), self.passes.take() or (None, None)
        self._deciding, self._asked_s = _begun(lambda: self._planned(load_LE, held_LGP, times)), self._clock()
        self._expected_LGP = held_LGP
        if not self.in_pieces:
            wait([self._deciding], PATIENCE_S)
        return self._go_on(held_LGP)

    def _planned(self, load_LE: IntArray, held_LGP: IntArray, times: tuple[float | None, float | None]) -> Decision:
        """The controller's decision after a window."""
        controller = self._settled(held_LGP)
        ended_s = self._clock()
        controller.options = replace(controller.options, period_s=max(ended_s - self._began_s, 1e-3))
        self._began_s = ended_s
        return controller.window(load_LE, *times)

    def _decided(self, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the first map by what is decided; the one in force if that is not there yet, or does not come in time."""
        deciding = self._deciding
        assert deciding is not None
        if not deciding.done() and self.in_pieces and self._clock() - self._asked_s < PATIENCE_S:
            return held_LGP
        self._deciding = None
        if deciding.done():
            return self._begin(deciding.result(), held_LGP)
        self._late = deciding
        self._metrics.failed()
        LOG.warning("aurora: experts stay where they are: no decision within %g s; vLLM serves on", PATIENCE_S)
        return held_LGP

    def _begin(self, decision: Decision, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the first map on the way to what was decided on."""
        assert self._controller is not None
        next_LGP = held_LGP
        if decision.action != "keep" and self._settings.dry_run:
            self._controller.failed()
        elif decision.action != "keep":
            next_LGP = _filled(decision.held_LGP, held_LGP)
            _check_all_held(next_LGP, self._facts.experts)
            self._wanted = decision
            if self.in_pieces:
                self._rounds.extend(list(moves) for _, moves in groupby(decision.moves, attrgetter("round")))
                self._piece_s, next_LGP = 0.0, self._go_on(held_LGP)
        self._metrics.decided(decision.kind, decision.balancedness, decision.expected_balancedness)
        LOG.info("aurora: %s%s", "dry run: " if self._settings.dry_run else "", decision)
        return next_LGP

    def _go_on(self, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the next map: as it is until a decision is there, then after as many rounds as a pass may wait for."""
        if self._expected_LGP is None or not np.array_equal(held_LGP, self._expected_LGP):
            raise RuntimeError("vLLM has other experts in place than were decided on")
        if self._deciding is not None:
            return self._decided(held_LGP)
        if self._piece_s:
            self._pieces.took(self._piece_s)
            self.passes.take()  # which had moves between them
        next_LGP = held_LGP.copy()
        for _ in range(self._pieces.next(len(self._rounds), self._pass_s)):
            for move in self._rounds.popleft():
                next_LGP[move.layer, move.dst, move.slot] = move.expert
        _check_all_held(next_LGP, self._facts.experts)
        self._expected_LGP = next_LGP
        return next_LGP

    def _settled(self, held_LGP: IntArray) -> Controller:
        """The controller, which has been told what became of its last decision: what EPLB holds is in force."""
        if self._late is not None and self._controller is not None:  # nobody has waited for its decision
            self._controller.failed()
        self._late = None
        if self._controller is None:
            options, cluster = ControlOptions(self._settings.loss, self._settings.bytes_per_s), self._cluster
            slots = move_Bps = None
            if cluster is not None:
                width_G = np.full(self._facts.ranks, held_LGP.shape[2])
                slots = GpuSlots(width_G, load_cost_G(cluster, self._profile))
                move_Bps = slowest_port_Bps(cluster) * len(cluster)
            made_of = (held_LGP, self._facts.expert_bytes, options, slots, move_Bps, self._clock)
            self._controller = Controller(*made_of, stalls=self._stalls)
        controller, wanted, self._wanted = self._controller, self._wanted, None
        moved_LGP = controller.held_LGP if wanted is None else wanted.held_LGP
        as_wanted = bool((_filled(moved_LGP, held_LGP) == held_LGP).all())
        if not as_wanted:
            LOG.warning("aurora: vLLM has other experts in place than were decided on")
            controller.failed(held_LGP)
        elif wanted is not None:
            controller.moved(self._move_s)
            self._metrics.moved(wanted.bytes, self._move_s)
        self._move_s = 0.0
        return controller

    def _failed(self, error: Exception, held_LGP: IntArray | None = None) -> None:
        """Says that experts stay where they are: in `held_LGP`, if not where they were before the last decision."""
        self._wanted = None
        self._rounds.clear()
        if self._deciding is not None:
            self._late, self._deciding = self._deciding, None
        elif self._controller is not None:
            self._controller.failed(held_LGP if held_LGP is not None and self._move_s else None)
        self._metrics.failed()
        LOG.warning("aurora: experts stay where they are: %s: %s", type(error).__name__, error)

    def _beat(self) -> None:
        """Says that what moves experts is well, unless a decision is late."""
        if self._late is None or self._late.done():
            self._metrics.beat()


def _begun(work: Callable[[], Decision]) -> Future[Decision]:
    """Begins work in a thread of its own, which does not keep the process from ending."""
    found: Future[Decision] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True, name="aurora-decision").start()
    return found


def _filled(table_LGP: IntArray, held_LGP: IntArray) -> IntArray:
    """A table of slots in which those that are empty hold what they held."""
    return np.where(table_LGP == EMPTY, held_LGP, table_LGP)


def _check_all_held(table_LGP: IntArray, experts: int) -> None:
    """Raises RuntimeError if a layer of a table of slots lacks an expert, or has one that the model has not."""
    for layer, table_GP in enumerate(table_LGP):
        if set(table_GP.flat) != set(range(experts)):
            raise RuntimeError(f"the controller's table of layer {layer} has {sorted(set(table_GP.flat))} of {experts} experts")
