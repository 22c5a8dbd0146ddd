"""Redundancy that pays, by times that were observed."""

from collections.abc import Sequence

import numpy as np

from aurora.algorithms.gradient_codes import GradientCode, check_sizes, group_count, grouped_code
from aurora.types.arrays import FloatArray, IntArray
from bench.papers.bcc.recoverable_batches import messages_needed


def replay(code: GradientCode, seconds_IW: FloatArray, receive_s: float = 0.0) -> tuple[FloatArray, IntArray]:
    """Replays iterations with a code; seconds_IW are (I, W) seconds until each worker's message reaches the master.

    Returns (I,) seconds until the master can recover the sum, infinite if it cannot, and (I,) the messages it waited for. The
    master takes receive_s seconds per message.
    """
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
    """Returns a balanced code whose groups are dealt to workers by rising seconds_W (W,), back and forth.

    Fast workers hold different groups; slow workers repeat them. `load` is the batches of a worker.
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
    """Converts seconds_IW, observed with one batch per worker, to the seconds with `load` batches per worker.

    Each further batch adds work_s seconds; None: seconds are in proportion to the load.
    """
    return np.asarray(seconds_IW * load if work_s is None else np.maximum(seconds_IW + work_s * (load - 1), 0.0))


def choose_load(
    seconds_IW: FloatArray, loads: Sequence[int], batches: int, *, work_s: float | None = None
) -> tuple[int, GradientCode]:
    """Replays iterations, observed with one batch per worker, at each of `loads`; returns (quickest load, its code).

    Ties go to the smaller load. Codes are those of `code_by_speed`, with mean seconds of the first half of the iterations; the
    second half is replayed. The returned code uses the means of all iterations. `batches` is the number of batches, `work_s`
    as in `scaled`.
    """
    half = len(seconds_IW) // 2
    learned_W = seconds_IW[: max(1, half)].mean(axis=0)

    def seconds(load: int) -> float:
        return float(replay(code_by_speed(learned_W, batches, load), scaled(seconds_IW[half:], load, work_s))[0].mean())

    load = min(sorted(loads), key=seconds)
    return load, code_by_speed(seconds_IW.mean(axis=0), batches, load)
