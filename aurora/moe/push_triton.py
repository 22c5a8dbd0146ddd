"""Triton kernels of ordered push: a rank writes rows into its peers' memory, in the order of a table, and then sets flags.

They run on CUDA devices, and with TRITON_INTERPRET=1 on CPUs, where ranks are processes that share memory. Imported only if
Triton is installed.

Each rank has one buffer into which all ranks write (`aurora.runtime.transports.symmetric_memory`). It begins with int64 words,
which the peers set:

- arrived (R, LANES): how many epochs each lane of each peer has written its rows into this buffer for.
- counts (2, R, told): for each half, `told` numbers from each peer: the rows that the peer has written into the half, then how
  often the peer's tokens have chosen each of this rank's experts.

Then come two halves of slots, (R, slots, row_bytes) each; a slot takes one row. One exchange is an epoch. A lane that has
written its last row for a peer in epoch e sets its word there to e + 1. Words only grow, so none is ever cleared, and words of
old epochs are never mistaken for new ones.

A lane is one Triton program (thread block). With L lanes in a launch it writes every L-th row for each peer, and waits only for
the peers' lanes of the same number, so lanes may run in parallel or one after the other. The lane that ends last begins the
next epoch. An exchange may have fewer lanes than LANES, the same number on all ranks: the words of the other lanes stay behind
until these take part again.

Memory model. A system fence takes about 1.4 us while stores are in flight (estimated), so words are set for several stages at
once:

1. All threads of the lane store the rows of stages i to j with plain stores, and wait for none of them.
2. A barrier of the lane follows: these stores now happen before whatever any of its threads does next.
3. For each peer of stages i to j one thread sets the peer's word, with release semantics at system scope. A release is
   cumulative: it covers all that happens before it, so other threads' stores too, and those of all these stages.

Whoever reads the word with acquire semantics at system scope, and then passes a barrier, sees the rows. Threads that set no
word go on with the rows of stage j + 1 while step 3 waits. A word must not be set for a stage whose rows come after step 2.

Reuse: rows of epoch e + 2 overwrite those of epoch e, in a launch that begins when all lanes of this rank have seen the words
of epoch e + 1 of all peers. A peer sets these in a launch that follows, on its stream, its last use of the rows of epoch e.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from aurora.moe.push_layout_triton import words

COLUMNS = tl.constexpr(5)  # of a table's row: peer, begin, end, last, sets; see `stage_table`
ENOUGH, ALWAYS = tl.constexpr(1), tl.constexpr(2)  # values of `sets`
SHARE_BITS = tl.constexpr(20)  # of a table's begin and end, which are parts of a peer's rows
VECTOR_BYTES = 16  # that a thread loads and stores at a time
TILE_BYTES, TILE_ROWS = 1 << 14, 4  # of a row that a lane copies at a time, by 1024 threads; rows in flight
SUM_ELEMENTS, SUM_ROWS = 8192, 2  # the same for sums
FEW_ROWS = 256  # for a peer, of an exchange that takes half of the lanes
FENCED_BYTES = 1 << 17  # a lane sets words after a stage if it has written so much since it set words before


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _set(table, address, word, done, begin, end, STAGES: tl.constexpr):
    """Sets this lane's words at the peers of stages `begin` to `end` - 1, after all rows that the lane has stored before."""
    stage = tl.arange(0, STAGES)
    entry, due = table + stage * COLUMNS, (stage >= begin) & (stage < end)
    peer = tl.load(entry, mask=due, other=-1)
    due = due & (peer >= 0) & (tl.load(entry + 3, mask=due, other=0) > 0)
    words = tl.load(address + peer, mask=due, other=0).to(tl.pointer_type(tl.int64)) + word
    # The barrier orders all threads' rows before the releases, and each release, at system scope, orders them before its word.
    # So it must follow the last row of stage end - 1, and nothing may be stored for these stages after it. A word of this epoch
    # also tells the peer that this rank has used the rows of the epoch before, whose half the peer's next launch overwrites.
    tl.debug_barrier()
    tl.atomic_xchg(words, tl.full((STAGES,), 0, tl.int64) + done, mask=due, sem="release", scope="sys")


