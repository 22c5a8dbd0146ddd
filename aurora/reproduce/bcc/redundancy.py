"""How much redundancy pays, from times that were observed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.planner.gradient_codes import GradientCode, check_sizes, group_count, grouped_code
from aurora.reproduce.bcc.recoverable_batches import messages_needed
from aurora.types.arrays import FloatArray, IntArray, numbers


def replay(code: GradientCode, seconds_IW: FloatArray, receive_s: float = 0.0) -> tuple[FloatArray, IntArray]:
    """(seconds_I, waited_I): when the master has enough in each iteration, and how many messages that took.

    seconds_IW: when each worker's message is there, infinite for never; the master takes receive_s for each, one at a time.
    Infinite, with all that came, where it never has enough.
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
    """A balanced code whose groups are dealt by speed, back and forth: fast workers hold different groups, slow ones repeat."""
    workers = len(seconds_W)
    check_sizes("balanced", workers, batches, load)
    groups = group_count(batches, load)
    deal = np.arange(workers)
    rounds, place = deal // groups, deal % groups
    group_W = np.empty(workers, dtype=np.int64)
    group_W[np.argsort(seconds_W, kind="stable")] = np.where(rounds % 2, groups - 1 - place, place)
    return grouped_code("balanced", group_W, batches, groups)


@dataclass(frozen=True)
class LoadChoice:
    """The load with the least seconds an iteration, a code for it, and all that were tried: seconds_X of loads_X."""

    load: int
    code: GradientCode
    loads: tuple[int, ...]
    seconds_X: FloatArray


def scaled(seconds_IW: FloatArray, observed_load: int, load: int, work_s: float | None) -> FloatArray:
    """What seconds observed at one load are at another. work_s: what one batch more adds; None: time grows like the load."""
    if work_s is None:
        return np.asarray(seconds_IW * (load / observed_load))
    return np.asarray(np.maximum(seconds_IW + work_s * (load - observed_load), 0.0))


def choose_load(
    seconds_IW: FloatArray,
    observed_load: int,
    loads: Sequence[int],
    batches: int,
    *,
    work_s: float | None = None,
    receive_s: float = 0.0,
) -> LoadChoice:
    """Replay observed iterations at other loads and take the quickest; ties go to the smaller load.

    Groups are dealt to workers by their speed, so that slow ones repeat what quick ones hold: as seen in the first half of the
    iterations, judged by the second, and by all of them in the code that is given. seconds_IW: at `observed_load` batches a
    worker, scaled by `scaled`. BadInput for no times or negative ones, or loads that no code fits.
    """
    seconds_IW = numbers("observed seconds", seconds_IW, 2)
    if not seconds_IW.size or (seconds_IW < 0).any() or observed_load < 1 or not loads:
        raise BadInput("observed seconds: expected some, none below zero, of a load above zero, and loads to choose from")
    half = len(seconds_IW) // 2
    tried = tuple(sorted(set(loads)))
    learned_W = seconds_IW[: max(1, half)].mean(axis=0)
    seconds = []
    for load in tried:
        code = code_by_speed(learned_W, batches, load)
        seconds.append(replay(code, scaled(seconds_IW[half:], observed_load, load, work_s), receive_s)[0].mean())
    seconds_X = np.array(seconds)
    load = tried[int(seconds_X.argmin())]
    return LoadChoice(load, code_by_speed(seconds_IW.mean(axis=0), batches, load), tried, seconds_X)
