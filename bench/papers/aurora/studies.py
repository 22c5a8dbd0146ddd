"""Studies: the evaluation's scenarios and baselines; each prices every method for a case, for one draw of the traffic.

GPUs, experts and source shards are 8 each; "Aurora" is the paper's own method for the scenario, "ours" the best that is known
here without proof: exact for one model, local search for two.

Source: Aurora §8 (arXiv:2410.17043).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.algorithms.placement.assignment import ASSIGN, bottleneck_matching
from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.types import Cluster, Profile
from aurora.types.arrays import IntArray
from bench.papers.aurora.jobs import LayerJob, LayerOutcome, Pricing, job, lina_all, lina_half
from bench.papers.aurora.traffic import Workload

Found = Iterator[tuple[str, str, LayerOutcome]]  # method, case, outcome
ORDERS = {"Aurora": "birkhoff", "Alg. 1, read literally": "aurora-alg1", "SJF": "sjf", "RCS": "random"}
LEVELS = (0, 25, 50, 75)  # per cent of foreign traffic


@dataclass(frozen=True)
class StudySetting:
    """What a study runs on: one draw of the traffic, a cluster, a pricing, and the generator of random placements."""

    workload: Workload
    cluster: Cluster
    pricing: Pricing
    rng: np.random.Generator

    def pairs(self) -> Iterator[list[LayerJob]]:
        """Yields [first model's job, second model's job] for each data set and layer: one bar of the colocated figures."""
        for profiles in self.workload.profiles_DM:
            for layer in range(self.workload.layers):
                yield self.jobs(profiles, layer)

    def jobs(self, profiles: Sequence[Profile], layer: int = 0) -> list[LayerJob]:
        """Returns the LayerJob of one layer of each profile."""
        return [job(self.cluster, profile, layer, self.pricing.coupled) for profile in profiles]

    def assign(self, one: LayerJob, name: str) -> IntArray:
        """Returns (G,) int64, the expert on each GPU, as the strategy `name` of ASSIGN places it."""
        return ASSIGN[name](one.costs, self.rng)

    def assigned(self, one: LayerJob, name: str) -> LayerOutcome:
        """Returns the outcome of one job that the strategy `name` of ASSIGN places."""
        return self.pricing.price([one], [self.assign(one, name)])

    def colocate(self, jobs: Sequence[LayerJob], name: str) -> list[IntArray]:
        """Returns, for each job, (G,) int64, the expert on each GPU, as the strategy `name` of COLOCATE places them."""
        kept = {0: np.arange(len(jobs[0].costs.load_J))}
        problem = ColocationProblem(tuple(one.costs for one in jobs), kept, objective=self.pricing.objective)
        return list(COLOCATE[name](problem, self.rng).group_MG)

    def colocated(self, jobs: Sequence[LayerJob], name: str) -> LayerOutcome:
        """Returns the outcome of two jobs that the strategy `name` of COLOCATE places."""
        return self.pricing.price(jobs, self.colocate(jobs, name))

    def drawn(self, *jobs: LayerJob) -> LayerOutcome:
        """Returns the outcome of jobs with experts on random GPUs, the mean over `pricing.draws` placements."""
        n = len(jobs[0].cluster)
        return self.mean(jobs, ([self.rng.permutation(n) for _ in jobs] for _ in range(self.pricing.draws)))

    def mean(self, jobs: Sequence[LayerJob], held: Iterable[Sequence[IntArray]]) -> LayerOutcome:
        """Returns the mean outcome of jobs over placements; each element of `held` has (G,) int64 per job."""
        outcomes = [self.pricing.price(jobs, each) for each in held]
        seconds, utilisation = zip(*((outcome.seconds, outcome.utilisation) for outcome in outcomes), strict=True)
        return LayerOutcome(float(np.mean(seconds)), float(np.mean(utilisation)))


def _exclusive_equal(setting: StudySetting) -> Found:
    """Fig. 11a: orders. GPUs are alike; a drawn placement lets the random order differ from case to case."""
    for jobs in setting.pairs():
        for one in jobs:
            held_G = setting.rng.permutation(len(setting.cluster))
            for way, order in ORDERS.items():
                yield way, one.name, setting.pricing.price([one], [held_G], order)


def _exclusive_mixed(setting: StudySetting) -> Found:
    """Fig. 11b: assignment by load (Thm 5.1) against random assignment."""
    for jobs in setting.pairs():
        for one in jobs:
            yield "Aurora", one.name, setting.assigned(one, "by-load")
            yield "ours", one.name, setting.assigned(one, "exact")
            yield "RGA", one.name, setting.drawn(one)


def _colocated_equal(setting: StudySetting) -> Found:
    """Fig. 11c and 12a: bottleneck matching of two models' experts (§6.2) against REC, Lina, and each model exclusive."""
    for jobs in setting.pairs():
        yield from _both("Aurora", jobs, setting.colocated(jobs, "matching"))
        yield from _both("ours", jobs, setting.colocated(jobs, "local-search"))
        yield from _both("REC", jobs, setting.drawn(*jobs))
        for one in jobs:
            yield "exclusive", one.name, setting.assigned(one, "contiguous")
        yield from _lina(setting, jobs)


def _colocated_mixed(setting: StudySetting) -> Found:
    """Fig. 11d and 12b: two matchings one after the other (§7.2) against REC, RGA + REC, Lina, and each model exclusive."""
    for jobs in setting.pairs():
        yield from _both("Aurora", jobs, setting.colocated(jobs, "decoupled"))
        yield from _both("ours", jobs, setting.colocated(jobs, "local-search"))
        yield from _both("REC", jobs, setting.mean(jobs, _random_pairs(jobs, setting)))
        yield from _both("RGA + REC", jobs, setting.drawn(*jobs))
        for one in jobs:
            yield "exclusive", one.name, setting.assigned(one, "by-load")
            yield "Lina, half, by load", one.name, setting.assigned(lina_half(one), "by-load")
        yield from _lina(setting, jobs)


