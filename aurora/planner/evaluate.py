"""Evaluates a plan on traffic that it was not made for, compared with a plan made for that traffic; measures traffic drift."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.algorithms.check.fit import check_traffic
from aurora.algorithms.gpu_slots import even_slots
from aurora.algorithms.network.switch import timed_steps
from aurora.algorithms.replicas.eplb import balanced
from aurora.algorithms.workload.load_statistics import LEVEL, MIN_ROUNDS, REPLICATES, rounds_of, variation, variation_by_chance
from aurora.algorithms.workload.traffic import exchange_bytes, exchange_rows
from aurora.errors import BadInput, BrokenPlan
from aurora.planner.options import remade
from aurora.planner.plan import layer_seconds, make_plan, scenario_of_plan
from aurora.planner.scenarios.scenario import rows_estimated
from aurora.types import ModelPlan, Plan, Profile
from aurora.types.arrays import FloatArray, IntArray, gap

LOSS_KEPT = 0.05  # slowdown of a plan, as a share of its time, above which planning again pays
JOINT = 0.01  # slowdown up to which a plan for two kinds of traffic serves both


@dataclass(frozen=True)
class Evaluation:
    """Result of `aurora.evaluate`: the time of a plan on traffic that it was not made for.

    Args:
        served_s_L: (L,) predicted seconds of each layer under the evaluated plan, by its objective and aim.
        replanned: a plan made for this traffic with the options of the evaluated plan.
        dispatch_s_ML: one array (L,) per model, seconds of each layer's dispatch of the whole profile in the plan's order.
        estimated: whether seconds are estimated from counts, as `Plan.estimated` says.
    """

    served_s_L: FloatArray
    replanned: Plan
    dispatch_s_ML: tuple[FloatArray, ...]
    estimated: bool = False

    @property
    def slowdown(self) -> float:
        """Time of the plan / time of `replanned` - 1: 0.1 means 10 % longer."""
        return gap(float(self.served_s_L.sum()), self.replanned.objective_s)


def evaluate(plan: Plan, profiles: Profile | Sequence[Profile]) -> Evaluation:
    """Computes the time of a plan on traffic that it was not made for, and compares it to a plan made for that traffic.

    If the plan was made for several domains, only `profiles` count here.

    Args:
        plan: the plan to price.
        profiles: the traffic, one profile per model.

    Returns:
        The Evaluation: seconds of each layer, the slowdown against a plan made for this traffic, and each layer's dispatch.

    Raises:
        BadInput: if a profile is not of the plan's model, or comes from another number of source ranks.

    Example:
        >>> import aurora
        >>> config, cluster = "mixtral-topics", aurora.load("demo-4")
        >>> now, later = (aurora.synthetic_profile("zipf:1", config, aurora.SyntheticOptions(seed=s)) for s in (0, 1))
        >>> plan = aurora.plan(cluster, now)
        >>> aurora.evaluate(plan, now).slowdown, aurora.evaluate(plan, later).slowdown > 0
        (0.0, True)
    """
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    check_traffic(plan, profiles)
    placements = [model.placement for model in plan.models]
    dispatch_s_ML = tuple(
        np.array([_dispatch_s(plan, model, profile, layer) for layer in range(profile.layers)])
        for model, profile in zip(plan.models, profiles, strict=True)
    )
    served_s_L = layer_seconds(plan, placements, profiles)
    if not plan.estimated:  # estimates of earlier versions were others
        _check_own_price(plan, profiles, float(served_s_L.sum()))
    replanned = make_plan(plan.cluster, profiles, remade(plan.options))
    return Evaluation(
        served_s_L, replanned, dispatch_s_ML, rows_estimated([model.hierarchy for model in plan.models], profiles)
    )


def _dispatch_s(plan: Plan, model: ModelPlan, profile: Profile, layer: int) -> float:
    """Seconds of a layer's whole dispatch of other traffic in the plan's order."""
    placed = profile, layer, model.placement.split_EG(layer)
    rows_SGG = exchange_rows(*placed, deduplicated=model.deduplicated, hierarchy=model.hierarchy)
    bytes_SGG = exchange_bytes(rows_SGG, profile, "dispatch", model.deduplicated)
    return timed_steps(model.dispatch_L[layer], bytes_SGG, plan.cluster.network, bounded=False).makespan_s


def _check_own_price(plan: Plan, profiles: Sequence[Profile], served_s: float) -> None:
    """Raises BrokenPlan if the plan was made for just these profiles, and its objective is not that of its placement."""
    pairs = list(zip(plan.models, profiles, strict=True))
    made_for = all(m.profile_digest == p.digest and np.array_equal(m.load_LE, p.load_LE) for m, p in pairs)
    if made_for and abs(served_s - plan.objective_s) > 1e-6 * served_s:
        raise BrokenPlan(
            f"plan: its objective is {plan.objective_s:.6g} s, but its placement takes {served_s:.6g} s; price a changed "
            "placement anew with `aurora.price`"
        )


def repriced(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Returns the plan with seconds computed anew from profiles of the same traffic whose compute curves have changed.

    Returns the plan itself if no curves have changed, or if it was made for several domains.
    """
    pairs = list(zip(plan.models, profiles, strict=True))
    more = any(not np.array_equal(m.load_LE, p.load_LE) for m, p in pairs)  # domains, which a plan does not name
    if more or all(m.profile_digest == p.digest for m, p in pairs):
        return plan
    placed = scenario_of_plan(plan, profiles).priced([model.placement for model in plan.models])
    return replace(
        plan,
        models=tuple(replace(model, profile_digest=profile.digest) for model, profile in pairs),
        objective_s=placed.objective_s,
        bound_s=placed.bound_s,
        assignment_bound_s=None,
        unseen_s=placed.unseen_s,
        slot_gain=None,
        estimated=placed.estimated,
        notes=(*plan.notes, "priced anew by compute times that were measured after it was made"),
    )


