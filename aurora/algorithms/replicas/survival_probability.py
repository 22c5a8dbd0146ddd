"""Survival probability: the probability that every expert is still held after k failures, its upper bound, and a local search.

An item is an expert held by failure domains (recovery), or a batch held by workers (coded aggregation). Its holders are the
bits of one integer. An item is lost when all its holders have failed. The probability is exact if the exact count ends soon
enough, else sampled with a 95 % interval. The bound is for any placement of the same replica counts.

The local search swaps replicas between failure domains until no swap makes the loss of an expert less likely. It minimises
first the number of domains and nodes that experts lack of their guarantee, then the odds that some expert is lost, of all sets
of failed domains. It does not use `search/slots_core`: a domain may hold an expert several times, and whether a set of domains
loses an expert is no sum over GPUs.
"""

from collections.abc import Sequence
from functools import cache, reduce
from itertools import zip_longest
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.gpu_slots import failure_domains
from aurora.algorithms.replicas import survival_probability_core as core
from aurora.types import Cluster, FailureDomains, Placement, PlanOptions, SurvivalProbability
from aurora.types.arrays import BoolArray, FloatArray, IntArray

Polynomial = list[float]  # coefficient k: the summed odds of sets of k failures; whole numbers if all odds are


def all_held(held_WE: BoolArray, alive_MW: BoolArray) -> BoolArray:
    """Returns (...) bool, whether every item is on at least one alive holder.

    Args:
        held_WE: (W, E) bool, whether holder w has item e.
        alive_MW: (..., W) bool, whether each holder is alive.
    """
    return np.asarray((alive_MW.astype(np.float32) @ held_WE.astype(np.float32) > 0).all(axis=-1))


def minimal_holders(count_ED: NDArray[Any]) -> tuple[int, ...]:
    """Returns each expert's set of holders as bits, without duplicates and without supersets of other sets.

    count_ED (E, D) is above zero where domain d holds expert e. An expert whose holders include all holders of a second expert
    is lost only if the second is lost too.
    """
    bits = {sum(1 << int(domain) for domain in np.flatnonzero(count_D)) for count_D in count_ED}
    return _without_supersets(bits)


def _without_supersets(sets: set[int]) -> tuple[int, ...]:
    """The sets that contain no other of the sets, ascending."""
    minimal: list[int] = []
    for mask in sorted(sets, key=lambda bits: (bits.bit_count(), bits)):
        if all(other & ~mask for other in minimal):
            minimal.append(mask)
    return tuple(sorted(minimal))


class _TooManyBranches(Exception):
    """Ends a count that takes more branches than allowed."""


def recoverable_odds(holders: tuple[int, ...], odds: Sequence[float], most: int, branches: int) -> Polynomial:
    """Returns, for k = 0..most, the summed odds of the sets of k failed domains after which every item is still held.

    Args:
        holders: the sets of holders as bits, as `minimal_holders` returns them; an item is lost if one set fails entirely.
        odds: (D,) the odds that each domain fails, relative to the others.
        most: largest number of failures.
        branches: largest number of branches of the search.

    Returns:
        The sums for 0, 1, ..., most failures; empty if the search would take more branches.
    """
    spent = 0

    @cache
    def counted(sets: tuple[int, ...], limit: int) -> Polynomial:
        """The odds of the failures of at most `limit` of the domains in `sets` alone that lose no item."""
        nonlocal spent
        spent += 1
        if spent > branches:
            raise _TooManyBranches
        union = reduce(or_, sets)
        if len(sets) == 1:
            return [odd * (number < union.bit_count()) for number, odd in enumerate(subset_odds(union, odds, limit))]
        parts = _components(sets)
        if len(parts) > 1:
            return _product([within(part, reduce(or_, part), limit) for part in parts], limit)
        pivot = _most_frequent_domain(sets)
        rest = union & ~pivot
        alive = within(tuple(mask for mask in sets if not mask & pivot), rest, limit)
        if pivot in sets or not limit:
            return alive
        failed = within(_without_supersets({mask & ~pivot for mask in sets}), rest, limit - 1)
        odd = odds[pivot.bit_length() - 1]
        return _sum(alive, [0, *(odd * value for value in failed)])

    def within(sets: tuple[int, ...], universe: int, limit: int) -> Polynomial:
        """The same over all domains of `universe`."""
        short = tuple(mask for mask in sets if mask.bit_count() <= limit)  # larger sets cannot fail entirely
        free = subset_odds(universe & ~reduce(or_, short, 0), odds, limit)
        return _product([counted(short, limit), free], limit) if short else free

    try:
        return within(holders, (1 << len(odds)) - 1, most)
    except _TooManyBranches:
        return []


def subset_odds(bits: int, odds: Sequence[float], most: int) -> Polynomial:
    """Returns, for k = 0..most, the summed odds of all sets of k of the domains in `bits`; odds multiply within a set."""
    product: Polynomial = [1]
    for domain, odd in enumerate(odds):
        if bits >> domain & 1:
            product = _sum(product, [0, *(odd * value for value in product)])[: most + 1]
    return product


