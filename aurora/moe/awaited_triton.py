"""Triton kernel of a grouped product over rows that peers push: each tile waits for the flags of its own rows alone.

It runs on CUDA devices, and with TRITON_INTERPRET=1 on CPUs. Imported only if Triton is installed. No GPU has run it; nothing
calls it unless it is named.

One launch computes all experts. Its programs go through the tiles in the sequence in which their senders are expected, so rows
of the first senders are multiplied while the others still travel. Flags and memory model are those of `aurora.moe.push_triton`:
a tile reads the words of its rows' senders with acquire semantics at system scope, and then the rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 128, 64  # of a tile's product
WARPS, STAGES = 8, 3
ENTRIES = tl.constexpr(3)  # of a row of the tiles' table: expert, begin, end


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _await(words, goal, lost, first, last, looks, LANES: tl.constexpr, WORDS: tl.constexpr):
    """Waits until the words of senders `first` to `last` have come to a goal; one that has not after all looks is lost."""
    word, zero = tl.arange(0, WORDS), tl.full((WORDS,), 0, tl.int64)
    sender = word // LANES
    due = (sender >= first) & (sender <= last)
    seen = tl.where(due, tl.atomic_add(words + word, zero, mask=due, sem="acquire", scope="sys"), goal)
    while (tl.reduce(seen, 0, _least) < goal) & (looks > 0):
        seen = tl.where(due, tl.atomic_add(words + word, zero, mask=due, sem="acquire", scope="sys"), goal)
        looks -= 1
    silent = tl.reduce(tl.where(seen < goal, sender, WORDS), 0, _least)
    if silent < WORDS:
        tl.atomic_cas(lost, tl.full((), 0, tl.int64), (silent + 1).to(tl.int64))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["slots", "goal", "polls"])
def _awaited_product(
    arrived, place, weights, out, tiles, words, lost,
    slots, goal, polls, number, columns, depth, row_stride, expert_stride, column_stride, depth_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = (columns + COLUMNS - 1) // COLUMNS
    for task in range(tl.program_id(0), number * across, tl.num_programs(0)):
        entry = tiles + task // across * ENTRIES
        expert, begin, end = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
        if begin < end:
            row, column = begin + tl.arange(0, ROWS), task % across * COLUMNS + tl.arange(0, COLUMNS)
            inside, wide = (row < end)[:, None], (column < columns)[None, :]
            slot = tl.load(place + row, mask=row < end, other=-1).to(tl.int64)
            sender = (slot // slots).to(tl.int32)
            first = tl.reduce(tl.where(row < end, sender, WORDS), 0, _least)
            last = -tl.reduce(tl.where(row < end, -sender, 0), 0, _least)
            _await(words, goal, lost, first, last, polls, LANES, WORDS)
            total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
            of_column = weights + expert * expert_stride + column[None, :] * column_stride
            for top in range(0, depth, DEPTH):
                at = top + tl.arange(0, DEPTH)
                value = tl.load(
                    arrived + slot[:, None] * row_stride + at[None, :], mask=inside & (at < depth)[None, :], other=0.0
                )
                weight = tl.load(of_column + at[:, None] * depth_stride, mask=(at < depth)[:, None] & wide, other=0.0)
                total = tl.dot(value, weight, total, input_precision="ieee")
            into = out + row.to(tl.int64)[:, None] * columns + column[None, :]
            tl.store(into, total.to(out.dtype.element_ty), mask=inside & wide)


class Arrivals(NamedTuple):
    """Flags of the rows that peers push.

    Attributes:
        words: (R, LANES) int64, the word of each lane of each sender; it is set after the lane's rows are written.
        goal: value of a word from which on the rows are there.
        slots: number of slots, one for each row, of a sender.
        lost: (1,) int64, 0; it is set to 1 + a sender whose words have not come to the goal after all `polls`.
        polls: number of reads of unchanged words after which their sender counts as lost.
        turn_R: (R,) int, the turn in which each sender's rows are expected.
    """

    words: torch.Tensor
    goal: int
    slots: int
    lost: torch.Tensor
    polls: int
    turn_R: torch.Tensor


def tile_table(ends_E: torch.Tensor, place_X: torch.Tensor, arrivals: Arrivals) -> torch.Tensor:
    """Returns (T, 3) int32: expert, first row and end of each tile, sorted by the last turn of its senders; some are empty.

    The host learns no size: T is the most that so many rows and experts can need. Arguments as in `awaited_product`.
    """
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    until_E = ((counts_E + TILE_ROWS - 1) // TILE_ROWS).cumsum(0)
    tile_T = torch.arange(triton.cdiv(len(place_X), TILE_ROWS) + len(ends_E), device=ends_E.device)
    expert_T = torch.searchsorted(until_E, tile_T, right=True).clamp(max=len(ends_E) - 1)
    before_E = until_E.roll(1).index_fill(0, until_E.new_zeros(1), 0)
    begin_T = (ends_E - counts_E)[expert_T] + (tile_T - before_E[expert_T]) * TILE_ROWS
    end_T = torch.minimum(begin_T + TILE_ROWS, ends_E[expert_T])
    row_TM = torch.minimum(begin_T[:, None] + torch.arange(TILE_ROWS, device=ends_E.device), end_T[:, None] - 1)
    turn_T = arrivals.turn_R[place_X[row_TM.clamp(min=0)].long() // arrivals.slots].amax(dim=1)
    turn_T = torch.where(begin_T < end_T, turn_T, len(arrivals.turn_R))
    return torch.stack([expert_T, begin_T, end_T], dim=1)[turn_T.argsort(stable=True)].int()


def awaited_product(
    arrived: torch.Tensor, place_X: torch.Tensor, ends_E: torch.Tensor, weights: torch.Tensor, arrivals: Arrivals, programs: int
) -> torch.Tensor:
    """Returns (X, F), the product of each row with its expert's weights, in one launch, whose tiles wait for their rows.

    Args:
        arrived: (R * slots, H), the slots, which the peers write.
        place_X: (X,) int, the slot of each row. Rows are sorted by expert; within an expert, rows of neighbouring senders that
            arrive together should be neighbours.
        ends_E: (E,) int64, the end of each expert's rows: expert e has rows ends_E[e - 1] to ends_E[e] - 1. Rows after the last
            expert's are left uninitialised.
        weights: (E, H, F), of any strides.
        arrivals: the flags of the rows.
        programs: number of Triton programs, each of which takes every `programs`-th tile: at most as many as the GPU runs at
            once, so that those that wait hold up nobody.
    """
    out, tiles = arrived.new_empty(len(place_X), weights.shape[2]), tile_table(ends_E, place_X, arrivals)
    words, strides = arrivals.words, (arrived.stride(0), weights.stride(0), weights.stride(2), weights.stride(1))
    _awaited_product[(programs,)](
        arrived, place_X, weights, out, tiles, words, arrivals.lost,
        arrivals.slots, arrivals.goal, arrivals.polls, len(tiles), out.shape[1], arrived.shape[1], *strides,
        LANES=words.shape[1], WORDS=triton.next_power_of_2(words.numel()), ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        DEPTH=TILE_DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