@dataclass(frozen=True)
class Drift:
    """Result of `aurora.drift`: the distance between the traffic of two profiles, and the slowdown of a plan that it causes.

    Attributes:
        variation_L: (L,) float64, total variation distance of the experts' shares in the profiles, 0 (equal) to 1 (disjoint).
        noise_L: (L,) float64, significance limit: unchanged traffic exceeds it with probability 1 - LEVEL, by chance.
        noise: the same limit for the mean of variation_L.
        overlap_L: (L,) float64, Jaccard index of the `hot` most loaded experts of both profiles.
        hot: number of most loaded experts that `overlap_L` compares.
        slowdown: on the second profile, time of a placement made for the first / time of one made for the second - 1.
        threshold: the slowdown above which planning again pays.
        estimated: whether `slowdown` is estimated from counts.
        slowdown_of_joint: slowdowns, on the first and on the second profile, of one plan made for both (`domains`) against a
            plan made for each; None if no such plan was made.
    """

    variation_L: FloatArray
    noise_L: FloatArray
    noise: float
    overlap_L: FloatArray
    hot: int
    slowdown: float
    threshold: float
    estimated: bool = False
    slowdown_of_joint: tuple[float, float] | None = None

    @property
    def moved(self) -> bool:
        """True if traffic has changed: the mean of variation_L is above `noise`."""
        return float(self.variation_L.mean()) > self.noise

    @property
    def replan(self) -> bool:
        """True if planning again pays: the slowdown exceeds `threshold`, and traffic has moved by more than chance explains."""
        return self.moved and self.slowdown > self.threshold

    @property
    def joint_serves(self) -> bool:
        """True if planning again pays, and one plan made for both profiles loses at most JOINT on each of them."""
        return self.replan and self.slowdown_of_joint is not None and max(self.slowdown_of_joint) <= JOINT

    @property
    def reason(self) -> str:
        """One sentence that says whether to keep the plan or to plan again, and why."""
        if not self.moved:
            apart, chance = f"{self.variation_L.mean():.2%}", f"{self.noise:.2%}"
            return (
                f"keep the plan: shares differ by {apart}, two samples as small as these of the same traffic by up to {chance}"
            )
        if not self.replan:
            return f"keep the plan: traffic has moved, but it loses {self._lost}, not more than {self.threshold:.1%}"
        why = f"traffic has moved, and the plan loses {self._lost}, more than {self.threshold:.1%}"
        if not self.joint_serves or self.slowdown_of_joint is None:
            return f"plan again: {why}"
        first, second = (f"{slowdown:.1%}" for slowdown in self.slowdown_of_joint)
        return f"plan once for both (--domain): {why}; a plan for both loses {first} on the first and {second} on the second"

    @property
    def _lost(self) -> str:
        """The slowdown, and whether it is estimated."""
        return f"{self.slowdown:.1%}" + (" (estimated from counts)" if self.estimated else "")


