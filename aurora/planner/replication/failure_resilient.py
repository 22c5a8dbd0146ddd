"""SURVIVE: where the replicas of a layer's experts sit so that every expert is still held after failures, by name.

Each takes (count_E, hosts, aim, rng): the replicas of each expert (E,) int64; the nodes; what counts, see Aim; and gives how
many replicas of each expert each node holds, (E, N) int64.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.replication.domain_swaps import LISTED, improve
from aurora.planner.replication.mro import NAMED, Named, ranked
from aurora.planner.replication.recoverability import losing_nothing, minimal
from aurora.planner.replication.replica_counts import allocate, check_min_replicas, default_min_replicas
from aurora.planner.replication.survival_probability import held_by, survival
from aurora.types import FailureDomains, ResilientPlacement
from aurora.types.arrays import FloatArray, IntArray, counts
from aurora.types.replica_placement import expert_loads

DEFAULT = "aurora"
KICKS = 60
MEASURES = 4e6  # what all swaps of a layer may spend, in sets or experts looked at
BRANCHES = 2000  # of one count, when candidates are compared
MASKED = 62  # domains, at most, that swaps know


@dataclass(frozen=True)
class Aim:
    """floor: every expert on at least min(floor, N) distinct nodes and min(floor, D) distinct failure domains. failures: after
    how many failures surviving counts, first those that count most; a tie goes on to the next."""

    min_replicas: int
    failures: tuple[int, ...]


Maker = Callable[[IntArray, FailureDomains, Aim, np.random.Generator], IntArray]


def aim_of(min_replicas: int, hosts: FailureDomains, alive: int | None = None) -> Aim:
    """With `alive` domains left first; then the failures that the floor does not cover, fewest first."""
    if alive is not None and not 0 < alive < hosts.domains:
        raise BadInput(f"`alive`: expected 1 to {hosts.domains - 1} of {hosts.domains} failure domains, found {alive}")
    first = [] if alive is None else [hosts.domains - alive]
    rest = [*range(min_replicas, hosts.domains), *range(1, min(min_replicas, hosts.domains))]
    return Aim(min_replicas, tuple(dict.fromkeys([*first, *rest])))


def aurora(count_E: IntArray, hosts: FailureDomains, aim: Aim, rng: np.random.Generator) -> IntArray:
    """The best of the named ones, on nodes and on failure domains, each improved by swaps and made to keep the floor; and for
    no number of failures worse than `mro`, unless only that lets it keep the floor."""
    starts = [_by_domain(make(count_E, hosts.slots_N), hosts) for make in NAMED.values()]
    if hosts.domains < hosts.nodes:
        starts += [make(count_E, hosts.slots_D) for make in NAMED.values()]
    starts.append(_guaranteed(count_E, hosts, aim))
    baseline = starts[0]
    found = [start for start in starts if not _lacking(start, hosts, aim)]
    found += [each for each in _improved(starts, hosts, aim, rng) if not _lacking(each, hosts, aim)]
    return dealt(_chosen(found, baseline, hosts, aim), hosts)


def named(make: Named) -> Maker:
    """A placement that knows nodes alone: no failure domains, no floor."""

    def placed(count_E: IntArray, hosts: FailureDomains, aim: Aim, rng: np.random.Generator) -> IntArray:
        return make(count_E, hosts.slots_N)

    return placed


SURVIVE: dict[str, Maker] = {DEFAULT: aurora, **{name: named(make) for name, make in NAMED.items()}}


def survive(
    load_LE: FloatArray | IntArray,
    hosts: FailureDomains,
    method: str = DEFAULT,
    min_replicas: int | None = None,
    replicas: Sequence[int] | None = None,
    alive: int | None = None,
    seed: int = 0,
) -> ResilientPlacement:
    """Each layer's experts and replicas on `hosts`, and what they survive. load_LE (L, E), or (E,) for one layer: numbers >= 0.

    floor: replicas of each expert at least; by default as few as `replicas` says, or else 2 where they fit. replicas: how many
    each expert has, in every layer; by default by load (`allocate`). alive: optimise for so many failure domains left. Raises
    BadInput, InfeasiblePlan where the slots do not suffice.
    """
    load_LE = expert_loads("loads", load_LE)
    experts = load_LE.shape[1]
    if method not in SURVIVE:
        raise BadInput(f"`method`: expected one of {', '.join(SURVIVE)} to survive failures, found {method!r}")
    if seed < 0:
        raise BadInput(f"`seed`: expected zero or more, found {seed}")
    given_E = None if replicas is None else _given(replicas, experts, hosts, min_replicas)
    if min_replicas is None:
        min_replicas = default_min_replicas(experts, hosts) if given_E is None else int(given_E.min())
    check_min_replicas(experts, hosts, min_replicas)
    aim = aim_of(min_replicas, hosts, alive)
    warm_up(method)
    began = time.perf_counter()
    placed = []
    for load_E in load_LE:
        count_E = allocate(load_E, hosts, min_replicas) if given_E is None else given_E
        placed.append(SURVIVE[method](count_E, hosts, aim, np.random.default_rng(seed)))
    seconds = time.perf_counter() - began
    slots_LN = tuple(tuple(tuple(np.repeat(np.arange(experts), held_E).tolist()) for held_E in held_EN.T) for held_EN in placed)
    survivals = tuple(survival(held_by(slots_N, hosts, experts), hosts, np.random.default_rng(seed)) for slots_N in slots_LN)
    return ResilientPlacement(method, min_replicas, slots_LN, survivals, seconds)


def dealt(count_ED: IntArray, hosts: FailureDomains) -> IntArray:
    """(E, N) int64: the replicas of each failure domain on its nodes, an expert's on as many of them as can be."""
    held_EN = np.zeros((len(count_ED), hosts.nodes), dtype=np.int64)
    for domain in range(hosts.domains):
        node_J = np.flatnonzero(hosts.domain_N == domain)
        room_J = hosts.slots_N[node_J]
        left_E = count_ED[:, domain].copy()
        while left_E.any():  # each round one of each on a node; first what needs most nodes, to the nodes with most room
            for expert in np.lexsort((np.arange(len(left_E)), -left_E)).tolist():
                most = np.lexsort((node_J, -room_J))[: min(int(left_E[expert]), int((room_J > 0).sum()))]
                held_EN[expert, node_J[most]] += 1
                room_J[most] -= 1
                left_E[expert] -= len(most)
    return held_EN


