"""Rank 0's control of a live placement: runs its control loop, and keeps what it decided."""

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence

from aurora.planner.control.controller import Controller, Decision
from aurora.planner.control.plan_controller import plan_controller
from aurora.runtime.control_loop import ControlLoop, ServingEnded
from aurora.runtime.live_placement import LivePlacement
from aurora.runtime.model_worker import ModelWorker
from aurora.runtime.result import ControlReport, PlacementChange
from aurora.types import Cluster, Program, RunOptions

LOG = logging.getLogger("aurora.control")


class PlacementControl:
    """Runs the control loop of one model's live placement, until it is closed.

    Args:
        live: the model's placement on rank 0; it hands its windows to the loop from now on.
        controller: decides.
        dry_run: whether nothing moves.
        model: the model's name, for the log.
        began_s: when the run began, by time.perf_counter, which is the controller's clock.
    """

    def __init__(self, live: LivePlacement, controller: Controller, dry_run: bool, model: str, began_s: float) -> None:
        self._live, self._dry_run, self._model, self._began_s = live, dry_run, model, began_s
        self._decided: list[tuple[Decision, float | None]] = []  # with the seconds until it was in force
        self._loop = ControlLoop(controller, self._perform, dry_run, self._say)
        live.control = self._loop

    def close(self) -> None:
        """Ends the loop; what is under way is given up."""
        self._live.close()
        self._loop.close()

    def report(self) -> ControlReport:
        """Returns what the loop has decided and done so far."""
        status = self._loop.status()
        decisions: Counter[str] = Counter()
        for (_, kind), count in status.decisions.items():
            decisions[kind] += count
        changes = tuple(
            PlacementChange(
                decision.at_s - self._began_s,
                decision.action,
                decision.kind,
                decision.reason,
                decision.layers,
                len(decision.moves),
                decision.bytes,
                took_s,
            )
            for decision, took_s in self._decided
        )
        now, expected = (None if math.isnan(each) else each for each in (status.balancedness, status.expected_balancedness))
        return ControlReport(
            self._model, self._dry_run, status.windows, dict(decisions), now, expected, status.failures, changes
        )

    def _perform(self, decision: Decision) -> None:
        """Performs a decision, and keeps how long that took."""
        if self._live.closed:
            raise ServingEnded("serving has ended")
        start_s = time.perf_counter()
        self._decided.append((decision, None))
        self._live.perform(decision)
        self._decided[-1] = decision, time.perf_counter() - start_s

    def _say(self, line: str) -> None:
        """Logs a line; in a dry run keeps the change that it tells."""
        last = self._loop.status().last
        if self._dry_run and last is not None and last.action != "keep" and all(last is not each for each, _ in self._decided):
            self._decided.append((last, None))
        LOG.info("%s: %s", self._model, line)


def controlled(
    workers: Sequence[ModelWorker], program: Program, cluster: Cluster, options: RunOptions, began_s: float
) -> list[PlacementControl]:
    """Makes each model's placement follow its traffic, if `options.adapt`. All ranks make the call.

    Args:
        workers: the models' workers, which perform `program`.
        program: the program of all ranks.
        cluster: the ranks' GPUs.
        options: of the run.
        began_s: when the run began, by time.perf_counter.

    Returns:
        What controls the placements, to be closed when serving ends; only on rank 0.
    """
    controls: list[PlacementControl] = []
    if options.adapt is None:
        return controls
    for index, worker in enumerate(workers):
        context, placement = worker.context, program.placements_M[index]
        rules = cluster.network, options.local_first, options.adapt.period_s
        live = LivePlacement(worker.layers, placement, program.ops_ML[index], context, worker.row_bytes, *rules)
        worker.between_steps = live.next_step
        if context.transport.rank == 0:
            controller = plan_controller(placement, cluster, worker.expert_bytes, options.adapt, time.perf_counter)
            controls.append(PlacementControl(live, controller, options.dry_run, program.names_M[index], began_s))
    return controls


def log_decisions() -> None:
    """Writes the log of decisions to stderr, unless it goes elsewhere; for a process that is one rank."""
    if not LOG.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("aurora: %(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