def drift(before: Profile, after: Profile, plan: Plan | None = None) -> Drift:
    """Measures whether traffic has moved by more than chance explains, and whether planning again pays.

    Args:
        before: the traffic that was planned for.
        after: the traffic now, of the same model.
        plan: the plan made for `before`; None: the slowdown is that of groups of experts balanced for `before`.

    Returns:
        The Drift: each layer's distance, the distance that chance explains, and the slowdown.

    Raises:
        BadInput: if the profiles are of different models, or the plan was not made for `before`.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> aurora.drift(traffic, traffic).replan
        False
    """
    after.identity.check_same(before.identity, f"drift from {before.model!r}: profile of {after.model!r}")
    for profile in (before, after):
        if not profile.tokens_TLSE.any():
            raise BadInput(f"profile of {profile.model!r}: expected tokens, found none")
    if plan is not None and [model.made_from(before) for model in plan.models] != [True]:
        raise BadInput(f"drift: expected a plan for the first profile, {before.model!r} alone, found one made from others")
    hot = max(1, before.experts // 8)
    loads = before.load_LE, after.load_LE
    evaluation = None if plan is None else evaluate(plan, [after])
    slowdown = balance_slowdown(loads[0], loads[1], before.sources) if evaluation is None else evaluation.slowdown
    joint = None
    if plan is not None and evaluation is not None and slowdown > LOSS_KEPT:
        joint = _slowdown_of_joint(plan, evaluation.replanned, before, after)
    noise_BL = _by_chance(before, after, np.random.default_rng(0))
    return Drift(
        variation(*loads),
        np.quantile(noise_BL, LEVEL, axis=0),
        float(np.quantile(noise_BL.mean(axis=1), LEVEL)),
        overlap(loads[0], loads[1], hot),
        hot,
        slowdown,
        LOSS_KEPT,
        evaluation is not None and evaluation.estimated,
        joint,
    )


def _slowdown_of_joint(plan: Plan, later: Plan, before: Profile, after: Profile) -> tuple[float, float] | None:
    """The slowdowns of a plan for both profiles, against a plan for each; None if its options take no domains."""
    try:
        joint = make_plan(plan.cluster, [before], remade(plan.options), domains=[after])
    except BadInput:
        return None
    placements = [model.placement for model in joint.models]
    first, second = (
        gap(float(layer_seconds(best, placements, [profile]).sum()), best.objective_s)
        for best, profile in ((plan, before), (later, after))
    )
    return first, second


def overlap(load_LE: IntArray, other_LE: IntArray, hot: int) -> FloatArray:
    """Returns (L,), per layer the Jaccard index of the sets of the `hot` most loaded experts in load_LE and in other_LE."""
    tops = [np.argsort(-loads, axis=1, kind="stable")[:, :hot] for loads in (load_LE, other_LE)]
    both = [len(np.intersect1d(*rows)) for rows in zip(*tops, strict=True)]
    return np.array([count / (2 * hot - count) for count in both])


def balance_slowdown(load_LE: IntArray, other_LE: IntArray, groups: int) -> float:
    """Returns the slowdown, on loads other_LE, of groups of experts that are balanced for load_LE.

    It is A / B - 1, zero or more: A is the load of the fullest group, summed over layers; B the same with groups balanced for
    other_LE.

    Args:
        load_LE, other_LE: (L, E) tokens of each expert.
        groups: number of groups.
    """
    slots_J = even_slots(load_LE.shape[1], np.full(groups, load_LE.shape[1]))
    rng = np.random.default_rng(0)  # every strategy of PLACE takes one; `balanced` does not draw

    def fullest(made_for_LE: IntArray) -> int:
        """The load of the fullest groups, summed over layers, if groups are balanced for made_for_LE."""
        groups_L = (balanced(load_E, slots_J, rng) for load_E in made_for_LE)
        return sum(
            int(np.bincount(group_E, weights=load_E, minlength=groups).max())
            for group_E, load_E in zip(groups_L, other_LE, strict=True)
        )

    return max(gap(float(fullest(load_LE)), float(fullest(other_LE))), 0.0)


def _by_chance(before: Profile, after: Profile, rng: np.random.Generator) -> FloatArray:
    """(B, L) float64: variation between two samples of the profiles' common traffic, as large as the profiles.

    Whole rounds change sides (a permutation test). If a profile has few rounds, single tokens are drawn instead.
    """
    rounds = [rounds_of(profile.tokens_TLSE, profile.stage_T).sum(axis=2) for profile in (before, after)]
    first = len(rounds[0])
    both_ULE = np.concatenate(rounds)
    variations = []
    if min(map(len, rounds)) >= MIN_ROUNDS:
        for _ in range(REPLICATES):
            mixed_ULE = both_ULE[rng.permutation(len(both_ULE))]
            variations.append(variation(mixed_ULE[:first].sum(axis=0), mixed_ULE[first:].sum(axis=0)))
        return np.stack(variations)
    return variation_by_chance(rounds[0].sum(axis=0), rounds[1].sum(axis=0), rng, REPLICATES)
