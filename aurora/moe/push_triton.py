"""Triton kernels of ordered push: rows go into peers' memory, peer after peer as a table says, and flags announce them.

They run on CUDA devices, and with TRITON_INTERPRET=1 on CPUs, where ranks are processes that share memory. Imported only where
Triton is.

Each rank has one buffer that all ranks write (`aurora.runtime.transports.symmetric_memory`). It begins with words, int64:

- arrived (R, LANES): up to which stamp each lane of each peer has written its rows here; the peer sets it.
- permits (R, LANES): up to which stamp each lane of this rank may write to each peer; the peer sets it.
- counts (2, R): how many rows each peer has written into each half; the peer sets it.

Then come two halves of slots, (R, slots, row_bytes) each. An exchange is an epoch. Stage s of epoch e has the stamp
e * stages + s + 1, and a lane whose last row for a peer is written has the stamp (e + 1) * stages. Stamps only grow, so that no
word is ever cleared, and a word of an old epoch is never taken for one of a new epoch.

A lane is one program. It carries each LANES-th row of every peer, and waits for the peers' lanes of its own number alone: lanes
may run side by side or one after the other.

Memory model: all threads of a lane write rows, a barrier of the lane follows, and one thread then sets the word with release
semantics at system scope. Whoever reads the word with acquire semantics at system scope sees the rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

COLUMNS = tl.constexpr(6)  # of a table's row: peer, sender, gated, begin, end, last; see `stage_table`
SHARE_BITS = tl.constexpr(20)  # of a table's begin and end, which are parts of a peer's rows
GROUP = tl.constexpr(128)  # columns that share a scale
E4M3_MAX = tl.constexpr(448.0)
BLOCK = 1024  # elements that a lane copies at a time
SCANNED = 1024  # choices that are laid out at a time


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _most(a, b):
    return tl.maximum(a, b)


@triton.jit
def _set(word, stamp):
    """Sets a peer's word, after all rows that this lane has written and all that it has read."""
    tl.debug_barrier()
    tl.atomic_xchg(word, stamp, sem="release", scope="sys")


@triton.jit
def _await(word, stamp, lost, peer, polls):
    """Waits until a word of this rank has come to a stamp. A peer that has not set it after so many looks is noted as lost.

    Once a peer is lost nothing waits any more.
    """
    left = tl.where(tl.load(lost, volatile=True) == 0, polls, 0)
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while (seen < stamp) & (left > 0):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        left -= 1
    if seen < stamp:
        tl.atomic_cas(lost, tl.full((), 0, tl.int64), peer.to(tl.int64) + 1)


