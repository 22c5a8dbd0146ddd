"""Adapts the placement to traffic through EPLB: rank 0 decides after each of EPLB's windows, and broadcasts expert maps.

EPLB applies one expert map per rebalance window. With synchronous moves a rebalance is split into rounds; between two forward
passes, as many rounds are run as lengthen a pass by at most a tenth, but at least one.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from aurora.algorithms.control.move_rounds import Move, fill, rounds_of
from aurora.runtime.between_steps import Moved, MovesFailed, MovesGivenUp, MovesHandover, WorkPieces
from aurora.types import Cluster, ControlOptions, GpuSlots, Profile
from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY
from aurora_vllm.plugin_status import ControlMetrics, HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts

if TYPE_CHECKING:
    from aurora.algorithms.control.controller import Controller, Decision
    from aurora.runtime.follower import Follower

LOG = logging.getLogger("vllm.aurora")
MOST_PASSES = 1000  # whose times are kept for a window
RECENT = 8  # passes, of which the shortest tells how long moves between two of them may take
PATIENCE_S = 2.0  # after which a decision is too late; one takes less than 0.1 s
WAIT_S = 0.001  # between two looks whether it has come


class PassTimes:
    """Records start times and tokens of forward passes.

    Args:
        clock: returns the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passes: deque[tuple[float, int]] = deque(maxlen=MOST_PASSES)

    def add(self, tokens: int) -> None:
        """Adds a forward pass with `tokens` tokens that begins now."""
        self._passes.append((self._clock(), tokens))

    def shortest_s(self) -> float:
        """Returns the shortest time between the starts of two passes among the last RECENT; 0 before the second pass."""
        began_s_P = np.array([began_s for began_s, _ in self._passes])
        return float(np.diff(began_s_P)[-RECENT:].min(initial=np.inf)) if len(began_s_P) > 1 else 0.0

    def take(self) -> tuple[float, float] | None:
        """Returns (median seconds from pass to pass, median tokens per pass) since the last call, and clears the passes.

        Returns None if there were fewer than two passes.
        """
        passes, self._passes = self._passes, deque(maxlen=MOST_PASSES)
        if len(passes) < 2:
            return None
        began_s_P, tokens_P = np.array(passes).T
        return float(np.median(np.diff(began_s_P))), float(np.median(tokens_P))


