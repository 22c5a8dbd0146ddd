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

A lane is one Triton program (thread block). It writes every LANES-th row for each peer, and waits only for the peers' lanes of
the same number, so lanes may run in parallel or one after the other. The lane that ends last begins the next epoch.

Memory model: all threads of a lane write rows, a barrier of the lane follows, and one thread then sets the word with release
semantics at system scope. Whoever reads the word with acquire semantics at system scope sees the rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat

COLUMNS = tl.constexpr(4)  # of a table's row: peer, begin, end, last; see `stage_table`
SHARE_BITS = tl.constexpr(20)  # of a table's begin and end, which are parts of a peer's rows
BLOCK = 1024  # elements that a lane copies at a time
SCANNED = 1024  # choices that are laid out at a time


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _set(word, value):
    """Sets a peer's word, after all rows that this lane has written and all that it has read."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def _copy(into, source, elements, BLOCK: tl.constexpr):
    for first in range(0, elements, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(into + at, tl.load(source + at, mask=at < elements), mask=at < elements)


@triton.jit
def _sum(into, source, stride, places, weights, columns, K: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the weighted sum of the rows at K places, -1 for none, in float32 and in their sequence, rounded once."""
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = tl.full((BLOCK,), 0.0, tl.float32)
        for k in tl.static_range(K):
            place = tl.load(places + k).to(tl.int64)
            inside = at < tl.where(place >= 0, columns, 0)
            total += tl.load(source + place * stride + at, mask=inside, other=0.0).to(tl.float32) * tl.load(weights + k)
        tl.store(into + at, total.to(source.dtype.element_ty), mask=at < columns)


@triton.jit
def _await_all(words, goal, lost, ranks, polls, LANES: tl.constexpr, RANKS: tl.constexpr):
    """Waits until the words of all peers have come to a goal. A peer that has not set it after so many looks is noted as lost.

    Once a peer is lost nothing waits any more.
    """
    peer, zero = tl.arange(0, RANKS), tl.full((RANKS,), 0, tl.int64)
    inside = peer < ranks
    looks = tl.where(tl.load(lost, volatile=True) == 0, polls, 0)
    seen = tl.where(inside, tl.atomic_add(words + peer * LANES, zero, mask=inside, sem="acquire", scope="sys"), goal)
    while (tl.reduce(seen, 0, _least) < goal) & (looks > 0):
        seen = tl.where(inside, tl.atomic_add(words + peer * LANES, zero, mask=inside, sem="acquire", scope="sys"), goal)
        looks -= 1
    silent = tl.reduce(tl.where(seen < goal, peer, ranks), 0, _least)
    if silent < ranks:
        tl.atomic_cas(lost, tl.full((), 0, tl.int64), (silent + 1).to(tl.int64))


