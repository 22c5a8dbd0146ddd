"""Redundancy that pays, by times that were observed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.planner.gradient_codes import GradientCode, check_sizes, group_count, grouped_code
from aurora.reproduce.bcc.recoverable_batches import messages_needed
from aurora.types.arrays import FloatArray, IntArray, numbers


def replay(code: GradientCode, seconds_IW: FloatArray, receive_s: float = 0.0) -> tuple[FloatArray, IntArray]:
    """Replays iterations: when the master can recover the sum in each, and from how many messages.

    Args:
        code: which workers hold which batches.
        seconds_IW: (I, W) when each worker's message arrives; infinite for never.
        receive_s: seconds that the master takes for each message, one at a time.

    Returns:
        seconds_I and waited_I (I,). Infinite, with all messages that came, where the sum is not recoverable.
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
    """Returns a balanced code whose groups are dealt by speed, back and forth.

    Fast workers hold different groups; slow workers hold the same groups again.

    Args:
        seconds_W: (W,) of each worker.
        batches: of the sum.
        load: batches of a worker.
    """
    workers = len(seconds_W)
    check_sizes("balanced", workers, batches, load)
    groups = group_count(batches, load)
    deal = np.arange(workers)
    rounds, nth = deal // groups, deal % groups
    group_W = np.empty(workers, dtype=np.int64)
    group_W[np.argsort(seconds_W, kind="stable")] = np.where(rounds % 2, groups - 1 - nth, nth)
    return grouped_code("balanced", group_W, batches, groups)


@dataclass(frozen=True)
class LoadChoice:
    """The load with the least seconds per iteration.

    Args:
        load: batches of a worker.
        code: for that load.
        loads: all X loads that were tried.
        seconds_X: (X,) seconds per iteration with each.
    """

    load: int
    code: GradientCode
    loads: tuple[int, ...]
    seconds_X: FloatArray


def scaled(seconds_IW: FloatArray, observed_load: int, load: int, work_s: float | None) -> FloatArray:
    """Returns seconds that were observed at one load as they are at another.

    Args:
        seconds_IW: (I, W), observed.
        observed_load: batches of a worker then.
        load: batches of a worker now.
        work_s: seconds that one batch more adds; None: time grows like the load.
    """
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
    """Replays observed iterations at other loads and takes the quickest; ties go to the smaller load.

    Groups are dealt to workers by their speed, so that slow ones repeat what quick ones hold. Speeds are of the first
    half of
    the iterations, and the second half judges them; the code that is returned uses all iterations.

    Args:
        seconds_IW: (I, W) observed at `observed_load` batches of a worker; `scaled` to other loads.
        observed_load: batches of a worker then.
        loads: to try.
        batches: of the sum.
        work_s: as in `scaled`.
        receive_s: as in `replay`.

    Raises:
        BadInput: if there are no times, or negative ones, or no code fits a load.
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
