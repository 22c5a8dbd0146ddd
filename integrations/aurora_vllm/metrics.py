"""Prometheus metrics of all-to-alls: on vLLM's /metrics if vLLM collects from all processes, else on a separate port."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from aurora.algorithms.network.port_bounds import fluid_bound, nics_of
from aurora.algorithms.workload.load_statistics import LEVEL, variation, variation_by_chance
from aurora.types import Network, Plan
from aurora.types.arrays import IntArray
from aurora_vllm.served_metrics import RankMetrics
from aurora_vllm.served_plan import planned_profile
from aurora_vllm.settings import Settings

PHASES = ("dispatch", "combine")
DRAWS = 50  # samples that the level of chance is read from
REFRESH_S = 5.0  # seconds over which balancedness is averaged, at least; shorter than the usual scrape interval of 15 s


@dataclass
class _Phase:
    """Metrics of the dispatches or of the combines, and the totals that the gap is made from."""

    bytes: Any
    seconds: Any
    duration: Any
    bound: Any = None  # bound and gap: None without a plan
    gap: Any = None
    total_s: float = 0.0
    total_bound_s: float = 0.0


@dataclass
class _Layer:
    """Metrics of a MoE layer, and sums over the passes since its balancedness was last set."""

    tokens: Any
    balancedness: Any
    mean: float = 0.0  # tokens of a GPU on average
    most: int = 0  # tokens of the GPU with the most


class Metrics:
    """Prometheus counters, histograms and gauges of one rank. Bounds use the plan's cluster, and drift uses its profile.

    Metrics without a value are not exported. Bound, gap, drift and the plan's time need a plan; drift also needs a record, and
    balancedness needs traffic.

    If a rank was restarted, two processes export metrics with the same labels to one folder: their counters and histograms add
    up, and gauges show the latest value.

    Args:
        model_name: the name under which vLLM serves the model; a label of all metrics, as in vLLM.
        rank: this expert-parallel rank; exported as label `ep_rank`.
        decoder_layers: {MoE layer: its decoder layer}; exported as label `layer`.
        plan: the plan in use; None: vLLM's own placement, without bounds and drift.
        settings: the plugin's settings, with the path of the plan.
        registry: as in `RankMetrics`.
    """

    def __init__(
        self,
        model_name: str,
        rank: int,
        decoder_layers: Mapping[int, int],
        plan: Plan | None,
        settings: Settings,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._rank, self._plan, self._decoder_layers = rank, plan, decoder_layers
        self._metrics = RankMetrics("all-to-alls", model_name, rank, registry)
        self._lost_records = self._metrics.of("record_failures")
        self._of_phase: dict[str, _Phase] = {}
        names = ["exchange_bytes", "exchange_seconds", "exchange_duration_seconds"]
        names += [] if plan is None else ["exchange_bound_seconds", "exchange_gap"]
        for phase in PHASES:
            self._of_phase[phase] = _Phase(*(self._metrics.of(name, phase=phase) for name in names))
        self._of_layer: dict[int, _Layer] = {}
        self._refreshed_s = -np.inf
        self._planned_TLE = None
        if plan is not None and (path := settings.plan) is not None:
            if (profile := planned_profile(plan, path)) is not None:
                self._planned_TLE = np.asarray(profile.tokens_TLSE.sum(axis=2))
            if path.exists():
                self._metrics.of("plan_timestamp_seconds").set(path.stat().st_mtime)

    def change_ranks(self, rank: int) -> None:
        """Exports metrics as rank `rank` from now on, after a change of ranks.

        Bounds are no longer exported, because the plan is for other ranks.
        """
        self._rank, self._plan = rank, None

    def add_exchange(self, phase: str, seconds: float, bytes_GG: IntArray) -> None:
        """Adds one all-to-all to the metrics.

        Args:
            phase: "dispatch" or "combine".
            seconds: its duration on this rank, including waits for other ranks.
            bytes_GG: (G, G) bytes from each rank (row) to each rank (column); the diagonal is ignored.
        """
        between_GG = bytes_GG.copy()
        np.fill_diagonal(between_GG, 0)
        of = self._of_phase[phase]
        of.bytes.inc(int(between_GG[self._rank].sum()))
        of.seconds.inc(seconds)
        of.duration.observe(seconds)
        if self._plan is not None:
            bound_s = exchange_bound(between_GG, self._plan.cluster.network)
            of.bound.inc(bound_s)
            of.total_s, of.total_bound_s = of.total_s + seconds, of.total_bound_s + bound_s
            if of.total_bound_s > 0:
                of.gap.set(of.total_s / of.total_bound_s - 1)

    def add_tokens(self, layer: int, tokens_G: IntArray) -> None:
        """Adds the tokens of each rank in one layer of a forward pass to the metrics.

        Args:
            layer: the MoE layer's index.
            tokens_G: (G,) tokens that each rank's experts compute; a token counts once for each expert that it chose.
        """
        most = int(tokens_G.max())
        if most == 0:
            return
        if layer not in self._of_layer:
            names, decoder_layer = ("layer_tokens", "expert_balancedness"), str(self._decoder_layers[layer])
            self._of_layer[layer] = _Layer(*(self._metrics.of(name, layer=decoder_layer) for name in names))
        of = self._of_layer[layer]
        of.tokens.inc(int(tokens_G[self._rank]))
        of.mean, of.most = of.mean + float(tokens_G.mean()), of.most + most

    def refresh(self) -> None:
        """Updates the balancedness of all layers with traffic, at most every REFRESH_S seconds."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        for of in self._of_layer.values():
            if of.most:
                of.balancedness.set(of.mean / of.most)
                of.mean, of.most = 0.0, 0

    def add_lost_record(self) -> None:
        """Counts a record that could not be written."""
        self._lost_records.inc()

    def update_drift(self, tokens_TLE: IntArray) -> None:
        """Sets the drift gauges: distance of the traffic from the plan's profile beyond chance, chance level, and tokens.

        Args:
            tokens_TLE: (T, L, E) this rank's recorded tokens by window, MoE layer and expert.
        """
        load_LE = tokens_TLE.sum(axis=0)
        if self._planned_TLE is not None and load_LE.any():
            apart, chance = drift(tokens_TLE, self._planned_TLE)
            self._metrics.of("plan_drift").set(max(apart - chance, 0.0))
            self._metrics.of("plan_drift_chance").set(chance)
            self._metrics.of("plan_drift_tokens").set(load_LE.sum())


