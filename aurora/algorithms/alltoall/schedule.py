"""Makes orders and their checked schedules, for one all-to-all, and for dispatch and combine of a placed layer."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
from aurora.algorithms.alltoall.registry import ORDER, OrderStrategy
from aurora.algorithms.check.plans import check_order, check_schedule, check_steps
from aurora.algorithms.network.switch import steps_seconds, timed, timed_steps
from aurora.errors import BadInput
from aurora.types import Cluster, Hierarchy, Network, Order, Schedule
from aurora.types.arrays import IntArray, square_bytes

DEFAULT_BPS = 12.5e9  # 100 Gbps, Aurora §8.1
MANY_RANKS = 48  # from here on, timing "all-at-once" takes seconds
NEAR = 0.1  # of MANY_RANKS ranks, the gap at which "auto" tries no further order
BEST_RANKS = 64  # most ranks to search for: 2 % shorter at 16 ranks, half a per cent at 64, for a tenth of a second at most


def auto_orders(ranks: int) -> tuple[str, str]:
    """Returns the names of the two orders of which "auto" keeps the one with the shorter schedule.

    The first has one partner at a time: `openshop-best`, or above BEST_RANKS ranks `openshop`. On mixed ports it can take twice
    the fluid bound; the second, `all-at-once`, covers that case. From MANY_RANKS ranks on, `all-at-once` is tried only if the
    first is not within NEAR of its bound.
    """
    return ("openshop-best" if ranks <= BEST_RANKS else "openshop"), "all-at-once"


def order(
    bytes_GG: ArrayLike,
    cluster: Cluster | None = None,
    method: str | Order | OrderStrategy = "openshop",
) -> Schedule:
    """Orders one all-to-all, and returns its checked schedule on the cluster's network, with lower bounds.

    Args:
        bytes_GG: (G, G) integers, the bytes that rank i sends to rank j; the diagonal is ignored.
        cluster: the GPUs and their network; None: equal ports of 100 Gbit/s.
        method: a name in ORDER; "auto", the shorter of two orders; a function as in ORDER; or an Order to time.

    Returns:
        The Schedule, with the fluid bound and the one-to-one bound.

    Raises:
        BadInput: if the matrix is not square, whole and non-negative, or does not fit the cluster.

    Source:
        Aurora (arXiv:2410.17043) Thm 4.2; Gonzalez & Sahni 1976.

    Example:
        >>> import aurora
        >>> schedule = aurora.order([[0, 4, 6], [5, 0, 2], [3, 7, 0]])
        >>> round(schedule.makespan_s / schedule.fluid_bound_s, 3)
        1.0
    """
    matrix = square_bytes("traffic", bytes_GG)
    n = len(matrix)
    if cluster is not None and len(cluster) != n:
        raise BadInput(f"order: cluster {cluster.name!r} has {len(cluster)} GPUs, the traffic matrix {n} rows")
    if isinstance(method, str) and method not in ORDER and method != "auto":
        raise BadInput(f"`method`: expected one of auto, {', '.join(ORDER)}, found {method!r}")
    network = cluster.network if cluster else equal_network(n)
    return scheduled(matrix, network, method, rng=np.random.default_rng(SEED))[1]


class _Seed(np.random.SeedSequence):
    """A seed that keeps the state of its generators, which takes longer to make than the order of a few ranks."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.generate_state = cache(super().generate_state)  # type: ignore[assignment, method-assign]


SEED = _Seed(0)


@lru_cache(maxsize=64)
def equal_network(ranks: int) -> Network:
    """Returns a network of equal ports of DEFAULT_BPS; it is cached, with the rates computed from it."""
    return Network.equal(ranks, DEFAULT_BPS)


def scheduled(
    bytes_GG: IntArray, network: Network, method: str | Order | OrderStrategy, *, rng: np.random.Generator
) -> tuple[Order, Schedule]:
    """Makes an order and its checked schedule.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: the network that carries them.
        method: a name in ORDER; "auto" takes the shortest of `auto_orders`; a function as in ORDER; or the order itself.
        rng: draws random priorities.

    Raises:
        BadInput: if the name is not in ORDER, or the function returns no Order.
        BrokenPlan: if the order does not carry every pair once.
    """

    if isinstance(method, str) and method == "auto":
        first, other = auto_orders(len(bytes_GG))
        best = scheduled(bytes_GG, network, first, rng=rng)
        if best[1].gap <= (NEAR if len(bytes_GG) >= MANY_RANKS else 0.0):
            return best
        return min(best, scheduled(bytes_GG, network, other, rng=rng), key=lambda candidate: candidate[1].makespan_s)
    chosen = _valid_order(method, bytes_GG, network, rng)
    schedule = timed(chosen, bytes_GG, network)
    check_schedule(schedule, bytes_GG, network)
    return chosen, schedule


