"""Live placement: one model's experts change their ranks while the model serves.

Between two steps all ranks wait for each other anyway. There they agree on what comes next: rank 0 says when a window of
traffic ends, and what its control loop has decided; each rank says how long its last step and its last slice of weights took.

The experts of a decision move in rounds (`aurora.planner.control.move_sequence`). A round's weights travel in slices, one
between two steps, so small that a step is not LENGTHENED by more. When a round's weights have arrived everywhere, its layers
change over, as many between two steps as a step may wait for, each on all ranks before the same step. What a round needs,
expert maps and orders, is made in a thread meanwhile.
"""

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from aurora.planner.alltoall.registry import ORDER
from aurora.planner.alltoall.schedule import both_ways
from aurora.planner.control.controller import Decision
from aurora.planner.control.move_sequence import Move
from aurora.planner.control.move_times import LENGTHENED
from aurora.planner.migration.survivors import ExpertTransfer
from aurora.planner.workload.traffic import tokens_to_gpus
from aurora.runtime.control_loop import ControlLoop, MovesFailed, ServingEnded
from aurora.runtime.dispatch_layout import ExpertMap
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.expert_moves import MovableExperts, WeightMessages, Weights
from aurora.runtime.work_pieces import WorkPieces
from aurora.types import Exchange, Network, Op, Order, Placement
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY

RECENT = 8  # steps, of which the shortest tells how long a slice may take
FIRST_BYTES = 16 * 1024  # of the first slice, and of the smallest
REST_S = 0.1  # at most, after a piece of what is prepared; longer ones are compiled code, beside which serving goes on
NO_TRANSFER = -1  # in place of a GPU that sends: the slot is emptied

LOG = logging.getLogger("aurora.control")

SlotsG = tuple[tuple[int, ...], ...]

ACTIVE, WINDOW_ENDS, MOVES, PREPARED, PIECE_NS, STEP_NS = range(6)  # what a rank tells the others between two steps


