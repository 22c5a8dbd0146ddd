"""Whether traffic has moved away from what a plan was made for, by how much, and whether that is worth another plan."""

from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.planner.evaluate import evaluate
from aurora.planner.placement.grouping import balanced
from aurora.planner.placement.slots import even_slots
from aurora.planner.workload.load_statistics import LEVEL, MIN_ROUNDS, REPLICATES, rounds_of
from aurora.types import DriftOptions, Plan, Profile
from aurora.types.arrays import FloatArray, IntArray, gap
from aurora.types.profile import same_model


@dataclass(frozen=True)
class Drift:
    """variation_L (L,) float64: total variation of the experts' shares between two profiles, 0 alike to 1 disjoint. noise_L,
    noise: below what it, and its mean over layers, stay with probability LEVEL when both are of the same traffic. overlap_L:
    of the `hot` most loaded experts of either profile, the part that is in both (Jaccard). loss: how much longer the first
    profile's placement takes on the second than one made for that. threshold: the loss from which planning again pays.
    """

    variation_L: FloatArray
    noise_L: FloatArray
    noise: float
    overlap_L: FloatArray
    hot: int
    loss: float
    threshold: float

    @property
    def moved(self) -> bool:
        """The traffic differs by more than two samples of the same would."""
        return float(self.variation_L.mean()) > self.noise

    @property
    def replan(self) -> bool:
        return self.moved and self.loss > self.threshold

    @property
    def reason(self) -> str:
        """Why to plan again or why not, in one sentence."""
        if not self.moved:
            apart, chance = f"{self.variation_L.mean():.2%}", f"{self.noise:.2%}"
            return (
                f"keep the plan: shares differ by {apart}, two samples as small as these of the same traffic by up to {chance}"
            )
        if not self.replan:
            return f"keep the plan: traffic has moved, but it loses {self.loss:.1%}, not more than {self.threshold:.1%}"
        return f"plan again: traffic has moved, and the plan loses {self.loss:.1%}, more than {self.threshold:.1%}"


def drift(before: Profile, after: Profile, plan: Plan | None = None, options: DriftOptions = DriftOptions()) -> Drift:
    """How far `after` is from `before`. plan: one made for `before`; without it the loss is that of the fullest of groups, one
    a source rank, that were balanced for `before`.

    Raises BadInput for profiles of different models, or a plan that was not made for `before` alone.
    """
    found, expected = ((each.layers, each.experts) for each in (after, before))
    if found != expected or not same_model(after.fingerprint, before.fingerprint):
        raise BadInput(
            f"drift: expected two profiles of one model, found {before.model!r} with {before.layers} MoE layers of "
            f"{before.experts} experts and {after.model!r} with {after.layers} of {after.experts}"
            + (", and other router weights" if found == expected else "")
        )
    if plan is not None and [model.profile_digest for model in plan.models] != [before.digest]:
        raise BadInput(f"drift: expected a plan for the first profile, {before.model!r} alone, found one made from others")
    hot = max(1, before.experts // 8) if options.hot is None else min(options.hot, before.experts)
    loads = before.load_LE, after.load_LE
    noise_BL = _by_chance(before, after, np.random.default_rng(options.seed))
    return Drift(
        variation(*loads),
        np.quantile(noise_BL, LEVEL, axis=0),
        float(np.quantile(noise_BL.mean(axis=1), LEVEL)),
        overlap(loads[0], loads[1], hot),
        hot,
        balance_loss(loads[0], loads[1], before.sources) if plan is None else evaluate(plan, [after]).loss,
        options.threshold,
    )


def variation(load_XE: IntArray | FloatArray, other_XE: IntArray | FloatArray) -> FloatArray:
    """(...) float64: total variation of two tables' shares, half of the sum of what they differ by; 0 where one is empty."""
    sum_X1, other_X1 = (np.maximum(each.sum(axis=-1, keepdims=True), 1) for each in (load_XE, other_XE))
    apart_X: FloatArray = np.abs(load_XE / sum_X1 - other_XE / other_X1).sum(axis=-1) / 2
    return np.where((load_XE.sum(axis=-1) > 0) & (other_XE.sum(axis=-1) > 0), apart_X, 0.0)


def overlap(load_LE: IntArray, other_LE: IntArray, hot: int) -> FloatArray:
    """(L,) float64: Jaccard index of the `hot` most loaded experts of each layer; of equal loads, the lower numbers."""
    tops = [np.argsort(-each, axis=1, kind="stable")[:, :hot] for each in (load_LE, other_LE)]
    both = [len(np.intersect1d(*rows)) for rows in zip(*tops, strict=True)]
    return np.array([each / (2 * hot - each) for each in both])


def balance_loss(load_LE: IntArray, other_LE: IntArray, groups: int) -> float:
    """How much fuller, over all layers, the fullest groups are on `other_LE` when balanced for `load_LE` than for itself."""
    slots_J = even_slots(load_LE.shape[1], np.full(groups, load_LE.shape[1]))
    rng = np.random.default_rng(0)  # of PLACE's protocol; balanced draws nothing

    def fullest(made_for_LE: IntArray) -> int:
        groups_L = (balanced(load_E, slots_J, rng) for load_E in made_for_LE)
        return sum(
            int(np.bincount(group_E, weights=load_E, minlength=groups).max())
            for group_E, load_E in zip(groups_L, other_LE, strict=True)
        )

    return max(gap(float(fullest(load_LE)), float(fullest(other_LE))), 0.0)


def _by_chance(before: Profile, after: Profile, rng: np.random.Generator) -> FloatArray:
    """(B, L) float64: variation between two samples of both profiles' traffic together, as large as they are.

    Whole rounds change sides (a permutation test); where there are few of them, tokens are drawn one by one.
    """
    rounds = [rounds_of(each.tokens_TLSE, each.stage_T).sum(axis=2) for each in (before, after)]
    first = len(rounds[0])
    both_ULE = np.concatenate(rounds)
    made = []
    if min(map(len, rounds)) >= MIN_ROUNDS:
        for _ in range(REPLICATES):
            mixed_ULE = both_ULE[rng.permutation(len(both_ULE))]
            made.append(variation(mixed_ULE[:first].sum(axis=0), mixed_ULE[first:].sum(axis=0)))
        return np.stack(made)
    for load_E, sizes in zip(both_ULE.sum(axis=0), zip(*(each.sum(axis=(0, 2)) for each in rounds), strict=True), strict=True):
        share_E = load_E / max(load_E.sum(), 1) if load_E.any() else np.full(len(load_E), 1 / len(load_E))
        made.append(variation(*(rng.multinomial(int(size), share_E, size=REPLICATES) for size in sizes)))
    return np.stack(made, axis=1)
