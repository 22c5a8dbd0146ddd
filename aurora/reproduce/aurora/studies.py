"""Studies: the evaluation's scenarios and baselines; each prices every method for a case, for one draw of the traffic.

A study is a function of

- workload: one draw of the traffic
- pricing: how outcomes are found
- rng: random generator of the random baselines

and returns Outcomes: by method and case. GPUs, experts and source shards are 8 each; "Aurora" is the paper's own method for the
scenario, "ours" the best that is known here without proof: exact for one model, local search for two.

Source: Aurora §8 (arXiv:2410.17043).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.io import load_cluster, shipped
from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.bottleneck_matching import bottleneck_matching
from aurora.planner.placement.colocation import COLOCATE
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.reproduce.aurora.jobs import LayerJob, LayerOutcome, Pricing, job, lina_all, lina_half
from aurora.reproduce.aurora.traffic import Workload
from aurora.types import Cluster, Profile
from aurora.types.arrays import IntArray

Outcomes = dict[str, dict[str, LayerOutcome]]  # way -> case -> outcome
ORDERS = {"Aurora": "birkhoff", "Alg. 1, read literally": "aurora-alg1", "SJF": "sjf", "RCS": "random"}
LEVELS = (0, 25, 50, 75)  # per cent of foreign traffic


def equal_cluster() -> Cluster:
    """Returns the paper's cluster of 8 equal GPUs."""
    return load_cluster(shipped("clusters/paper-equal-8.toml"))


def mixed_cluster() -> Cluster:
    """Returns the paper's cluster of 8 GPUs of different kinds."""
    return load_cluster(shipped("clusters/paper-mixed-8.toml"))


