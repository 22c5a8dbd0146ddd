"""Placement control of `aurora run`: followers that move the experts of each model's live placement, and their log."""

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
    """Runs a follower for one model's live placement, on rank 0, until `close`.

    Args:
        live: the model's placement on rank 0; it hands its windows to the follower from now on.
        controller: decides.
        dry_run: whether nothing moves.
        model: the model's name, for the log.
        began_s: when the run began, by time.perf_counter, which is the controller's clock.
        tell: receives the report after each decision, in another thread, and at the end; None: reports are not passed on.
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
        """Ends the follower; moves that are under way are given up."""
        self._live.close()
        self._follower.close()
        if self._tell is not None:
            self._tell(self.report())

    def report(self) -> ControlReport:
        """Returns the report of windows, decisions and moves so far."""
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
    """Makes each model's placement follow its traffic, if `options.adapt`. All ranks make the call.

    Args:
        workers: the models' workers, which perform `program`.
        program: the program of all ranks.
        cluster: the ranks' GPUs.
        options: options of the run.
        min_replicas: least number of replicas, from the plan's options; moves keep it.
        began_s: when the run began, by time.perf_counter.
        cost_MG: (M, G) relative cost of a unit of load on each GPU, by model; None: it follows from the GPUs' speeds.
        tell: receives the index of a model and its report, whenever `PlacementControl` makes one.

    Returns:
        The placements' controls, to be closed when serving ends; on ranks other than 0 an empty list.
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
    """Writes the log of decisions to stderr, unless it goes elsewhere; for a process that is one rank."""
    if not LOG.hasHandlers():
        handler = _DecisionLog(sys.stderr)
        handler.setFormatter(logging.Formatter("aurora: %(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
