"""Exports the workers' metrics on vLLM's /metrics if there is one API server: workers write files, which that server reads.

With several API servers, vLLM itself collects the metrics of all processes.
"""

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from aurora_vllm.rank_progress import FOLDER

LOG = logging.getLogger("vllm.aurora")
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM when it runs several API servers, or by the user
WRITE_S = 2.0  # between two writes


def open_status_folder() -> None:
    """Creates this server's status folder, once, and exports the metrics that child processes write there."""
    if FOLDER in os.environ:
        return
    try:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="aurora-vllm-")
    except OSError as error:
        LOG.warning("aurora: no watchdog, and no metrics with one API server: %s", error)
        return
    atexit.register(_remove, folder, os.getpid())
    if MULTIPROCESS not in os.environ:
        REGISTRY.register(WorkersMetrics(Path(folder)))


def _remove(folder: str, creator: int) -> None:
    """Removes the folder, unless this process is a fork of its creator."""
    if os.getpid() == creator:
        shutil.rmtree(folder, ignore_errors=True)


class WorkersMetrics(Collector):  # type: ignore[misc]
    """Prometheus collector of the metrics that other processes write to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        """Returns an empty list, because the metrics are not known before workers have written them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields each metric once, with the values from all processes."""
        families: dict[str, Metric] = {}
        for path in sorted(self._folder.glob("*.prom")):
            if path != metrics_file(self._folder):  # this process shows its own
                with suppress(OSError, ValueError):
                    for family in text_string_to_metric_families(path.read_text()):
                        known = families.setdefault(family.name, family)
                        known.samples += [] if known is family else family.samples
        yield from families.values()


class MetricsWriter:
    """Writes this process's metrics to the status folder, in a background thread, unless vLLM collects them itself."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry, self._soon = registry, threading.Event()
        folder = os.environ.get(FOLDER)
        if folder is not None and MULTIPROCESS not in os.environ:
            threading.Thread(target=self._run, args=(Path(folder),), daemon=True, name="aurora-metrics").start()

    def write_soon(self) -> None:
        """Wakes the thread, so that it writes the metrics now."""
        self._soon.set()

    def collect(self) -> Iterator[Metric]:
        """Yields the plugin's metrics."""
        for family in self._registry.collect():
            if family.name.startswith("aurora_"):
                yield family

    def _run(self, folder: Path) -> None:
        path = metrics_file(folder)
        new = path.with_suffix(".new")
        with suppress(OSError):  # the server has ended
            while True:
                new.write_bytes(generate_latest(self))
                new.replace(path)
                self._soon.wait(WRITE_S)
                self._soon.clear()


def metrics_file(folder: Path) -> Path:
    """Returns the path in `folder` of this process's metrics file."""
    return folder / f"metrics-{os.getpid()}.prom"
