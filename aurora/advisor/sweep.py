"""Sweeps: simulates one MoE layer with synthetic traffic, or ways of sharing GPUs, over a grid of settings."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

import numpy as np

from aurora.advisor.sharing import WAYS, WaysCompared, compare_ways
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.model_structure import LAYER_KINDS, LAYER_RULES, flat_config
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, PlanOptions, Profile, SyntheticOptions
from aurora.types.options import SIMULATED_STEPS
from aurora.types.read_numbers import finite_number, whole_number

MOST_POINTS = 10_000  # of a grid
LARGEST = {"bandwidth": 1e24, "skew": 99.0, "tokens": 1e6, "speed": 1e6}  # value of each key
PAYS = 1.05  # the smallest speed-up that counts as a gain
Axis = tuple[str, tuple[float, ...]]  # a field of Setting, and the values that it takes, rising
BATCHES = tuple(1 << power for power in range(10))  # 1 to 512
BANDWIDTHS = (0.25, 1.0, 4.0)
SKEWS = (0.0, 1.0)
MOST_BATCH, MOST_FACTOR, MOST_SKEW = 1 << 20, 1e6, 99.0


@dataclass(frozen=True)
class Setting:
    """Values of the swept settings at one point of the grid."""

    bandwidth: float | None = None  # bytes per second of the fastest port, the others in proportion; None: as in the cluster
    skew: float = 1.0  # Zipf exponent of the experts' popularity; 0 is uniform
    tokens: float = 1024  # tokens of each rank
    speed: float = 1.0  # factor on every GPU's speed


@dataclass(frozen=True)
class Point:
    """Result of `sweep` at one point of the grid: the settings and the simulated times."""

    setting: Setting  # the point of the grid
    order_s: Mapping[str, float]  # seconds of one model alone, by the name of its order
    colocated_s: float  # seconds of two models of the same shape that share the GPUs
    sequential_s: float  # seconds of these two models one after the other, each with the GPUs for itself

    @property
    def speedups(self) -> dict[str, float]:
        """Speed-ups by name: of the planned order over each other order, and of colocated over sequential models."""
        planned_s = self.order_s["openshop"]
        over = {f"order over {name}": seconds / planned_s for name, seconds in self.order_s.items() if name != "openshop"}
        return {**over, "colocated over sequential": self.sequential_s / self.colocated_s}

    @property
    def pays(self) -> str:
        """Returns the speed-ups that exceed PAYS: "order" (over every other order), "colocating", "both" or "neither"."""
        *orders, colocated = self.speedups.values()
        return {(True, True): "both", (True, False): "order", (False, True): "colocating", (False, False): "neither"}[
            min(orders) > PAYS, colocated > PAYS
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the setting, times and speed-ups as one flat JSON object."""
        times = {"order_s": dict(self.order_s), "colocated_s": self.colocated_s, "sequential_s": self.sequential_s}
        return {**asdict(self.setting), **times, "speedups": self.speedups, "pays": self.pays}


def read_axis(text: str) -> Axis:
    """Parses an axis of the grid: the name of a setting and its values.

    Args:
        text: "KEY=FIRST:LAST:COUNT" for evenly spaced values, or "KEY=FIRST:LAST:logCOUNT" for even ratios.

    Raises:
        BadInput: if the key is unknown, the text is of another form, or the range is empty.
    """
    key, _, grid = text.partition("=")
    keys = [field.name for field in fields(Setting)]
    if key not in keys:
        raise BadInput(f"{text}: expected one of {', '.join(keys)} before =, found {key!r}")
    parts = grid.split(":")
    log = len(parts) == 3 and parts[2].startswith("log")
    try:
        first, last, count = finite_number(parts[0]), finite_number(parts[1]), whole_number(parts[2].removeprefix("log"))
    except (BadInput, IndexError):
        raise BadInput(f"{text}: expected {key}=FIRST:LAST:COUNT or {key}=FIRST:LAST:logCOUNT") from None
    least = 0.0 if key == "skew" and not log else 1.0 if key == "tokens" else 1e-6
    most = LARGEST[key]
    if not 1 <= count <= MOST_POINTS or not least <= first <= last <= most:
        raise BadInput(f"{text}: expected {least:g} <= FIRST <= LAST <= {most:g} and a COUNT from 1 to {MOST_POINTS}")
    values = np.geomspace(first, last, count) if log else np.linspace(first, last, count)
    return key, tuple(float(f"{value:.6g}") for value in values)


