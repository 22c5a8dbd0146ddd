"""Placement control of `aurora run`: one follower per model that adapts its live placement to traffic, and their log."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

from aurora.planner.control.controller import Controller, plan_controller
from aurora.runtime.follower import Follower
from aurora.runtime.live_placement import LOG, LivePlacement
from aurora.types import Cluster, ControlReport, Program
from aurora.types.arrays import FloatArray
from aurora.types.program import hierarchy_of

if TYPE_CHECKING:
    from aurora.runtime.model_worker import ModelWorker
    from aurora.types import RunOptions


class PlacementControl:
    """Runs, on rank 0, the Follower that adapts one model's live placement, until `close`.

    Args:
        live: the model's placement on rank 0; passes its traffic windows to the follower from now on.
        controller: decides which experts move.
        dry_run: True: log decisions, but move nothing.
        model: the model's name, for the log.
        began_s: start of the run, by time.perf_counter, which is also the controller's clock.
        tell: called with the report after each decision, in another thread, and at the end; None: not called.
    """

    def __init__(
        self,
        live: LivePlacement,
        controller: Controller,
        dry_run: bool,
        model: str,
        began_s: float,
        tell: Callable[[ControlReport], None] | None = None,
    ) -> None:
        self._live, self._model, self._began_s, self._tell = live, model, began_s, tell
        self._follower = live.follower = Follower(controller, live.handover.perform, dry_run, self._say)

    def close(self) -> None:
        """Ends the follower, and abandons unfinished moves."""
        self._live.close()
        self._follower.close()
        if self._tell is not None:
            self._tell(self.report())

    def report(self) -> ControlReport:
        """Returns a report of the windows, decisions and moves since the start."""
        return self._follower.report(self._model, self._began_s)

    def _say(self, line: str) -> None:
        """Logs a line, and tells the report with what it says."""
        if self._tell is not None:
            self._tell(self.report())
        LOG.info("%s: %s", self._model, line)


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
) -> list[PlacementControl]:
    """Starts to adapt each model's expert placement to its traffic, if `options.adapt` is set. All ranks make the call.

    Args:
        workers: the models' workers, which run `program`.
        program: the program of all ranks.
        cluster: the ranks' GPUs.
        options: options of the run.
        min_replicas: least number of replicas of an expert, which moves preserve; None: 1.
        began_s: start of the run, by time.perf_counter.
        cost_MG: (M, G) relative cost of one unit of load on each GPU, by model; None: derived from the GPUs' speeds.
        tell: receives a model's index and its report, as `tell` of `PlacementControl`.

    Returns:
        One PlacementControl per model, to be closed when serving ends; an empty list on ranks other than 0.
    """
    controls: list[PlacementControl] = []
    if options.adapt is None:
        return controls
    for index, worker in enumerate(workers):
        context, placement = worker.context, program.placements_M[index]
        how = cluster.network, options.local_first, options.adapt.period_s
        live = LivePlacement(worker.layers, placement, program.ops_ML[index], context, worker.row_bytes, *how)
        worker.between_steps, worker.end_serving = live.next_step, live.close
        if context.transport.rank == 0:
            rules = options.adapt, time.perf_counter, min_replicas or 1, None if cost_MG is None else cost_MG[index]
            hierarchy = hierarchy_of(program.ops_ML[index][0])
            controller = plan_controller(placement, cluster, worker.expert_bytes, *rules, hierarchy)
            told = None if tell is None else partial(tell, index)
            controls.append(PlacementControl(live, controller, options.dry_run, program.names_M[index], began_s, told))
    return controls


def log_decisions() -> None:
    """Sends the decision log to stderr, unless it has a handler already; for processes that run a single rank."""
    if not LOG.hasHandlers():
        handler = _DecisionLog(sys.stderr)
        handler.setFormatter(logging.Formatter("aurora: %(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