def _optimum(setting: StudySetting) -> Found:
    """Fig. 13: the paper's two matchings, and ours, beside the optimum, by branch and bound."""
    for jobs in setting.pairs():
        for way, name in (("Aurora", "decoupled"), ("ours", "local-search"), ("optimum", "exact")):
            yield way, jobs[0].name.split(maxsplit=1)[1], setting.colocated(jobs, name)


def _foreign_exclusive(setting: StudySetting) -> Found:
    """Fig. 14a: planned on the first layer's traffic, serving traffic that is mixed with other layers'."""
    for profiles in setting.workload.profiles_DM:
        for profile in profiles:
            yield from _foreign(setting, profile.model, [profile], lambda jobs: [setting.assign(jobs[0], "by-load")], "RGA")


def _foreign_colocated(setting: StudySetting) -> Found:
    """Fig. 14b: as `_foreign_exclusive`, with two models."""
    for profiles in setting.workload.profiles_DM:
        data = profiles[0].model.split()[-1]
        yield from _foreign(setting, data, profiles, lambda jobs: setting.colocate(jobs, "decoupled"), "RGA + REC")


def _foreign(
    setting: StudySetting,
    case: str,
    profiles: Sequence[Profile],
    plan: Callable[[Sequence[LayerJob]], Sequence[IntArray]],
    random: str,
) -> Found:
    """The first layer's plan at every level of foreign traffic, beside a plan for that traffic and a random one."""
    planned = plan(setting.jobs(profiles))
    for level in LEVELS:
        served = setting.jobs([with_foreign(profile, level) for profile in profiles])
        yield f"Aurora, {level} %", case, setting.pricing.price(served, planned)
        yield f"planned again, {level} %", case, setting.pricing.price(served, plan(served))
        yield f"{random}, {level} %", case, setting.drawn(*served)


def with_foreign(profile: Profile, level: int) -> Profile:
    """Returns a profile of one layer: the first layer's traffic with `level` per cent of other layers' mixed in.

    These per cent come, in equal parts, from the next level / 25 layers, or from all if there are fewer. The levels are 0, 25,
    50 and 75; token counts are eight times those of one layer.
    """
    quarters = level // 25
    layers = min(quarters, profile.layers - 1)
    weight_L = np.zeros(profile.layers, dtype=np.int64)
    weight_L[0] = 8 - 2 * quarters
    if layers:
        weight_L[1 : 1 + layers] = 2 * quarters // layers
    return replace(profile, tokens_TLSE=np.einsum("tlse,l->tse", profile.tokens_TLSE, weight_L)[:, None])


def _both(way: str, jobs: Sequence[LayerJob], outcome: LayerOutcome) -> Found:
    """Jobs that share the GPUs end together."""
    yield from ((way, one.name, outcome) for one in jobs)


def _lina(setting: StudySetting, jobs: Sequence[LayerJob]) -> Found:
    """Lina's packing, pairs on random GPUs: each model on its half, and both in turn on all."""
    outcomes = []
    for one in jobs:
        packed = lina_half(one)
        yield "Lina, half", one.name, setting.drawn(packed)
        held_G = setting.rng.permutation(len(packed.cluster))
        yield "Lina, half, RCS", one.name, setting.pricing.price([packed], [held_G], "random")
        outcomes.append(setting.drawn(lina_all(one)))
    seconds = sum(outcome.seconds for outcome in outcomes)
    busy_s = sum(outcome.utilisation * outcome.seconds for outcome in outcomes)
    yield from _both("Lina, all in turn", jobs, LayerOutcome(seconds, busy_s / seconds))


def _random_pairs(jobs: Sequence[LayerJob], setting: StudySetting) -> Iterator[tuple[IntArray, IntArray]]:
    """REC on mixed GPUs: random pairs, which go to GPUs as Aurora's second matching says."""
    a, b = (one.costs for one in jobs)
    for _ in range(setting.pricing.draws):
        partner_J = setting.rng.permutation(len(a.load_J))
        group_G = bottleneck_matching(a.exclusive_s_GJ + b.exclusive_s_GJ[:, partner_J])
        yield group_G, partner_J[group_G]


@dataclass(frozen=True)
class _Study:
    """A scenario of the evaluation."""

    make: Callable[[StudySetting], Found]
    cluster: str  # by name: the paper's 8 equal GPUs, or its 8 of different kinds
    pricings: tuple[str, ...]  # names in PRICINGS by which it is priced; the first is the paper's own


EQUAL, MIXED = "paper-equal-8", "paper-mixed-8"
STUDIES: dict[str, _Study] = {
    "exclusive, equal": _Study(_exclusive_equal, EQUAL, ("printed", "simulated")),
    "exclusive, mixed": _Study(_exclusive_mixed, MIXED, ("printed", "simulated", "experts-only")),
    "colocated, equal": _Study(_colocated_equal, EQUAL, ("printed", "causal", "simulated", "experts-only")),
    "colocated, mixed": _Study(_colocated_mixed, MIXED, ("printed", "causal", "simulated", "experts-only")),
    "optimum": _Study(_optimum, MIXED, ("printed", "causal")),
    "foreign, exclusive": _Study(_foreign_exclusive, MIXED, ("printed", "experts-only")),
    "foreign, colocated": _Study(_foreign_colocated, MIXED, ("printed", "causal", "experts-only")),
}