@cache
def warm_up(method: str) -> None:
    """Compile the method now, once on a machine, instead of in its first placement."""
    hosts = FailureDomains.equal(3, 1)
    SURVIVE[method](np.ones(3, dtype=np.int64), hosts, aim_of(1, hosts), np.random.default_rng(0))


def _given(replicas: Sequence[int], experts: int, hosts: FailureDomains, min_replicas: int | None) -> IntArray:
    count_E = counts("`replicas`", replicas, 1)
    if len(count_E) != experts or (count_E < (min_replicas or 1)).any():
        raise BadInput(f"`replicas`: expected {experts} counts of {min_replicas or 1} or more, found {count_E.tolist()}")
    if count_E.sum() > hosts.slots_N.sum():
        raise InfeasiblePlan(f"{count_E.sum()} replicas need as many slots; {hosts.nodes} nodes have {hosts.slots_N.sum()}")
    return count_E


def _by_domain(held_EN: IntArray, hosts: FailureDomains) -> IntArray:
    count_ED = np.zeros((len(held_EN), hosts.domains), dtype=np.int64)
    np.add.at(count_ED.T, hosts.domain_N, held_EN.T)
    return count_ED


def _guaranteed(count_E: IntArray, hosts: FailureDomains, aim: Aim) -> IntArray:
    """(E, D) that keeps the floor wherever slots allow: first the replicas that it asks for, always to the domains with most
    room, as Gale and Ryser fill a table; then the rest, where fewest of the expert are."""
    count_ED = np.zeros((len(count_E), hosts.domains), dtype=np.int64)
    room_D = hosts.slots_D
    for wanted_E in (np.minimum(count_E, min(aim.min_replicas, hosts.domains)), count_E):
        for expert in ranked(count_E):
            while (left := int(wanted_E[expert] - count_ED[expert].sum())) > 0:
                crowded_D = count_ED[expert] // hosts.nodes_D
                open_D = np.lexsort((np.arange(hosts.domains), -room_D, count_ED[expert], crowded_D))
                open_D = open_D[room_D[open_D] > 0]
                least = open_D[count_ED[expert, open_D] == count_ED[expert, open_D[0]]][:left]
                count_ED[expert, least] += 1
                room_D[least] -= 1
    return count_ED