@triton.jit
def _copy(into, source, elements, BLOCK: tl.constexpr):
    for first in range(0, elements, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(into + at, tl.load(source + at, mask=at < elements), mask=at < elements)


@triton.jit
def _quantize(into, scales, source, columns, BLOCK: tl.constexpr):
    """Writes a row as e4m3, with a float32 scale for every GROUP columns, of which the largest becomes E4M3_MAX."""
    for first in range(0, columns, BLOCK):
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        value = tl.load(source + at, mask=at < columns, other=0.0).to(tl.float32)
        largest = tl.reduce(tl.abs(value), 1, _most)
        scale = tl.where(largest > 0.0, largest, 1.0) / E4M3_MAX
        tl.store(into + at, (value / scale[:, None]).to(tl.float8e4nv), mask=at < columns)
        tl.store(scales + group, scale, mask=group * GROUP < columns)


@triton.jit
def _push(
    source, tail, row_of, count, table, address, state,
    rank, ranks, stages, slots, half, half_at, row_bytes, polls,
    elements, source_stride, choices, tail_words, tail_stride, tail_choices, tail_at, scales_at,
    LANES: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    begun, lost = tl.load(state) * stages, state + 1
    words = ranks * LANES
    own = tl.load(address + rank).to(tl.pointer_type(tl.int64))
    for stage in range(stages):
        entry = table + (lane * stages + stage) * COLUMNS
        peer, sender, gated = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        stamp = begun + stage + 1
        if sender >= 0:  # it may write here now: whoever came before it has ended
            _set(tl.load(address + sender).to(tl.pointer_type(tl.int64)) + words + rank * LANES + lane, stamp)
        if gated > 0:
            _await(own + words + peer * LANES + lane, stamp, lost, peer, polls)
        if (peer >= 0) & (tl.load(lost, volatile=True) == 0):
            buffer = tl.load(address + peer)
            rows = tl.load(count + peer).to(tl.int64)
            begin, end = (rows * tl.load(entry + 3)) >> SHARE_BITS, (rows * tl.load(entry + 4)) >> SHARE_BITS
            first = buffer + half_at + rank * slots * tl.cast(row_bytes, tl.int64)
            for row in range(begin + lane, end, LANES):
                choice = tl.load(row_of + peer * slots + row).to(tl.int64)
                slot = first + row * row_bytes
                taken = source + choice // choices * source_stride
                if QUANTIZED:
                    scales = (slot + scales_at).to(tl.pointer_type(tl.float32))
                    _quantize(slot.to(tl.pointer_type(tl.float8e4nv)), scales, taken, elements, BLOCK)
                else:
                    into = slot.to(tl.pointer_type(source.dtype.element_ty))
                    _copy(tl.multiple_of(into, 16), taken, elements, BLOCK)  # else stores are narrower than loads
                of_tail = tail + choice // tail_choices * tail_stride
                _copy(tl.multiple_of((slot + tail_at).to(tl.pointer_type(tl.int32)), 16), of_tail, tail_words, BLOCK)
            there = buffer.to(tl.pointer_type(tl.int64))
            tl.store(there + 2 * words + half * ranks + rank, rows)
            _set(there + rank * LANES + lane, tl.where(tl.load(entry + 5) > 0, begun + stages, stamp))
        if sender >= 0:
            _await(own + sender * LANES + lane, stamp, lost, sender, polls)


@triton.jit
def _wait(
    address, state, count, rank, ranks, stages, half, polls,
    LANES: tl.constexpr, WORDS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    goal, lost = (tl.load(state) + 1) * stages, state + 1
    words = tl.load(address + rank).to(tl.pointer_type(tl.int64))
    at, zero = tl.arange(0, WORDS), tl.full((WORDS,), 0, tl.int64)
    inside = at < ranks * LANES
    left = tl.where(tl.load(lost, volatile=True) == 0, polls, 0)
    seen = tl.where(inside, tl.atomic_add(words + at, zero, mask=inside, sem="acquire", scope="sys"), goal)
    while (tl.reduce(seen, 0, _least) < goal) & (left > 0):
        seen = tl.where(inside, tl.atomic_add(words + at, zero, mask=inside, sem="acquire", scope="sys"), goal)
        left -= 1
    silent = tl.reduce(tl.where(seen < goal, at // LANES, ranks), 0, _least)
    if silent < ranks:
        tl.atomic_cas(lost, tl.full((), 0, tl.int64), (silent + 1).to(tl.int64))
    tl.debug_barrier()
    peer = tl.arange(0, RANKS)
    told = tl.load(words + (2 * LANES + half) * ranks + peer, mask=peer < ranks, volatile=True)
    tl.store(count + peer, told, mask=peer < ranks)
    tl.store(state, tl.load(state) + 1)


@triton.jit
def _lay_out(
    ranks_of, row_of, place, count, chosen, slots, ranks, K: tl.constexpr, DEDUPLICATED: tl.constexpr, BLOCK: tl.constexpr
):
    rank = tl.program_id(0)
    rows = 0
    for first in range(0, chosen, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < chosen
        to = tl.load(ranks_of + at, mask=inside, other=-1)
        goes = inside & (to == rank)
        if DEDUPLICATED:  # the first of a token's choices of a rank stands for all
            for k in tl.static_range(1, K):
                before = tl.load(ranks_of + at - k, mask=inside & (at % K >= k), other=-1)
                goes = goes & (before != rank)
        one = goes.to(tl.int32)
        row = rows + tl.associative_scan(one, 0, _plus) - one
        tl.store(row_of + rank * slots + row, at, mask=goes)
        writer = tl.where((to < 0) | (to >= ranks), 0, to)  # of the choice's place
        tl.store(place + at, tl.where(goes, rank * slots + row, -1), mask=inside & (writer == rank))
        rows += tl.reduce(one, 0, _plus)
    tl.store(count + rank, rows)


def lay_out(rank_NK: torch.Tensor, ranks: int, slots: int, deduplicated: bool) -> tuple[torch.Tensor, ...]:
    """Sorts the choices of tokens by rank, and then by token. The host waits for nothing.

    Args:
        rank_NK: (N, K) int, the rank of every choice; below 0 or from `ranks` on: none.
        ranks: number of ranks R.
        slots: most rows for a rank, N or N * K at least.
        deduplicated: whether a token's choices of one rank share a row: the first has it, the others have none.

    Returns:
        row_of_RX, (R, slots) int32, the choice n * K + k of each row; count_R, (R,) int32, the rows of each rank; place_NK,
        (N, K) int64, rank * slots + row of each choice, -1 for none.
    """
    tokens, top_k = rank_NK.shape
    row_of_RX = torch.empty(ranks, slots, dtype=torch.int32, device=rank_NK.device)
    count_R, place_NK = row_of_RX.new_empty(ranks), torch.empty_like(rank_NK, dtype=torch.int64)
    _lay_out[(ranks,)](
        rank_NK.contiguous(), row_of_RX, place_NK, count_R, tokens * top_k, slots, ranks,
        K=top_k, DEDUPLICATED=deduplicated, BLOCK=SCANNED,
    )  # fmt: skip
    return row_of_RX, count_R, place_NK


class Peers(NamedTuple):
    """Buffers of the ranks of a group, and how they are divided: the arguments that all launches share.

    Attributes:
        address_R: (R,) int64 on the device, where each rank's buffer is in this rank's address space.
        state_2: (2,) int64 on the device: the epoch, and one more than the first peer that was lost, 0 for none.
        rank, ranks: this rank, and how many there are.
        slots: rows of a peer that a half holds.
        stages: rows of a table for each lane.
        lanes: programs of a launch.
        polls: looks at a word after which its peer is lost.
    """

    address_R: torch.Tensor
    state_2: torch.Tensor
    rank: int
    ranks: int
    slots: int
    stages: int
    lanes: int
    polls: int


class Rows(NamedTuple):
    """Rows to push, and where their parts go in a slot.

    Attributes:
        source: (X, H) what the rows begin with.
        choices: `row_of_RX // choices` is the row of `source`.
        tail: (Y, T) uint8, what each row goes on with at byte tail_at; None: nothing.
        tail_choices: `row_of_RX // tail_choices` is the row of `tail`.
        tail_at: byte of a slot.
        row_bytes: size of a slot.
        scales_at: byte of a slot from which a row's scales go if `source` is to become e4m3; None: it stays as it is.
    """

    source: torch.Tensor
    choices: int
    tail: torch.Tensor | None
    tail_choices: int
    tail_at: int
    row_bytes: int
    scales_at: int | None = None


def push(
    peers: Peers, table: torch.Tensor, rows: Rows, row_of_RX: torch.Tensor, count_R: torch.Tensor, half: int, half_at: int
) -> None:
    """Queues one exchange: writes each peer's rows into its slots, in the order of this rank's table.

    Args:
        peers, rows: buffers and rows.
        table: (lanes, stages, COLUMNS) int32, this rank's (`stage_table`).
        row_of_RX, count_R: as `lay_out` returns them.
        half, half_at: which half of the buffers is written, and the byte at which it begins.
    """
    source, tail = rows.source, rows.source.new_empty(0, 0, dtype=torch.int32) if rows.tail is None else rows.tail
    if rows.scales_at is None:
        source = words(source)
    tail = tail.view(torch.int32)
    _push[(peers.lanes,)](
        source, tail, row_of_RX, count_R, table, peers.address_R, peers.state_2,
        peers.rank, peers.ranks, peers.stages, peers.slots, half, half_at, rows.row_bytes, peers.polls,
        source.shape[1], source.stride(0), rows.choices,
        tail.shape[1], tail.stride(0), rows.tail_choices, rows.tail_at, rows.scales_at or 0,
        LANES=peers.lanes, QUANTIZED=rows.scales_at is not None, BLOCK=BLOCK,
    )  # fmt: skip


def wait(peers: Peers, half: int) -> torch.Tensor:
    """Queues a wait until all rows of all peers have arrived, and ends the epoch. Returns (R,) int64, the rows of each peer."""
    count_R, power = torch.empty_like(peers.address_R), triton.next_power_of_2
    _wait[(1,)](
        peers.address_R, peers.state_2, count_R, peers.rank, peers.ranks, peers.stages, half, peers.polls,
        LANES=peers.lanes, WORDS=power(peers.ranks * peers.lanes), RANKS=power(peers.ranks),
    )  # fmt: skip
    return count_R


def words(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows (X, H), contiguous in H, as (X, words) of the widest integers that fit their width, stride and beginning."""
    whole = (rows.shape[1] * rows.element_size(), rows.stride(0) * rows.element_size(), rows.data_ptr())
    sizes = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return rows.view(next(dtype for dtype in sizes if not any(part % dtype.itemsize for part in whole)))
