"""Live placement: one model's experts move between ranks while the model serves, as a follower on rank 0 decides.

Between two steps all ranks wait for each other anyway. There they exchange a few numbers: rank 0 tells when a window of traffic
ends, and its follower's decision; each rank tells how long its last step and its last slice of weights took.

The experts of a decision move in rounds (`aurora.algorithms.control.move_rounds`). A round's weights travel in slices. When
they have arrived everywhere, the round's layers change over to the new placement, each on all ranks before the same step.
Slices and changes of layers are pieces of work. Between two steps run as many pieces as do not lengthen a step by more than
LENGTHENED.
Meanwhile a thread prepares the expert maps of all rounds, and the orders that follow the last one.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from aurora.algorithms.control.move_rounds import Move, fill, rounds_of
from aurora.algorithms.workload.serving_gpus import tokens_to_gpus
from aurora.moe.expert_map import ExpertMap
from aurora.moe.transport import Transport
from aurora.runtime.between_steps import Moved, MovesFailed, MovesHandover, WorkPieces
from aurora.runtime.weight_messages import ExpertTransfer, MovableExperts, WeightMessages, Weights
from aurora.types import Exchange, Network, Op, Order, Placement, Plan
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.options import LENGTHENED
from aurora.types.placement import EMPTY
from aurora.types.program import hierarchy_of

if TYPE_CHECKING:  # rank 0 alone has them
    from aurora.algorithms.control.controller import Decision
    from aurora.runtime.follower import Follower

RECENT = 8  # steps, of which the shortest tells how long a slice may take
FIRST_BYTES = 16 * 1024  # of the first slice, and of the smallest
NO_TRANSFER = -1  # in place of a GPU that sends: the slot is emptied
SAME = ("all-at-once", "paced")  # orders that are the same for all tokens
QUICK = {"openshop-best": "openshop"}  # orders within some percent of others whose search would stall serving
WARM_UPS = 8
REST_S = 0.1  # at most, after a piece of what is prepared; longer ones are compiled code, beside which serving goes on

SlotsG = tuple[tuple[int, ...], ...]
_compiled: set[str] = set()  # methods of orders, in this process

LOG = logging.getLogger("aurora.control")

ACTIVE, WINDOW_ENDS, MOVES, PREPARED, STEP_NS, PIECE_NS, GATHER_NS = range(7)  # what a rank tells the others between two steps


class BetweenSteps(Protocol):
    """Interface that LivePlacement needs for work between steps; implemented by `LayerContext` and by the vLLM plugin."""

    transport: Transport
    tokens_LE: torch.Tensor | None  # (L, E) int64, this rank's tokens of each expert are added to it; None: not counted

    def gather_between_steps(self, row: torch.Tensor) -> torch.Tensor:
        """All-gathers a tensor; see `LayerContext.gather_between_steps`."""

    def exchange_between_steps(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> float:
        """Performs an all-to-all and returns its seconds; see `LayerContext.exchange_between_steps`."""

    def work_between_steps(self, work: Callable[[], None]) -> float:
        """Calls `work` and returns its seconds; see `LayerContext.work_between_steps`."""


class Prepared(NamedTuple):
    """The expert maps of each migration round, by layer; and the operations, with new orders, that follow the last round."""

    maps: list[dict[int, ExpertMap]]
    ops: dict[int, tuple[Op, ...]]


@dataclass
class _MovesUnderWay:
    """A decision's moves, and how far they are."""

    rounds: list[list[Move]]
    preparing: Future[Prepared]
    messages: WeightMessages  # of the present round
    number: int = 0  # of the present round
    sent: int = 0  # bytes of each message
    changed: int = 0  # layers of the round

    @property
    def layers(self) -> list[int]:
        """The layers of the round."""
        return sorted({move.layer for move in self.rounds[self.number]})


