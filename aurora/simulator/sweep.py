"""When does ordering pay, when does colocating: one MoE layer of invented traffic, planned and simulated over a grid."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.planner.make_plan import make_plan
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, PlanOptions, Profile, SyntheticOptions

MOST_POINTS = 10_000
PAYS = 1.05  # a speed-up that is worth the trouble


@dataclass(frozen=True)
class Setting:
    """One point. bandwidth: bytes per second of the fastest port, the others in proportion; None as the cluster has it.
    skew: the Zipf exponent of the experts' popularity. tokens: of each rank. speed: every GPU's is multiplied by it."""

    bandwidth: float | None = None
    skew: float = 1.0
    tokens: float = 1024
    speed: float = 1.0


@dataclass(frozen=True)
class Axis:
    """values: what `key` of Setting takes, in turn."""

    key: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """Simulated seconds. order_s: one model alone, by the name of its order; together_s: two models of the same shape that
    share the GPUs; in_turn_s: the two one after the other, each alone."""

    setting: Setting
    order_s: Mapping[str, float]
    together_s: float
    in_turn_s: float

    @property
    def speedups(self) -> dict[str, float]:
        """By what: of the planned order over all transfers at once and over a random one, and of colocating."""
        planned_s = self.order_s["openshop"]
        over = {f"order over {name}": seconds / planned_s for name, seconds in self.order_s.items() if name != "openshop"}
        return {**over, "together over in turn": self.in_turn_s / self.together_s}

    @property
    def pays(self) -> str:
        """What gains more than PAYS: order (over everything it is compared with), colocating, both or neither."""
        *orders, together = self.speedups.values()
        return {(True, True): "both", (True, False): "order", (False, True): "colocating", (False, False): "neither"}[
            min(orders) > PAYS, together > PAYS
        ]

    def as_json(self) -> dict[str, Any]:
        own = {"order_s": dict(self.order_s), "together_s": self.together_s, "in_turn_s": self.in_turn_s}
        return {**asdict(self.setting), **own, "speedups": self.speedups, "pays": self.pays}


def read_axis(text: str) -> Axis:
    """KEY=a:b:n, n values evenly from a to b, or KEY=a:b:logn, in even ratios. Raises BadInput."""
    key, _, grid = text.partition("=")
    keys = [field.name for field in fields(Setting)]
    if key not in keys:
        raise BadInput(f"{text}: expected one of {', '.join(keys)} before =, found {key!r}")
    parts = grid.split(":")
    log = len(parts) == 3 and parts[2].startswith("log")
    try:
        first, last, count = float(parts[0]), float(parts[1]), int(parts[2].removeprefix("log"))
    except (ValueError, IndexError):
        raise BadInput(f"{text}: expected {key}=FIRST:LAST:COUNT or {key}=FIRST:LAST:logCOUNT") from None
    least = 0.0 if key == "skew" and not log else 1.0 if key == "tokens" else 1e-6
    if count < 1 or not (least <= first <= last < 1e24):
        raise BadInput(f"{text}: expected {least:g} <= FIRST <= LAST and a COUNT above zero")
    values = np.geomspace(first, last, count) if log else np.linspace(first, last, count)
    return Axis(key, tuple(float(f"{value:.6g}") for value in values))


def sweep(
    cluster: Cluster,
    config: Mapping[str, Any],
    axes: Sequence[Axis],
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Point]:
    """Every combination of the axes' values, the last axis fastest; one layer of what `config` (config.json) describes.

    Raises BadInput for no axis or more than two, one that comes twice, or too many points; InfeasiblePlan where two models do
    not fit.
    """
    keys = [axis.key for axis in axes]
    if not 1 <= len(axes) <= 2 or len(set(keys)) != len(keys):
        raise BadInput(f"sweep: expected one or two keys, each once, found {', '.join(keys) or 'none'}")
    grid = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]
    if len(grid) > MOST_POINTS:
        raise BadInput(f"sweep: expected at most {MOST_POINTS} points, found {len(grid)}")
    points = []
    for done, values in enumerate(grid):
        progress("points", done, len(grid))
        points.append(_point(cluster, config, Setting(**values), seed))
    progress("points", len(grid), len(grid))
    return points


def _point(cluster: Cluster, config: Mapping[str, Any], setting: Setting, seed: int) -> Point:
    machines = _machines(cluster, setting)
    one_layer = {**config, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    a, b = (
        synthetic_profile(
            f"zipf:{setting.skew}",
            one_layer,
            SyntheticOptions(len(cluster), round(setting.tokens), seed=seed + number),
        )
        for number in range(2)
    )
    order_s = {name: _seconds(machines, [a], name, seed) for name in ("openshop", "all-at-once", "random")}
    together_s = _seconds(machines, [a, b], "openshop", seed)
    return Point(setting, order_s, together_s, order_s["openshop"] + _seconds(machines, [b], "openshop", seed))


def _seconds(cluster: Cluster, profiles: Sequence[Profile], order: str, seed: int) -> float:
    return simulate_plan(make_plan(cluster, profiles, PlanOptions(order=order, seed=seed)), profiles).seconds


def _machines(cluster: Cluster, setting: Setting) -> Cluster:
    """The cluster with the setting's bandwidth and speed; a fabric's links change as the ports do."""
    fastest_Bps = max(max(gpu.out_Bps, gpu.in_Bps) for gpu in cluster.gpus)
    times = 1.0 if setting.bandwidth is None else setting.bandwidth / fastest_Bps
    gpus = tuple(
        replace(gpu, out_Bps=gpu.out_Bps * times, in_Bps=gpu.in_Bps * times, speed=gpu.speed * setting.speed)
        for gpu in cluster.gpus
    )
    fabric = cluster.fabric
    if fabric is not None:
        links = tuple(replace(link, Bps=link.Bps * times) for link in fabric.links)
        fabric = replace(fabric, links=links, nic_Bps=None if fabric.nic_Bps is None else fabric.nic_Bps * times)
    return replace(cluster, gpus=gpus, fabric=fabric)
