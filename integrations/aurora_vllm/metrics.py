"""Prometheus metrics of the all-to-all: on vLLM's /metrics where it collects from all processes, else on a port of our own."""

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

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM when it runs several API servers, or by the user
PHASES = ("dispatch", "combine")
RANK = ("ep_rank",)


class Metrics:
    """Counters and gauges of one rank. Bounds come from the plan's cluster and drift from its profile.

    Args:
        rank: this expert-parallel rank, the label `ep_rank`.
        plan: the plan that is served; None: vLLM's own placement, without bounds and drift.
        settings: give the plan's file and the metrics' port.
    """

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
        self._planned_LE = None if plan is None or self._path is None else _planned_load(plan, self._path)
        self._update_age()
        if MULTIPROCESS not in os.environ and settings.metrics_port is not None:
            start_http_server(settings.metrics_port + rank)

    def add_exchange(self, phase: str, seconds: float, bytes_GG: IntArray) -> None:
        """Adds one all-to-all.

        Args:
            phase: "dispatch" or "combine".
            seconds: how long it took on this rank, waiting for others included.
            bytes_GG: (G, G) bytes from each rank (row) to each rank; the diagonal is not sent.
        """
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

    def update_drift(self, load_LE: IntArray) -> None:
        """Updates the gauges of the plan's age and drift.

        Args:
            load_LE: (L, E) this rank's tokens by MoE layer and expert, since its record began.
        """
        self._update_age()
        if self._planned_LE is not None and load_LE.any():
            self._drift.set(drift(load_LE, self._planned_LE))

    def _update_age(self) -> None:
        if self._plan is not None and self._path is not None and self._path.exists():
            self._age.set(time.time() - self._path.stat().st_mtime)


DRIFT = "How far this rank's recorded loads are from the plan's profile: the part of the traffic at other experts, 0 to 1"


def drift(load_LE: IntArray | FloatArray, planned_LE: IntArray | FloatArray) -> float:
    """Returns the distance of two load tables, from 0 to 1: the total variation of a layer's shares, averaged over layers.

    Args:
        load_LE: (L, E) recorded tokens.
        planned_LE: (L, E) tokens of the plan's profile.
    """
    shares = [table / np.maximum(table.sum(axis=1, keepdims=True), 1) for table in (load_LE, planned_LE)]
    return float(np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2)


def _planned_load(plan: Plan, path: os.PathLike[str]) -> IntArray | None:
    """(L, E) int64: loads of the plan's profile; None if its file is gone or is another one."""
    model = plan.models[0]
    if not model.profile_path:
        return None
    try:
        profile: Profile = load_profile(os.path.join(os.path.dirname(path), model.profile_path))
    except AuroraError:
        return None
    return np.asarray(profile.tokens_TLSE.sum(axis=(0, 2))) if profile.digest == model.profile_digest else None
