"""BALANCERS: engines' load-balancing methods by name; and the part of the ceiling (`ceiling.py`) that each reaches.

A method is a function that takes a BalancingCase and returns Served. The traffic is divided into blocks, and a method knows
only a part of it:

- Methods that plan once serve each block by a placement planned from the other blocks.
- Methods that plan while serving know past windows. They warm up in the first block, which is not evaluated for any method.
- Methods that balance each batch know its token counts, and nothing else of the block.

A new method takes one such function and one line in BALANCERS.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from aurora.advisor.ceiling import (
    TOKENS,
    RankCurve,
    ServedTraffic,
    SlotMap,
    checked_slots,
    linear_map,
    perfect_seconds,
    planned_map,
    ratio_interval,
    slot_seconds,
)
from aurora.algorithms.control.controller import moves_L
from aurora.algorithms.layers_in_threads import Progress, map_layers, no_progress
from aurora.algorithms.replicas.per_batch import split_least_largest
from aurora.errors import BadInput, check_one_of
from aurora.io.files import shipped
from aurora.types import Profile
from aurora.types.arrays import FloatArray, IntArray

RECORDED_RANGE = "recorded_balance.json"  # shipped


class Served(NamedTuple):
    """Result of serving a BalancingCase by a balancing method.

    Attributes:
        seconds_D: (D,) seconds of all layers of each step.
        fetched: number of experts whose weights GPUs fetch per window, on average.
        slots: mean number of slots per GPU in a layer.
    """

    seconds_D: FloatArray
    fetched: float
    slots: float


@dataclass(frozen=True, eq=False)
class BalancingCase:
    """Input of a balancing method: traffic, GPUs and limits.

    Attributes:
        traffic: windows, steps and blocks.
        gpus: number of GPUs, which are equal.
        slots: number of experts that fit on each GPU in a layer.
        curve: seconds of a rank's experts.
        expert_bytes: bytes of an expert's weights in one layer.
        every: interval in windows at which EPLB plans again, from the loads of the last `every` windows.
        lag: number of windows from planning until the new map is in force.
        seed: random seed of strategies that draw.
        maps: cache of planned maps, by method and slots.
    """

    traffic: ServedTraffic
    gpus: int
    slots: int
    curve: RankCurve
    expert_bytes: int
    every: int = 1
    lag: int = 0
    seed: int = 0
    maps: dict[tuple[str, int | None], list[SlotMap]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.traffic.load_TLE.shape[1])

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.traffic.load_TLE.shape[2])

    @property
    def fewest(self) -> int:
        """Minimum number of slots per GPU that hold every expert once."""
        return -(-self.experts // self.gpus)

    def held_out(self, method: str, slots: int | None) -> list[SlotMap]:
        """Returns one SlotMap per block, planned from the other blocks by a method of REPLICAS; slots as in `planned_map`."""
        if (method, slots) not in self.maps:
            self.maps[method, slots] = self.traffic.held_out(lambda load: self.plan(load, method, slots))
        return self.maps[method, slots]

    def plan(self, load_LE: FloatArray, method: str, slots: int | None) -> SlotMap:
        """Returns the SlotMap planned for loads load_LE (L, E), cached in `maps`; arguments as in `planned_map`."""
        return planned_map(load_LE, self.gpus, slots, method, self.seed)

    def once(self, method: str, slots: int | None) -> Served:
        """Returns the result of serving each block by a fixed map, planned from the other blocks. `slots` None: no replicas."""
        maps = self.held_out(method, slots)
        return Served(self.traffic.seconds_D(maps, self.traffic.block_T, self.curve), 0.0, slots or self.fewest)

    def by_batch(self, priced: Callable[[FloatArray, IntArray], FloatArray]) -> Served:
        """Returns the result of dividing each batch's tokens over EPLB's replicas.

        Args:
            priced: a function that returns the tokens of each slot, (D, G, P), from a layer's counts in each step, (D, E), and
                the expert in each slot, (G, P).
        """
        seconds_DL = np.zeros(self.traffic.step_DLE.shape[:2])
        for block, experts in enumerate(self.held_out("eplb", self.slots)):
            at_D = np.flatnonzero(self.traffic.block_D == block)

            def layer_seconds(layer: int, at_D: IntArray = at_D, experts: SlotMap = experts) -> None:
                tokens_DGP = priced(self.traffic.step_DLE[at_D, layer], experts.held_LGP[layer])
                seconds_DL[at_D, layer] = slot_seconds(tokens_DGP[:, None], self.curve)[:, 0]

            map_layers(layer_seconds, self.layers, "balancing batches")
        return Served(seconds_DL.sum(axis=1), 0.0, self.slots)


def _linear(case: BalancingCase) -> Served:
    """Experts in sequence, as engines do by default."""
    experts = linear_map(case.layers, case.experts, case.gpus)
    return Served(case.traffic.seconds_D([experts], np.zeros_like(case.traffic.block_T), case.curve), 0.0, case.fewest)


def _eplb_every(case: BalancingCase) -> Served:
    """EPLB while serving: after every few windows a map for their loads, in force `lag` windows later; linear before."""
    loads_TLE = case.traffic.load_TLE

    @cache
    def planned(end: int) -> SlotMap:
        if not end:
            return linear_map(case.layers, case.experts, case.gpus)
        return case.plan(loads_TLE[end - case.every : end].sum(axis=0), "eplb", case.slots)

    ends_T = np.maximum((np.arange(len(loads_TLE)) - case.lag) // case.every, 0) * case.every
    return _followed(case, [planned(end) for end in ends_T.tolist()])


def _followed(case: BalancingCase, maps_T: Sequence[SlotMap]) -> Served:
    """Served by a map for each window; fetched is the mean over the windows that are judged."""
    seconds_D = case.traffic.seconds_D(maps_T, np.arange(len(maps_T)), case.curve)
    judged_T = np.flatnonzero(case.traffic.block_T > 0)
    tables = [experts.held_LGP for experts in maps_T]
    width = max(held_LGP.shape[2] for held_LGP in tables)
    wide = [np.pad(held_LGP, ((0, 0), (0, 0), (0, width - held_LGP.shape[2])), constant_values=-1) for held_LGP in tables]
    fetched = sum(int(moves_L(wide[t - 1], wide[t]).sum()) for t in judged_T.tolist() if maps_T[t] is not maps_T[t - 1])
    return Served(seconds_D, fetched / max(len(judged_T), 1), case.slots)


def _exact(case: BalancingCase) -> Served:
    """Perfect balance of every batch, as methods permit that fetch any expert at any time (MoonEP): the ceiling itself."""
    return Served(perfect_seconds(case.traffic.step_DLE, case.gpus, case.curve).sum(axis=1), 0.0, case.slots)


Balancer = Callable[[BalancingCase], Served]
BALANCERS: dict[str, Balancer] = {
    "linear": _linear,
    "static": lambda case: case.once("equal-split", case.slots if case.slots > case.fewest else None),
    "eplb": lambda case: case.once("eplb", case.slots),
    "eplb-every": _eplb_every,
    "lplb": lambda case: case.by_batch(split_least_largest),
    "exact": _exact,
}


@dataclass(frozen=True)
class MethodReach:
    """Result of a balancing method on held-out traffic, and the part of the ceiling that it reaches.

    Attributes:
        name: a name in BALANCERS.
        ratio: seconds of the slowest GPUs / seconds with perfect balance, over all layers and evaluated steps; 1 is perfect.
        low, high: 95 % interval of `ratio`.
        share: time saved against the linear placement / time that perfect balance would save; 1 is perfect.
        slots: mean number of slots per GPU in a layer.
        memory_bytes: bytes per GPU, over all layers, of slots beyond those that the experts need.
        moved_bytes: bytes of expert weights that all GPUs together fetch in a recorded window.
        worst: `ratio` in the worst evaluated window.
    """

    name: str
    ratio: float
    low: float
    high: float
    share: float
    slots: float
    memory_bytes: float
    moved_bytes: float
    worst: float


def reach(
    profile: Profile,
    gpus: int,
    slots_per_gpu: int | None = None,
    methods: Sequence[str] = tuple(BALANCERS),
    step_tokens: float | None = None,
    curve: RankCurve = TOKENS,
    seed: int = 0,
    *,
    every: int = 1,
    lag: int = 0,
    progress: Progress = no_progress,
) -> tuple[MethodReach, ...]:
    """Computes the part of the ceiling that each balancing method reaches on held-out windows.

    Args:
        profile: the traffic; its sources are summed, so that `gpus` may be any number.
        gpus: number of GPUs, which are equal.
        slots_per_gpu: slots of methods with replicas; None: as few as the experts need.
        methods: names in BALANCERS.
        step_tokens: tokens of a step on all GPUs; None: as many as in a window of the profile.
        curve: seconds of a rank's experts by its tokens.
        seed: random seed for cutting windows into steps, and of strategies that draw.
        every: interval in windows at which EPLB plans again while serving.
        lag: number of windows from planning until a map planned while serving is in force.
        progress: called with (name of the work, amount done, amount in all).

    Returns:
        A MethodReach for each method, in the sequence of `methods`.

    Raises:
        BadInput: if a method is unknown or a number is out of range.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> linear, static = reach(traffic, gpus=4, methods=("linear", "static"))
        >>> linear.share, static.share > 0.5
        (0.0, True)
    """
    for name in methods:
        check_one_of("methods", name, BALANCERS)
    if every < 1 or lag < 0:
        raise BadInput(f"expected `every` of one or more and `lag` of zero or more, found {every} and {lag}")
    slots = checked_slots(profile, gpus, slots_per_gpu)
    traffic = ServedTraffic.of(profile, step_tokens, np.random.default_rng(seed))
    windows = len(traffic.load_TLE)
    interval = max(1, round(every * windows / max(traffic.recorded, windows)))  # windows were summed
    case = BalancingCase(traffic, gpus, slots, curve, profile.expert_bytes, interval, min(lag, windows), seed)
    perfect_D, linear_D = _exact(case).seconds_D, _linear(case).seconds_D
    methods_reached = []
    for number, name in enumerate(methods):
        progress("comparing methods", number, len(methods))
        methods_reached.append(_reached(case, name, BALANCERS[name](case), linear_D, perfect_D))
    progress("comparing methods", len(methods), len(methods))
    return tuple(methods_reached)


def _reached(case: BalancingCase, name: str, served: Served, linear_D: FloatArray, perfect_D: FloatArray) -> MethodReach:
    """The figures of one method by the judged blocks, all but the first."""
    traffic = case.traffic
    served_B, linear_B, perfect_B = (traffic.by_block(each_D)[1:] for each_D in (served.seconds_D, linear_D, perfect_D))
    ratio = ratio_interval(served_B, perfect_B)
    saves = bool((linear_B > perfect_B).any())
    share = float((linear_B - served_B).sum() / (linear_B - perfect_B).sum()) if saves else 1.0
    windows = [np.bincount(traffic.window_D, each_D, len(traffic.block_T)) for each_D in (served.seconds_D, perfect_D)]
    judged_T = (traffic.block_T > 0) & (windows[1] > 0)
    worst = float((windows[0][judged_T] / windows[1][judged_T]).max())
    more = max(served.slots - case.fewest, 0.0)
    per_window = case.expert_bytes * len(traffic.load_TLE) / max(traffic.recorded, len(traffic.load_TLE))
    return MethodReach(
        name, ratio.value, ratio.low, ratio.high, share, served.slots,
        more * case.layers * case.expert_bytes, served.fetched * per_window, worst,
    )  # fmt: skip


@dataclass(frozen=True)
class RecordedRange:
    """Range of imbalance and of balancing methods' results over recorded models.

    For each model, only recordings with the nearest number of GPUs and of tokens per step are used.

    Attributes:
        models: names of the recorded models.
        gpus: the numbers of GPUs of the used recordings.
        parts: (smallest, largest) value over the models of each part of ImbalanceSplit: "whole", "stable", "drifting", ...
        ratios: (smallest, largest) value over the models of each method's `ratio`, as in MethodReach.
    """

    models: tuple[str, ...]
    gpus: tuple[int, ...]
    parts: Mapping[str, tuple[float, float]]
    ratios: Mapping[str, tuple[float, float]]


def recorded_range(gpus: int, step_tokens: float | None = None) -> RecordedRange:
    """Returns the range of imbalance and of methods' ratios over recorded models, for use when a model's traffic is unknown.

    The results on the recordings are shipped with aurora; `python bench/ceiling.py --range` writes them.

    Args:
        gpus: number of GPUs that share the experts.
        step_tokens: tokens of a step on all GPUs; None: recordings with any number are used.
    """
    rows: list[dict[str, Any]] = json.loads(shipped(RECORDED_RANGE).read_text())["recordings"]
    chosen = []
    for model in {row["model"]: None for row in rows}:
        mine = [row for row in rows if row["model"] == model]
        chosen += _nearest(_nearest(mine, "gpus", gpus), "step_tokens", step_tokens)

    def spans(kind: str) -> dict[str, tuple[float, float]]:
        names = {name: None for row in chosen for name in row[kind]}
        values = {name: [row[kind][name] for row in chosen if name in row[kind]] for name in names}
        return {name: (min(recordings), max(recordings)) for name, recordings in values.items()}

    models, of_gpus = ({row[key]: None for row in chosen} for key in ("model", "gpus"))
    return RecordedRange(tuple(models), tuple(of_gpus), spans("parts"), spans("ratios"))


def _nearest(rows: list[dict[str, Any]], key: str, target: float | None) -> list[dict[str, Any]]:
    """The rows whose number is nearest by its ratio to `target`; all, if that is None."""
    if target is None:
        return rows
    least = min(abs(np.log(row[key] / target)) for row in rows)
    return [row for row in rows if abs(np.log(row[key] / target)) <= least + 1e-9]
