"""Times an order: its schedule for given bytes on a network."""

from dataclasses import fields

import numpy as np
from numba import njit

from aurora.planner.network.bounds import cut_bound, fluid_bound, one_to_one_bound
from aurora.planner.network.switch import Pieces, Switch
from aurora.types import Network, Order, Schedule
from aurora.types.arrays import IntArray


def timed(order: Order, bytes_GG: IntArray, network: Network, staged: bool = False) -> Schedule:
    """Computes the schedule of an order when all ranks begin at once; bytes_GG (G, G) int64 has a zero diagonal."""
    return timed_steps(order, bytes_GG[None], network, staged)


def timed_steps(order: Order, bytes_SGG: IntArray, network: Network, staged: bool = False) -> Schedule:
    """Computes the schedule of an all-to-all of one step or several when all ranks begin at once.

    Each rank goes on to the next step as soon as its own transfers of a step have ended, as the runtime's ranks do. On a
    fabric, transfers share links as well as ports, and the schedule names the cut that limits it.

    Args:
        order: the order of every step.
        bytes_SGG: (S, G, G) int64 with zero diagonals, bytes from each rank to each other in each step.
        network: ports, start-ups, fabric and incast.
        staged: whether transfers run in stages, as on NCCL; see `Switch.open`.

    Returns:
        A Schedule, with `step_X` if there are several steps. Its bounds are those of the bytes of all steps.
    """
    steps, bytes_GG = len(bytes_SGG), bytes_SGG.sum(axis=0) if len(bytes_SGG) > 1 else bytes_SGG[0]
    plain = steps == 1 and not order.paced and order.tier_X is None and network.fabric is None and not network.curves
    if plain and order.one_to_one and not staged:
        made = one_to_one_pieces(order, bytes_GG, network)
    else:
        made = by_start(fluid_pieces(order, bytes_SGG, network, staged))
    tier_X = None
    if order.tier_X is not None:
        tier_GG = np.zeros(bytes_GG.shape, dtype=np.int64)
        tier_GG[*order.pairs_X2.T] = order.tier_X
        tier_X = tier_GG[made.src_X, made.dst_X]
    return Schedule(
        order.method,
        order.one_to_one,
        made.src_X,
        made.dst_X,
        made.bytes_X,
        made.start_s_X,
        made.end_s_X,
        made.rate_Bps_X,
        fluid_bound(bytes_GG, network),
        one_to_one_bound(bytes_GG, network.without_startup),
        None if network.fabric is None else cut_bound(bytes_GG, network),
        tier_X,
        made.number_X if steps > 1 else None,
    )


def steps_seconds(order: Order, bytes_SGG: IntArray, network: Network, staged: bool = False) -> float:
    """Predicts the seconds of one all-to-all of one step or several; arguments as in `timed_steps`.

    Schedules keep to the rates of ports. A prediction does not where curves say that ports let some bytes pass at once.
    """
    switch = Switch(network)
    _perform(switch, order, bytes_SGG, staged)
    return switch.now_s


def by_start(made: Pieces) -> Pieces:
    """Returns pieces in the sequence of their starts."""
    row_X = np.lexsort((made.rate_Bps_X, made.end_s_X, made.bytes_X, made.dst_X, made.src_X, made.start_s_X))
    return Pieces(*(getattr(made, column.name)[row_X] for column in fields(made)))


def one_to_one_pieces(order: Order, bytes_GG: IntArray, network: Network) -> Pieces:
    """Returns the timed pieces of an order with `one_to_one`, by start and source.

    The order is not paced and has one tier, and the network has neither fabric nor curves.

    A transfer starts when both of its ports have ended the one before. Ports are not shared then, so that every transfer flows
    at one rate.
    """
    src_X, dst_X = order.pairs_X2.T
    size_X = bytes_GG[src_X, dst_X]
    if order.share_X2 is not None:
        first_X, end_X = order.cuts(size_X).T
        size_X = end_X - first_X
    return Pieces(*_one_after_the_other(order.pairs_X2, size_X, network.pair_Bps_GG, network.pair_startup_s_GG))


@njit(cache=True, error_model="numpy")
def _one_after_the_other(pairs_X2, size_X, Bps_GG, startup_s_GG):
    """The columns of `Pieces`; size_X are the bytes of each row."""
    rows, ranks = len(pairs_X2), len(Bps_GG)
    whole_3X, real_3X = np.empty((3, rows), np.int64), np.empty((3, rows))  # source, destination, bytes; start, end, B/s
    free_out_s, free_in_s = np.zeros((2, ranks))
    at, by_start = 0, True
    for row in range(rows):
        src, dst, size = pairs_X2[row, 0], pairs_X2[row, 1], size_X[row]
        if size > 0:
            start_s = max(free_out_s[src], free_in_s[dst]) + startup_s_GG[src, dst]
            end_s = start_s + size / Bps_GG[src, dst]
            free_out_s[src] = free_in_s[dst] = end_s
            whole_3X[0, at], whole_3X[1, at], whole_3X[2, at] = src, dst, size
            real_3X[0, at], real_3X[1, at], real_3X[2, at] = start_s, end_s, Bps_GG[src, dst]
            by_start &= at == 0 or start_s >= real_3X[0, at - 1]
            at += 1
    whole_3X, real_3X = whole_3X[:, :at], real_3X[:, :at]
    if not by_start:
        row_X = np.argsort(real_3X[0], kind="mergesort")
        whole_3X, real_3X = whole_3X[:, row_X], real_3X[:, row_X]
    for row in range(1, at):  # rows that start at the same time go by source
        at = row
        while at > 0 and real_3X[0, at] == real_3X[0, at - 1] and whole_3X[0, at] < whole_3X[0, at - 1]:
            for column in range(3):
                whole_3X[column, at - 1], whole_3X[column, at] = whole_3X[column, at], whole_3X[column, at - 1]
                real_3X[column, at - 1], real_3X[column, at] = real_3X[column, at], real_3X[column, at - 1]
            at -= 1
    number_X = np.zeros(whole_3X.shape[1], np.int64)
    return whole_3X[0], whole_3X[1], whole_3X[2], real_3X[0], real_3X[1], real_3X[2], number_X


def fluid_pieces(order: Order, bytes_SGG: IntArray, network: Network, staged: bool = False) -> Pieces:
    """Returns the timed pieces of any order, event by event on the Switch: concurrent transfers share ports and links.

    bytes_SGG (S, G, G) are the bytes of each step of the all-to-all, whose number the pieces have.
    """
    switch = Switch(network, logging=True)
    _perform(switch, order, bytes_SGG, staged)
    return switch.pieces()


def _perform(switch: Switch, order: Order, bytes_SGG: IntArray, staged: bool) -> None:
    """Performs all steps of an all-to-all on a switch."""
    steps = [switch.open(order, bytes_GG, staged) for bytes_GG in bytes_SGG]
    ready = [(0, rank) for rank in range(bytes_SGG.shape[1])]  # steps that ranks come to
    while ready or switch.busy:
        for step, rank in ready:
            while step < len(steps) and switch.join(steps[step], rank):
                step += 1
        ready = [(step + 1, rank) for step, rank in switch.run()]