def _components(sets: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sets in groups, so that sets of different groups share no domain."""
    groups: list[tuple[int, list[int]]] = []
    for mask in sets:
        union, joined = mask, [mask]
        apart = []
        for other, members in groups:
            if other & union:
                union, joined = union | other, joined + members
            else:
                apart.append((other, members))
        groups = [*apart, (union, joined)]
    return [tuple(sorted(members)) for _, members in groups]


def _most_frequent_domain(sets: tuple[int, ...]) -> int:
    """The domain, as a bit, that is in most sets; the last of several."""
    times: dict[int, int] = {}
    for mask in sets:
        while mask:
            low = mask & -mask
            times[low] = times.get(low, 0) + 1
            mask ^= low
    return max(times, key=lambda bit: (times[bit], bit))


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    """The sum of two polynomials."""
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]


def _product(factors: Sequence[Polynomial], most: int) -> Polynomial:
    """The product of polynomials, up to coefficient `most`."""
    product: Polynomial = [1]
    for factor in factors:
        longer: Polynomial = [0] * min(len(product) + len(factor) - 1, most + 1)
        for i, a in enumerate(product[: most + 1]):
            for j, b in enumerate(factor[: most + 1 - i]):
                longer[i + j] += a * b
        product = longer
    return product


BRANCHES = 20_000  # limit of an exact count
DRAWS = 20_000  # samples for each number of failures
Z_95 = 1.96  # standard deviations of a 95 % interval


def held_by(slots_N: Sequence[Sequence[int]], failure_domains: FailureDomains, experts: int) -> IntArray:
    """Returns (E, D) int64, the replicas of each expert in each failure domain; slots_N[n] are the experts on node n."""
    count_ED = np.zeros((experts, failure_domains.domains), dtype=np.int64)
    for node_experts, domain in zip(slots_N, failure_domains.domain_N.tolist(), strict=True):
        np.add.at(count_ED, (list(node_experts), domain), 1)
    return count_ED


def relative_odds(failure_domains: FailureDomains) -> list[float]:
    """Returns the odds of each domain to fail, relative to the first domain's; integers if all are equal, for exact sums."""
    odds = (failure_domains.odds_D / failure_domains.odds_D[0]).tolist()
    return [1] * len(odds) if set(odds) == {1.0} else odds


def survival(count_ED: IntArray, failure_domains: FailureDomains, rng: np.random.Generator) -> SurvivalProbability:
    """Returns the probability that every expert is still held after 1, 2, ... failed domains.

    Given that k domains fail, the probability of a set of k domains is proportional to the product of their odds. The result is
    exact, by branching over domains. If that takes too long, it is exact for the first numbers of failures and sampled beyond.

    Args:
        count_ED: (E, D) int64, the replicas of each expert in each failure domain, at least one of each expert.
        failure_domains: the domains and their odds to fail.
        rng: for the samples.
    """
    domains = failure_domains.domains
    odds = relative_odds(failure_domains)
    odds_K: Polynomial = []
    for most in dict.fromkeys((domains, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
        counted = recoverable_odds(minimal_holders(count_ED), odds, most, BRANCHES) if most <= domains else []
        odds_K = counted or odds_K
        if (most == domains) == bool(counted):  # all is counted, or a part takes too long
            break
    return SurvivalProbability(
        *_with_samples(odds_K, count_ED, failure_domains, odds, rng), _upper_bound_K(count_ED.sum(axis=1), failure_domains)
    )


def plan_survival(cluster: Cluster, options: PlanOptions, placement: Placement) -> FloatArray | None:
    """Computes how likely every expert of a layer is still held after 1, 2, ... of D nodes failed.

    Args:
        cluster: the GPUs, on D nodes.
        options: a plan's options; without `min_replicas` nothing is computed.
        placement: the GPUs of the experts.

    Returns:
        (L, D-1) float64 probabilities; None without `options.min_replicas`.
    """
    if options.min_replicas is None:
        return None
    domains = failure_domains(cluster, np.array([max(1, len(experts)) for experts in placement.slots_LG[0]]))
    rng = np.random.default_rng(options.seed)
    return np.array([survival(held_by(held_G, domains, placement.experts), domains, rng).p_K for held_G in placement.slots_LG])


def _with_samples(
    odds_K: Polynomial, count_ED: IntArray, failure_domains: FailureDomains, odds: Sequence[float], rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """(D - 1,) probabilities and half-widths: the exact ones of `odds_K`, and samples beyond."""
    domains = failure_domains.domains
    whole = subset_odds((1 << domains) - 1, odds, domains)
    exact = domains if len(odds_K) > domains else len(odds_K)
    p_K, half_K = np.zeros(domains - 1), np.zeros(domains - 1)
    held_DE = count_ED.T > 0
    most_held = np.sort(held_DE.sum(axis=1))[::-1].cumsum()  # by how many are left
    for failures in range(1, domains):
        if failures < exact:
            p_K[failures - 1] = odds_K[failures] / whole[failures]
        elif most_held[domains - failures - 1] >= len(count_ED):
            p = float(all_held(held_DE, ~sample_failures(failure_domains.odds_D, failures, DRAWS, rng)).mean())
            p_K[failures - 1], half_K[failures - 1] = wilson(p, DRAWS)
    return p_K, half_K


def wilson(p: float, draws: int) -> tuple[float, float]:
    """Returns the centre and half-width of Wilson's 95 % interval of a frequency `p` among `draws` samples."""
    shrink = 1 + Z_95**2 / draws
    half = Z_95 / shrink * float(np.sqrt(p * (1 - p) / draws + Z_95**2 / (4 * draws**2)))
    centre = (p + Z_95**2 / (2 * draws)) / shrink
    return centre, min(half, centre, 1 - centre)  # rounding apart it is within 0 and 1


def sample_failures(odds_D: FloatArray, failures: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Draws (M, D) bool, `draws` sets of exactly `failures` failed domains.

    A set's probability is proportional to the product of its domains' odds_D (D,).
    """
    domains = len(odds_D)
    odds_D = odds_D / np.exp(np.log(odds_D).mean())
    rest_DK = np.zeros((domains + 1, failures + 1))  # the odds of all sets of 0..k of the domains from here on
    rest_DK[domains, 0] = 1
    for domain in range(domains - 1, -1, -1):
        rest_DK[domain] = rest_DK[domain + 1]
        rest_DK[domain, 1:] += odds_D[domain] * rest_DK[domain + 1, :-1]
    failed_MD = np.zeros((draws, domains), dtype=bool)
    left_M = np.full(draws, failures)
    for domain in range(domains):
        among_M = np.where(left_M > 0, odds_D[domain] * rest_DK[domain + 1, left_M - 1], 0.0)
        failed_MD[:, domain] = rng.random(draws) * rest_DK[domain, left_M] < among_M
        left_M -= failed_MD[:, domain]
    return failed_MD


def _upper_bound_K(count_E: IntArray, failure_domains: FailureDomains) -> FloatArray:
    """Returns an upper bound on the survival probability after 1, 2, ... failures, for all placements of the replicas.

    The slots of k failed domains hold all replicas of only so many experts. So the probability of losing some expert is at
    least the sum of the probabilities of losing each expert, divided by the number of experts that one set of failures can
    lose. An expert is lost least often on the domains least likely to fail.

    Returns (D - 1,) float64 for the replica counts count_E (E,).
    """
    domains, count_E = failure_domains.domains, np.sort(count_E)
    odds = np.sort(failure_domains.odds_D / failure_domains.odds_D.max()).tolist()
    all_K = subset_odds((1 << domains) - 1, odds, domains)
    slots = np.sort(failure_domains.slots_D)[::-1].cumsum()
    lost: dict[int, Polynomial] = {}  # by replicas: the odds that as many of the safest domains all fail
    for replicas in np.unique(np.minimum(count_E, domains)).tolist():
        others = subset_odds((1 << domains) - (1 << replicas), odds, domains)
        lost[replicas] = [0.0] * replicas + [float(np.prod(odds[:replicas])) * value for value in others]
    bound_K = np.ones(domains - 1)
    for failures in range(1, domains):
        lost_E = np.array([lost[min(int(count), domains)][failures] / all_K[failures] for count in count_E])
        lost_at_once = int(np.searchsorted(count_E.cumsum(), slots[failures - 1], side="right"))
        lost_share_E = lost_E.cumsum() / np.minimum(np.arange(1, len(count_E) + 1), max(lost_at_once, 1))
        bound_K[failures - 1] = 1 - min(1.0, float(lost_share_E.max()))
        if slots[domains - failures - 1] < len(count_E):
            bound_K[failures - 1] = 0.0
    return bound_K


MAX_LISTED_DOMAINS = 12  # all sets of failed domains are listed up to this number of domains


def swap_local_search(count_ED: IntArray, slots_D: IntArray, aim: core.SurvivalAim, kick_R2: FloatArray, most: int) -> IntArray:
    """Swaps replicas between failure domains while that lowers the objective `aim`, with random restarts.

    After each descent come two random swaps (a kick) and another descent; the result is kept unless it is worse than the best.

    Args:
        count_ED: (E, D) int64, the replicas of each expert in each domain at the start.
        slots_D: (D,) int64, slots of each domain.
        aim: the objective.
        kick_R2: (R, 2) random numbers in [0, 1), a row for each kick.
        most: maximum number of evaluations of the objective.

    Returns:
        (E, D) int64, the replicas of each expert in each domain in the best placement.
    """
    (experts, domains), empty_D = count_ED.shape, slots_D - count_ED.sum(axis=0)
    expert_X = np.repeat(np.tile(np.arange(experts + 1), domains), np.vstack([count_ED, empty_D]).T.ravel())
    domain_X = np.repeat(np.arange(domains), slots_D)
    slots = len(domain_X)
    kick_R4 = np.stack([kick_R2 * slots, kick_R2[:, ::-1] * slots * slots % slots], axis=2).astype(np.int64).reshape(-1, 4)
    found_ED = np.zeros((experts + 1, domains), dtype=np.int64)
    np.add.at(found_ED, (core.search(aim, expert_X, domain_X, experts, kick_R4, most), domain_X), 1)
    return found_ED[:-1]
