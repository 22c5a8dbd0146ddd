"""State of the plugin in the log and in metrics: whether it is engaged, its heartbeat, and the controller's decisions.

"Engaged" means that the plugin does all that its settings request."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from aurora.errors import RankFailed
from aurora_vllm.served_metrics import RankMetrics, vllm_collects
from aurora_vllm.settings import Settings

if TYPE_CHECKING:
    from aurora.algorithms.control.controller import Decision

LOG = logging.getLogger("vllm.aurora")
WITHOUT_PLUGIN = "vLLM places experts and sends tokens as it would without the plugin"
BEAT_S = 2.0
STUCK_S = 5.0  # a step that takes longer is stuck; with BEAT_S below the 10 s within which that is to be seen


class PluginStatus:
    """Logs the state of the plugin in one rank, and exports it as gauge `aurora_engaged`: 1 if engaged, else 0 and a reason.

    Args:
        settings: the plugin's settings.
        model_name: the name under which vLLM serves the model.
        rank: this expert-parallel rank.
        reports: True: this process logs the messages that concern all processes of the server.
        registry: Prometheus registry for the gauge; it is served at `metrics_port` if vLLM cannot show it.
    """

    def __init__(
        self, settings: Settings, model_name: str, rank: int, reports: bool, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._settings, self._reports, self._degraded = settings, reports, False
        self._metrics = RankMetrics("the plugin", model_name, rank, registry)
        try:
            if settings.metrics_port is not None and not vllm_collects():
                start_http_server(settings.metrics_port + rank, settings.metrics_host, registry)
        except OSError as error:  # the port is taken
            LOG.warning("aurora: no metrics: %s", error)

    def engaged(self, how: str) -> None:
        """Logs how the model is served, and sets the gauge to 1 unless `report_degraded` was called.

        Args:
            how: text for the log on placement and order of all-to-alls, from `ServedPlan.summary`.
        """
        if not self._degraded:
            self._metrics.of("engaged", reason="").set(1)
        if self._reports:
            LOG.info("aurora: %s", how)

    def report_disabled(self, reason: str, report_here: bool | None = None) -> None:
        """Logs that vLLM serves without the plugin, and sets the gauge to 0; arguments and errors as in `report_degraded`."""
        self.report_degraded(reason, report_here, f"; {WITHOUT_PLUGIN}")

    def report_degraded(self, reason: str, report_here: bool | None = None, consequence: str = "") -> None:
        """Logs that the plugin does not do all that its settings request, and sets the gauge to 0.

        Args:
            reason: a sentence on what the plugin does not do, and why.
            report_here: True: this rank logs a warning; None: the process with `reports` does.
            consequence: end of the sentence, on what vLLM does instead.

        Raises:
            RankFailed: if the setting `required` is True.
        """
        self._degraded = True
        self._metrics.of("engaged", reason=reason).set(0)
        if self._settings.required:
            raise RankFailed(f'aurora: {reason}; the setting "required" ends a server that would serve without the plugin')
        reports = self._reports if report_here is None else report_here
        LOG.log(logging.WARNING if reports else logging.DEBUG, "aurora: %s%s", reason, consequence)


class HeartbeatThread:
    """Thread that calls `beat` every BEAT_S seconds while some work is alive and no step of it takes longer than STUCK_S.

    Args:
        beat: the function to call.
        alive: returns True while the work runs.
        clock: returns the present time in seconds.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat, self._alive, self._clock = beat, alive, clock
        self._began_s: float | None = None  # when the present step began
        self._beats = True
        threading.Thread(target=self._run, daemon=True, name="aurora-heartbeat").start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that must surround each step of the work, to time it."""
        self._began_s = self._clock()
        try:
            yield
        finally:
            self._began_s = None

    @property
    def well(self) -> bool:
        """True if the work is alive and not stuck in a step."""
        began_s = self._began_s
        return self._alive() and (began_s is None or self._clock() - began_s < STUCK_S)

    def look(self) -> None:
        """Calls `beat` if `well`; otherwise logs a warning, once."""
        before, self._beats = self._beats, self.well
        if self._beats:
            self._beat()
        elif before:
            LOG.warning("aurora: what moves experts is stuck or gone; vLLM serves on, and experts may stay where they are")

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(BEAT_S)


class ControlMetrics:
    """Metrics of the placement controller (on rank 0), and the heartbeat of this rank.

    If processes share metrics through files and the disk is full, values are lost: this is logged once, and serving continues.

    Args:
        model_name: the name under which vLLM serves the model, a label of all metrics.
        rank: this expert-parallel rank, the label `ep_rank`.
        registry: as in `RankMetrics`.
    """

    def __init__(self, model_name: str, rank: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = RankMetrics("the placement", model_name, rank, registry)
        self._lost = False
        with self._kept():
            self._metrics.of("control_failures")
        if rank == 0:
            self.changed()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Context manager in which values are set; it tells once if they cannot be."""
        try:
            yield
        except OSError as error:
            if not self._lost:
                LOG.warning("aurora: metrics of the placement are not kept: %s", error)
            self._lost = True

    def beat(self) -> None:
        """Sets the heartbeat gauge to the present time; called while the code that moves experts works."""
        with self._kept():
            self._metrics.of("control_heartbeat_timestamp_seconds").set_to_current_time()

    def tell(self, decision: "Decision", dry_run: bool) -> None:
        """Logs a decision, and counts it, with the balancedness of its window and of the next one.

        Args:
            decision: the decision; a balancedness that is NaN tells nothing.
            dry_run: True: it is not carried out.
        """
        for name in ("balancedness", "expected_balancedness"):
            if not math.isnan(value := getattr(decision, name)):
                with self._kept():
                    self._metrics.of(f"control_{name}").set(value)
        with self._kept():
            self._metrics.of("control_decisions", kind=decision.kind).inc()
        LOG.info("aurora: %s%s", "dry run: " if dry_run else "", decision)

    def moved(self, moved_bytes: int, seconds: float) -> None:
        """Adds the bytes and seconds of a decision's moves, once its placement is in force."""
        with self._kept():
            self._metrics.of("control_moved_bytes").inc(moved_bytes)
            self._metrics.of("control_move_seconds").inc(seconds)
        self.changed()

    def changed(self) -> None:
        """Sets the time of the last change of the placement to now."""
        with self._kept():
            self._metrics.of("control_changed_timestamp_seconds").set_to_current_time()

    def failed(self) -> None:
        """Counts a failure: a window in which an error or a late decision left the experts where they are."""
        with self._kept():
            self._metrics.of("control_failures").inc()