def sweep(
    cluster: Cluster,
    config: Mapping[str, Any],
    axes: Sequence[Axis],
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[Point]:
    """Plans and simulates one MoE layer for every combination of the axes' values, the last axis fastest.

    Args:
        cluster: the GPUs and network, whose rates and speeds the settings replace.
        config: a transformers config.json, which gives the layer's shape.
        axes: one or two axes of the grid, as `read_axis` returns them.
        seed: random seed of the synthetic traffic.
        progress: called with (name of the work, points done, points in all).

    Returns:
        A Point for each combination.

    Raises:
        BadInput: if there are no axes or more than two, two with the same key, or more than MOST_POINTS points.
        InfeasiblePlan: if two models do not fit into the GPUs' memory.
    """
    keys = [key for key, _ in axes]
    if not 1 <= len(axes) <= 2 or len(set(keys)) != len(keys):
        raise BadInput(f"sweep: expected one or two keys, each once, found {', '.join(keys) or 'none'}")
    grid = _combinations("sweep", "points", [values for _, values in axes], progress)
    return [_point(cluster, config, Setting(**dict(zip(keys, values, strict=True))), seed) for values in grid]


def _combinations(name: str, what: str, axes: Sequence[Sequence[float]], progress: Progress) -> Iterator[tuple[float, ...]]:
    """Yields every combination of the axes' values, the last axis fastest, and tells how many are done."""
    if (many := prod(map(len, axes))) > MOST_POINTS:
        raise BadInput(f"{name}: expected at most {MOST_POINTS} {what}, found {many}")
    for number, values in enumerate(itertools.product(*axes)):
        progress(what, number, many)
        yield values
    progress(what, many, many)


def _point(cluster: Cluster, config: Mapping[str, Any], setting: Setting, seed: int) -> Point:
    """Simulates one setting."""
    machines = _machines(cluster, setting)
    one_layer = one_moe_layer(config)
    a, b = (
        draw_profile(
            f"zipf:{setting.skew}",
            one_layer,
            SyntheticOptions(len(cluster), round(setting.tokens), seed=seed + number),
        )
        for number in range(2)
    )
    order_s = {name: _seconds(machines, [a], name, seed) for name in ("openshop", "all-at-once", "random")}
    colocated_s = _seconds(machines, [a, b], "openshop", seed)
    return Point(setting, order_s, colocated_s, order_s["openshop"] + _seconds(machines, [b], "openshop", seed))


def _seconds(cluster: Cluster, profiles: Sequence[Profile], order: str, seed: int) -> float:
    """Simulated seconds of the models under a plan with this order."""
    return simulate_plan(make_plan(cluster, profiles, PlanOptions(order=order, seed=seed)), profiles).seconds


def _machines(cluster: Cluster, setting: Setting) -> Cluster:
    """The cluster with the setting's bandwidth and speed."""
    fastest_Bps = max(max(gpu.out_Bps, gpu.in_Bps) for gpu in cluster.gpus)
    return cluster.scaled(1.0 if setting.bandwidth is None else setting.bandwidth / fastest_Bps, setting.speed)


def one_moe_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config.json's content with a single decoder layer, an MoE layer."""
    rules = (*LAYER_RULES, *LAYER_KINDS, "model_type", "layer_types")
    return {key: value for key, value in flat_config(config).items() if key not in rules} | {"num_hidden_layers": 1}


@dataclass(frozen=True)
class GridCell:
    """One point of the grid of `compare_over_grid`: its settings, and the comparison of ways of sharing GPUs.

    Attributes:
        bandwidth: factor on the bytes per second of the cluster's ports.
        skew: exponent on the experts' shares: 1 as in the profiles, 0 all equal.
        compared: the comparison of ways.
    """

    bandwidth: float
    skew: float
    compared: WaysCompared

    @property
    def batch(self) -> int:
        """Tokens of each rank in a step of each model."""
        return self.compared.batch


def compare_over_grid(
    cluster: Cluster,
    profiles: Sequence[Profile],
    batches: Sequence[int] = BATCHES,
    bandwidths: Sequence[float] = BANDWIDTHS,
    skews: Sequence[float] = SKEWS,
    steps: int = SIMULATED_STEPS,
    seed: int = 0,
    ways: Sequence[str] = WAYS,
    progress: Progress = no_progress,
) -> list[GridCell]:
    """Simulates each way of sharing GPUs at each combination of skew, bandwidth and batch; in the result, batch varies fastest.

    Args:
        cluster, profiles, steps, seed, ways: as in `compare_ways`.
        batches: tokens of each rank in a step.
        bandwidths: factors on the bytes per second of the cluster's ports.
        skews: exponents on the experts' shares.
        progress: called with (what is being done, cells done, cells in all).

    Raises:
        BadInput: if a value is out of range or given twice, there are more than MOST_POINTS cells, or as in `compare_ways`.
        InfeasiblePlan: as in `compare_ways`.
    """
    limits = (("batch", batches, 1, MOST_BATCH), ("bandwidth", bandwidths, 1 / MOST_FACTOR, MOST_FACTOR))
    for name, values, least, most in (*limits, ("skew", skews, 0, MOST_SKEW)):
        wrong = [value for value in values if not least <= value <= most]
        if wrong or not values or len(set(values)) != len(values):
            listed = ", ".join(f"{value:g}" for value in wrong or values) or "none"
            raise BadInput(f"`{name}`: expected different values from {least:g} to {most:.12g}, found {listed}")
    return [
        GridCell(bandwidth, skew, compare_ways(cluster.scaled(bandwidth), profiles, int(batch), skew, steps, seed, ways))
        for skew, bandwidth, batch in _combinations("`batch`", "cells", (skews, bandwidths, batches), progress)
    ]
