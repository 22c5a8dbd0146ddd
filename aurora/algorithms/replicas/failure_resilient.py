"""SURVIVE: failure-resilient placements by name, which put replicas on nodes so that every expert is still held after failures.

A strategy is a function (count_E, failure_domains, aim, rng): the number of replicas of each expert, (E,) int64; the nodes; the
objective, see Aim; and a random generator. It returns the replicas of each expert on each node, (E, N) int64. A new strategy
takes one such function and one line in SURVIVE.

`place_to_survive` needs the fewest slots with which every expert survives any k failures of D ranks or servers. An expert
survives them if and only if it is on at least k + 1 ranks or servers. So E experts need at least E * (k + 1) slots. These are
enough if k < D and all have equally many slots: replicas are dealt to ranks in turn, so that those of an expert get to k + 1
consecutive ranks, and no rank gets more than its part of all replicas, rounded up.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.replicas import load_bounds
from aurora.algorithms.replicas.rebalance import rebalance
from aurora.algorithms.replicas.survival_probability import (
    MAX_LISTED_DOMAINS,
    minimal_holders,
    recoverable_odds,
    relative_odds,
    survival,
    swap_local_search,
)
from aurora.algorithms.replicas.survival_probability_core import SurvivalAim
from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import FailureDomains, GpuSlots, PlanOptions, ReplicaPlacement, ResilientPlacement
from aurora.types.arrays import FloatArray, IntArray, counts
from aurora.types.placement import EMPTY, expert_loads

DEFAULT_MIN_REPLICAS = 2  # every expert survives any one failure


def allocate(load_E: FloatArray | IntArray, failure_domains: FailureDomains, min_replicas: int) -> IntArray:
    """Returns (E,) int64, replica counts in proportion to load that fill all slots.

    By rising load, each expert gets its share of the remaining slots, rounded down, but at least `min_replicas`.

    Args:
        load_E: (E,) loads of zero or more; if all are zero they count as equal. Shares are computed exactly.
        failure_domains: the nodes and their slots.
        min_replicas: minimum replicas of each expert.

    Raises:
        BadInput, InfeasiblePlan: as `check_min_replicas`.
    """
    experts = len(load_E)
    check_min_replicas(experts, failure_domains, min_replicas)
    loads = [Fraction(load) for load in np.asarray(load_E).tolist()] if load_E.any() else [Fraction(1)] * experts
    count_E = np.zeros(experts, dtype=np.int64)
    rest, slots = sum(loads, start=Fraction(0)), int(failure_domains.slots_N.sum())
    for expert in np.argsort(load_E, kind="stable").tolist():
        share = loads[expert] * slots / rest  # every later load is as large, so rest is above zero
        count_E[expert] = max(int(share), min_replicas)
        rest -= loads[expert]
        slots -= int(count_E[expert])
    return count_E


def capped(count_E: IntArray, load_E: FloatArray | IntArray, most: int) -> IntArray:
    """Returns the replica counts count_E (E,), limited to `most` for each expert.

    Replicas above the limit go one by one to the expert with the largest load per replica among those below it.
    """
    count_E = np.minimum(spare_E := count_E, most)
    for _ in range(min(int((spare_E - count_E).sum()), int((most - count_E).sum()))):
        count_E[np.where(count_E < most, load_E / count_E, -1.0).argmax()] += 1
    return count_E


def default_min_replicas(experts: int, failure_domains: FailureDomains) -> int:
    """Returns the default of `min_replicas`: DEFAULT_MIN_REPLICAS, or fewer if nodes or failure domains hold fewer."""
    useful = (int(np.minimum(slots_X, experts).sum()) for slots_X in (failure_domains.slots_N, failure_domains.slots_D))
    return max(1, min(DEFAULT_MIN_REPLICAS, min(useful) // experts))


def check_min_replicas(experts: int, failure_domains: FailureDomains, min_replicas: int) -> None:
    """Raises BadInput or InfeasiblePlan unless every expert can have `min_replicas` replicas on distinct nodes.

    If there are fewer nodes than `min_replicas`, it is enough that every expert can be on all nodes.
    """
    if min_replicas < 1:
        raise BadInput(f"`min_replicas`: expected one or more, found {min_replicas}")
    have = int(failure_domains.slots_N.sum())
    if experts * min_replicas > have:
        raise InfeasiblePlan(
            f"`min_replicas` {min_replicas}: {experts} experts x {min_replicas} replicas need {experts * min_replicas} slots; "
            f"{failure_domains.nodes} nodes have {have}"
        )
    distinct, useful = min(min_replicas, failure_domains.nodes), int(np.minimum(failure_domains.slots_N, experts).sum())
    if experts * distinct > useful:
        raise InfeasiblePlan(
            f"`min_replicas` {min_replicas}: {experts} experts on {distinct} distinct nodes each need {experts * distinct} "
            f"slots; of {have} slots {useful} can hold different experts"
        )


def checked_counts(replicas: Sequence[int], experts: int, least: int, slots_X: IntArray, holders: str) -> IntArray:
    """Returns `replicas` as (E,) int64, after checking that each is at least `least` and that the slots suffice.

    Args:
        replicas: number of replicas of each expert.
        experts: number of experts, E.
        least: minimum replicas of each expert.
        slots_X: slots of each GPU or node.
        holders: the word for GPUs or nodes in error messages.
    """
    count_E = counts("`replicas`", replicas, 1)
    if len(count_E) != experts or (count_E < least).any():
        raise BadInput(f"`replicas`: expected {experts} counts of {least} or more, found {count_E.tolist()}")
    if count_E.sum() > slots_X.sum():
        raise InfeasiblePlan(f"{count_E.sum()} replicas need as many slots; {len(slots_X)} {holders} have {slots_X.sum()}")
    return count_E


DEFAULT = "aurora"
KICKS = 120  # random restarts of the swap local search
MEASURE_OPERATIONS = 8e6  # budget of the search from one start, in sets that the measure visits
BRANCHES = 2000  # limit of one exact count, when candidates are compared


@dataclass(frozen=True)
class Aim:
    """Guarantee and objective of a failure-resilient placement."""

    min_replicas: int  # every expert is on at least min(min_replicas, N) distinct nodes and min(min_replicas, D) domains
    failures: tuple[int, ...]  # numbers of failed domains after which survival is optimised, the most important first


FailureStrategy = Callable[[IntArray, FailureDomains, Aim, np.random.Generator], IntArray]


def aim_of(min_replicas: int, failure_domains: FailureDomains, alive: int | None = None) -> Aim:
    """Returns the aim of a placement.

    It optimises the numbers of failures that `min_replicas` does not guarantee to survive, fewest failures first; with `alive`,
    the number of failures that leaves `alive` domains comes first.

    Args:
        min_replicas: minimum replicas of each expert.
        failure_domains: the domains.
        alive: number of domains left in the case to optimise first; None: the fewest failures come first.

    Raises:
        BadInput: unless `alive` is None or from 1 to one less than the domains.
    """
    if alive is not None and not 0 < alive < failure_domains.domains:
        raise BadInput(
            f"`alive`: expected 1 to {failure_domains.domains - 1} of {failure_domains.domains} failure domains, found {alive}"
        )
    first = [] if alive is None else [failure_domains.domains - alive]
    rest = [*range(min_replicas, failure_domains.domains), *range(1, min(min_replicas, failure_domains.domains))]
    return Aim(min_replicas, tuple(dict.fromkeys([*first, *rest])))


def mro(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Places by Lazarus's maximum rank overlap: groups experts sorted by replica count (`ranked`), and gives each group nodes.

    A group has as many experts as the smallest node has slots, and as many nodes as the fewest replicas of an expert in it.
    Empty slots then go round robin to experts with replicas left; a node may then hold an expert twice.

    Args:
        count_E: (E,) int64, the replicas of each expert.
        slots_N: (N,) int64, the slots of each node.

    Returns:
        (E, N) int64, the replicas of each expert on each node.

    Source:
        Lazarus (arXiv:2407.04656) §4.1. Its Theorem 1 claims that this is optimal, which it is not.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    rank = ranked(count_E)
    slots, first = int(slots_N.min()), 0
    if len(rank) <= slots:  # each expert fits on its first count_E nodes
        for expert in rank:
            held_EN[expert, : count_E[expert]] = 1
    else:
        for start in range(0, len(rank), slots):
            group = rank[start : start + slots]
            served_by = slice(first, min(len(slots_N), first + int(count_E[group[0]])))
            held_EN[group, served_by] = 1
            first = served_by.stop
    left_E = count_E - held_EN.sum(axis=1)
    round_robin = cycle(rank)
    for node in range(len(slots_N)):
        for _ in range(min(int(slots_N[node] - held_EN[:, node].sum()), int(left_E.sum()))):
            expert = next(expert for expert in round_robin if left_E[expert])
            held_EN[expert, node] += 1
            left_E[expert] -= 1
    return held_EN


def ranked(count_E: IntArray) -> list[int]:
    """Returns the experts sorted by rising replica count, then by number."""
    return [int(expert) for expert in np.argsort(count_E, kind="stable")]


def aurora(count_E: IntArray, failure_domains: FailureDomains, aim: Aim, rng: np.random.Generator) -> IntArray:
    """Takes the best of a few placements that keeps `min_replicas`, with a swap local search from each if domains are few.

    They are Lazarus' on nodes and on failure domains, and one that keeps `min_replicas` wherever slots allow. For every number
    of failures, the result survives with at least the probability of `mro`, unless no candidate that does also keeps
    `min_replicas`.

    Args:
        count_E: (E,) int64, the number of replicas of each expert.
        failure_domains: the nodes, their slots and domains.
        aim: the guarantee and the objective.
        rng: for the search.

    Returns:
        (E, N) int64, the replicas of each expert on each node.

    Raises:
        InfeasiblePlan: if the slots of the failure domains do not keep `min_replicas`.
    """
    starts = [_by_domain(mro(count_E, failure_domains.slots_N), failure_domains)]
    if failure_domains.domains < failure_domains.nodes:
        starts.append(mro(count_E, failure_domains.slots_D))
    starts.append(_guaranteed(count_E, failure_domains, aim))
    candidates = [*starts, *_improved(starts, failure_domains, aim, rng)]
    feasible = [count_ED for count_ED in candidates if _keeps_min_replicas(count_ED, failure_domains, aim)]
    if not feasible:
        distinct = min(aim.min_replicas, failure_domains.domains)
        raise InfeasiblePlan(
            f"`min_replicas` {aim.min_replicas}: {len(count_E)} experts on {distinct} distinct failure domains each do not fit "
            f"into {', '.join(map(str, failure_domains.slots_D.tolist()))} slots"
        )
    return _deal_to_nodes(_best(feasible, starts[0], failure_domains, aim), failure_domains)


SURVIVE: dict[str, FailureStrategy] = {
    DEFAULT: aurora,
    "mro": lambda count_E, failure_domains, aim, rng: mro(count_E, failure_domains.slots_N),
}


def place_for_failures(
    loads: ArrayLike,
    failure_domains: FailureDomains,
    method: str = DEFAULT,
    min_replicas: int | None = None,
    replicas: Sequence[int] | None = None,
    alive: int | None = None,
    seed: int = 0,
) -> ResilientPlacement:
    """Places replicas on nodes so that, after nodes fail, every expert is still held with the highest probability.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        failure_domains: the nodes' slots and which nodes fail together; `FailureDomains.equal(nodes, slots)` for equal nodes.
        method: "aurora", or "mro", that of Lazarus.
        min_replicas: minimum replicas of each expert, each on another node; None: two, or one if two do not fit.
        replicas: (E,) number of replicas of each expert; None: in proportion to load.
        alive: number of failure domains left in the case to optimise first; None: the fewest failures come first.
        seed: random seed of strategies that draw.

    Returns:
        The placement, with the probability that every expert is still held after 1, 2, ... failures of domains.

    Raises:
        BadInput: if an argument is out of range.
        InfeasiblePlan: if the slots do not suffice.

    Source:
        Lazarus (arXiv:2407.04656) §4.1, whose placement is "mro".

    Example:
        >>> import aurora
        >>> domains = aurora.FailureDomains.equal(nodes=4, slots=3)
        >>> aurora.place_for_failures([1, 1, 1, 1], domains, replicas=[3, 3, 3, 3]).survival_L[0].p_K.tolist()
        [1.0, 1.0, 0.0]
    """
    load_LE = expert_loads("loads", loads)
    experts = load_LE.shape[1]
    if method not in SURVIVE:
        raise BadInput(f"`method`: expected one of {', '.join(SURVIVE)} to survive failures, found {method!r}")
    PlanOptions(seed=seed)  # refuses what no seed can be
    given_E = (
        None if replicas is None else checked_counts(replicas, experts, min_replicas or 1, failure_domains.slots_N, "nodes")
    )
    if min_replicas is None:
        min_replicas = default_min_replicas(experts, failure_domains) if given_E is None else int(given_E.min())
    check_min_replicas(experts, failure_domains, min_replicas)
    if min_replicas > failure_domains.nodes:
        raise InfeasiblePlan(f"`min_replicas` {min_replicas}: expected as many nodes, found {failure_domains.nodes}")
    aim = aim_of(min_replicas, failure_domains, alive)
    began = time.perf_counter()
    held_LEN = []
    for load_E in load_LE:
        count_E = allocate(load_E, failure_domains, min_replicas) if given_E is None else given_E
        held_LEN.append(SURVIVE[method](count_E, failure_domains, aim, np.random.default_rng(seed)))
    seconds = time.perf_counter() - began
    slots_LN = tuple(
        tuple(tuple(np.repeat(np.arange(experts), held_E).tolist()) for held_E in held_EN.T) for held_EN in held_LEN
    )
    survival_L = tuple(
        survival(_by_domain(held_EN, failure_domains), failure_domains, np.random.default_rng(seed)) for held_EN in held_LEN
    )
    return ResilientPlacement(method, min_replicas, slots_LN, survival_L, seconds)


def _deal_to_nodes(count_ED: IntArray, failure_domains: FailureDomains) -> IntArray:
    """(E, N) int64: the replicas count_ED (E, D) of each domain on its nodes, those of an expert on as many as possible.

    In each round every expert places one replica on each of as many nodes as it has replicas left. Experts with the most
    replicas left go first, to the nodes with the most empty slots.
    """
    held_EN = np.zeros((len(count_ED), failure_domains.nodes), dtype=np.int64)
    for domain in range(failure_domains.domains):
        node_X = np.flatnonzero(failure_domains.domain_N == domain)
        empty_X = failure_domains.slots_N[node_X]
        left_E = count_ED[:, domain].copy()
        while left_E.any():
            for expert in np.lexsort((np.arange(len(left_E)), -left_E)).tolist():
                most = np.lexsort((node_X, -empty_X))[: min(int(left_E[expert]), int((empty_X > 0).sum()))]
                held_EN[expert, node_X[most]] += 1
                empty_X[most] -= 1
                left_E[expert] -= len(most)
    return held_EN


def _by_domain(held_EN: IntArray, failure_domains: FailureDomains) -> IntArray:
    """(E, D) int64: the replicas of each expert in each failure domain."""
    return np.asarray(held_EN @ (failure_domains.domain_N[:, None] == np.arange(failure_domains.domains)))


def _guaranteed(count_E: IntArray, failure_domains: FailureDomains, aim: Aim) -> IntArray:
    """(E, D) int64: a placement that keeps `min_replicas` wherever slots allow.

    The replicas that `min_replicas` requires go first, to the domains with the most empty slots (the greedy rule of the
    Gale-Ryser theorem). Each further replica goes to the domain with the fewest replicas of the expert.
    """
    count_ED = np.zeros((len(count_E), failure_domains.domains), dtype=np.int64)
    empty_D = failure_domains.slots_D
    for wanted_E in (np.minimum(count_E, min(aim.min_replicas, failure_domains.domains)), count_E):
        for expert in ranked(count_E):
            while (lack := int(wanted_E[expert] - count_ED[expert].sum())) > 0:
                crowded_D = count_ED[expert] // failure_domains.nodes_D
                open_D = np.lexsort((np.arange(failure_domains.domains), -empty_D, count_ED[expert], crowded_D))
                open_D = open_D[empty_D[open_D] > 0]
                least = open_D[count_ED[expert, open_D] == count_ED[expert, open_D[0]]][:lack]
                count_ED[expert, least] += 1
                empty_D[least] -= 1
    return count_ED


def _keeps_min_replicas(count_ED: IntArray, failure_domains: FailureDomains, aim: Aim) -> bool:
    """Returns whether every expert is on as many nodes and domains as `aim` guarantees."""
    on_nodes = np.minimum(count_ED, failure_domains.nodes_D).sum(axis=1)
    on_domains = (count_ED > 0).sum(axis=1)
    return bool(
        (on_nodes >= min(aim.min_replicas, failure_domains.nodes)).all()
        and (on_domains >= min(aim.min_replicas, failure_domains.domains)).all()
    )


def _improved(
    starts: Iterable[IntArray], failure_domains: FailureDomains, aim: Aim, rng: np.random.Generator
) -> list[IntArray]:
    """The result of the swap local search from each start; empty if there are too many domains to list what fails."""
    domains = failure_domains.domains
    if not 1 < domains <= MAX_LISTED_DOMAINS:
        return []
    failed_FD = np.arange(1 << domains)[:, None] >> np.arange(domains) & 1
    odds_F = np.where(failed_FD, failure_domains.odds_D / failure_domains.odds_D[0], 1.0).prod(axis=1)
    rank_K = np.full(domains + 1, domains)
    rank_K[list(aim.failures)] = np.arange(1, domains)
    distinct = min(aim.min_replicas, domains), min(aim.min_replicas, failure_domains.nodes)
    measured_by = SurvivalAim(failure_domains.nodes_D, *distinct, odds_F, rank_K[failed_FD.sum(axis=1)])
    most = int(MEASURE_OPERATIONS / (domains << domains))
    return [swap_local_search(start, failure_domains.slots_D, measured_by, rng.random((KICKS, 2)), most) for start in starts]


def _best(candidates: Sequence[IntArray], baseline: IntArray, failure_domains: FailureDomains, aim: Aim) -> IntArray:
    """The candidate most likely to survive, compared in the order of aim.failures; if possible one never below `baseline`.

    Candidates whose exact count takes too long are left out. If that leaves none, the candidate with the fewest experts on few
    domains is taken.
    """
    odds = relative_odds(failure_domains)

    def survived(count_ED: IntArray) -> list[float]:
        """The odds of the sets of 1, 2, ... failures that lose no expert; empty if counting takes too long."""
        return recoverable_odds(minimal_holders(count_ED), odds, failure_domains.domains, BRANCHES)[1:]

    base = survived(baseline)
    counted = [(odds_K, candidate) for candidate in candidates if (odds_K := survived(candidate))]
    if not counted:
        return min(
            candidates,
            key=lambda count_ED: np.bincount([bits.bit_count() for bits in minimal_holders(count_ED)], minlength=99).tolist(),
        )
    never_below = [pair for pair in counted if base and all(a >= b * (1 - 1e-12) for a, b in zip(pair[0], base, strict=True))]
    return max(never_below or counted, key=lambda pair: [pair[0][failures - 1] for failures in aim.failures])[1]


def fewest_slots(experts: int, gpus: int, failures: int, servers: int | None = None) -> int:
    """Returns the fewest slots per GPU, equal on all GPUs, with which every expert is still held after any `failures` failures.

    Args:
        experts: number of experts of a layer.
        gpus: number of GPUs.
        failures: maximum number of GPUs, or servers, that fail at the same time.
        servers: number of servers of equally many GPUs, which fail as a whole; None: each GPU fails by itself.

    Raises:
        BadInput: if a number is out of range or the servers do not divide the GPUs.
        InfeasiblePlan: if no GPU or server would be left.
    """
    domains = gpus if servers is None else servers
    if min(experts, gpus, domains) < 1 or gpus % domains:
        raise BadInput(
            f"expected experts, and servers of equally many GPUs, found {experts} on {gpus} GPUs in {domains} servers"
        )
    if failures < 0:
        raise BadInput(f"`failures`: expected zero or more, found {failures}")
    if failures >= domains:
        raise InfeasiblePlan(f"{failures} failures: expected more GPUs or servers, found {domains}")
    return -(-experts * (failures + 1) // gpus)


def place_to_survive(
    loads: ArrayLike, gpus: int, failures: int, servers: int | None = None, slots: int | None = None
) -> ReplicaPlacement:
    """Places experts so that all are still held after any `failures` failures, and balances the GPUs' loads.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        gpus, failures, servers: as in `fewest_slots`.
        slots: slots of each GPU; None: the fewest.

    Returns:
        The placement, with the largest load of a GPU in each layer and a lower bound on it.

    Raises:
        BadInput, InfeasiblePlan: as in `fewest_slots`; also if `slots` are too few.
    """
    load_LE = expert_loads("loads", loads)
    experts, domains, copies = load_LE.shape[1], gpus if servers is None else servers, failures + 1
    least = fewest_slots(experts, gpus, failures, servers)
    slots = least if slots is None else slots
    if slots < least:
        raise InfeasiblePlan(
            f"{failures} failures: {experts} experts x {copies} copies need {least} slots per GPU, found {slots}"
        )
    turn_X = np.arange(experts * copies)  # the copies of an expert in turn, experts by load
    gpu_X = turn_X % domains * (gpus // domains) + turn_X // domains % (gpus // domains)
    held_LGP = np.full((len(load_LE), gpus, slots), EMPTY, dtype=np.int64)
    held_LGP[:, gpu_X, turn_X // gpus] = np.repeat(np.argsort(-load_LE, axis=1, kind="stable"), copies, axis=1)
    domain_G = np.arange(gpus) // (gpus // domains)
    rebalanced = rebalance(load_LE, held_LGP, GpuSlots.equal(gpus, slots), enough=0.0, min_replicas=copies, domain_G=domain_G)
    bound_L, have = rebalanced.mean_load_L, GpuSlots.equal(gpus, slots)
    if experts * copies == gpus * slots:  # no expert can have a further copy
        bound_L = np.array([load_bounds.given_counts(load_E, have, np.full(experts, copies)) for load_E in load_LE])
    return ReplicaPlacement(
        f"any {failures} of {domains} may fail",
        rebalanced.placement,
        rebalanced.max_load_L,
        rebalanced.mean_load_L,
        np.minimum(bound_L, rebalanced.max_load_L),  # apart only by rounding
        rebalanced.seconds,
    )
