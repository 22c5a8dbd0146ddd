"""How likely every expert is still held after k failures: exact where a search ends soon, else by drawing, with an interval.

Every expert has its holders, the failure domains that hold it, as bits of one integer. Lost is what has all holders failed.
"""

from collections.abc import Sequence

import numpy as np

from aurora.planner.replication.recoverability import Polynomial, any_of, covered, losing_nothing, minimal
from aurora.types import FailureDomains, SurvivalProbability
from aurora.types.arrays import FloatArray, IntArray

BRANCHES = 20_000  # of a search, before it gives up
DRAWS = 20_000
WIDTH = 1.96  # standard deviations: 95 %


def held_by(slots_N: Sequence[Sequence[int]], hosts: FailureDomains, experts: int) -> IntArray:
    """(E, D) int64: how many replicas of each expert each failure domain holds."""
    count_ED = np.zeros((experts, hosts.domains), dtype=np.int64)
    for held, domain in zip(slots_N, hosts.domain_N.tolist(), strict=True):
        np.add.at(count_ED, (list(held), domain), 1)
    return count_ED


def survival(count_ED: IntArray, hosts: FailureDomains, rng: np.random.Generator) -> SurvivalProbability:
    """See SurvivalProbability. count_ED (E, D) int64: the replicas of each expert in each failure domain, one at least of each.

    Given that k fail, a set of k is as likely as the product of its odds. Exact: inclusion by branching over domains, parts
    that share no domain apart; where that takes too long, exact up to as many failures as it can and drawn beyond.
    """
    domains = hosts.domains
    odds = [int(odd) if (hosts.odds_D == hosts.odds_D[0]).all() else odd for odd in (hosts.odds_D / hosts.odds_D[0]).tolist()]
    found: Polynomial = []
    for most in dict.fromkeys((domains, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
        counted = losing_nothing(minimal(count_ED), odds, most, BRANCHES) if most <= domains else []
        found = counted or found
        if (most == domains) == bool(counted):  # all is counted, or a part takes too long
            break
    return SurvivalProbability(*_filled(found, count_ED, hosts, odds, rng), best(count_ED.sum(axis=1), hosts))


def _filled(
    found: Polynomial, count_ED: IntArray, hosts: FailureDomains, odds: Sequence[float], rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """(D-1,) probabilities and half-widths: what was counted, and drawn beyond."""
    domains = hosts.domains
    whole = any_of((1 << domains) - 1, odds, domains)
    exact = domains if len(found) > domains else len(found)
    p_K, half_K = np.zeros(domains - 1), np.zeros(domains - 1)
    held_DE = count_ED.T > 0
    most_held = np.sort(held_DE.sum(axis=1))[::-1].cumsum()  # by how many are left
    for failures in range(1, domains):
        if failures < exact:
            p_K[failures - 1] = found[failures] / whole[failures]
        elif most_held[domains - failures - 1] >= len(count_ED):
            p = float(covered(held_DE, ~drawn(hosts.odds_D, failures, DRAWS, rng)).mean())
            p_K[failures - 1], half_K[failures - 1] = wilson(p, DRAWS)
    return p_K, half_K


def wilson(p: float, draws: int) -> tuple[float, float]:
    """The centre and half the width of the interval that holds a probability seen as p in so many draws (95 %, Wilson)."""
    shrink = 1 + WIDTH**2 / draws
    half = WIDTH / shrink * float(np.sqrt(p * (1 - p) / draws + WIDTH**2 / (4 * draws**2)))
    centre = (p + WIDTH**2 / (2 * draws)) / shrink
    return centre, min(half, centre, 1 - centre)  # rounding apart it is within 0 and 1


def drawn(odds_D: FloatArray, failures: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(M, D) bool: `draws` sets of exactly so many failed domains, each as likely as the product of its odds."""
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


def best(count_E: IntArray, hosts: FailureDomains) -> FloatArray:
    """(D-1,) above what no placement of count_E (E,) replicas in `hosts` survives k failures.

    Of k failed domains, the slots hold all replicas of few experts only; so the sets that lose some expert are at least the
    sets that lose each, summed, over how many one set can lose. Holders lie at best in the domains least likely to fail.
    """
    domains, count_E = hosts.domains, np.sort(count_E)
    odds = np.sort(hosts.odds_D / hosts.odds_D.max()).tolist()
    all_K = any_of((1 << domains) - 1, odds, domains)
    slots = np.sort(hosts.slots_D)[::-1].cumsum()
    sure: dict[int, Polynomial] = {}  # the odds that all of the so many safest domains fail
    for held in np.unique(np.minimum(count_E, domains)).tolist():
        others = any_of((1 << domains) - (1 << held), odds, domains)
        sure[held] = [0.0] * held + [float(np.prod(odds[:held])) * value for value in others]
    best_K = np.ones(domains - 1)
    for failures in range(1, domains):
        lost_E = np.array([sure[min(int(count), domains)][failures] / all_K[failures] for count in count_E])
        together = int(np.searchsorted(count_E.cumsum(), slots[failures - 1], side="right"))
        share_E = lost_E.cumsum() / np.minimum(np.arange(1, len(count_E) + 1), max(together, 1))
        best_K[failures - 1] = 1 - min(1.0, float(share_E.max()))
        if slots[domains - failures - 1] < len(count_E):
            best_K[failures - 1] = 0.0
    return best_K
