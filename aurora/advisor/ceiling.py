"""Ceiling of load balancing: the time that perfect balance would save, and its stable, drifting and per-step parts.

A layer's step ends when its slowest GPU has ended. Imbalance = seconds of the slowest GPUs / seconds with perfect balance - 1,
summed over all layers and steps. A map gives the GPU of each expert. With three maps, A linear (experts in index order), B
planned for the mean loads of other traffic, and C planned for the loads shortly before and after a step, the parts are:

    stable    imbalance of A - imbalance of B: a static map removes it
    drifting  imbalance of B - imbalance of C: maps that follow slow changes remove it
    per step  imbalance of C: only methods that know the counts of a batch remove it

The three sum to the whole by construction. No map knows the steps that it is evaluated on, so that luck does not count as
balance. The per-step part is mostly chance: n tokens of a GPU vary by about sqrt(n), so it falls with the square root of a
step's tokens. It also contains the imbalance that remains with known loads for lack of slots (`by_slots`).

Windows of a profile are not steps. Steps are cut from them in sequence: parts of a window are drawn without replacement, so
that every token is used at most once. This assumes that the tokens of a window are exchangeable. If steps are shorter than
windows, real steps are less balanced, because the tokens of a prompt follow each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from scipy.special import stdtrit

from aurora.algorithms.gpu_slots import gpu_loads
from aurora.algorithms.replicas.registry import slot_tables
from aurora.algorithms.workload.load_statistics import LEVEL, Interval
from aurora.errors import BadInput
from aurora.types import Gpu, GpuSlots, Profile
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY
from aurora.types.profile import OVERHEAD

BLOCKS = 5  # parts of the traffic in sequence, each judged by maps of the others
MOST_GROUPS = 40  # windows that maps are planned from; more are summed, neighbours together
FEWEST_WINDOWS = 8  # fewer are cut into as many, which shows no drift
MOST_STEPS = 240  # that judge
MOST_DRAWN = 10**9  # tokens that are drawn without replacement; of more, with
NEAR = (1.0, 3.0, 10.0)  # windows within which loads count for the map that knows what is near, in the mean


@dataclass(frozen=True)
class RankCurve:
    """Seconds of a rank's experts in one layer: overhead_s + active_s x active experts + token_s x their tokens.

    Args:
        overhead_s: seconds of a grouped kernel without active experts.
        active_s: seconds per active expert (an expert that has tokens).
        token_s: seconds of each (token, expert) pair.
    """

    overhead_s: float = 0.0
    active_s: float = 0.0
    token_s: float = 1.0

    def __post_init__(self) -> None:
        if min(self.overhead_s, self.active_s, self.token_s) < 0 or self.active_s + self.token_s <= 0:
            raise BadInput(f"rank curve: expected seconds of zero or more, and some of experts or tokens, found {self}")

    @classmethod
    def of(cls, profile: Profile, gpu: Gpu, step_tokens: float, experts: float) -> Self:
        """Makes a RankCurve from a profile's curves: an expert's seconds become a straight line through two points.

        The points are one (token, expert) pair, and the mean number of pairs of an expert in a step.

        Args:
            profile: the profile with the compute curves.
            gpu: the GPU to compute on.
            step_tokens: tokens of a step.
            experts: number of experts of the layer, over which the step's pairs are divided.
        """
        pairs = step_tokens * profile.top_k
        few, mean = 1.0, max(2.0, pairs / experts)
        few_s, mean_s = (float(profile.seconds("expert", gpu, tokens)) for tokens in (few, mean))
        token_s = max(mean_s - few_s, 0.0) / (mean - few)
        return cls(float(profile.seconds(OVERHEAD, gpu, pairs)), max(few_s - token_s * few, 0.0), token_s)

    def __call__(self, tokens_X: FloatArray, active_X: FloatArray) -> FloatArray:
        """Returns the seconds of numbers of tokens and of active experts, in their shape."""
        return np.asarray(self.overhead_s + self.active_s * active_X + self.token_s * tokens_X)


TOKENS = RankCurve()  # seconds in units of a token


class SlotMap(NamedTuple):
    """Placement of experts in slots: the expert in each slot, and the part of its load there, both (L, G, P)."""

    held_LGP: IntArray
    part_LGP: FloatArray

    @classmethod
    def of_gpus(cls, gpu_E: IntArray, gpus: int, layers: int) -> Self:
        """Returns the map without replicas in which expert e is on GPU gpu_E[e] in every layer."""
        held_GP = np.full((gpus, int(np.bincount(gpu_E).max())), EMPTY)
        for gpu in range(gpus):
            expert_X = np.flatnonzero(gpu_E == gpu)
            held_GP[gpu, : len(expert_X)] = expert_X
        held_LGP = np.repeat(held_GP[None], layers, axis=0)
        return cls(held_LGP, (held_LGP != EMPTY).astype(np.float64))


def linear_map(layers: int, experts: int, gpus: int) -> SlotMap:
    """Returns the engines' default map: experts in sequence, with one more on the first GPUs if they do not divide evenly."""
    return SlotMap.of_gpus(np.repeat(np.arange(gpus), experts // gpus + (np.arange(gpus) < experts % gpus)), gpus, layers)


def planned_map(load_LE: FloatArray, gpus: int, slots: int | None, method: str = "equal-split", seed: int = 0) -> SlotMap:
    """Plans a SlotMap for given loads by a method of REPLICAS.

    Args:
        load_LE: (L, E) the loads to plan for.
        gpus: number of GPUs, which are equal.
        slots: slots of each GPU; None: as few as the experts need, without replicas.
        method, seed: as in `aurora.place`.

    Raises:
        InfeasiblePlan: if the slots are too few.
    """
    once_E = np.ones(load_LE.shape[1], dtype=np.int64) if slots is None else None
    tables = slot_tables(load_LE, GpuSlots.equal(gpus, slots or -(-load_LE.shape[1] // gpus)), method, once_E, seed)
    held_L, part_L = zip(*tables, strict=True)
    return SlotMap(np.stack(held_L), np.stack(part_L))


def slot_seconds(tokens_DLGP: FloatArray, curve: RankCurve) -> FloatArray:
    """Returns (D, L), the seconds of the slowest GPU in each step and layer.

    Args:
        tokens_DLGP: (D, L, G, P) tokens of each slot; a slot with x < 1 tokens on average counts as x active experts.
        curve: seconds of a rank's experts.
    """
    return np.asarray(curve(tokens_DLGP.sum(axis=3), np.minimum(tokens_DLGP, 1.0).sum(axis=3)).max(axis=2))


def map_seconds(load_DLE: FloatArray, experts: SlotMap, curve: RankCurve) -> FloatArray:
    """Returns (D, L), the seconds of the slowest GPU in each step and layer under a map.

    Args:
        load_DLE: (D, L, E) tokens of each expert in each step.
        experts: the map.
        curve: seconds of a rank's experts.
    """
    cost_G = np.ones(experts.held_LGP.shape[1])
    if not curve.active_s:
        tokens_DLG = gpu_loads(load_DLE, experts.held_LGP, cost_G, experts.part_LGP)
        return np.asarray(curve(tokens_DLG, np.zeros(1)).max(axis=2))
    layers, expert_LGP = np.arange(load_DLE.shape[1])[:, None, None], np.maximum(experts.held_LGP, 0)
    return slot_seconds(load_DLE[:, layers, expert_LGP] * experts.part_LGP, curve)


def perfect_seconds(load_DLE: FloatArray, gpus: int, curve: RankCurve) -> FloatArray:
    """Returns (D, L), the seconds of perfect balance: all GPUs have equally many tokens and active experts.

    No map is faster. load_DLE (D, L, E) are the tokens of each expert in each step.
    """
    return curve(load_DLE.sum(axis=2) / gpus, np.minimum(load_DLE, 1.0).sum(axis=2) / gpus)


class ServingSteps(NamedTuple):
    """D steps cut from windows.

    Attributes:
        load_DLE: (D, L, E) int64, tokens of each expert in each step.
        window_D: (D,) int64, the window in which the middle of each step lies.
    """

    load_DLE: IntArray
    window_D: IntArray


def serving_steps(load_TLE: IntArray, step_pairs: float, most: int, rng: np.random.Generator) -> ServingSteps:
    """Cuts windows in sequence into steps with equally many (token, expert) pairs.

    A step consists of whole windows and of parts of windows, whose pairs are drawn without replacement.

    Args:
        load_TLE: (T, L, E) int64, pairs of each window.
        step_pairs: pairs of a step per layer, averaged over layers; need not be whole.
        most: maximum number of steps; of more, `most` evenly spaced ones are cut.
        rng: draws the parts of windows.

    Raises:
        BadInput: if the windows hold less than one step.
    """
    load_TLE = load_TLE[load_TLE.any(axis=(1, 2))]
    total_TL = load_TLE.sum(axis=2)
    upto_T = np.concatenate([[0.0], total_TL.mean(axis=1).cumsum()])
    steps = int(upto_T[-1] / step_pairs * (1 + 1e-12)) if step_pairs > 0 else 0
    if not steps:
        raise BadInput(f"steps: expected at most the {upto_T[-1]:g} pairs that were recorded, above zero, found {step_pairs:g}")
    chosen_D = np.unique(np.linspace(0, steps - 1, min(most, steps)).round().astype(np.int64))
    step_DLE = np.zeros((len(chosen_D), *load_TLE.shape[1:]), dtype=np.int64)
    left_LE, left_of = load_TLE[0], -1
    for index, begin in enumerate((chosen_D * step_pairs).tolist()):
        first = int(np.searchsorted(upto_T, begin, side="right")) - 1
        for window in range(first, len(load_TLE)):
            inside = np.clip((np.array([begin, begin + step_pairs]) - upto_T[window]) / np.diff(upto_T)[window], 0.0, 1.0)
            if inside[1] <= inside[0]:
                break
            if left_of != window:
                left_LE, left_of = load_TLE[window].copy(), window
            cuts_2L = np.rint(inside[:, None] * total_TL[window]).astype(np.int64)
            part_LE = _part_of(left_LE, np.minimum(cuts_2L[1] - cuts_2L[0], left_LE.sum(axis=1)), rng)
            step_DLE[index] += part_LE
            left_LE = left_LE - part_LE
    middle_D = np.searchsorted(upto_T, (chosen_D + 0.5) * step_pairs, side="right") - 1
    return ServingSteps(step_DLE, np.minimum(middle_D, len(load_TLE) - 1))


def _part_of(load_LE: IntArray, size_L: IntArray, rng: np.random.Generator) -> IntArray:
    """(L, E): in each layer, size_L of the tokens load_LE, drawn without replacement."""
    total_L = load_LE.sum(axis=1)
    if (size_L == total_L).all():
        return load_LE
    rows = []
    for load_E, size, total in zip(load_LE, size_L.tolist(), total_L.tolist(), strict=True):
        if total < MOST_DRAWN:
            rows.append(rng.multivariate_hypergeometric(load_E, size, method="marginals"))
        else:
            rows.append(np.minimum(rng.multinomial(size, load_E / total), load_E))
    return np.stack(rows)


@dataclass(frozen=True, eq=False)
class ServedTraffic:
    """Recorded traffic in blocks of windows: maps are planned from windows, and evaluated on steps that are cut from them.

    Attributes:
        load_TLE: (T, L, E) float64, the windows' loads; if many windows were recorded, neighbouring ones are summed.
        step_DLE: (D, L, E) float64, (token, expert) pairs of the steps.
        window_D: (D,) int64, the window of each step.
        block_T: (T,) int64, the block of each window.
        step_tokens: tokens of a step.
        in_windows: whether each step lies within one window.
        recorded: number of recorded windows.
    """

    load_TLE: FloatArray
    step_DLE: FloatArray
    window_D: IntArray
    block_T: IntArray
    step_tokens: float
    in_windows: bool
    recorded: int

    @classmethod
    def of(cls, profile: Profile, step_tokens: float | None, rng: np.random.Generator) -> Self:
        """Cuts a profile's windows into steps and blocks; the tokens of all sources are added.

        Args:
            profile: the traffic.
            step_tokens: tokens of a step, at most those of a block; None: as many as in a window.
            rng: draws the parts of windows.

        Raises:
            BadInput: if `step_tokens` is not above zero, or the profile is nearly empty.
        """
        if step_tokens is not None and not 0 < step_tokens < np.inf:
            raise BadInput(f"`step_tokens`: expected a number above zero, found {step_tokens}")
        load_TLE = profile.tokens_TLSE.sum(axis=2)
        load_TLE = load_TLE[load_TLE.any(axis=(1, 2))]
        pairs = float(load_TLE.sum() / profile.layers)
        if pairs < FEWEST_WINDOWS:
            raise BadInput(f"profile of {profile.model!r}: expected {FEWEST_WINDOWS} pairs in a layer, found {pairs:g}")
        step_pairs = pairs / len(load_TLE) if step_tokens is None else step_tokens * profile.top_k
        if len(load_TLE) < FEWEST_WINDOWS:
            load_TLE = serving_steps(load_TLE, pairs / FEWEST_WINDOWS, FEWEST_WINDOWS, rng).load_DLE
        pairs_T = load_TLE.sum(axis=(1, 2)) / profile.layers
        groups = min(len(load_TLE), MOST_GROUPS)
        group_T = np.arange(len(load_TLE)) * groups // len(load_TLE)
        middle_G = np.bincount(group_T, pairs_T).cumsum() - np.bincount(group_T, pairs_T) / 2
        block_G = np.unique((middle_G / pairs * BLOCKS).astype(np.int64), return_inverse=True)[1]
        step_pairs = min(step_pairs, float(np.bincount(block_G[group_T], pairs_T).min()))
        within_T = group_T if step_pairs <= np.bincount(group_T, pairs_T).min() else block_G[group_T]
        most = -(-MOST_STEPS // (int(within_T[-1]) + 1))
        steps, windows = [], []
        for part in range(int(within_T[-1]) + 1):  # so that no step is in two
            at_X = np.flatnonzero(within_T == part)
            cut = serving_steps(load_TLE[at_X], step_pairs, most, rng)
            steps.append(cut.load_DLE.astype(np.float64))
            windows.append(group_T[at_X[cut.window_D]])
        return cls(
            np.stack([load_TLE[group_T == group].sum(axis=0) for group in range(groups)]).astype(np.float64),
            np.concatenate(steps),
            np.concatenate(windows),
            block_G,
            step_pairs / profile.top_k,
            within_T is group_T,
            profile.windows,
        )

    @property
    def block_D(self) -> IntArray:
        """(D,) int64, the block of each step."""
        return np.asarray(self.block_T[self.window_D])

    def by_block(self, seconds_D: FloatArray) -> FloatArray:
        """Returns (B,) the sum of the steps' seconds_D (D,) in each block."""
        return np.bincount(self.block_D, seconds_D).astype(np.float64)

    def seconds_D(self, maps_of: Sequence[SlotMap], of_T: IntArray, curve: RankCurve) -> FloatArray:
        """Returns (D,) the seconds of each step, summed over layers; window t is served by the map maps_of[of_T[t]]."""
        seconds_D = np.zeros(len(self.step_DLE))
        for number, experts in enumerate(maps_of):
            at_D = of_T[self.window_D] == number
            seconds_D[at_D] = map_seconds(self.step_DLE[at_D], experts, curve).sum(axis=1)
        return seconds_D

    def held_out(self, plan: Callable[[FloatArray], SlotMap]) -> list[SlotMap]:
        """Returns one map per block, made by `plan` from the summed loads (L, E) of all other blocks."""
        blocks = range(int(self.block_T[-1]) + 1)
        return [plan(self.load_TLE[self.block_T != block].sum(axis=0)) for block in blocks]


def ratio_interval(above_B: FloatArray, below_B: FloatArray) -> Interval:
    """Returns sum(above_B) / sum(below_B) over blocks with its confidence interval, by a jackknife over blocks (Student's t).

    Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), chapter 11.
    """
    blocks, value = len(above_B), float(above_B.sum() / below_B.sum())
    if blocks < 2:
        return Interval(-np.inf, value, np.inf)
    without_B = (above_B.sum() - above_B) / (below_B.sum() - below_B)
    error = np.sqrt((blocks - 1) / blocks * ((without_B - without_B.mean()) ** 2).sum())
    reach = float(stdtrit(blocks - 1, (1 + LEVEL) / 2) * error)
    return Interval(value - reach, value, value + reach)


@dataclass(frozen=True)
class ImbalanceSplit:
    """The imbalance of the linear map and the three parts that sum to it; 0.2 is 20 % longer than with perfect balance.

    Attributes:
        whole: the imbalance of the linear map, with its interval.
        stable: the part that a static map removes.
        drifting: the further part that maps remove if they follow slow changes.
        per_step: the rest, which only methods that know the counts of a batch remove.
        by_slots: the part of `per_step` that remains even if loads are known, for lack of slots.
        step_tokens: tokens of a step; fewer than asked for if a fifth of the profile has fewer.
        windows: number of recorded windows; with fewer than FEWEST_WINDOWS, drift cannot be measured.
    """

    whole: Interval
    stable: Interval
    drifting: Interval
    per_step: Interval
    by_slots: float
    step_tokens: float
    windows: int


def imbalance_split(
    profile: Profile,
    gpus: int,
    step_tokens: float | None = None,
    slots_per_gpu: int | None = None,
    curve: RankCurve = TOKENS,
    seed: int = 0,
) -> ImbalanceSplit:
    """Splits the imbalance of the linear map into its stable, drifting and per-step parts, with intervals.

    Args:
        profile: the traffic; its sources are summed, so that `gpus` may be any number.
        gpus: number of GPUs, which are equal.
        step_tokens: tokens of a step on all GPUs; None: as many as in a window of the profile.
        slots_per_gpu: slots of planned maps; None: as few as the experts need, without replicas.
        curve: seconds of a rank's experts.
        seed: random seed for cutting windows into steps.

    Returns:
        The ImbalanceSplit; intervals at 95 % over blocks of windows.

    Raises:
        BadInput: if a number is out of range.
        InfeasiblePlan: if the slots are too few.

    Example:
        >>> import aurora
        >>> split = imbalance_split(aurora.synthetic_profile("zipf:1", "mixtral-topics"), gpus=4, step_tokens=64)
        >>> parts = split.stable.value + split.drifting.value + split.per_step.value
        >>> bool(abs(parts - split.whole.value) < 1e-9)
        True
    """
    checked = checked_slots(profile, gpus, slots_per_gpu)
    slots = None if slots_per_gpu is None else checked
    traffic = ServedTraffic.of(profile, step_tokens, np.random.default_rng(seed))
    perfect_B = traffic.by_block(perfect_seconds(traffic.step_DLE, gpus, curve).sum(axis=1))
    every_T = np.arange(len(traffic.load_TLE))

    def plan(load_LE: FloatArray) -> SlotMap:
        return planned_map(load_LE, gpus, slots, seed=seed)

    linear = linear_map(profile.layers, profile.experts, gpus)
    linear_B = traffic.by_block(traffic.seconds_D([linear], np.zeros_like(every_T), curve))
    static_B = traffic.by_block(traffic.seconds_D(traffic.held_out(plan), traffic.block_T, curve))
    ways, apart_TT = [], np.abs(every_T[:, None] - every_T)
    wide = traffic.step_DLE.sum() / len(traffic.step_DLE) / traffic.load_TLE.sum() * len(every_T)  # step, in windows
    overlapping = 0 if traffic.in_windows else int(np.ceil(max(wide - 1, 0.5) / 2))  # windows beside, that a step may be in too
    for near in NEAR:
        weight_TT = np.exp(-apart_TT / near) * (apart_TT > overlapping)
        maps = [plan(np.tensordot(weight_T, traffic.load_TLE, 1)) for weight_T in weight_TT]
        ways.append(traffic.by_block(traffic.seconds_D(maps, every_T, curve)))
    near_B = _best_of_others(np.stack([*ways, static_B]))
    near_B = near_B if near_B.sum() < static_B.sum() else static_B
    known = traffic.load_TLE.sum(axis=0)[None]
    by_slots = float(map_seconds(known, plan(known[0]), TOKENS).sum() / perfect_seconds(known, gpus, TOKENS).sum() - 1)
    pairs = (linear_B, perfect_B), (linear_B, static_B), (static_B, near_B), (near_B, perfect_B)
    whole, stable, drifting, per_step = (ratio_interval(above_B - less_B, perfect_B) for above_B, less_B in pairs)
    return ImbalanceSplit(
        whole, stable, drifting, per_step, min(by_slots, per_step.value), traffic.step_tokens, traffic.recorded
    )


def _best_of_others(seconds_XB: FloatArray) -> FloatArray:
    """(B,): the seconds of each block in the way, of X, that is best in the other blocks, so that chance chooses nothing."""
    best_B = (seconds_XB.sum(axis=1, keepdims=True) - seconds_XB).argmin(axis=0)
    return np.asarray(seconds_XB[best_B, np.arange(seconds_XB.shape[1])])


def checked_slots(profile: Profile, gpus: int, slots_per_gpu: int | None) -> int:
    """Returns slots_per_gpu after checking it; if it is None, as few slots as the profile's experts need.

    Raises:
        BadInput: if a number is below one.
        InfeasiblePlan: if the slots are too few.
    """
    for name, value in (("gpus", gpus), ("slots_per_gpu", 1 if slots_per_gpu is None else slots_per_gpu)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise BadInput(f"`{name}`: expected a whole number of one or more, found {value}")
    least = -(-profile.experts // gpus)
    if slots_per_gpu is not None and slots_per_gpu < least:
        raise BadInput(
            f"`slots_per_gpu`: expected at least {least} for {profile.experts} experts on {gpus} GPUs, found {slots_per_gpu}"
        )
    return least if slots_per_gpu is None else min(slots_per_gpu, profile.experts)