class LivePlacement:
    """Changes one model's expert placement while the model serves: one object per rank. All ranks make the same calls.

    Args:
        layers: the model's MoE layers.
        placement: the initial placement.
        ops_L: the initial operations of each layer.
        context: the layers' context; from now on it counts the tokens of each expert.
        row_bytes: bytes of one row of an all-to-all; converts token counts to traffic.
        network: the network for which orders are computed.
        local_first: as in `DistributedExperts.set_placement`.
        period_s: seconds from the end of one traffic window to the end of the next.

    Attributes:
        handover: on rank 0, receives the follower's decisions; all ranks then move the experts.
        follower: on rank 0, receives the traffic windows and returns decisions through `handover`; None on other ranks.
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
        self.handover = MovesHandover()
        self.follower: Follower | None = None
        self._layers, self._ops_L, self._context, self._period_s = layers, list(ops_L), context, period_s
        self._row_bytes, self._network, self._local_first = row_bytes, network, local_first
        self._held_LGP = placement.held_LGP()
        self._device, transport = next(iter(layers[0].empty_weights().values())).device, context.transport
        context.tokens_LE = torch.zeros(len(layers), placement.experts, dtype=torch.int64, device=self._device)
        self._tokens_SLE = np.zeros((transport.ranks, len(layers), placement.experts), dtype=np.int64)  # of the last window
        warm_up(ops_L, placement, network)
        self._order = Order.all_at_once(transport.ranks)  # of a slice: a rank has one partner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="aurora-moves")
        self._announced = torch.empty(0, 6, dtype=torch.int64)
        self._moves: _MovesUnderWay | None = None
        self._slices = self._pieces = WorkPieces(FIRST_BYTES)  # the latter: those of the last work between steps
        self._layers_at_once = WorkPieces(1)
        self._piece_s = 0.0  # of that work, if it is still to be told
        self._waited_s = 0.0  # of all such work of a decision, on the slowest rank
        self._gather_s = self._telling_s = 0.0  # what it took ranks to tell each other last: this rank, and all of them
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._steps = 0  # of this window
        self._steps_s: list[float] = []  # of these, by the placement in force
        self._began_s: float | None = None  # this window
        self._left_s: float | None = None  # the last work between steps; None: no step began since

    def next_step(self, active: bool) -> bool:
        """Does the work that is due between two steps: ends a traffic window, starts a migration, or does part of one.

        A collective call. `active`: this rank has requests. Returns True if any rank is active; if none is, does nothing.
        """
        now_s, paused = time.perf_counter(), self._began_s is not None and self._left_s is None
        if self._began_s is None:
            self._began_s = now_s
        rows_RX = self._gathered(self._report(active, 0.0 if self._left_s is None else now_s - self._left_s))
        if not rows_RX[:, ACTIVE].any():
            self._left_s = None  # the next step may be long after
            return False
        if self.follower is not None:
            if paused:
                self.follower.beat()  # moves waited for this step
            self.follower.check()
        self._learn(rows_RX[:, STEP_NS].max() / 1e9)
        self._learn_piece(rows_RX[:, PIECE_NS].max() / 1e9)
        self._telling_s = rows_RX[:, GATHER_NS].min() / 1e9  # who came last waited for nobody
        if rows_RX[0, WINDOW_ENDS]:
            self._end_window()
        if rows_RX[0, MOVES]:
            self._begin(int(rows_RX[0, MOVES]))
        self._work(rows_RX[:, PREPARED])
        self._left_s = time.perf_counter()
        return True

    def close(self) -> None:
        """Abandons unfinished moves, and makes no further ones."""
        self.handover.close(self._held_LGP.copy())
        self._end_moves(None)
        self._context.tokens_LE = None
        self._pool.shutdown(wait=False)

    def end(self) -> None:
        """Closes the placement, and ends its follower."""
        self.close()
        if self.follower is not None:
            self.follower.close()

    def _report(self, active: bool, step_s: float) -> torch.Tensor:
        """(7,) int64: what this rank tells the others."""
        first = self._context.transport.rank == 0
        ends = first and self._began_s is not None and time.perf_counter() - self._began_s >= self._period_s
        announced = prepared = 0
        if self._moves is None and (decision := self.handover.decision) is not None:
            self._announced = _encoded(decision, self._held_LGP)
            announced = len(self._announced)
            if not announced:
                self._end_moves(None)
        if self._moves is not None:
            preparing = self._moves.preparing
            prepared = 0 if not preparing.done() else 1 if preparing.exception() is None else -1
        row = [active, ends, announced, prepared, *_ns(step_s, self._piece_s, self._gather_s)]
        return torch.tensor(row, dtype=torch.int64)

    def _gathered(self, row: torch.Tensor) -> IntArray:
        """Gathers the numbers of all ranks, (R, ...) int64."""
        began_s = time.perf_counter()
        rows_RX: IntArray = self._context.gather_between_steps(row).numpy()
        self._gather_s = time.perf_counter() - began_s
        return rows_RX

    def _learn(self, step_s: float) -> None:
        """Takes the time of the slowest rank's last step into account."""
        if step_s:
            self._steps += 1
            self._recent_s.append(step_s)
            self._steps_s.append(step_s)

    def _learn_piece(self, piece_s: float) -> None:
        """Takes the time of the slowest rank's last piece of work into account, if there was one."""
        self._piece_s = 0.0
        if piece_s:
            self._pieces.record(piece_s)
            self._waited_s += piece_s

    def _end_window(self) -> None:
        """Sums the window's tokens over all ranks, and hands them to the follower."""
        tokens_LE = self._context.tokens_LE
        assert tokens_LE is not None
        self._tokens_SLE = self._context.gather_between_steps(tokens_LE.cpu()).numpy()
        tokens_LE.zero_()
        if self.follower is not None:
            load_LE, step_s = self._tokens_SLE.sum(axis=0), statistics.median(self._steps_s) if self._steps_s else None
            self.follower.add(load_LE, step_s, load_LE.sum() / self._steps if self._steps else None)
        self._steps = 0
        self._steps_s.clear()
        self._began_s = time.perf_counter()

    def _begin(self, count: int) -> None:
        """Begins the moves that rank 0 has announced."""
        mine = self._announced if self._context.transport.rank == 0 else torch.zeros(count, 6, dtype=torch.int64)
        moves = [Move(*row) for row in self._context.gather_between_steps(mine)[0].tolist()]
        rounds = rounds_of(moves)
        preparing = self._pool.submit(self._prepare, rounds, self._held_LGP.copy(), self._tokens_SLE)
        preparing.add_done_callback(_tell_failure)
        self._waited_s = 0.0
        self._moves = _MovesUnderWay(rounds, preparing, self._messages(rounds[0]))

    def _prepare(self, rounds: list[list[Move]], held_LGP: IntArray, tokens_SLE: IntArray) -> Prepared:
        """Builds what the moves need, in another thread; replicas get equal shares of tokens.

        Args:
            rounds: the moves of each round.
            held_LGP: (L, G, P) the expert in each slot before the moves, EMPTY for none; changed in place.
            tokens_SLE: (S, L, E) tokens of each rank for each expert in the last window.
        """
        maps = []
        for moves in rounds:
            fill(held_LGP, moves)
            layers = sorted({move.layer for move in moves})
            maps.append({layer: _rested(self._expert_map, slots_G(held_LGP[layer]), self._ops_L[layer]) for layer in layers})
        ops = {}
        for layer in sorted({layer for layers in maps for layer in layers}):
            args = self._ops_L[layer], layer, slots_G(held_LGP[layer]), tokens_SLE[:, layer]
            ops[layer] = _rested(reordered, *args, self._row_bytes, self._network)
        return Prepared(maps, ops)

    def _expert_map(self, held_G: SlotsG, ops: tuple[Op, ...]) -> ExpertMap:
        rank, hierarchy = self._context.transport.rank, hierarchy_of(ops)
        return ExpertMap(held_G, rank, _split_EG(held_G), self._local_first, hierarchy).to(self._device)

    def _messages(self, moves: list[Move]) -> WeightMessages:
        transport = self._context.transport
        transfers = [ExpertTransfer(0, m.layer, m.expert, m.src, m.dst) for m in moves if m.src != NO_TRANSFER]
        return WeightMessages([self._layers], transfers, transport.rank, transport.ranks)

    def _work(self, prepared_R: IntArray) -> None:
        """Does the next pieces of work of moves, as many as a step may wait for.

        Between two pieces ranks tell how they got on. So no layer changes over before its weights have arrived on all ranks.
        """
        if self._moves is not None and (prepared_R < 0).any():
            self._end_moves(MovesFailed("a rank cannot change over", self._held_LGP.copy()))
        began_s, step_s, spent_s = time.perf_counter(), min(self._recent_s, default=0.0), 0.0
        due = self._due(prepared_R)
        while due is not None:
            self._pieces, left = due
            if not (size := self._pieces.next(left, step_s, spent_s)):
                return
            if self._pieces is self._slices:
                self._send_slice(size)
            else:
                self._change_layers(size)
            spent_s += self._pieces.seconds(size) + self._telling_s
            due = self._due(prepared_R)
            if due is None or not due[0].fits(step_s, spent_s):
                return
            told_R2 = self._gathered(torch.tensor(_ns(self._piece_s, time.perf_counter() - began_s)))
            self._learn_piece(told_R2[:, 0].max() / 1e9)
            spent_s = told_R2[:, 1].max() / 1e9 + self._telling_s

    def _due(self, prepared_R: IntArray) -> tuple[WorkPieces, int] | None:
        """Returns the work that comes next, and how much is left: bytes of a round's messages; then its layers, if prepared."""
        if (moves := self._moves) is None:
            return None
        if moves.sent < moves.messages.bytes:
            return self._slices, moves.messages.bytes - moves.sent
        return (self._layers_at_once, len(moves.layers) - moves.changed) if prepared_R.all() else None

    def _send_slice(self, size: int) -> None:
        """Exchanges so many bytes of each message."""
        moves = self._moves
        assert moves is not None
        sends, recvs = moves.messages.cut(moves.sent, moves.sent + size)
        self._piece_s = self._context.exchange_between_steps(self._order, sends, recvs)
        moves.sent += size
        if self.follower is not None:
            self.follower.beat()

    def _change_layers(self, count: int) -> None:
        """Changes so many layers of a round over; after its last one the next round begins."""
        moves = self._moves
        assert moves is not None
        prepared, layers = moves.preparing.result(), moves.layers[moves.changed : moves.changed + count]
        arrived: dict[int, dict[int, Weights]] = {layer: {} for layer in moves.layers}
        for transfer, weights in moves.messages.arrived():
            arrived[transfer.layer][transfer.expert] = weights

        def change() -> None:
            for layer in layers:
                fill(self._held_LGP, [move for move in moves.rounds[moves.number] if move.layer == layer])
                experts = slots_G(self._held_LGP[layer])[self._context.transport.rank]
                self._layers[layer].place(prepared.maps[moves.number][layer], experts, arrived[layer])

        self._piece_s = self._context.work_between_steps(change)
        moves.changed += count
        if moves.changed < len(moves.layers):
            return
        moves.number, moves.sent, moves.changed = moves.number + 1, 0, 0
        if moves.number < len(moves.rounds):
            moves.messages = self._messages(moves.rounds[moves.number])
            return
        for layer, ops in prepared.ops.items():
            self._layers[layer].ops = self._ops_L[layer] = ops
        self._end_moves(None)

    def _end_moves(self, failure: MovesFailed | None) -> None:
        """Tells the follower, if it waits, that its decision is in force, or what is, between two rounds, and why."""
        self._moves = None
        self._steps_s.clear()
        if failure is None:
            self.handover.commit(Moved(self._waited_s + self._piece_s))  # the last piece's seconds on this rank
        else:
            self.handover.give_up(failure)