class BetweenSteps(Protocol):
    """What a live placement needs of the context of a model's layers: a `LayerContext`, or an engine's."""

    transport: Transport
    tokens_LE: torch.Tensor | None  # (L, E) int64, this rank's tokens of each expert are added to it; None: not counted

    def gather_between_steps(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's tensor; see `LayerContext.gather_between_steps`."""

    def exchange_between_steps(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> float:
        """Performs an exchange; see `LayerContext.exchange_between_steps`."""

    def work_between_steps(self, work: Callable[[], None]) -> float:
        """Does work on this rank's experts; see `LayerContext.work_between_steps`."""


@dataclass(frozen=True)
class _Prepared:
    """What changes with each round of moves: expert maps by layer; and at the end the operations by layer, in new orders."""

    maps: list[dict[int, ExpertMap]]
    ops: dict[int, tuple[Op, ...]]


@dataclass
class _MovesUnderWay:
    """A decision's moves, and how far they are."""

    rounds: list[list[Move]]
    prepared: Future[_Prepared]
    messages: WeightMessages  # of the present round
    began_s: float
    number: int = 0  # of the present round
    sent: int = 0  # bytes of each message
    changed: int = 0  # layers of the round


class LivePlacement:
    """One model's placement on one rank, which changes while the model serves. All ranks make the same calls.

    Args:
        layers: the model's layers.
        placement: the placement in force at first.
        ops_L: the operations of each layer at first.
        context: the layers' context; it counts the tokens of each expert from now on.
        row_bytes: bytes of a row of an exchange, by which orders are made.
        network: the network that orders are made for; those that are in use only for servers stay.
        local_first: as of `DistributedExperts.perform`.
        period_s: seconds between two windows.

    Attributes:
        control: on rank 0, the control loop that gets the windows and calls `perform`; None: no moves are asked for here.
    """

    def __init__(
        self,
        layers: Sequence[MovableExperts],
        placement: Placement,
        ops_L: Sequence[tuple[Op, ...]],
        context: BetweenSteps,
        row_bytes: int,
        network: Network,
        local_first: bool,
        period_s: float,
    ) -> None:
        self.control: ControlLoop | None = None
        self._layers, self._ops_L, self._context, self._network = layers, list(ops_L), context, network
        self._row_bytes, self._local_first, self._period_s = row_bytes, local_first, period_s
        self._held_LGP = placement.held_LGP()
        self._device = next(iter(layers[0].empty_weights().values())).device
        context.tokens_LE = torch.zeros(len(layers), placement.experts, dtype=torch.int64, device=self._device)
        self._tokens_SLE = np.zeros((context.transport.ranks, len(layers), placement.experts), dtype=np.int64)  # last window
        pairs = 1 - np.eye(context.transport.ranks, dtype=np.int64)
        self._order = ORDER["all-at-once"](pairs, network, rng=np.random.default_rng(0))  # of a slice: a rank has one partner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="aurora-moves")
        self._lock = threading.Lock()
        self._request: tuple[Decision, Future[float]] | None = None  # on rank 0
        self._announced = torch.empty(0, 6, dtype=torch.int64)
        self._closed = False
        self._moves: _MovesUnderWay | None = None
        self._slices = self._pieces = WorkPieces(FIRST_BYTES)  # the latter: those of the last work between steps
        self._layers_at_once = WorkPieces(1)
        self._piece_s = 0.0  # of that work
        self._waited_s = 0.0  # of all such work of a decision, on the slowest rank
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._steps = 0  # of this window
        self._steps_s: list[float] = []  # of these, by the placement in force
        self._began_s = 0.0  # this window
        self._left_s: float | None = None
        # Compiles what makes orders, which would take seconds beside serving. Without tokens there would be nothing to order.
        uneven_SE = np.arange(1, self._tokens_SLE[:, 0].size + 1).reshape(len(self._tokens_SLE), -1) ** 2
        self._ordered(0, _slots_G(self._held_LGP, 0), uneven_SE)

    def perform(self, decision: Decision) -> float:
        """Moves the experts of a decision, and returns when the new placement is in force. Called on rank 0, in any thread.

        Returns:
            The seconds that serving waited for it: of each piece of work between steps, those of the slowest rank.

        Raises:
            MovesFailed: if the moves are given up; it says which placement is in force.
        """
        done: Future[float] = Future()
        with self._lock:
            if self._closed:
                raise ServingEnded("serving has ended")
            self._request = decision, done
        return done.result()

    def next_step(self, active: bool) -> bool:
        """Returns whether any rank is active, and does what is due between two steps. A collective call."""
        now_s = time.perf_counter()
        if self._left_s is None:
            self._began_s = self._left_s = now_s
        step_s = now_s - self._left_s
        rows_RX = self._context.gather_between_steps(self._report(active, step_s)).numpy()
        if not rows_RX[:, ACTIVE].any():
            self.close()
            return False
        if self.control is not None:
            self.control.check()
        self._learn(*(rows_RX[:, (STEP_NS, PIECE_NS)].max(axis=0) / 1e9).tolist())
        if rows_RX[0, WINDOW_ENDS]:
            self._end_window()
        if rows_RX[0, MOVES]:
            self._begin(int(rows_RX[0, MOVES]))
        elif self._moves is not None:
            self._go_on(self._moves, rows_RX[:, PREPARED])
        self._left_s = time.perf_counter()
        return True

    @property
    def closed(self) -> bool:
        """Whether no more moves are asked for."""
        return self._closed

    def close(self) -> None:
        """Gives up what is under way, and asks for no more moves."""
        with self._lock:
            self._closed = True
        self._end_moves(ServingEnded("serving has ended", self._held_LGP.copy()))
        self._context.tokens_LE = None
        self._pool.shutdown(wait=False)

    def _report(self, active: bool, step_s: float) -> torch.Tensor:
        """(6,) int64: what this rank tells the others."""
        first = self._context.transport.rank == 0
        ends = first and time.perf_counter() - self._began_s >= self._period_s
        announced = prepared = 0
        if self._request is not None and self._moves is None:
            self._announced = _encoded(self._request[0], self._held_LGP)
            announced = len(self._announced)
            if not announced:
                self._end_moves(None)
        if self._moves is not None and self._moves.prepared.done():
            prepared = -1 if self._moves.prepared.exception() else 1
        row = (active, ends, announced, prepared, round(self._piece_s * 1e9), round(step_s * 1e9))
        self._piece_s = 0.0
        return torch.tensor(row, dtype=torch.int64)

    def _learn(self, step_s: float, piece_s: float) -> None:
        """Takes the time of the slowest rank's last step, and of its work before that, into account."""
        if step_s:
            self._steps += 1
            self._recent_s.append(step_s)
            self._steps_s.append(step_s)
        if piece_s:
            self._pieces.took(piece_s)
            self._waited_s += piece_s

    def _end_window(self) -> None:
        """Sums the window's tokens over all ranks, and hands them to the control loop."""
        tokens_LE = self._context.tokens_LE
        assert tokens_LE is not None
        self._tokens_SLE = self._context.gather_between_steps(tokens_LE.cpu()).numpy()
        tokens_LE.zero_()
        if self.control is not None:
            load_LE, step_s = self._tokens_SLE.sum(axis=0), statistics.median(self._steps_s) if self._steps_s else None
            self.control.add(load_LE, step_s, load_LE.sum() / self._steps if self._steps else None)
        self._steps = 0
        self._steps_s.clear()
        self._began_s = time.perf_counter()

    def _begin(self, count: int) -> None:
        """Begins the moves that rank 0 has announced."""
        mine = self._announced if self._context.transport.rank == 0 else torch.zeros(count, 6, dtype=torch.int64)
        moves = [Move(*row) for row in self._context.gather_between_steps(mine)[0].tolist()]
        rounds = [list(each) for _, each in groupby(moves, attrgetter("round"))]
        prepared = self._pool.submit(self._prepare, rounds, self._held_LGP.copy(), self._tokens_SLE)
        prepared.add_done_callback(_tell_failure)
        self._waited_s = 0.0
        self._moves = _MovesUnderWay(rounds, prepared, self._messages(rounds[0]), time.perf_counter())
        self._send_slice(self._moves)

    def _prepare(self, rounds: list[list[Move]], held_LGP: IntArray, tokens_SLE: IntArray) -> _Prepared:
        """Makes the expert maps of each round, and at the end orders for what was counted in the last window."""
        maps = []
        for moves in rounds:
            _fill(held_LGP, moves)
            layers = sorted({move.layer for move in moves})
            maps.append({layer: _rested(self._expert_map, _slots_G(held_LGP, layer)) for layer in layers})
        changed = sorted({move.layer for moves in rounds for move in moves})
        slots_XG = [_slots_G(held_LGP, layer) for layer in changed]
        ordered_X = [
            _rested(self._ordered, layer, slots_G, tokens_SLE[:, layer])
            for layer, slots_G in zip(changed, slots_XG, strict=True)
        ]
        return _Prepared(maps, dict(zip(changed, ordered_X, strict=True)))

    def _expert_map(self, slots_G: SlotsG) -> ExpertMap:
        rank = self._context.transport.rank
        return ExpertMap(slots_G, rank, _split_EG(slots_G), self._local_first).to(self._device)

    def _ordered(self, layer: int, slots_G: SlotsG, tokens_SE: IntArray) -> tuple[Op, ...]:
        """A layer's operations in orders of the same method for these tokens; as they are without one or if it needs more."""
        ops = self._ops_L[layer]
        method = next((op.order.method for op in ops if isinstance(op, Exchange)), None)
        if method is None or method not in ORDER:
            return ops
        bytes_GG = tokens_to_gpus(tokens_SE, _split_EG(slots_G)) * self._row_bytes
        np.fill_diagonal(bytes_GG, 0)
        back_GG = np.ascontiguousarray(bytes_GG.T)
        made = both_ways(bytes_GG[None], back_GG[None], None, self._network, method, rng=np.random.default_rng(layer))
        orders = dict(zip(("dispatch", "combine"), made[:2], strict=True))
        return tuple(replace(op, order=orders[op.phase]) if isinstance(op, Exchange) else op for op in ops)

    def _messages(self, moves: list[Move]) -> WeightMessages:
        transport = self._context.transport
        transfers = [ExpertTransfer(0, m.layer, m.expert, m.src, m.dst) for m in moves if m.src != NO_TRANSFER]
        return WeightMessages([self._layers], transfers, transport.rank, transport.ranks)

    def _go_on(self, moves: _MovesUnderWay, prepared_R: IntArray) -> None:
        """Sends the next slice; when a round's weights are there and all ranks are ready, changes layers over."""
        if (prepared_R < 0).any():
            self._end_moves(MovesFailed("a rank cannot change over", self._held_LGP.copy()))
        elif moves.sent < moves.messages.bytes:
            self._send_slice(moves)
        elif prepared_R.all():
            self._change_layers(moves, moves.prepared.result())

    def _send_slice(self, moves: _MovesUnderWay) -> None:
        """Exchanges as many bytes of each message as a step may wait for."""
        size = self._slices.next(moves.messages.bytes - moves.sent, min(self._recent_s, default=0.0))
        if size:
            sends, recvs = moves.messages.cut(moves.sent, moves.sent + size)
            self._piece_s = self._context.exchange_between_steps(self._order, sends, recvs)
            self._pieces, moves.sent = self._slices, moves.sent + size
            if self.control is not None:
                self.control.beat()

    def _change_layers(self, moves: _MovesUnderWay, prepared: _Prepared) -> None:
        """Changes as many layers over as a step may wait for; after a round's last one the next round begins."""
        maps = prepared.maps[moves.number]
        count = self._layers_at_once.next(len(maps) - moves.changed, min(self._recent_s, default=0.0))
        layers, self._pieces = list(maps)[moves.changed : moves.changed + count], self._layers_at_once
        arrived: dict[int, dict[int, Weights]] = {layer: {} for layer in maps}
        for transfer, weights in moves.messages.arrived():
            arrived[transfer.layer][transfer.expert] = weights

        def change() -> None:
            for layer in layers:
                _fill(self._held_LGP, [move for move in moves.rounds[moves.number] if move.layer == layer])
                held = _slots_G(self._held_LGP, layer)[self._context.transport.rank]
                self._layers[layer].place(maps[layer], held, arrived[layer])

        self._piece_s = self._context.work_between_steps(change)
        moves.changed += count
        if moves.changed < len(maps):
            return
        moves.number, moves.sent, moves.changed = moves.number + 1, 0, 0
        if moves.number < len(moves.rounds):
            moves.messages = self._messages(moves.rounds[moves.number])
            return
        for layer, ops in prepared.ops.items():
            self._layers[layer].ops = self._ops_L[layer] = ops
        self._end_moves(None)

    def _end_moves(self, failure: MovesFailed | None) -> None:
        """Tells the control loop, if it waits, that its decision is in force, or what is, between two rounds, and why."""
        self._moves = None
        self._steps_s.clear()
        with self._lock:
            request, self._request = self._request, None
        if request is None:
            return
        if failure is None:
            request[1].set_result(self._waited_s + self._piece_s)  # the last piece's seconds on this rank
        else:
            request[1].set_exception(failure)


def _rested(make: Callable[..., Any], *args: Any) -> Any:
    """What `make` returns. Then this thread rests, so that it takes no more than LENGTHENED of the interpreter from serving."""
    began_s = time.thread_time()
    made = make(*args)
    time.sleep(min((time.thread_time() - began_s) * (1 / LENGTHENED - 1), REST_S))
    return made


def _tell_failure(prepared: Future[_Prepared]) -> None:
    """Logs why this rank cannot change over, if it cannot."""
    if (error := prepared.exception()) is not None:
        LOG.warning("a rank cannot change over: %s: %s", type(error).__name__, error)


def _encoded(decision: Decision, held_LGP: IntArray) -> torch.Tensor:
    """(X, 6) int64: a decision's moves, and behind them the slots that are emptied, as moves of no expert."""
    after_LGP = held_LGP.copy()
    _fill(after_LGP, decision.moves)
    last = decision.moves[-1].round if decision.moves else 0
    emptied = np.argwhere((after_LGP != decision.held_LGP) & (decision.held_LGP == EMPTY)).tolist()
    rows = [*decision.moves, *(Move(last, layer, EMPTY, NO_TRANSFER, gpu, slot) for layer, gpu, slot in emptied)]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)


def _fill(held_LGP: IntArray, moves: Sequence[Move]) -> None:
    """Puts the experts of moves into their slots."""
    for move in moves:
        held_LGP[move.layer, move.dst, move.slot] = move.expert


def _slots_G(held_LGP: IntArray, layer: int) -> SlotsG:
    """The experts that each GPU holds in a layer, by slot."""
    return tuple(tuple(expert for expert in row if expert != EMPTY) for row in held_LGP[layer].tolist())


def _split_EG(slots_G: SlotsG) -> FloatArray:
    """(E, G) the part of each expert's load that each GPU takes, if replicas take equal parts."""
    return Placement.evenly((slots_G,)).split_EG(0)