def exchange_bound(bytes_GG: IntArray, network: Network) -> float:
    """Returns a lower bound in seconds on an all-to-all: the busiest port or, in a network of servers, the busiest NIC.

    Args:
        bytes_GG: (G, G) bytes from each rank (row) to each other; for a hierarchical all-to-all, the sum of both hops.
        network: the plan's network.
    """
    if (nics := nics_of(network)) is None:
        return fluid_bound(bytes_GG, network)
    (across_GG,) = nics.across(bytes_GG[None])
    return max(fluid_bound(bytes_GG - across_GG, network), float(nics.seconds(bytes_GG).max()))


def drift(tokens_TLE: IntArray, planned_TLE: IntArray) -> tuple[float, float]:
    """Returns the distance between two samples of traffic, and the distance that chance alone explains, both from 0 to 1.

    The distance is the total variation between the experts' shares, averaged over layers. Tokens of one request choose similar
    experts, so windows vary more than for independent tokens; the samples' token counts are divided by this overdispersion.

    Args:
        tokens_TLE: (T, L, E) recorded tokens by window.
        planned_TLE: (T, L, E) tokens of the plan's profile by window.

    Returns:
        The distance, and the distance below which two samples of the same traffic stay with probability LEVEL.
    """
    load_LE, planned_LE = tokens_TLE.sum(axis=0), planned_TLE.sum(axis=0)
    independent_LE, other_LE = load_LE / _overdispersion(tokens_TLE), planned_LE / _overdispersion(planned_TLE)
    drawn_BL = variation_by_chance(independent_LE, other_LE, np.random.default_rng(0), DRAWS)
    return float(variation(load_LE, planned_LE).mean()), float(np.quantile(drawn_BL.mean(axis=1), LEVEL))


def _overdispersion(tokens_TLE: IntArray) -> float:
    """Returns how much more windows differ than those of independent tokens: Pearson's statistic over its mean, or 1."""
    sum_TL1, load_LE = tokens_TLE.sum(axis=2, keepdims=True), tokens_TLE.sum(axis=0)
    expected_TLE = sum_TL1 * (load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1))
    seen_TLE = expected_TLE > 0
    statistic = float(((tokens_TLE - expected_TLE)[seen_TLE] ** 2 / expected_TLE[seen_TLE]).sum())
    freedom = int((((sum_TL1[..., 0] > 0).sum(axis=0) - 1) * ((load_LE > 0).sum(axis=1) - 1)).clip(min=0).sum())
    return max(statistic / freedom, 1.0) if freedom else 1.0