def colocate(name: str, jobs: Sequence[LayerJob], pricing: Pricing, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Colocates two jobs of which both may move.

    Args:
        name: of a strategy in COLOCATE.
        jobs: the two.
        pricing: searches go by its objective.
        rng: random generator of the strategy.

    Returns:
        For each job, (G,) int64, the expert on each GPU.
    """
    a, b = (j.costs for j in jobs)
    found = COLOCATE[name](ColocationProblem(a, b, np.arange(len(a.load_J)), objective=pricing.objective), rng)
    return found.a_G, found.b_G


def exclusive_equal(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 11a: orders. GPUs are alike; a drawn placement lets the random order differ from case to case.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = equal_cluster(), _empty()
    for profiles, layer in workload.pairs():
        for profile in profiles:
            one, held_G = job(cluster, profile, layer, pricing.coupled), rng.permutation(len(cluster))
            for way, order in ORDERS.items():
                found[way][_case(profile, layer)] = pricing.ordered(one, held_G, order)
    return found


def exclusive_mixed(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 11b: assignment by load (Thm 5.1) against random assignment.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = mixed_cluster(), _empty()
    for profiles, layer in workload.pairs():
        for profile in profiles:
            case, one = _case(profile, layer), job(cluster, profile, layer, pricing.coupled)
            found["Aurora"][case] = pricing.price([one], [ASSIGN["by-load"](one.costs, rng)])
            found["ours"][case] = pricing.price([one], [ASSIGN["exact"](one.costs, rng)])
            found["RGA"][case] = _drawn(pricing, [one], rng)
    return found


def colocated_equal(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 11c and 12a: bottleneck matching of two models' experts (§6.2) against REC, Lina, and each model exclusive.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = equal_cluster(), _empty()
    for profiles, layer in workload.pairs():
        jobs = [job(cluster, profile, layer, pricing.coupled) for profile in profiles]
        shared = {
            "Aurora": pricing.price(jobs, colocate("matching", jobs, pricing, rng)),
            "ours": pricing.price(jobs, colocate("local-search", jobs, pricing, rng)),
            "REC": _drawn(pricing, jobs, rng),
        }
        for profile, one in zip(profiles, jobs, strict=True):
            for way, outcome in shared.items():
                found[way][_case(profile, layer)] = outcome
            found["exclusive"][_case(profile, layer)] = pricing.price([one], [np.arange(len(cluster))])
        _lina(found, cluster, profiles, layer, pricing, rng)
    return found


def colocated_mixed(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 11d and 12b: two matchings one after the other (§7.2) against REC, RGA + REC, Lina, and each model exclusive.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = mixed_cluster(), _empty()
    for profiles, layer in workload.pairs():
        jobs = [job(cluster, profile, layer, pricing.coupled) for profile in profiles]
        shared = {
            "Aurora": pricing.price(jobs, colocate("decoupled", jobs, pricing, rng)),
            "ours": pricing.price(jobs, colocate("local-search", jobs, pricing, rng)),
            "REC": _mean([pricing.price(jobs, _random_pairs(jobs, rng)) for _ in range(pricing.draws)]),
            "RGA + REC": _drawn(pricing, jobs, rng),
        }
        for profile, one in zip(profiles, jobs, strict=True):
            for way, outcome in shared.items():
                found[way][_case(profile, layer)] = outcome
            found["exclusive"][_case(profile, layer)] = pricing.price([one], [ASSIGN["by-load"](one.costs, rng)])
            packed = lina_half(cluster, profile, layer, pricing.coupled)
            sorted_G = ASSIGN["by-load"](packed.costs, rng)
            found["Lina, half, by load"][_case(profile, layer)] = pricing.price([packed], [sorted_G])
        _lina(found, cluster, profiles, layer, pricing, rng)
    return found


def optimum(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 13: the paper's two matchings, and ours, beside the optimum, by branch and bound.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = mixed_cluster(), _empty()
    for profiles, layer in workload.pairs():
        jobs, case = [job(cluster, profile, layer, pricing.coupled) for profile in profiles], f"{_data(profiles)} {layer + 1}"
        for way, name in (("Aurora", "decoupled"), ("ours", "local-search"), ("optimum", "exact")):
            found[way][case] = pricing.price(jobs, colocate(name, jobs, pricing, rng))
    return found


def foreign_exclusive(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 14a: planned on the first layer's traffic, serving traffic that is mixed with other layers'.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = mixed_cluster(), _empty()
    for profiles in workload.profiles_DM:
        for profile in profiles:
            planned = [ASSIGN["by-load"](job(cluster, profile, 0, pricing.coupled).costs, rng)]
            for level in LEVELS:
                served = job(cluster, with_foreign(profile, level), 0, pricing.coupled)
                again = [ASSIGN["by-load"](served.costs, rng)]
                found[f"Aurora, {level} %"][profile.model] = pricing.price([served], planned)
                found[f"planned again, {level} %"][profile.model] = pricing.price([served], again)
                found[f"RGA, {level} %"][profile.model] = _drawn(pricing, [served], rng)
    return found


def foreign_colocated(workload: Workload, pricing: Pricing, rng: np.random.Generator) -> Outcomes:
    """Fig. 14b: as `foreign_exclusive`, with two models.

    Args:
        workload, pricing, rng: as in the module's docstring.
    """
    cluster, found = mixed_cluster(), _empty()
    for profiles in workload.profiles_DM:
        planned = colocate("decoupled", [job(cluster, profile, 0, pricing.coupled) for profile in profiles], pricing, rng)
        for level in LEVELS:
            served = [job(cluster, with_foreign(profile, level), 0, pricing.coupled) for profile in profiles]
            case = _data(profiles)
            found[f"Aurora, {level} %"][case] = pricing.price(served, planned)
            found[f"planned again, {level} %"][case] = pricing.price(served, colocate("decoupled", served, pricing, rng))
            found[f"RGA + REC, {level} %"][case] = _drawn(pricing, served, rng)
    return found


def with_foreign(profile: Profile, level: int) -> Profile:
    """Mixes other layers' traffic into the first's: one layer of eight passes. Exact for 0, 25, 50 and 75 %.

    Args:
        profile: the traffic.
        level: per cent of the traffic that comes, in equal parts, from the next level / 25 layers, or from as many as there
            are; the rest comes from the first layer.
    """
    quarters = level // 25
    layers = min(quarters, profile.layers - 1)
    weight_L = np.zeros(profile.layers, dtype=np.int64)
    weight_L[0] = 8 - 2 * quarters
    if layers:
        weight_L[1 : 1 + layers] = 2 * quarters // layers
    return replace(profile, tokens_TLSE=np.einsum("tlse,l->tse", profile.tokens_TLSE, weight_L)[:, None])


def _lina(
    found: Outcomes,
    cluster: Cluster,
    profiles: Sequence[Profile],
    layer: int,
    pricing: Pricing,
    rng: np.random.Generator,
) -> None:
    """Lina's packing, pairs on random GPUs: each model on its half, and both in turn on all."""
    outcomes = []
    for profile in profiles:
        packed, case = lina_half(cluster, profile, layer, pricing.coupled), _case(profile, layer)
        found["Lina, half"][case] = _drawn(pricing, [packed], rng)
        found["Lina, half, RCS"][case] = pricing.ordered(packed, rng.permutation(len(packed.cluster)), "random")
        outcomes.append(_drawn(pricing, [lina_all(cluster, profile, layer, pricing.coupled)], rng))
    seconds = sum(outcome.seconds for outcome in outcomes)
    both = LayerOutcome(seconds, sum(outcome.utilisation * outcome.seconds for outcome in outcomes) / seconds)
    for profile in profiles:
        found["Lina, all in turn"][_case(profile, layer)] = both


def _random_pairs(jobs: Sequence[LayerJob], rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """REC on mixed GPUs: random pairs, which go to GPUs as Aurora's second matching says."""
    a, b = (j.costs for j in jobs)
    partner_J = rng.permutation(len(a.load_J))
    group_G = bottleneck_matching(a.exclusive_s_GJ + b.exclusive_s_GJ[:, partner_J])
    return group_G, partner_J[group_G]


def _drawn(pricing: Pricing, jobs: Sequence[LayerJob], rng: np.random.Generator) -> LayerOutcome:
    """Every job's experts on random GPUs, the mean of pricing.draws."""
    n = len(jobs[0].cluster)
    return _mean([pricing.price(jobs, [rng.permutation(n) for _ in jobs]) for _ in range(pricing.draws)])


def _mean(outcomes: Sequence[LayerOutcome]) -> LayerOutcome:
    return LayerOutcome(
        float(np.mean([outcome.seconds for outcome in outcomes])),
        float(np.mean([outcome.utilisation for outcome in outcomes])),
    )


def _case(profile: Profile, layer: int) -> str:
    return f"{profile.model} {layer + 1}"


def _data(profiles: Sequence[Profile]) -> str:
    """The data set that both models' profiles are of."""
    return profiles[0].model.split()[-1]


def _empty() -> Outcomes:
    return defaultdict(dict)


StudyMaker = Callable[[Workload, Pricing, np.random.Generator], Outcomes]


@dataclass(frozen=True)
class Study:
    """A scenario of the evaluation.

    Args:
        make: the study, as in the module's docstring.
        pricings: names in PRICINGS by which it is priced; the first is the paper's own.
    """

    make: StudyMaker
    pricings: tuple[str, ...]


STUDIES: dict[str, Study] = {
    "exclusive, equal": Study(exclusive_equal, ("printed", "simulated")),
    "exclusive, mixed": Study(exclusive_mixed, ("printed", "simulated", "experts-only")),
    "colocated, equal": Study(colocated_equal, ("printed", "causal", "simulated", "experts-only")),
    "colocated, mixed": Study(colocated_mixed, ("printed", "causal", "simulated", "experts-only")),
    "optimum": Study(optimum, ("printed", "causal")),
    "foreign, exclusive": Study(foreign_exclusive, ("printed", "experts-only")),
    "foreign, colocated": Study(foreign_colocated, ("printed", "causal", "experts-only")),
}
