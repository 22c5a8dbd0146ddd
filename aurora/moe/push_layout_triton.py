"""Triton kernels beside those of a push: they lay out the choices of tokens before a dispatch, and sort or unpack what arrives.

They run on CUDA devices, and with TRITON_INTERPRET=1 on CPUs. Imported only if Triton is installed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat

ARRANGED = 1024  # elements of a row that a program of `arrange` or `unpack` copies
SCANNED = 1024  # choices that are laid out at a time


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _ranks_at(chosen, rank_of, at, inside, BY_EXPERT: tl.constexpr):
    """The ranks of choices, which are given as ranks or as experts, -1 for none."""
    ranks = tl.load(chosen + at, mask=inside, other=-1)
    if BY_EXPERT:
        ranks = tl.load(rank_of + ranks, mask=inside & (ranks >= 0), other=-1)
    return ranks


@triton.jit(do_not_specialize=["length", "slots"])
def _lay_out(
    chosen, row_of, place, count, rank_of, slot_of, weights, tail,
    length, slots, ranks, told, experts, weight_stride, tail_words, codes_at,
    K: tl.constexpr, BY_EXPERT: tl.constexpr, NUMBERED: tl.constexpr, BLOCK: tl.constexpr,
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
    elif not NUMBERED:  # one program for so many choices
        at = (rank - ranks) * BLOCK + tl.arange(0, BLOCK)
        into = tail + at // K * tail_words + at % K
        tl.store(into + codes_at, tl.load(chosen + at, mask=at < length, other=-1).to(tl.int32), mask=at < length)
        value = tl.load(weights + at // K * weight_stride + at % K, mask=at < length, other=0.0).to(tl.float32)
        tl.store(into.to(tl.pointer_type(tl.float32)), value, mask=at < length)
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


@triton.jit(do_not_specialize=["slots", "rank"])
def _unpack(
    arrived, count, rank_of, elsewhere, out, weights, index, extra,
    slots, row_bytes, weights_at, codes_at, extra_at, told, rank, elements, extra_words,
    K: tl.constexpr, CHOICES: tl.constexpr, EXTRA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    filled = tl.program_id(0) % slots < tl.load(count + tl.program_id(0) // slots * told)
    begin = arrived + slot * row_bytes
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.multiple_of(begin.to(tl.pointer_type(out.dtype.element_ty)), 16)
    value = tl.load(source + at, mask=at < tl.where(filled, elements, 0), other=0)
    tl.store(out + slot * elements + at, value, mask=at < elements)
    if tl.program_id(1) == 0:
        k = tl.arange(0, CHOICES)
        inside = k < tl.where(filled, K, 0)
        expert = tl.load((begin + codes_at).to(tl.pointer_type(tl.int32)) + k, mask=inside, other=-1)
        here = tl.load(rank_of + expert, mask=expert >= 0, other=-1) == rank
        weight = tl.load((begin + weights_at).to(tl.pointer_type(tl.float32)) + k, mask=here, other=0.0)
        tl.store(weights + slot * K + k, weight.to(weights.dtype.element_ty), mask=k < K)
        tl.store(index + slot * K + k, tl.where(here, expert, tl.load(elsewhere)).to(index.dtype.element_ty), mask=k < K)
        if EXTRA > 0:
            word = tl.arange(0, EXTRA)
            come = (begin + extra_at).to(tl.pointer_type(tl.int32)) + word
            carried = tl.load(come, mask=word < tl.where(filled, extra_words, 0), other=0)
            tl.store(extra + slot * extra_words + word, carried, mask=word < extra_words)


class PushedChoices(NamedTuple):
    """Router weights and experts, appended to rows after the hidden states.

    Attributes:
        rank_P: (P + 1,) int64, the rank of every physical expert; the last entry, R, stands for none.
        slot_P: (P,) int64, the slot of every physical expert on its rank, for sorting by expert at the receiver; None: the
            receiver does not sort, and codes are the chosen experts.
        weights: (N, K) floating point, the weights of the choices.
        told: number of counts that a rank sends to each peer: 1 (rows) + the peer's number of experts (choices of each), and
            without `slot_P` 1.
        tail: (N, T) int32, filled by `lay_out`: K weights as float32, and from word `codes_at` on K codes. The code of a choice
            is n * P + p if it is this rank's n-th choice of physical expert p, and -1 if the token needs no experts.
        codes_at: index of the first code in a row of `tail`.
    """

    rank_P: torch.Tensor
    slot_P: torch.Tensor | None
    weights: torch.Tensor
    told: int
    tail: torch.Tensor
    codes_at: int


def lay_out(chosen_NK: torch.Tensor, ranks: int, slots: int, choices: PushedChoices | None = None) -> tuple[torch.Tensor, ...]:
    """Sorts the choices of tokens by rank, and then by token, in one launch, without synchronizing the host.

    Args:
        chosen_NK: (N, K) int, the rank of every choice; a number below 0 or from `ranks` on means none. With `choices` it is
            the physical expert of every choice; P or a number below 0 means none.
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
    place_NK, numbered = torch.empty_like(chosen_NK, dtype=torch.int64), choices is not None and choices.slot_P is not None
    rank_P, slot_P, weights, told, tail, codes_at = choices or PushedChoices(place_NK, place_NK, place_NK, 1, row_of_RX, 0)
    count_RT, experts = row_of_RX.new_empty(ranks, told), len(rank_P) - 1
    more = 0 if choices is None else experts + 1 if numbered else triton.cdiv(tokens * top_k, SCANNED)
    _lay_out[(ranks + more,)](
        chosen_NK.contiguous(), row_of_RX, place_NK, count_RT, rank_P, rank_P if slot_P is None else slot_P, weights, tail,
        tokens * top_k, slots, ranks, told, experts, weights.stride(0), tail.shape[1], codes_at,
        K=top_k, BY_EXPERT=choices is not None, NUMBERED=numbered, BLOCK=SCANNED,
    )  # fmt: skip
    return row_of_RX, count_RT, place_NK


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
    _arrange[(len(arrived), triton.cdiv(out.shape[1], ARRANGED))](
        arrived, count_RT, out, place_XK, weight_XK, ends_E, len(arrived) // ranks, packing.row_bytes, packing.weights_at,
        packing.physical_at, ranks, count_RT.stride(0), local_experts, int(local.start), expert_map.num_physical, most,
        out.shape[1], RANKS=power(ranks), TOLD=power(local_experts + 1), K=top_k, BLOCK=ARRANGED,
    )  # fmt: skip
    return rows, ends_E, place_XK, weight_XK


