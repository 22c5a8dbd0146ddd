"""State of the plugin in the log and in metrics: whether it is engaged, its heartbeat, and the controller's decisions.

"Engaged" means that the plugin does all that its settings request."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, start_http_server

from aurora.errors import RankFailed
from aurora_vllm.served_metrics import MULTIPROCESS, MetricsWriter
from aurora_vllm.settings import Settings

if TYPE_CHECKING:
    from aurora.planner.control.controller import Decision
    from aurora.runtime.follower import ControlStatus

LOG = logging.getLogger("vllm.aurora")
WITHOUT_PLUGIN = "vLLM places experts and sends tokens as it would without the plugin"
ENGAGED = "1 if the plugin does what its settings ask for; 0 if it does not, for the reason in the label"
BALANCEDNESS = "Mean over largest load of the GPUs in the last window, all layers: 1 is balanced"
EXPECTED = "The same as expected in the next window, after the moves that were decided on"
CHANGED = "When the placement was last changed, in Unix time; before that, when serving began"
DECISIONS = "Decisions after windows of traffic, by kind"
BYTES = "Bytes of expert weights that were moved between ranks"
SECONDS = "Seconds in which expert weights were moved"
FAILURES = "Windows in which an error left the experts where they were"
HEARTBEAT = "When what moves experts was last seen well, in Unix time"
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
        self._settings, self._reports, self._labels = settings, reports, (model_name, str(rank))
        self._falls_short = False
        self._gauge: Gauge | None = None
        try:
            names = ("model_name", "ep_rank", "reason")
            self._gauge = Gauge("aurora_engaged", ENGAGED, names, registry=registry, multiprocess_mode="mostrecent")
            if MULTIPROCESS not in os.environ and settings.metrics_port is not None:
                start_http_server(settings.metrics_port + rank, settings.metrics_host, registry)
        except (ValueError, OSError) as error:  # the name is taken in this process, or the port is
            LOG.warning("aurora: no metrics: %s", error)
        self.show = MetricsWriter(registry).write_soon

    def engaged(self, how: str) -> None:
        """Logs how the model is served, and sets the gauge to 1 unless `report_degraded` was called.

        Args:
            how: text for the log on placement and order of all-to-alls, from `ServedPlan.summary`.
        """
        if not self._falls_short:
            self._set(1, "")
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
        self._falls_short = True
        self._set(0, reason)
        if self._settings.required:
            raise RankFailed(f'aurora: {reason}; the setting "required" ends a server that would serve without the plugin')
        reports = self._reports if report_here is None else report_here
        LOG.log(logging.WARNING if reports else logging.DEBUG, "aurora: %s%s", reason, consequence)

    def _set(self, value: int, reason: str) -> None:
        if self._gauge is not None:
            self._gauge.labels(*self._labels, reason).set(value)


class HeartbeatThread:
    """Thread that calls `beat` every BEAT_S seconds while some work is alive and no step of it takes longer than STUCK_S.

    Args:
        beat: the function to call.
        alive: returns True while the work runs.
        tells: True: log a warning when the beats stop.
        clock: returns the present time in seconds.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        alive: Callable[[], bool] = lambda: True,
        tells: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat, self._alive, self._tells, self._clock = beat, alive, tells, clock
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
        elif before and self._tells:
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
        registry: Prometheus registry; if it already has metrics of these names, these are not exported.
    """

    def __init__(self, model_name: str, rank: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._labels = {"model_name": model_name, "ep_rank": str(rank)}
        self._lost = False
        self._told: Decision | None = None  # the last decision that is counted
        self._failed = 0  # failures of the follower that are counted
        try:
            self._register(registry)
        except ValueError as error:
            LOG.warning("aurora: no metrics of the placement: %s", error)
            self._register(CollectorRegistry())
        with self._kept():
            self._failures.labels(**self._labels)
        if rank == 0:
            self.changed()

    def _register(self, registry: CollectorRegistry) -> None:
        common: tuple[str, ...] = (*self._labels,)
        latest: dict[str, Any] = {"multiprocess_mode": "mostrecent", "registry": registry}
        self._heartbeat = Gauge("aurora_control_heartbeat_timestamp_seconds", HEARTBEAT, common, **latest)
        self._failures = Counter("aurora_control_failures", FAILURES, common, registry=registry)
        self._balancedness = Gauge("aurora_control_balancedness", BALANCEDNESS, common, **latest)
        self._expected = Gauge("aurora_control_expected_balancedness", EXPECTED, common, **latest)
        self._changed = Gauge("aurora_control_changed_timestamp_seconds", CHANGED, common, **latest)
        self._decisions = Counter("aurora_control_decisions", DECISIONS, (*common, "kind"), registry=registry)
        self._bytes = Counter("aurora_control_moved_bytes", BYTES, common, registry=registry)
        self._seconds = Counter("aurora_control_move_seconds", SECONDS, common, registry=registry)

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
            self._heartbeat.labels(**self._labels).set_to_current_time()

    def tell(self, line: str, status: "ControlStatus") -> None:
        """Logs a line from the follower, and updates the metrics with new decisions and failures.

        Args:
            line: the line.
            status: the follower's status; compared with the last one to detect new decisions and failures.
        """
        if (decision := status.last) is not None and decision is not self._told:
            self._told = decision
            self._decided(decision)
            LOG.info("aurora: %s", line)
        elif status.failures > self._failed:
            self._failed = status.failures
            self.failed()
            LOG.warning("aurora: experts stay where they are: %s", line.removeprefix("failed: "))
        else:
            LOG.log(logging.WARNING if status.stuck else logging.INFO, "aurora: %s", line)

    def _decided(self, decision: "Decision") -> None:
        """Adds a decision, and the balancedness of its window and of the next one; NaN: the window tells nothing of it."""
        shown = (self._balancedness, decision.balancedness), (self._expected, decision.expected_balancedness)
        for gauge, value in shown:
            if not math.isnan(value):
                with self._kept():
                    gauge.labels(**self._labels).set(value)
        with self._kept():
            self._decisions.labels(**self._labels, kind=decision.kind).inc()

    def moved(self, moved_bytes: int, seconds: float) -> None:
        """Adds the bytes and seconds of a decision's moves, once its placement is in force."""
        with self._kept():
            self._bytes.labels(**self._labels).inc(moved_bytes)
            self._seconds.labels(**self._labels).inc(seconds)
        self.changed()

    def changed(self) -> None:
        """Sets the time of the last change of the placement to now."""
        with self._kept():
            self._changed.labels(**self._labels).set_to_current_time()

    def failed(self) -> None:
        """Counts a failure: a window in which an error or a late decision left the experts where they are."""
        with self._kept():
            self._failures.labels(**self._labels).inc()
