"""Redundancy that pays, by times that were observed."""

from collections.abc import Sequence

import numpy as np

from aurora.planner.gradient_codes import GradientCode, check_sizes, group_count, grouped_code
from aurora.reproduce.bcc.recoverable_batches import messages_needed
from aurora.types.arrays import FloatArray, IntArray


def replay(code: GradientCode, seconds_IW: FloatArray, receive_s: float = 0.0) -> tuple[FloatArray, IntArray]:
    """Replays iterations: when the master can recover the sum in each, and from how many messages."""
    ended_I, waited_I = np.full(len(seconds_IW), np.inf), np.zeros(len(seconds_IW), dtype=np.int64)
    for iteration, seconds_W in enumerate(seconds_IW):
        order = np.argsort(seconds_W, kind="stable")
        order = order[np.isfinite(seconds_W[order])]
        received, enough = 0.0, _fewest(code, order)
        waited_I[iteration] = enough or len(order)
        if enough:
            for worker in order[:enough]:
                received = max(received, seconds_W[worker]) + receive_s
            ended_I[iteration] = received
    return ended_I, waited_I


def _fewest(code: GradientCode, order: IntArray) -> int:
    """How many of `order`, from its beginning, the code can be decoded from; 0: not from all of them."""
    if code.needed is not None:
        return code.needed if len(order) >= code.needed else 0
    return messages_needed(code.holds_WB, order.tolist()) or 0


def code_by_speed(seconds_W: FloatArray, batches: int, load: int) -> GradientCode:
    """Returns a balanced code whose groups are dealt by speed, back and forth.

    Fast workers hold different groups; slow workers hold the same groups again.
    """
    workers = len(seconds_W)
    check_sizes("balanced", workers, batches, load)
    groups = group_count(batches, load)
    deal = np.arange(workers)
    rounds, nth = deal // groups, deal % groups
    group_W = np.empty(workers, dtype=np.int64)
    group_W[np.argsort(seconds_W, kind="stable")] = np.where(rounds % 2, groups - 1 - nth, nth)
    return grouped_code("balanced", group_W, batches, groups)


def scaled(seconds_IW: FloatArray, load: int, work_s: float | None) -> FloatArray:
    """Returns seconds that were observed with one batch a worker as they are with `load` batches.

    One batch more adds work_s seconds; None: time grows like the load.
    """
    return np.asarray(seconds_IW * load if work_s is None else np.maximum(seconds_IW + work_s * (load - 1), 0.0))


def choose_load(
    seconds_IW: FloatArray, loads: Sequence[int], batches: int, *, work_s: float | None = None
) -> tuple[int, GradientCode]:
    """Replays iterations that were observed with one batch a worker at other loads; returns the quickest load and its code.

    Ties go to the smaller load. Groups are dealt to workers by their speed, so that slow ones repeat what quick ones hold.
    Speeds are of the first half of the iterations, and the second half judges them; the code that is returned uses all
    iterations.
    """
    half = len(seconds_IW) // 2
    learned_W = seconds_IW[: max(1, half)].mean(axis=0)

    def seconds(load: int) -> float:
        return float(replay(code_by_speed(learned_W, batches, load), scaled(seconds_IW[half:], load, work_s))[0].mean())

    load = min(sorted(loads), key=seconds)
    return load, code_by_speed(seconds_IW.mean(axis=0), batches, load)