def _valid_order(method: str | Order | OrderStrategy, bytes_GG: IntArray, network: Network, rng: np.random.Generator) -> Order:
    """The order that `method` is, names or makes; it carries every pair once."""
    if isinstance(method, str):
        if method not in ORDER:
            raise BadInput(f"`order`: expected one of auto, {', '.join(ORDER)}, found {method!r}; `aurora.register` adds one")
        method = ORDER[method]
    chosen = method if isinstance(method, Order) else method(bytes_GG, network, rng=rng)
    if not isinstance(chosen, Order):
        raise BadInput(f"`method`: expected a function that returns an Order, found one that returns {type(chosen).__name__}")
    check_order(chosen, len(bytes_GG))
    return chosen


def hierarchical_order_s(
    bytes_SGG: IntArray, hierarchy: Hierarchy, network: Network, method: str, *, rng: np.random.Generator
) -> tuple[Order, float]:
    """Makes one order for all steps of a hierarchical dispatch; returns it and the predicted seconds of all steps.

    Args:
        bytes_SGG: (S, G, G) int64 with zero diagonals, bytes from each rank to each other in each step.
        hierarchy: the servers.
        network: the network that carries them.
        method: a name in ORDER; "auto" takes the faster of `hierarchical_order` and all-at-once. From MANY_RANKS ranks on,
            all-at-once is not tried, because its prediction takes up to seconds.
        rng: draws random priorities.
    """
    orders = _hierarchical_orders(bytes_SGG.sum(axis=0), hierarchy, network, method, rng)
    return min(((candidate, steps_seconds(candidate, bytes_SGG, network)) for candidate in orders), key=lambda timed: timed[1])


def _hierarchical_orders(
    bytes_GG: IntArray, hierarchy: Hierarchy, network: Network, method: str, rng: np.random.Generator
) -> list[Order]:
    """The orders of which `hierarchical_order_s` takes the faster one."""
    if method != "auto":
        return [_valid_order(method, bytes_GG, network, rng)]
    first = hierarchical_order(bytes_GG, hierarchy, network, rng=rng)
    return [first] if hierarchy.ranks >= MANY_RANKS else [first, _valid_order("all-at-once", bytes_GG, network, rng)]


def scheduled_steps(
    bytes_SGG: IntArray, hierarchy: Hierarchy | None, network: Network, method: str, *, rng: np.random.Generator
) -> tuple[Order, Schedule]:
    """Makes the order of a flat or hierarchical dispatch; returns it and its checked schedule.

    Args:
        bytes_SGG: (S, G, G) int64 with zero diagonals, bytes from each rank to each other in each step; S is 1 if it is flat.
        hierarchy: the servers; None if the dispatch is flat.
        network, method, rng: as in `scheduled` or, with a hierarchy, `hierarchical_order_s`.
    """
    if hierarchy is None:
        return scheduled(bytes_SGG[0], network, method, rng=rng)
    orders = _hierarchical_orders(bytes_SGG.sum(axis=0), hierarchy, network, method, rng)
    best = orders[0] if len(orders) == 1 else min(orders, key=lambda candidate: steps_seconds(candidate, bytes_SGG, network))
    schedule = timed_steps(best, bytes_SGG, network)
    check_steps(schedule, bytes_SGG, network)
    return best, schedule


def order_exchanges(
    there_SGG: IntArray,
    back_SGG: IntArray,
    hierarchy: Hierarchy | None,
    network: Network,
    method: str,
    *,
    rng: np.random.Generator,
) -> tuple[Order, Order, Schedule]:
    """Makes the orders of a layer's dispatch and combine, and the dispatch's checked schedule.

    If each rank has one partner at a time, or all-to-alls are hierarchical, the combine's order is the dispatch's reversed.
    Otherwise only senders keep a sequence, and dispatch and combine are ordered separately.

    Args:
        there_SGG: (S, G, G) int64, bytes of the dispatch in each step.
        back_SGG: (S, G, G) int64, bytes of the combine in each step.
        hierarchy, network, method, rng: as in `scheduled_steps`.

    Returns:
        (order of the dispatch, order of the combine, schedule of the dispatch).
    """
    dispatch, schedule = scheduled_steps(there_SGG, hierarchy, network, method, rng=rng)
    if hierarchy is None and not dispatch.one_to_one:
        return dispatch, scheduled(back_SGG[0], network, method, rng=rng)[0], schedule
    return dispatch, dispatch.reversed, schedule


def batch_order(network: Network, method: str, seed: int) -> Callable[[IntArray, Hierarchy | None], Order]:
    """Returns a function that makes the order of an all-to-all from its bytes (S, G, G) and its hierarchy.

    With one seed, the same bytes give the same order. If the all-to-all is hierarchical, the bytes must be the dispatch's.
    """
    return lambda bytes_SGG, hierarchy: scheduled_steps(bytes_SGG, hierarchy, network, method, rng=np.random.default_rng(seed))[
        0
    ]