def _tell_failure(preparing: Future[Prepared]) -> None:
    """Logs why this rank cannot change over, if it cannot."""
    if (error := preparing.exception()) is not None:
        LOG.warning("a rank cannot change over: %s: %s", type(error).__name__, error)


def _ns(*seconds: float) -> list[int]:
    """Seconds as whole nanoseconds."""
    return [round(duration_s * 1e9) for duration_s in seconds]


def _encoded(decision: "Decision", held_LGP: IntArray) -> torch.Tensor:
    """(X, 6) int64: a decision's moves, and behind them the slots that are emptied, as moves of no expert."""
    after_LGP = held_LGP.copy()
    fill(after_LGP, decision.moves)
    last = decision.moves[-1].round if decision.moves else 0
    emptied = np.argwhere((after_LGP != decision.held_LGP) & (decision.held_LGP == EMPTY)).tolist()
    rows = [*decision.moves, *(Move(last, layer, EMPTY, NO_TRANSFER, gpu, slot) for layer, gpu, slot in emptied)]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)


def compile_orders(plan: Plan) -> None:
    """Compiles the ordering methods that a plan uses; see `warm_up`."""
    from aurora.algorithms.compile import compile_plan

    program = compile_plan(plan)
    for placement, ops_L in zip(program.placements_M, program.ops_ML, strict=True):
        warm_up(ops_L, placement, plan.cluster.network)