class Unpacked(NamedTuple):
    """Tensors that `unpack` fills, with a row for each slot.

    Attributes:
        rows: (X, H), hidden states, zero in empty slots.
        weights, experts: (X, K), router weights and experts of the rows.
        extra: (X, E) int32, what rows carry behind their experts, zero in empty slots.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    extra: torch.Tensor


def unpack(
    arrived: torch.Tensor, count_R: torch.Tensor, packing: MessageFormat, rank_P: torch.Tensor, rank: int,
    elsewhere: torch.Tensor, into: Unpacked,
) -> None:  # fmt: skip
    """Fills tensors with the rows of a dispatch whose codes are experts (`PushedChoices` without `slot_P`), in one launch.

    Args:
        arrived: (X, row_bytes) uint8, the slots of the dispatch.
        count_R: (R,) integers, the number of rows of each peer.
        packing: layout of the rows up to the extra words, which follow it.
        rank_P: as in `PushedChoices`.
        rank: this rank. Choices of experts that it does not hold get weight 0 and the expert `elsewhere`.
        elsewhere: () int64, an expert of another rank.
        into: what is filled.
    """
    out, top_k, extra, power = words(into.rows), into.experts.shape[1], into.extra.shape[1], triton.next_power_of_2
    _unpack[(len(arrived), triton.cdiv(out.shape[1], ARRANGED))](
        arrived, count_R, rank_P, elsewhere, out, into.weights, into.experts, into.extra,
        len(arrived) // len(count_R), arrived.stride(0), packing.weights_at, packing.physical_at, packing.row_bytes,
        count_R.stride(0), rank, out.shape[1], extra,
        K=top_k, CHOICES=power(top_k), EXTRA=power(extra) if extra else 0, BLOCK=ARRANGED,
    )  # fmt: skip


def words(rows: torch.Tensor) -> torch.Tensor:
    """Returns a view of rows (X, H), contiguous in H, as (X, words) integers, so that a copy has fewer elements.

    The integers are the widest that divide the rows' width, stride and offset. The storage must begin at a multiple of eight
    bytes, as torch's does.
    """
    whole = [part * rows.element_size() for part in (rows.shape[1], rows.stride(0), rows.storage_offset())]
    sizes = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return rows.view(next(dtype for dtype in sizes if not any(part % dtype.itemsize for part in whole)))