class EplbMover:
    """Computes the expert maps with which EPLB adapts to the traffic: one object per rank.

    Only rank 0 runs the controller, in a thread (the follower), and broadcasts its decisions as expert maps. So all ranks apply
    the same maps, although their clocks differ. Neither an error nor a late decision stops serving: the experts stay where they
    are, and the failure is logged and counted.

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
        self.layers, self.in_pieces, self.under_way = facts.layers, False, False
        self._settings, self._facts, self._cluster, self._profile = settings, facts, cluster, profile
        self._broadcast, self._metrics, self._clock, self._stalls = broadcast, metrics, clock, stalls
        self.heartbeat, self.passes = HeartbeatThread(self._beat, alive), PassTimes(clock)
        self._controller: Controller | None = None  # with its follower on rank 0, from the first window on
        self._follower: Follower | None = None
        self._handover = MovesHandover()
        self._asked_s: float | None = None  # since when a decision is awaited; None: none is
        self._late = False  # whether the follower is about to decide too late
        self._wanted: Decision | None = None  # whose moves are under way
        self._rounds: deque[list[Move]] = deque()  # of these, those that are left
        self._expected_LGP: IntArray | None = None  # what vLLM holds between two pieces
        self._pieces = WorkPieces(1)  # of rounds
        self._pass_s = self._piece_s = 0.0  # what a pass without moves takes, and what the last piece took
        self._move_s, self._began_s = 0.0, clock()
        if facts.rank == 0:
            from aurora.algorithms.control.controller import compile_decisions  # which other ranks never need

            compile_decisions()

    def change_ranks(self, rank: int, ranks: int) -> None:
        """Continues as rank `rank` of `ranks` remaining ranks.

        A new controller starts from the experts that EPLB holds now, and assumes equal GPUs.
        """
        self._facts, self._cluster = replace(self._facts, rank=rank, ranks=ranks), None
        self._controller = self._follower = self._wanted = self._asked_s = None
        self._handover, self._late, self.under_way = MovesHandover(), False, False
        self._rounds.clear()

    def next_map(self, load_LE: torch.Tensor, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns the next expert map, (L, P) int64: the expert that each slot must hold. Call it after each window.

        A collective call with the same result on all ranks.

        Args:
            load_LE: (L, E) tokens of each expert in the window, the same on all ranks.
            physical_LP: (L, P) the expert that each slot (physical expert) holds now, rank by rank.
        """
        return self._agreed(lambda held_LGP: self._decide(load_LE.numpy(), held_LGP), physical_LP)

    def next_piece(self, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns the expert map, (L, P) int64, after the next rounds of moves of the last decision.

        A collective call, to be made between passes while `under_way`; argument as in `next_map`.
        """
        return self._agreed(self._go_on, physical_LP)

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
                    self._failed(error, held_LGP)
                message = torch.from_numpy(np.append(next_LGP, len(self._rounds) + (self._asked_s is not None)))
            try:
                self._broadcast(message)
            except Exception as error:  # the group is broken, so the engine will say more
                self._failed(error)
                self.under_way = False
                return now_LP
            self.under_way = bool(message[-1])
            return message[:-1].view(now_LP.shape)

    def _decide(self, load_LE: IntArray, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the first map after a window, on which the follower decides from now on."""
        if self._asked_s is not None or self._rounds:  # vLLM asks for another reason
            return self._go_on(held_LGP)
        if self._late and self._deciding:
            self._metrics.failed()
            return held_LGP
        follower = self._settled(held_LGP)
        self._pass_s, (step_s, tokens) = self.passes.shortest_s(), self.passes.take() or (None, None)
        began_s, self._began_s = self._began_s, self._clock()
        follower.add(load_LE, step_s, tokens, max(self._began_s - began_s, 1e-3))
        self._asked_s, self._expected_LGP = self._clock(), held_LGP
        if not self.in_pieces:
            _wait(lambda: not self._deciding)
        return self._go_on(held_LGP)

    @property
    def _deciding(self) -> bool:
        """True if the follower is about to decide."""
        return self._follower is not None and self._handover.decision is None and self._follower.busy

    def _decided(self, held_LGP: IntArray, asked_s: float) -> IntArray:
        """(L, G, P) the first map by what is decided; the one in force if that is not there yet, or does not come in time."""
        decision = self._handover.decision
        late = decision is None and self._deciding
        if late and self.in_pieces and self._clock() - asked_s < PATIENCE_S:
            return held_LGP
        self._asked_s, self._late, self._wanted = None, late, decision
        if late:
            self._metrics.failed()
            LOG.warning("aurora: experts stay where they are: no decision within %g s; vLLM serves on", PATIENCE_S)
        if self._wanted is None:
            return held_LGP
        next_LGP = _filled(self._wanted.held_LGP, held_LGP)
        _check_all_held(next_LGP, self._facts.experts)
        if not self.in_pieces:
            return next_LGP
        self._rounds.extend(rounds_of(self._wanted.moves))
        self._piece_s = 0.0
        return self._go_on(held_LGP)

    def _go_on(self, held_LGP: IntArray) -> IntArray:
        """(L, G, P) the next map: as it is until a decision is there, then after as many rounds as a pass may wait for."""
        if self._expected_LGP is None or not np.array_equal(held_LGP, self._expected_LGP):
            raise RuntimeError("vLLM has other experts in place than were decided on")
        if self._asked_s is not None:
            return self._decided(held_LGP, self._asked_s)
        if self._piece_s:
            self._pieces.record(self._piece_s)
            self.passes.take()  # which had moves between them
        next_LGP = held_LGP.copy()
        for _ in range(self._pieces.next(len(self._rounds), self._pass_s)):
            fill(next_LGP, self._rounds.popleft())
        _check_all_held(next_LGP, self._facts.experts)
        self._expected_LGP = next_LGP
        return next_LGP

    def _settled(self, held_LGP: IntArray) -> "Follower":
        """The follower, which has been told what became of its last decision: what EPLB holds is in force."""
        if self._controller is None or self._follower is None:
            self._controller, self._follower = self._made_follower(held_LGP)
        follower, decision, self._wanted = self._follower, self._wanted, None
        if decision is None and not self._late:
            _wait(lambda: not follower.busy)
        if self._late:
            self._late = False
            self._handover.give_up(MovesGivenUp("the decision came too late", held_LGP))
        elif not self._settings.dry_run:
            in_force_LGP = self._controller.held_LGP if decision is None else decision.held_LGP
            if not np.array_equal(_filled(in_force_LGP, held_LGP), held_LGP):
                LOG.warning("aurora: vLLM has other experts in place than were decided on")
                if decision is None:
                    self._controller.failed(held_LGP)
                else:
                    self._handover.give_up(MovesGivenUp("vLLM has moved other experts", held_LGP))
            elif decision is not None:
                self._handover.commit(Moved(seconds=self._move_s))
                self._metrics.moved(decision.bytes, self._move_s)
        self._move_s = 0.0
        _wait(lambda: not follower.busy)
        return follower

    def _made_follower(self, held_LGP: IntArray) -> "tuple[Controller, Follower]":
        from aurora.algorithms.control.controller import Controller, load_cost_G, slowest_port_Bps
        from aurora.runtime.follower import Follower

        options, slots, move_Bps = ControlOptions(self._settings.loss, self._settings.bytes_per_s), None, None
        if (cluster := self._cluster) is not None:
            width_G = np.full(self._facts.ranks, held_LGP.shape[2])
            slots = GpuSlots(width_G, load_cost_G(cluster, self._profile))
            move_Bps = slowest_port_Bps(cluster) * len(cluster)
        inputs = held_LGP, self._facts.expert_bytes, options, slots, move_Bps, self._clock
        controller = Controller(*inputs, stalls=self._stalls)
        return controller, Follower(controller, self._handover.perform, self._settings.dry_run, self._say, self._clock)

    def _failed(self, error: Exception, held_LGP: IntArray | None = None) -> None:
        """Says that experts stay where they are: in `held_LGP`, if not where they were before the last decision."""
        self._rounds.clear()
        self._late = self._late or self._asked_s is not None
        self._asked_s = None
        if self._wanted is None:
            self._metrics.failed()
            LOG.warning("aurora: experts stay where they are: %s: %s", type(error).__name__, error)
        else:  # the follower says so
            self._wanted = None
            self._handover.give_up(MovesFailed(f"{type(error).__name__}: {error}", held_LGP if self._move_s else None))

    def _say(self, line: str) -> None:
        assert self._follower is not None
        self._metrics.tell(line, self._follower)

    def _beat(self) -> None:
        """Says that what moves experts is well, unless a decision is late."""
        if not (self._late and self._deciding):
            self._metrics.beat()


def _wait(condition: Callable[[], bool]) -> None:
    """Waits until a condition that another thread fulfils holds, for PATIENCE_S at most."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until_s:
        time.sleep(WAIT_S)


def _filled(table_LGP: IntArray, held_LGP: IntArray) -> IntArray:
    """A table of slots in which those that are empty hold what they held."""
    return np.where(table_LGP == EMPTY, held_LGP, table_LGP)


def _check_all_held(table_LGP: IntArray, experts: int) -> None:
    """Raises RuntimeError if a layer of a table of slots lacks an expert, or has one that the model has not."""
    for layer, table_GP in enumerate(table_LGP):
        if set(table_GP.flat) != set(range(experts)):
            raise RuntimeError(f"the controller's table of layer {layer} has {sorted(set(table_GP.flat))} of {experts} experts")