@triton.jit(do_not_specialize=["slots"])
def _push(
    source, tail, row_of, count, table, address, state, places, weights,
    rank, ranks, first_stage, stages, slots, half, half_at, row_bytes, polls, told, counted, count_stride,
    elements, source_stride, choices, tail_words, tail_stride, tail_at,
    LANES: tl.constexpr, RANKS: tl.constexpr, TOLD: tl.constexpr, SUMMED: tl.constexpr, WAITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    epoch, lost = tl.load(state), state + 1
    done, words, number = epoch + 1, ranks * LANES, tl.arange(0, TOLD)
    local = tl.load(address + rank).to(tl.pointer_type(tl.int64))
    for stage in range(first_stage, stages):
        entry = table + (lane * stages + stage) * COLUMNS
        peer = tl.load(entry)
        if (peer >= 0) & (tl.load(lost, volatile=True) == 0):
            buffer = tl.load(address + peer)
            rows = tl.load(count + peer * count_stride).to(tl.int64)
            begin, end = (rows * tl.load(entry + 1)) >> SHARE_BITS, (rows * tl.load(entry + 2)) >> SHARE_BITS
            first = buffer + half_at + rank * slots * tl.cast(row_bytes, tl.int64)
            for row in range(begin + lane, end, LANES):
                choice = tl.load(row_of + peer * slots + row).to(tl.int64)
                slot = first + row * row_bytes
                token = choice // choices
                if SUMMED > 0:
                    into = tl.multiple_of(slot.to(tl.pointer_type(source.dtype.element_ty)), 16)
                    of_choice = choice * SUMMED
                    _sum(into, source, source_stride, places + of_choice, weights + of_choice, elements, SUMMED, BLOCK)
                else:
                    into = slot.to(tl.pointer_type(source.dtype.element_ty))
                    _copy(tl.multiple_of(into, 16), source + token * source_stride, elements, BLOCK)  # narrow stores else
                of_tail = tail + token * tail_stride
                _copy(tl.multiple_of((slot + tail_at).to(tl.pointer_type(tl.int32)), 16), of_tail, tail_words, BLOCK)
            remote = buffer.to(tl.pointer_type(tl.int64))
            counts = tl.load(count + peer * count_stride + number, mask=number < counted, other=0).to(tl.int64)
            tl.store(remote + words + (half * ranks + rank) * told + number, counts, mask=number < counted)
            if tl.load(entry + 3) > 0:
                _set(remote + rank * LANES + lane, done)
    if WAITS:
        _await_all(local + lane, done, lost, ranks, polls, LANES, RANKS)
        tl.debug_barrier()
        # All lanes have read the epoch, on which what they waited for depends.
        if tl.atomic_add(state + 2, 1, sem="acquire", scope="sys") == LANES - 1:
            tl.store(state + 2, 0)
            tl.store(state, epoch + 1)


@triton.jit
def _ranks_at(chosen, rank_of, at, inside, BY_EXPERT: tl.constexpr):
    """The ranks of choices, which are given as ranks or as physical experts."""
    ranks = tl.load(chosen + at, mask=inside, other=-1)
    if BY_EXPERT:
        ranks = tl.load(rank_of + ranks, mask=inside, other=-1)
    return ranks


@triton.jit(do_not_specialize=["length", "slots"])
def _lay_out(
    chosen, row_of, place, count, rank_of, slot_of, weights, tail,
    length, slots, ranks, told, experts, weight_stride, tail_words, codes_at,
    K: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rank, number = tl.program_id(0), 0
    if rank < ranks:
        for first in range(0, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < length
            to = _ranks_at(chosen, rank_of, at, inside, BY_EXPERT)
            goes = inside & (to == rank)
            for k in tl.static_range(1, K):  # the first of a token's choices of a rank stands for all
                before = _ranks_at(chosen, rank_of, at - k, inside & (at % K >= k), BY_EXPERT)
                goes = goes & (before != rank)
            flag = goes.to(tl.int32)
            row = number + tl.associative_scan(flag, 0, _plus) - flag
            tl.store(row_of + rank * slots + row, at, mask=goes)
            writer = tl.where((to < 0) | (to >= ranks), 0, to)  # of the choice's place
            tl.store(place + at, tl.where(goes, rank * slots + row, -1), mask=inside & (writer == rank))
            number += tl.reduce(flag, 0, _plus)
        tl.store(count + rank * told, number)
    else:  # one program for each physical expert, and one for choices of none
        expert = rank - ranks
        for first in range(0, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            of_expert = tl.load(chosen + at, mask=at < length, other=-1) == expert
            flag = of_expert.to(tl.int32)
            nth = number + tl.associative_scan(flag, 0, _plus) - flag
            into, weight = tail + at // K * tail_words + at % K, weights + at // K * weight_stride + at % K
            tl.store(into + codes_at, tl.where(expert < experts, nth * experts + expert, -1), mask=of_expert)
            value = tl.load(weight, mask=of_expert, other=0.0).to(tl.float32)
            tl.store(into.to(tl.pointer_type(tl.float32)), value, mask=of_expert)
            number += tl.reduce(flag, 0, _plus)
        if expert < experts:
            tl.store(count + tl.load(rank_of + expert) * told + 1 + tl.load(slot_of + expert), number)


@triton.jit(do_not_specialize=["slots", "most"])
def _arrange(
    arrived, count, out, places, weights, ends,
    slots, row_bytes, weights_at, codes_at, ranks, told, local_experts, first, experts, most, elements,
    RANKS: tl.constexpr, TOLD: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    peer, row = tl.program_id(0) // slots, tl.program_id(0) % slots
    sender, number = tl.arange(0, RANKS), tl.arange(0, TOLD)
    known = (sender < ranks)[:, None] & ((number > 0) & (number <= local_experts))[None, :]
    counts = tl.load(count + sender[:, None] * told + number[None, :], mask=known, other=0).to(tl.int32)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        until = tl.associative_scan(tl.reduce(counts, 0, _plus), 0, _plus)
        tl.store(ends + number - 1, tl.minimum(until, most), mask=(number > 0) & (number <= local_experts))
    if row < tl.load(count + peer * told):
        slot = tl.program_id(0).to(tl.int64)
        begin = arrived + slot * row_bytes
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(begin.to(tl.pointer_type(out.dtype.element_ty)) + at, mask=at < elements, other=0)
        for k in tl.static_range(K):
            code = tl.load((begin + codes_at).to(tl.pointer_type(tl.int32)) + k)
            expert = tl.where(code < 0, -1, code % experts - first)
            before = (number[None, :] <= expert) | ((number[None, :] == expert + 1) & (sender[:, None] < peer))
            place = tl.reduce(tl.reduce(tl.where(before, counts, 0), 1, _plus), 0, _plus) + code // experts
            local = (expert >= 0) & (expert < local_experts) & (place < most)  # counts of a lost peer may be of another epoch
            tl.store(out + place.to(tl.int64) * elements + at, value, mask=at < tl.where(local, elements, 0))
            if tl.program_id(1) == 0:
                tl.store(places + slot * K + k, tl.where(local, place, -1))
                tl.store(weights + slot * K + k, tl.load((begin + weights_at).to(tl.pointer_type(tl.float32)) + k))


class PushedChoices(NamedTuple):
    """Router weights and physical experts, appended to rows after the hidden states, for sorting by expert at the receiver.

    Attributes:
        rank_P: (P + 1,) int64, the rank of every physical expert; the last entry, R, stands for none.
        slot_P: (P,) int64, the slot of every physical expert on its rank.
        weights: (N, K) floating point, the weights of the choices.
        told: number of counts that a rank sends to each peer: 1 (rows) + the peer's number of experts (choices of each).
        tail: (N, T) int32, filled by `lay_out`: K weights as float32, and from word `codes_at` on K codes. The code of a choice
            is n * P + p if it is this rank's n-th choice of physical expert p, and -1 if the token needs no experts.
        codes_at: index of the first code in a row of `tail`.
    """

    rank_P: torch.Tensor
    slot_P: torch.Tensor
    weights: torch.Tensor
    told: int
    tail: torch.Tensor
    codes_at: int


def lay_out(chosen_NK: torch.Tensor, ranks: int, slots: int, choices: PushedChoices | None = None) -> tuple[torch.Tensor, ...]:
    """Sorts the choices of tokens by rank, and then by token, in kernels on the GPU without synchronizing the host.

    Args:
        chosen_NK: (N, K) int, the rank of every choice; a number below 0 or from `ranks` on means none. With `choices` it is
            the physical expert of every choice; P means none.
        ranks: number of ranks R.
        slots: capacity in rows for each rank, at least N.
        choices: its `tail` is filled; None: rows carry no weights and physical experts.

    Returns:
        row_of_RX, (R, slots) int32, the number n * K + k of each row's choice (choice k of token n), the first of the token's
        choices on that rank, which share the row; count_RT, (R, told) int32,
        the number of rows for each rank and, with `choices`, how often the expert in each of its slots is chosen; place_NK,
        (N, K) int64, rank * slots + row for each choice, -1 if it has no row.
    """
    tokens, top_k = chosen_NK.shape
    row_of_RX = torch.empty(ranks, slots, dtype=torch.int32, device=chosen_NK.device)
    place_NK, experts = torch.empty_like(chosen_NK, dtype=torch.int64), 0 if choices is None else len(choices.slot_P)
    rank_P, slot_P, weights, told, tail, codes_at = choices or PushedChoices(place_NK, place_NK, place_NK, 1, row_of_RX, 0)
    count_RT = row_of_RX.new_empty(ranks, told)
    _lay_out[(ranks if choices is None else ranks + experts + 1,)](
        chosen_NK.contiguous(), row_of_RX, place_NK, count_RT, rank_P, slot_P, weights, tail,
        tokens * top_k, slots, ranks, told, experts, weights.stride(0), tail.shape[1], codes_at,
        K=top_k, BY_EXPERT=choices is not None, BLOCK=SCANNED,
    )  # fmt: skip
    return row_of_RX, count_RT, place_NK


class Peers(NamedTuple):
    """Launch arguments that are the same for all exchanges of a group of ranks: their buffers, and the layout of these.

    Attributes:
        address_R: (R,) int64 on the device, the address of each rank's buffer in this rank's address space.
        state_3: (3,) int64 on the device: the epoch; 1 + the first lost peer, or 0 if none is lost; the number of lanes that
            have ended in this epoch.
        rank, ranks: this rank, and the number of ranks.
        slots: capacity of a half, in rows per peer.
        stages: number of stages of an exchange, the rows of each lane's table.
        lanes: number of Triton programs of a launch.
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
    source, tail = rows.source, rows.source.new_empty(0, 0, dtype=torch.int32) if rows.tail is None else rows.tail
    if rows.places is None:
        source = words(source)
    tail, power = tail.view(torch.int32), triton.next_power_of_2
    places, weights = (row_of_RX, row_of_RX) if rows.places is None else (rows.places, rows.weights)
    _push[(peers.lanes,)](
        source, tail, row_of_RX, count_RT, table, peers.address_R, peers.state_3, places, weights,
        peers.rank, peers.ranks, 0 if sends else peers.stages, peers.stages, peers.slots, half, half_at, rows.row_bytes,
        peers.polls, peers.told, count_RT.shape[1], count_RT.stride(0),
        source.shape[1], source.stride(0), rows.choices,
        tail.shape[1], tail.stride(0), rows.tail_at,
        LANES=peers.lanes, RANKS=power(peers.ranks), TOLD=power(count_RT.shape[1]),
        SUMMED=0 if rows.places is None else rows.places.shape[1], WAITS=waits, BLOCK=BLOCK,
    )  # fmt: skip


def arrange(
    arrived: torch.Tensor, count_RT: torch.Tensor, packing: MessageFormat, expert_map: ExpertMap
) -> tuple[torch.Tensor, ...]:
    """Copies the hidden states that arrived in a dispatch into rows sorted by this rank's experts, in one launch.

    A token that chose several experts of this rank gets a row for each. The host waits for nothing.

    Args:
        arrived: (R * slots, row_bytes) uint8, the slots of a dispatch whose rows carry `PushedChoices`; at least one per peer.
        count_RT: (R, told) int64, the counts that each peer has written.
        packing, expert_map: layout of the rows, and the layer's map.

    Returns:
        rows, (X, H), with unused rows at the end; ends_E, (E,) int32, the end of each expert's rows; place_XK, (R * slots, K)
        int32, the row of each choice of a filled slot, -1 for other ranks' experts; weight_XK, of the same shape, float32, the
        choices' router weights.
    """
    ranks, local, top_k = len(count_RT), expert_map.local, packing.top_k
    local_experts = int(local.stop - local.start)
    most = len(arrived) * min(top_k, max(local_experts, 1))
    rows = torch.empty(most, packing.width, dtype=packing.dtype, device=arrived.device)
    place_XK = torch.empty(len(arrived), top_k, dtype=torch.int32, device=arrived.device)
    weight_XK, ends_E = torch.empty_like(place_XK, dtype=torch.float32), place_XK.new_empty(local_experts)
    out, power = words(rows), triton.next_power_of_2
    _arrange[(len(arrived), triton.cdiv(out.shape[1], BLOCK))](
        arrived, count_RT, out, place_XK, weight_XK, ends_E, len(arrived) // ranks, packing.row_bytes, packing.weights_at,
        packing.physical_at, ranks, count_RT.stride(0), local_experts, int(local.start), expert_map.num_physical, most,
        out.shape[1], RANKS=power(ranks), TOLD=power(local_experts + 1), K=top_k, BLOCK=BLOCK,
    )  # fmt: skip
    return rows, ends_E, place_XK, weight_XK


def words(rows: torch.Tensor) -> torch.Tensor:
    """Returns a view of rows (X, H), contiguous in H, as (X, words) integers, so that a copy has fewer elements.

    The integers are the widest that divide the rows' width, stride and offset. The storage must begin at a multiple of eight
    bytes, as torch's does.
    """
    whole = [part * rows.element_size() for part in (rows.shape[1], rows.stride(0), rows.storage_offset())]
    sizes = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return rows.view(next(dtype for dtype in sizes if not any(part % dtype.itemsize for part in whole)))