@triton.jit
def _copy(source, stride, token, slot, at_byte, live, elements, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies rows of `source` to byte `at_byte` of slots: all rows are loaded before one is stored."""
    for part in tl.static_range(PARTS):
        at = part * BLOCK + tl.arange(0, BLOCK)
        inside = live[:, None] & (at < elements)[None, :]
        value = tl.load(source + token[:, None] * stride + at[None, :], mask=inside)
        into = (slot + at_byte).to(tl.pointer_type(source.dtype.element_ty))
        tl.store(tl.multiple_of(into[:, None], [16, 16]) + at[None, :], value, mask=inside)  # narrow stores without the hint


@triton.jit
def _sum(
    source, stride, places, weights, choice, slot, live, elements,
    K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes to slots the weighted sums of the rows at K places, -1 for none, in float32, in their sequence, rounded once."""
    for part in tl.static_range(PARTS):
        at, total = part * BLOCK + tl.arange(0, BLOCK), tl.full((ROWS, BLOCK), 0.0, tl.float32)
        for k in tl.static_range(K):
            place = tl.load(places + choice * K + k, mask=live, other=-1).to(tl.int64)
            weight = tl.load(weights + choice * K + k, mask=live, other=0.0)
            inside = (place >= 0)[:, None] & (at < elements)[None, :]
            row = tl.load(source + place[:, None] * stride + at[None, :], mask=inside, other=0.0)
            total += row.to(tl.float32) * weight[:, None]
        into = tl.multiple_of(slot.to(tl.pointer_type(source.dtype.element_ty))[:, None], [16, 16]) + at[None, :]
        tl.store(into, total.to(source.dtype.element_ty), mask=live[:, None] & (at < elements)[None, :])


@triton.jit
def _await_all(words, goal, lost, ranks, looks, LANES: tl.constexpr, RANKS: tl.constexpr):
    """Waits until the words of all peers have come to a goal. A peer that has not set it after all looks is noted as lost."""
    peer, zero = tl.arange(0, RANKS), tl.full((RANKS,), 0, tl.int64)
    inside = peer < ranks
    seen = tl.where(inside, tl.atomic_add(words + peer * LANES, zero, mask=inside, sem="acquire", scope="sys"), goal)
    while (tl.reduce(seen, 0, _least) < goal) & (looks > 0):
        seen = tl.where(inside, tl.atomic_add(words + peer * LANES, zero, mask=inside, sem="acquire", scope="sys"), goal)
        looks -= 1
    silent = tl.reduce(tl.where(seen < goal, peer, ranks), 0, _least)
    if silent < ranks:
        tl.atomic_cas(lost, tl.full((), 0, tl.int64), (silent + 1).to(tl.int64))


@triton.jit(do_not_specialize=["slots", "first_stage", "polls", "fenced"])
def _push(
    source, tail, row_of, count, table, address, state, places, weights,
    rank, ranks, first_stage, stages, slots, half, half_at, row_bytes, polls, fenced, told, counted, count_stride,
    elements, source_stride, choices, tail_words, tail_stride, tail_at,
    LANES: tl.constexpr, RANKS: tl.constexpr, STAGES: tl.constexpr, TOLD: tl.constexpr, SUMMED: tl.constexpr,
    WAITS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    epoch, lost = tl.load(state), state + 1
    done, words, number = epoch + 1, ranks * LANES, tl.arange(0, TOLD)
    table += lane * stages * COLUMNS
    # One thread reads it for all: they would part ways, and mix up barriers, if a lane notes a loss between their reads.
    together = tl.atomic_max(lost, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu") == 0
    stage, unset, written = first_stage, first_stage, 0
    while stage < tl.where(together, stages, 0):
        entry = table + stage * COLUMNS
        peer, sets = tl.load(entry), tl.load(entry + 4)
        if peer >= 0:
            buffer = tl.load(address + peer)
            rows, chosen = tl.load(count + peer * count_stride).to(tl.int64), row_of + peer * slots
            begin = ((rows * tl.load(entry + 1)) >> SHARE_BITS).to(tl.int32) + lane
            end = ((rows * tl.load(entry + 2)) >> SHARE_BITS).to(tl.int32)
            first = buffer + half_at + rank * slots * tl.cast(row_bytes, tl.int64)
            ahead = begin + lanes * tl.arange(0, ROWS)
            choice = tl.load(chosen + ahead, mask=ahead < end, other=0)
            for top in range(begin, end, ROWS * lanes):
                row = top + lanes * tl.arange(0, ROWS)
                live, of_row, slot = row < end, choice, first + row.to(tl.int64) * row_bytes
                ahead = row + ROWS * lanes
                choice = tl.load(chosen + ahead, mask=ahead < end, other=0)  # of the next rows, beside these rows
                if SUMMED > 0:
                    _sum(source, source_stride, places, weights, of_row, slot, live, elements, SUMMED, PARTS, ROWS, BLOCK)
                else:
                    token = (of_row // choices).to(tl.int64)
                    _copy(source, source_stride, token, slot, 0, live, elements, PARTS, BLOCK)
                    if TAIL > 0:
                        _copy(tail, tail_stride, token, slot, tail_at, live, tail_words, 1, TAIL)
            remote = buffer.to(tl.pointer_type(tl.int64)) + words + (half * ranks + rank) * told
            counts = tl.load(count + peer * count_stride + number, mask=number < counted, other=0).to(tl.int64)
            tl.store(remote + number, counts, mask=number < tl.where(lane == 0, counted, 0))  # read after the launch
            written += (tl.maximum(end - begin, 0) + lanes - 1) // lanes * row_bytes
        stage += 1
        if (sets == ALWAYS) | ((sets == ENOUGH) & (written >= fenced)):
            _set(table, address, rank * LANES + lane, done, unset, stage, STAGES)
            unset, written = stage, 0
        stage = tl.where(sets == ALWAYS, stages, stage)  # the lane's last stage
    if WAITS:
        local = tl.load(address + rank).to(tl.pointer_type(tl.int64))
        _await_all(local + lane, done, lost, ranks, tl.where(together, polls, 0), LANES, RANKS)
        tl.debug_barrier()
        # All lanes have read the epoch, on which what they waited for depends.
        if tl.atomic_add(state + 2, 1, sem="acquire", scope="sys") == lanes - 1:
            tl.store(state + 2, 0)
            tl.store(state, epoch + 1)


class Peers(NamedTuple):
    """Launch arguments that are the same for all exchanges of a group of ranks: their buffers, and the layout of these.

    Attributes:
        address_R: (R,) int64 on the device, the address of each rank's buffer in this rank's address space.
        state_3: (3,) int64 on the device: the epoch; 1 + the first lost peer, or 0 if none is lost; the number of lanes that
            have ended in this epoch.
        rank, ranks: this rank, and the number of ranks.
        slots: capacity of a half, in rows per peer.
        stages: number of stages of an exchange, the rows of each lane's table.
        lanes: number of Triton programs of a launch, at most (`lanes_of`); LANES in the layout of the buffers.
        polls: number of reads of an unchanged word after which a lane reports the word's peer as lost.
        told: number of counts that a rank sends to each peer: 1 (rows) + experts of a rank, if rows carry PushedChoices.
    """

    address_R: torch.Tensor
    state_3: torch.Tensor
    rank: int
    ranks: int
    slots: int
    stages: int
    lanes: int
    polls: int
    told: int = 1


class Rows(NamedTuple):
    """Rows to push, and the byte offsets in a slot of their parts.

    Each slot is filled for one entry c of `row_of_RX` (see `push`), a choice of a token.

    Attributes:
        source: (X, H); row c // choices is written at the beginning of the slot.
        choices: see `source`; K if `source` has a row per token, 1 if it has one per choice.
        tail: (X, T) uint8; row c // choices is written at byte `tail_at`; None: nothing.
        tail_at: byte of a slot.
        row_bytes: size of a slot.
        places, weights: (Z, K) int32 and float32. If given, the slot gets the weighted sum of the rows places[c] of `source`;
            -1 is skipped. None: rows of `source` are written unchanged.
    """

    source: torch.Tensor
    choices: int
    tail: torch.Tensor | None
    tail_at: int
    row_bytes: int
    places: torch.Tensor | None = None
    weights: torch.Tensor | None = None


def push(
    peers: Peers,
    table: torch.Tensor,
    rows: Rows,
    row_of_RX: torch.Tensor,
    count_RT: torch.Tensor,
    half: int,
    half_at: int,
    sends: bool = True,
    waits: bool = True,
) -> None:
    """Queues one exchange: writes rows into the slots of each peer, in the order of a table, and waits for the peers' rows.

    Args:
        peers, rows: the buffers, and the rows to write.
        table: (lanes, stages, COLUMNS) int32, this rank's table, from `stage_table`.
        row_of_RX, count_RT: as `lay_out` returns them; count_RT is (R, 1) if only rows are counted.
        half, half_at: the half of the buffers that is written (0 or 1), and the byte at which it begins.
        sends, waits: whether to write, and whether to wait for the peers; the wait ends the epoch. Ranks that share a stream
            must all send before the first of them waits.
    """
    source, power, sums = rows.source, triton.next_power_of_2, rows.places is not None
    tail = source.new_empty(0, 0, dtype=torch.int32) if rows.tail is None else rows.tail.view(torch.int32)
    if not sums:
        source = words(source)
    places, weights = (row_of_RX, row_of_RX) if rows.places is None else (rows.places, rows.weights)
    elements, size = source.shape[1], source.element_size()
    block = min(power(elements), SUM_ELEMENTS if sums else max(TILE_BYTES // size, 1))
    _push[(lanes_of(peers),)](
        source, tail, row_of_RX, count_RT, table, peers.address_R, peers.state_3, places, weights,
        peers.rank, peers.ranks, 0 if sends else peers.stages, peers.stages, peers.slots, half, half_at, rows.row_bytes,
        peers.polls, FENCED_BYTES, peers.told, count_RT.shape[1], count_RT.stride(0),
        elements, source.stride(0), rows.choices,
        tail.shape[1], tail.stride(0), rows.tail_at,
        LANES=peers.lanes, RANKS=power(peers.ranks), STAGES=power(peers.stages), TOLD=power(count_RT.shape[1]),
        SUMMED=places.shape[1] if sums else 0, WAITS=waits, PARTS=triton.cdiv(elements, block),
        ROWS=SUM_ROWS if sums else TILE_ROWS, TAIL=power(tail.shape[1]) if tail.shape[1] else 0, BLOCK=block,
        num_warps=min(max(block * size // (32 * VECTOR_BYTES), 4), 32),
    )  # fmt: skip


def lanes_of(peers: Peers) -> int:
    """Returns the lanes of an exchange: half of them where a peer gets few rows, of which each lane would have none or one."""
    return peers.lanes if peers.slots > FEW_ROWS else -(-peers.lanes // 2)
