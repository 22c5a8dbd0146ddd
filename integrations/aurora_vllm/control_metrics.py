"""Prometheus metrics of a placement that follows its traffic."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

LOG = logging.getLogger("vllm.aurora")
BALANCEDNESS = "Mean over largest load of the GPUs in the last window, all layers: 1 is balanced"
EXPECTED = "The same as expected in the next window, after the moves that were decided on"
CHANGED = "When the placement was last changed, in Unix time; before that, when serving began"
DECISIONS = "Decisions after windows of traffic, by kind"
BYTES = "Bytes of expert weights that were moved between ranks"
SECONDS = "Seconds in which expert weights were moved"
FAILURES = "Windows in which an error left the experts where they were"
HEARTBEAT = "When what moves experts was last seen well, in Unix time"


class ControlMetrics:
    """Metrics of the controller, which runs on rank 0, and the heartbeat of each rank.

    Where processes share metrics through files, a full disk may prevent that a value is kept. One line says so, and
    serving goes on.

    Args:
        model_name: the name under which vLLM serves the model, a label of all metrics.
        rank: this expert-parallel rank, the label `ep_rank`.
        registry: where the metrics are registered. If it has metrics of these names already, these are not shown.
    """

    def __init__(self, model_name: str, rank: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._labels = {"model_name": model_name, "ep_rank": str(rank)}
        self._lost = False
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
        """Says that what moves experts is well."""
        with self._kept():
            self._heartbeat.labels(**self._labels).set_to_current_time()

    def decided(self, kind: str, balancedness: float, expected: float) -> None:
        """Adds a decision, and the balancedness of its window and of the next one; NaN: the window tells nothing of it."""
        for gauge, value in ((self._balancedness, balancedness), (self._expected, expected)):
            if not math.isnan(value):
                with self._kept():
                    gauge.labels(**self._labels).set(value)
        with self._kept():
            self._decisions.labels(**self._labels, kind=kind).inc()

    def moved(self, moved_bytes: int, seconds: float) -> None:
        """Adds the moves of a decision, which is in force now."""
        with self._kept():
            self._bytes.labels(**self._labels).inc(moved_bytes)
            self._seconds.labels(**self._labels).inc(seconds)
        self.changed()

    def changed(self) -> None:
        """Says that the placement in force is new."""
        with self._kept():
            self._changed.labels(**self._labels).set_to_current_time()

    def failed(self) -> None:
        """Adds a window in which there was an error."""
        with self._kept():
            self._failures.labels(**self._labels).inc()