def _lacking(count_ED: IntArray, hosts: FailureDomains, aim: Aim) -> bool:
    on_nodes = np.minimum(count_ED, hosts.nodes_D).sum(axis=1)
    on_domains = (count_ED > 0).sum(axis=1)
    return bool(
        (on_nodes < min(aim.min_replicas, hosts.nodes)).any() or (on_domains < min(aim.min_replicas, hosts.domains)).any()
    )


def _improved(starts: Iterable[IntArray], hosts: FailureDomains, aim: Aim, rng: np.random.Generator) -> list[IntArray]:
    """Each start after its swaps, none where there are too many domains."""
    domains = hosts.domains
    if not 1 < domains <= MASKED:
        return []
    listed = domains <= LISTED
    size_F = np.array([failed.bit_count() for failed in range(1 << domains)] if listed else [], dtype=np.int64)
    odds_F = np.zeros(len(size_F))
    if listed:
        failed_FD = np.arange(1 << domains)[:, None] >> np.arange(domains) & 1
        odds_F = np.where(failed_FD, hosts.odds_D / hosts.odds_D[0], 1.0).prod(axis=1)
    turn_K = np.full(domains + 1, domains)
    turn_K[list(aim.failures) if listed else slice(1, domains)] = np.arange(1, domains)
    found = []
    for start in starts:
        count_ED = start.copy()
        most = int(MEASURES / (domains << domains if listed else len(count_ED) * 8))
        needs = min(aim.min_replicas, domains), min(aim.min_replicas, hosts.nodes)
        kick_R2 = rng.random((KICKS if listed else 0, 2))
        improve(count_ED, hosts.slots_D, hosts.nodes_D, *needs, odds_F, size_F, turn_K, kick_R2, most)
        found.append(count_ED)
    return found


def _chosen(found: Sequence[IntArray], baseline: IntArray, hosts: FailureDomains, aim: Aim) -> IntArray:
    """The one that loses something least often, in the turn of the aim, among those never below `baseline` if there are any.

    Those whose exact count takes too long are not compared; where none can be, the first with the fewest rarest holders.
    """
    odds = [int(odd) if (hosts.odds_D == hosts.odds_D[0]).all() else odd for odd in (hosts.odds_D / hosts.odds_D[0]).tolist()]

    def kept(count_ED: IntArray) -> list[float]:
        return losing_nothing(minimal(count_ED), odds, hosts.domains, BRANCHES)[1:]

    base = kept(baseline)
    known = [(counted, each) for each in found if (counted := kept(each))]
    if not known:
        return min(found, key=lambda each: np.bincount([bits.bit_count() for bits in minimal(each)], minlength=99).tolist())
    never_below = [pair for pair in known if base and all(a >= b * (1 - 1e-12) for a, b in zip(pair[0], base, strict=True))]
    return max(never_below or known, key=lambda pair: [pair[0][failures - 1] for failures in aim.failures])[1]
