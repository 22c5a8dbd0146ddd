"""What the all-to-all costs, for Prometheus: on vLLM's /metrics where it collects from all processes, else on our own port."""

import os
import time

import numpy as np
from prometheus_client import Counter, Gauge, start_http_server

from aurora.errors import AuroraError
from aurora.io import load_profile
from aurora.planner.network.lower_bounds import fluid_bound
from aurora.types import Plan, Profile
from aurora.types.arrays import FloatArray, IntArray
from aurora_vllm.settings import Settings

SHARED = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM when it runs several API servers, or by the user: all processes' metrics meet
PHASES = ("dispatch", "combine")
RANK = ("ep_rank",)


class Metrics:
    """Counters and gauges of one rank. With a plan, bounds and drift are told against its cluster and profile."""

    def __init__(self, rank: int, plan: Plan | None, settings: Settings) -> None:
        self._plan, self._path = plan, settings.plan
        by_phase = ("ep_rank", "phase")
        bytes_ = Counter("aurora_exchange_bytes", "Bytes sent to other ranks in all-to-alls", by_phase)
        seconds = Counter("aurora_exchange_seconds", "Seconds spent in all-to-alls, waiting for others included", by_phase)
        bound = Counter("aurora_exchange_bound_seconds", "Below any all-to-all of these sizes at the plan's rates", by_phase)
        gap = Gauge("aurora_exchange_gap", "Seconds over bound, minus one", by_phase, multiprocess_mode="mostrecent")
        age = Gauge("aurora_plan_age_seconds", "Since the plan's file was written", RANK, multiprocess_mode="mostrecent")
        drift = Gauge("aurora_plan_drift", DRIFT, RANK, multiprocess_mode="mostrecent")
        of = str(rank)
        self._of = {p: tuple(metric.labels(of, p) for metric in (bytes_, seconds, bound, gap)) for p in PHASES}
        self._totals = {phase: [0.0, 0.0] for phase in PHASES}
        self._rank, self._age, self._drift = rank, age.labels(of), drift.labels(of)
        self._planned_LE = None if plan is None or self._path is None else _planned(plan, self._path)
        self._told()
        if SHARED not in os.environ and settings.metrics_port is not None:
            start_http_server(settings.metrics_port + rank)

    def exchanged(self, phase: str, seconds: float, bytes_GG: IntArray) -> None:
        """One all-to-all; bytes_GG (G, G): from every rank to every rank, its own among them."""
        between_GG = bytes_GG.copy()
        np.fill_diagonal(between_GG, 0)
        bytes_, spent, bound, gap = self._of[phase]
        bytes_.inc(int(between_GG[self._rank].sum()))
        spent.inc(seconds)
        if self._plan is not None:
            bound_s = fluid_bound(between_GG, self._plan.cluster.network)
            bound.inc(bound_s)
            totals = self._totals[phase]
            totals[0], totals[1] = totals[0] + seconds, totals[1] + bound_s
            if totals[1] > 0:
                gap.set(totals[0] / totals[1] - 1)

    def drifted(self, load_LE: IntArray) -> None:
        """load_LE (L, E): this rank's traffic since it records."""
        self._told()
        if self._planned_LE is not None and load_LE.any():
            self._drift.set(drift(load_LE, self._planned_LE))

    def _told(self) -> None:
        if self._plan is not None and self._path is not None and self._path.exists():
            self._age.set(time.time() - self._path.stat().st_mtime)


DRIFT = "How far this rank's recorded loads are from the plan's profile: the part of the traffic at other experts, 0 to 1"


def drift(load_LE: IntArray | FloatArray, planned_LE: IntArray | FloatArray) -> float:
    """Half the summed difference between two tables' shares of each layer's load, (L, E), the mean over layers, 0 to 1."""
    shares = [table / np.maximum(table.sum(axis=1, keepdims=True), 1) for table in (load_LE, planned_LE)]
    return float(np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2)


def _planned(plan: Plan, path: os.PathLike[str]) -> IntArray | None:
    """(L, E) int64: what the plan's profile holds; None where it is not beside the plan any more."""
    model = plan.models[0]
    if not model.profile_path:
        return None
    try:
        profile: Profile = load_profile(os.path.join(os.path.dirname(path), model.profile_path))
    except AuroraError:
        return None
    return np.asarray(profile.tokens_TLSE.sum(axis=(0, 2))) if profile.digest == model.profile_digest else None
