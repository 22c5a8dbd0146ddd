"""Ordered push: dispatch and combine by writes into peers' memory, in a planned order. The host neither knows sizes nor waits.

An exchange is one kernel launch: each rank writes its rows into the peers' slots, peer after peer in the order of its table,
and then waits for the peers' rows (`aurora.moe.push_triton`). Counts stay on the device. So does the table, which can be
overwritten between two exchanges, also between two replays of a captured graph.

Each sender keeps its sequence. Receivers may get rows of several senders at once.

Buffers have two halves, which exchanges use in turn. Rows that arrived in a half are used before the next exchange is queued.
So a rank's flags of an exchange also acknowledge the exchange before: once all peers' flags of a combine are here, no rank
reads the rows of the dispatch before it any more, and the next dispatch may overwrite them. No kernel waits for work that
follows on the same stream. Every dispatch has its combine, so each replay of a captured pass begins with the same half.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from aurora.algorithms.check.plans import check_order
from aurora.errors import BadInput
from aurora.moe.permutation import MessageFormat, aligned
from aurora.moe.permutation_triton import weighted_sum
from aurora.moe.push_layout_triton import PushedChoices, lay_out
from aurora.moe.push_triton import ALWAYS, COLUMNS, ENOUGH, SHARE_BITS, Peers, Rows, push
from aurora.moe.transport import peer_lost
from aurora.runtime.transports.symmetric_memory import SymmetricMemory
from aurora.types import Order
from aurora.types.arrays import IntArray

LANES = 48  # programs of a large exchange, each on a multiprocessor of the GPU; half of them of a small one
POLL_S = 1e-6  # of a look at a flag, at least; Triton's interpreter takes longer
HALF_ALIGNED = 256  # bytes


def stage_table(order: Order, rank: int, lanes: int, stages: int) -> IntArray:
    """Returns an order as the table that the push kernel reads on one rank: per lane and stage, which peer to write to.

    Of an order with one partner at a time a lane sets the words of a stage when it has written enough since it last set words;
    of others it sets all words at the end, behind one fence. A rank's rows for itself are written where the order gives it no
    partner. Otherwise each lane writes them at another stage, so that the other lanes keep the links busy meanwhile.

    Args:
        order: the order, whose rows cover every ordered pair of ranks. If it opens several transfers at once, lanes begin with
            different peers.
        rank: the rank.
        lanes, stages: lengths of the table's axes.

    Returns:
        (lanes, stages, 5) int32. Columns: peer to write to (-1: none); begin and end of the written part, as shares of the rows
        for the peer, in units of 2**-SHARE_BITS; 1 if it contains the last rows for the peer; and when the words of this and
        earlier stages are set: ENOUGH, ALWAYS (after the lane's last stage), or 0 for later.

    Raises:
        BadInput: if the table is too short.
    """
    row_X, peer_X = order.rows_of(rank, True)
    used = 1 + len(row_X)
    if used > stages:
        raise BadInput(f"order {order.method}: expected at most {stages} stages on a rank, found {used}")
    share_X2 = np.tile([0.0, 1.0], (len(row_X), 1)) if order.share_X2 is None else order.share_X2[row_X]
    whole, idle = 1 << SHARE_BITS.value, _idle_stage(order, row_X)
    table = np.zeros((lanes, stages, COLUMNS.value), dtype=np.int64)
    table[..., 0] = -1
    for lane in range(lanes):
        turn_X = np.roll(np.arange(len(row_X)), 0 if order.one_to_one else -(lane % max(len(row_X), 1)))
        own = lane % used if idle is None else idle
        to_X = np.insert(peer_X[turn_X], own, rank)
        table[lane, :used, 0] = to_X
        table[lane, :used, 1:3] = np.insert(np.rint(share_X2[turn_X] * whole), own, (0, whole), axis=0)
        table[lane, :used, 3] = [peer not in to_X[index + 1 :] for index, peer in enumerate(to_X)]
    table[:, :used, 4] = ENOUGH.value if order.one_to_one else 0
    table[:, used - 1, 4] = ALWAYS.value
    return table.astype(np.int32)


def _idle_stage(order: Order, row_X: IntArray) -> int | None:
    """Returns how many of a rank's rows come before the first stage without one of them; None if there is no such stage."""
    if not order.one_to_one:
        return None
    used_X, stages = order.stage_X[row_X], 1 + int(order.stage_X.max(initial=-1))
    idle = np.setdiff1d(np.arange(stages), used_X)
    return int(np.searchsorted(used_X, idle[0])) if len(idle) else None


class Dispatched(NamedTuple):
    """Rows that this rank received in a dispatch, and where it sent its own rows. Valid until the next dispatch.

    Attributes:
        rows: (R * slots, row_bytes) uint8, received rows: `slots` row buffers per peer; `MessageFormat.parts` decodes them.
        count_R: (R,) int64 on the device, number of rows received from each peer, which fill its first slots.
        place_NK: (N, K) int64, slot (peer * slots + row) to which the row of each token's choice was sent; -1: not sent.
    """

    rows: torch.Tensor
    count_R: torch.Tensor
    place_NK: torch.Tensor

    @property
    def filled_X(self) -> torch.Tensor:
        """(R * slots,) bool, True for slots that hold a received row."""
        slots = len(self.rows) // len(self.count_R)
        number_X = torch.arange(len(self.rows), device=self.rows.device)
        return number_X % slots < self.count_R.repeat_interleave(slots, output_size=len(self.rows))


class OrderedPush:
    """Performs dispatch and combine by ordered push, for all layers of a model. All methods are collective calls.

    Each dispatch is followed by its combine. A batch in several rounds makes all its dispatches first, and copies the rows of
    each out of the buffers before the next; then it makes its combines. Everything is queued on the current stream; the host
    waits only in `check_peers`.

    Args:
        make_memory: called with a size in bytes; allocates the buffers, see `aurora.runtime.transports.symmetric_memory`.
        ranks: number of ranks.
        tokens: largest number of tokens of a rank in one batch.
        row_bytes: largest size of a row in bytes.
        round_tokens: largest number of a rank's tokens per round (one dispatch and combine), to save memory; None: one round.
            All ranks make the same number of rounds, see `parts`.
        layers: number of layers, each of which has an order.
        lanes: programs (thread blocks) of a kernel launch.
        stages: most stages of an order; None: enough for orders that do not split the rows of a pair of ranks.
        timeout_s: seconds without an answer, at least, after which a peer counts as lost.
        experts: most experts of a rank, if senders also report tokens per expert (`aurora.runtime.pushed_batch`); else 0.
        lock_step: True, in tests, if all ranks share one stream: an exchange then only sends, and `receive` waits, after all
            ranks have sent.

    Attributes:
        batch_tokens: largest number of tokens of any rank in the present batch, the same on all ranks; at first `tokens`.
        row_bytes: size of a slot.
    """

    def __init__(
        self,
        make_memory: Callable[[int], SymmetricMemory],
        ranks: int,
        tokens: int,
        row_bytes: int,
        round_tokens: int | None = None,
        layers: int = 1,
        lanes: int = LANES,
        stages: int | None = None,
        timeout_s: float = 120.0,
        experts: int = 0,
        lock_step: bool = False,
    ) -> None:
        self.tokens = self.batch_tokens = tokens
        self.round_tokens, counts = tokens if round_tokens is None else min(round_tokens, tokens), 1 + experts
        self.slots, self.row_bytes = self.round_tokens, aligned(row_bytes)
        stages = 2 * ranks if stages is None else stages
        words = ranks * lanes + 2 * ranks * counts
        begin, half_bytes = aligned(8 * words, HALF_ALIGNED), aligned(ranks * self.slots * self.row_bytes, HALF_ALIGNED)
        self._half_at = (begin, begin + half_bytes)
        self.memory = memory = make_memory(begin + 2 * half_bytes)
        self.rank, self.ranks, device = memory.rank, memory.ranks, memory.local.device
        state_3 = torch.zeros(3, dtype=torch.int64, device=device)
        polls = max(int(timeout_s / POLL_S), 1)
        self.peers = Peers(memory.address_R, state_3, self.rank, ranks, self.slots, stages, lanes, polls, counts)
        self._counts_2RT = memory.local[: 8 * words].view(torch.int64)[ranks * lanes :].view(2, ranks, counts)
        self.table_L2 = torch.full((layers, 2, lanes, stages, COLUMNS.value), -1, dtype=torch.int32, device=device)
        self.same_RX = torch.arange(ranks * self.slots, dtype=torch.int32, device=device).view(ranks, self.slots)
        self._half, self._lock_step = 0, lock_step  # half of the next exchange
        self._seen_3 = torch.zeros(3, dtype=torch.int64, pin_memory=state_3.is_cuda)

    def parts(self, tokens: int) -> list[slice]:
        """Returns the slices into which a batch of `tokens` tokens is cut, one per round.

        All ranks get as many slices as `batch_tokens` tokens need, so the last ones may be empty.

        Raises:
            BadInput: if there are more tokens than the buffers can hold.
        """
        if tokens > self.tokens:
            raise BadInput(f"ordered push: expected at most {self.tokens} tokens of a rank, found {tokens}")
        return [slice(first, first + self.round_tokens) for first in range(0, max(self.batch_tokens, 1), self.round_tokens)]

    def set_order(self, layer: int, order: Order, back: Order | None = None) -> None:
        """Sets the order of a layer's dispatches and combines, from the next batch on.

        All ranks must set it between the same two batches. Captured graphs use it from the next replay on.

        Args:
            layer: the layer.
            order: order of the dispatch.
            back: order of the combine; None: the reversed order of the dispatch.

        Raises:
            BadInput: see `stage_table`.
            BrokenPlan: if an order leaves out a pair of ranks, whose flag would never come, or has one twice.
        """
        for phase, phase_order in enumerate((order, back or order.reversed)):
            check_order(phase_order, self.ranks)
            table = stage_table(phase_order, self.rank, self.peers.lanes, self.peers.stages)
            self.table_L2[layer, phase].copy_(torch.from_numpy(table))

    def dispatch(
        self, layer: int, hidden: torch.Tensor, chosen_NK: torch.Tensor, packing: MessageFormat,
        tail: torch.Tensor | PushedChoices | None, slots: int | None = None,
    ) -> Dispatched:  # fmt: skip
        """Sends each token to the ranks of its experts, in one row per rank. Returns the received rows.

        Args:
            layer: index of the layer; selects the order.
            hidden: (N, H) hidden states.
            chosen_NK: (N, K) the rank of each choice; a value outside 0 to R - 1: the choice is not sent.
            packing: layout of the rows.
            tail: the part of each token's rows behind its hidden state, from `MessageFormat.tail`. None: rows have only hidden
                states. PushedChoices: `chosen_NK` has experts; its tail is filled, and may have more words than `packing`.
            slots: bound on the rows from one rank to another in this dispatch, the same on all ranks; the result has R * slots
                rows. None: as many as the buffers hold.

        Raises:
            BadInput: if there are more rows than `slots` or than the buffers can hold.
        """
        slots = min(self.slots if slots is None else slots, self.slots)
        (tokens, top_k), row_bytes = chosen_NK.shape, packing.row_bytes
        choices = None
        if isinstance(tail, PushedChoices):
            choices, tail = tail, tail.tail
            row_bytes = packing.weights_at + 4 * tail.shape[1]
        self.check_size(tokens, row_bytes, slots)
        row_of_RX, count_RT, place_NK = lay_out(chosen_NK, self.ranks, slots, choices)
        sent = Rows(hidden, top_k, tail, packing.weights_at, row_bytes)
        arrived, count_RT = self.exchange(self.table_L2[layer, 0], sent, row_of_RX, count_RT)
        return Dispatched(arrived, count_RT[:, 0].clone(), place_NK)  # more dispatches may come before the combine

    def check_size(self, rows: int, row_bytes: int, slots: int) -> None:
        """Raises BadInput if `rows` (number of rows for one rank) exceeds `slots`, or `row_bytes` the size of a slot."""
        if rows > slots or row_bytes > self.row_bytes:
            raise BadInput(
                f"ordered push: expected at most {slots} rows for a rank, of at most {self.row_bytes} bytes, found up to "
                f"{rows} of {row_bytes}"
            )

    def combine(self, layer: int, dispatched: Dispatched, answers: torch.Tensor) -> torch.Tensor:
        """Sends expert outputs back to the ranks of their tokens. Returns (N, H), the summed outputs of this rank's tokens.

        Sums are taken in float32, in the order of the choices, and rounded once.

        Args:
            layer: index of the layer; selects the order.
            dispatched: result of the dispatch.
            answers: (R * slots, H) weighted expert outputs, by slot; unfilled slots are not read.
        """
        row_bytes = answers.shape[1] * answers.element_size()
        if row_bytes > self.row_bytes:
            raise BadInput(f"ordered push: expected answers of at most {self.row_bytes} bytes, found {row_bytes}")
        rows = Rows(answers, 1, None, 0, aligned(row_bytes))
        arrived, _ = self.exchange(self.table_L2[layer, 1], rows, self.same(len(dispatched.rows)), dispatched.count_R[:, None])
        return weighted_sum(arrived[:, :row_bytes].view(answers.dtype), dispatched.place_NK, None)

    def same(self, rows: int) -> torch.Tensor:
        """Returns the `row_of_RX` of a combine, (R, rows / R) int32, that sends each of `rows` dispatched slots back."""
        return self.same_RX.view(-1)[:rows].view(self.ranks, -1)

    def exchange(
        self, table: torch.Tensor, rows: Rows, row_of_RX: torch.Tensor, count_RT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queues one all-to-all and the wait for its end.

        Args:
            table: an entry of `table_L2` (layer; 0 dispatch, 1 combine).
            rows, row_of_RX, count_RT: the rows to send, as in `aurora.moe.push_triton.push`; `row_of_RX` has a column per slot.

        Returns:
            (R * slots, row_bytes) uint8, the slots into which rows arrive; and (R, 1 + experts) int64, received counts by peer:
            its number of rows, and how often it chose each of this rank's experts. Both are views of the buffers.
        """
        half, self._half = self._half, 1 - self._half
        peers = self.peers._replace(slots=row_of_RX.shape[1])
        self._sent = peers, table, rows, row_of_RX, count_RT, half, self._half_at[half]
        push(*self._sent, waits=not self._lock_step)
        size = row_of_RX.numel() * rows.row_bytes
        return self.memory.local[self._half_at[half] :][:size].view(-1, rows.row_bytes), self._counts_2RT[half]

    def receive(self) -> None:
        """With `lock_step`, queues the wait for the end of the last exchange; otherwise does nothing."""
        if self._lock_step:
            push(*self._sent, sends=False)

    def check_peers(self, waits: bool = True) -> None:
        """Raises RankFailed if a peer did not answer in time; results of that exchange and of later ones are invalid.

        Args:
            waits: True: first wait for all queued exchanges. False: do not wait; a loss may be reported only in a later call.
        """
        if lost := int((self.peers.state_3 if waits else self._seen_3)[1]):
            waited_s = self.peers.polls * POLL_S
            raise peer_lost(self.rank, [lost - 1], RuntimeError(f"no flag within {waited_s:g} s"))
        if not waits:
            self._seen_3.copy_(self.peers.state_3, non_blocking=True)