def warm_up(ops_L: Sequence[tuple[Op, ...]], placement: Placement, network: Network) -> None:
    """Compiles the ordering methods that `ops_L` use. Compiling takes seconds, and would stall serving later.

    It computes orders by each method, for random, uneven token counts. Methods that this process has compiled are skipped.

    Args:
        ops_L: the operations of each layer; their orders name the methods.
        placement: the placement.
        network: the network for which orders are computed.
    """
    held_G, rng = placement.slots_LG[0], np.random.default_rng(0)
    for method, ops in {_method(ops): ops for ops in ops_L}.items():
        if method is None or method in _compiled:
            continue
        for draw in range(WARM_UPS):
            reordered(ops, draw, held_G, rng.integers(1, 10**6, (len(held_G), placement.experts)), 1, network)
        _compiled.add(method)


def reordered(
    ops: tuple[Op, ...], layer: int, held_G: SlotsG, tokens_SE: IntArray, row_bytes: int, network: Network
) -> tuple[Op, ...]:
    """Returns the operations of a layer with orders computed anew for the given token counts.

    The orders are computed by the method of the present orders, or by its faster substitute in QUICK. `ops` are returned
    unchanged if the method ignores token counts, if it is not in ORDER, or if the all-to-alls are hierarchical.

    Args:
        ops: the present operations.
        layer: index of the layer; seeds the random generator.
        held_G: the experts that each GPU holds.
        tokens_SE: (S, E) tokens of each rank for each expert.
        row_bytes: bytes of one row of an all-to-all.
        network: the network for which orders are computed.
    """
    method = _method(ops)
    if method is None:
        return ops
    from aurora.algorithms.alltoall.schedule import order_exchanges

    bytes_GG = tokens_to_gpus(tokens_SE, _split_EG(held_G)) * row_bytes
    np.fill_diagonal(bytes_GG, 0)
    back_GG = np.ascontiguousarray(bytes_GG.T)
    rng = np.random.default_rng(layer)
    dispatch, combine, _ = order_exchanges(bytes_GG[None], back_GG[None], None, network, method, rng=rng)
    orders = {"dispatch": dispatch, "combine": combine}
    return tuple(replace(op, order=orders[op.phase]) if isinstance(op, Exchange) else op for op in ops)


def _method(ops: tuple[Op, ...]) -> str | None:
    """The method by which a layer's orders are made anew; None: they stay."""
    method = next((op.order.method for op in ops if isinstance(op, Exchange)), None)
    if method is None or method in SAME or hierarchy_of(ops) is not None:
        return None
    from aurora.algorithms.alltoall.registry import (
        ORDER,  # thousands of lines, which engines with exchanges of their own need not
    )

    return QUICK.get(method, method) if method in ORDER else None


def slots_G(held_GP: IntArray) -> SlotsG:
    """Returns, for each GPU, the experts in its slots of one layer. held_GP is (G, P); EMPTY entries are dropped."""
    return tuple(tuple(expert for expert in row if expert != EMPTY) for row in held_GP.tolist())


def _split_EG(held_G: SlotsG) -> FloatArray:
    """(E, G) the part of each expert's load that each GPU takes, if replicas take equal parts."""
    return Placement.evenly((held_G,)).split_EG(0)


def _rested(make: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `make`. Then this thread rests, to take no more than LENGTHENED of the interpreter from serving."""
    began_s = time.thread_time()
    result = make(*args)
    time.sleep(min((time.thread_time() - began_s) * (1 / LENGTHENED - 1), REST_S))
    return result
