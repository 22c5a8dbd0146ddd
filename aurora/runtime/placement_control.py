"""Rank 0's control of a live placement: runs its control loop, and keeps what it decided."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

from aurora.planner.control.controller import Controller
from aurora.planner.control.plan_controller import plan_controller
from aurora.runtime.control_loop import ControlLoop
from aurora.runtime.live_placement import LivePlacement
from aurora.runtime.model_worker import ModelWorker
from aurora.types import Cluster, ControlReport, Program, RunOptions
from aurora.types.arrays import FloatArray
from aurora.types.program import hierarchy_of

LOG = logging.getLogger("aurora.control")


class PlacementControl:
    """Runs the control loop of one model's live placement, until it is closed.

    Args:
        live: the model's placement on rank 0; it hands its windows to the loop from now on.
        controller: decides.
        dry_run: whether nothing moves.
        model: the model's name, for the log.
        began_s: when the run began, by time.perf_counter, which is the controller's clock.
        tell: receives the report after each decision, in another thread, and at the end; None: nobody does.
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
        self._loop = ControlLoop(controller, live.perform, dry_run, self._say)
        live.control = self._loop

    def close(self) -> None:
        """Ends the loop; what is under way is given up."""
        self._live.close()
        self._loop.close()
        if self._tell is not None:
            self._tell(self.report())

    def report(self) -> ControlReport:
        """Returns what the loop has seen and decided so far."""
        return self._loop.report(self._model, self._began_s)

    def _say(self, line: str) -> None:
        """Logs a line, and tells the report with what it says."""
        if self._tell is not None:
            self._tell(self.report())
        LOG.info("%s: %s", self._model, line)


class _DecisionLog(logging.StreamHandler[TextIO]):
    """Writes lines, and raises what prevents it, so that the control loop counts it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream.write(self.format(record) + self.terminator)
        self.flush()


def controlled(
    workers: Sequence[ModelWorker],
    program: Program,
    cluster: Cluster,
    options: RunOptions,
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
        options: of the run.
        min_replicas: as of the plan's options; moves keep them.
        began_s: when the run began, by time.perf_counter.
        cost_MG: (M, G) what a unit of load costs on each GPU, by model; None: the GPUs' speeds tell.
        tell: receives the index of a model and its report, as `PlacementControl` tells it.

    Returns:
        What controls the placements, to be closed when serving ends; only on rank 0.
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
