"""Watchdog of one rank: a thread that reads the progress of all ranks of its host, and reports a stuck rank."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from aurora_vllm.rank_progress import RankFiles, RankProgress
from aurora_vllm.served_metrics import RankMetrics
from aurora_vllm.stuck_rank import SILENT_S, StuckRank, stuck_rank

LOG = logging.getLogger("vllm.aurora")
LOOK_S = 0.5  # between two looks
WINDOW_S = 2.0  # of the passes that are compared
CONFIRMED = 2  # looks that have to find the same, unless a process is gone
SUSPECT_S = 1.0  # in an exchange, after which links are looked at
OVERSLEPT_S = 2.0  # between two looks: then this process was stopped, and what it saw before says nothing


class Watchdog:
    """Background thread that monitors the ranks of this host, and reports a stuck rank in the log and as a metric.

    Only the watchdog of the lowest rank with a recent heartbeat reports. Watchdogs never wait for each other.

    Attributes:
        balancer: returns the state of EPLB's background thread, and the number of layers whose moves it began; None: there is
            no such thread.
        files: as given.
        told: the stuck rank that was reported last; None: no rank is stuck.

    Args:
        rank: this rank.
        progress: writer of this rank's progress, for heartbeats.
        files: reader of the progress of all ranks of this host.
        complete: True: all ranks of the server run on this host.
        model_name: a label of the metrics.
        registry: Prometheus registry for the metrics.
    """

    def __init__(
        self,
        rank: int,
        progress: RankProgress,
        files: RankFiles,
        complete: bool,
        model_name: str,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._rank, self._progress, self.files, self._complete = rank, progress, files, complete
        self.balancer: Callable[[], tuple[str, int]] | None = None
        self.told: StuckRank | None = None
        self._seen: list[tuple[int | None, str] | None] = []
        self._looked_s = time.monotonic()
        self._metrics = RankMetrics("the watchdog", model_name, rank, registry)
        self._looked_at = self._metrics.of("watchdog_timestamp_seconds")
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="aurora-watchdog").start()

    def end(self) -> None:
        """Ends the thread, and publishes to the other ranks that this one ends as intended."""
        self._progress.end()
        self._ended.set()

    def keep(self, ranks: list[int]) -> None:
        """Watches `ranks` from now on, those of this host after a change. Called before the next forward pass."""
        self._progress.count_anew()
        self.files.keep(ranks)

    def look(self) -> None:
        """Writes a heartbeat, checks all ranks once, and reports a stuck rank."""
        now_s = time.monotonic()
        overslept, self._looked_s = now_s - self._looked_s > OVERSLEPT_S, now_s
        self._progress.beat()
        self._looked_at.set_to_current_time()
        if self._progress.waited_s >= SUSPECT_S:
            self._progress.publish_links()
        if self.balancer is not None:
            self._progress.balance(*self.balancer())
        if overslept:
            self._seen.clear()
        elif self.files.serving() and self._first():
            self._tell(stuck_rank(self.files.states(WINDOW_S), self._complete))

    def _first(self) -> bool:
        """Returns whether no rank before this one on its host looks."""
        return all(self.files.silent_s(rank) >= SILENT_S for rank in self.files.ranks if rank < self._rank)

    def _tell(self, verdict: StuckRank | None) -> None:
        """Says what CONFIRMED looks in a row have found, if that is new."""
        fault = None if verdict is None else (verdict.rank, verdict.cause)
        self._seen = [*self._seen, fault][-CONFIRMED:]
        reported = None if self.told is None else (self.told.rank, self.told.cause)
        certain = verdict is not None and verdict.cause == "gone"
        if fault == reported or not (certain or self._seen == [fault] * CONFIRMED):
            return
        if self.told is not None:
            self._gauge(self.told).set(0)
            LOG.warning("aurora: %s: that is over", self.told)
        if verdict is not None:
            self._gauge(verdict).set(1)
            LOG.warning("aurora: %s", verdict)
        self.told = verdict

    def _gauge(self, verdict: StuckRank) -> Any:
        rank = "" if verdict.rank is None else str(verdict.rank)
        return self._metrics.of("stuck_rank", ep_rank=rank, cause=verdict.cause, reason=verdict.reason)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # serving goes on, and no rank takes the silence for a stopped one
                LOG.exception("aurora: the watchdog has ended")
                self.end()
