"""Placement control of `aurora run`: one follower per model that adapts its live placement to traffic, and their log."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

from aurora.planner.control.controller import plan_controller
from aurora.runtime.follower import Follower
from aurora.runtime.live_placement import LOG, LivePlacement
from aurora.types import Cluster, ControlReport, Program
from aurora.types.arrays import FloatArray
from aurora.types.program import hierarchy_of

if TYPE_CHECKING:
    from aurora.runtime.model_worker import ModelWorker
    from aurora.types import RunOptions


class _DecisionLog(logging.StreamHandler[TextIO]):
    """Writes lines, and raises what prevents it, so that the follower counts it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream.write(self.format(record) + self.terminator)
        self.flush()


def controlled(
    workers: "Sequence[ModelWorker]",
    program: Program,
    cluster: Cluster,
    options: "RunOptions",
    min_replicas: int | None,
    began_s: float,
    cost_MG: FloatArray | None = None,
    tell: Callable[[int, ControlReport], None] | None = None,
) -> list[LivePlacement]:
    """Starts to adapt each model's expert placement to its traffic, if `options.adapt` is set. All ranks make the call.

    Args:
        workers: the models' workers, which run `program`.
        program: the program of all ranks.
        cluster: the ranks' GPUs.
        options: options of the run.
        min_replicas: least number of replicas of an expert, which moves preserve; None: 1.
        began_s: start of the run, by time.perf_counter.
        cost_MG: (M, G) relative cost of one unit of load on each GPU, by model; None: derived from the GPUs' speeds.
        tell: receives a model's index and its report, as `on_report` of `Follower`.

    Returns:
        One LivePlacement with its follower per model, to be ended when serving ends; an empty list on ranks other than 0.
    """
    followed: list[LivePlacement] = []
    if options.adapt is None:
        return followed
    for index, worker in enumerate(workers):
        context, placement = worker.context, program.placements_M[index]
        how = cluster.network, options.local_first, options.adapt.period_s
        live = LivePlacement(worker.layers, placement, program.ops_ML[index], context, worker.row_bytes, *how)
        worker.between_steps, worker.end_serving = live.next_step, live.close
        if context.transport.rank == 0:
            rules = options.adapt, time.perf_counter, min_replicas or 1, None if cost_MG is None else cost_MG[index]
            hierarchy = hierarchy_of(program.ops_ML[index][0])
            controller = plan_controller(placement, cluster, worker.expert_bytes, *rules, hierarchy)
            name, told = program.names_M[index], None if tell is None else partial(tell, index)
            say = partial(LOG.info, "%s: %s", name)
            live.follower = Follower(
                controller, live.handover.perform, options.dry_run, say, model=name, began_s=began_s, on_report=told
            )
            followed.append(live)
    return followed


def log_decisions() -> None:
    """Sends the decision log to stderr, unless it has a handler already; for processes that run a single rank."""
    if not LOG.hasHandlers():
        handler = _DecisionLog(sys.stderr)
        handler.setFormatter(logging.Formatter("aurora: %(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
