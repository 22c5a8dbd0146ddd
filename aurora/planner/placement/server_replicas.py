"""Replicas over servers: experts in spare slots of servers whose tokens choose them, so that fewer rows cross.

A server that holds an expert serves its own tokens of it (`planner/workload/serving_gpus`); all other servers' tokens go where
they went before. So a replica saves rows of one server's tokens and costs none of another's, and servers fill their spare slots
each for itself. Slots that are left take further replicas inside their server, which level its GPUs.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from aurora.planner.placement.server_search import NONE, Limits
from aurora.planner.replication.registry import ReplicaStrategy
from aurora.types import GpuSlots, Placement
from aurora.types.arrays import FloatArray, IntArray


class Homes(NamedTuple):
    """A layer whose experts each have a home: the server that serves them for all servers without a replica.

    Attributes:
        experts_UK: (U, K) int64, the experts of each token.
        server_U: (U,) int64, the server that each token starts on, or NONE if all servers' are alike.
        limits: what placements are held to.
        server_E: (E,) int64, the home of each expert.
        from_NE: (N, E) the part of each expert's tokens that starts on each server.
    """

    experts_UK: IntArray
    server_U: IntArray
    limits: Limits
    server_E: IntArray
    from_NE: FloatArray

    @property
    def spare_N(self) -> IntArray:
        """(N,) int64, how many slots of each server are left."""
        slots_N = np.bincount(self.limits.server_G, weights=self.limits.slots_G, minlength=len(self.from_NE)).astype(np.int64)
        return slots_N - np.bincount(self.server_E, minlength=len(slots_N))


def server_replicas(layer: Homes, most_N: IntArray, least: int = 1) -> NDArray[np.bool_] | None:
    """Chooses which servers hold replicas of which experts.

    First, experts come to `least` servers each, so that this saves the most rows. Then, again and again, the server with the
    least load takes the expert that saves most of its own rows. Where none fits into the limits, one is taken all the same, as
    further ones may relieve that server. The last state within the limits counts; servers above them do not get longer.

    Args:
        layer: the experts' homes.
        most_N: (N,) int64, how many replicas each server holds at most; more where `least` needs them.
        least: on how many servers each expert is at least.

    Returns:
        (N, E) bool, the experts that each server holds; None if the slots do not allow `least`.
    """
    limits, from_NE, servers = layer.limits, layer.from_NE, len(layer.from_NE)
    every_N, every_E = np.arange(servers), np.arange(len(layer.server_E))
    serving_NE, spare_N = np.tile(layer.server_E, (servers, 1)), layer.spare_N
    left_N = np.minimum(most_N, spare_N)

    def saved(server: int) -> FloatArray:
        saved_E: FloatArray = _rows_saved(layer.experts_UK, layer.server_U, serving_NE[server], server)
        return saved_E

    for _ in range(least - 1):
        saved_NE = np.stack([saved(server) for server in range(servers)])
        saved_NE[serving_NE == every_N[:, None]] = -np.inf
        at_X = np.repeat(every_N, spare_N)
        if len(at_X) < len(every_E):
            return None
        try:
            expert_X, slot_X = linear_sum_assignment(saved_NE[at_X].T, maximize=True)
        except ValueError:  # an expert is on all servers with spare slots
            return None
        serving_NE[at_X[slot_X], expert_X] = at_X[slot_X]
        taken_N = np.bincount(at_X[slot_X], minlength=servers)
        spare_N, left_N = spare_N - taken_N, np.maximum(left_N - taken_N, 0)
    server_s_N = np.zeros(servers)
    np.add.at(server_s_N, serving_NE, from_NE * limits.server_s_NE[serving_NE, every_E])
    saved_NE = np.stack([saved(server) * (left_N[server] > 0) for server in range(servers)])
    kept_NE, most_s = serving_NE.copy(), max(limits.most_server_s, server_s_N.max())
    while saved_NE.any():
        server, expert = _next_replica(layer, saved_NE, server_s_N)
        before = serving_NE[server, expert]
        server_s_N[before] -= from_NE[server, expert] * limits.server_s_NE[before, expert]
        server_s_N[server] += from_NE[server, expert] * limits.server_s_NE[server, expert]
        serving_NE[server, expert] = server
        left_N[server] -= 1
        saved_NE[server] = saved(server) * (left_N[server] > 0)
        if server_s_N.max() <= most_s:
            kept_NE = serving_NE.copy()
    return np.asarray(kept_NE == every_N[:, None])


def _next_replica(layer: Homes, saved_NE: FloatArray, server_s_N: FloatArray) -> tuple[int, int]:
    """The server with the least load (N,) and the expert that saves most of its rows (N, E), within the limits if any is."""
    servers = [server for server in np.argsort(server_s_N, kind="stable").tolist() if saved_NE[server].any()]
    for server in servers:
        then_s_E = server_s_N[server] + layer.from_NE[server] * layer.limits.server_s_NE[server]
        fitting_E = np.where(then_s_E <= layer.limits.most_server_s, saved_NE[server], 0.0)
        if fitting_E.any():
            return server, int(fitting_E.argmax())
    return servers[0], int(saved_NE[servers[0]].argmax())


def levelled(layer: Homes, holds_NE: NDArray[np.bool_], make: ReplicaStrategy, rng: np.random.Generator) -> Placement:
    """Returns the placement of a layer whose servers hold given experts, on GPUs by load.

    A server's spare slots take further replicas of its experts. By their shares, the home serves all servers without an expert.

    Args:
        layer: the experts' homes.
        holds_NE: (N, E) bool, the experts of each server, as many as it has slots or fewer.
        make: places the experts of a server on its GPUs.
        rng: for `make`.
    """
    limits, experts = layer.limits, len(layer.server_E)
    every_E, weight_N = np.arange(experts), np.bincount(limits.server_G) / len(limits.server_G)
    share_NE = holds_NE * weight_N[:, None]
    share_NE[layer.server_E, every_E] += 1 - share_NE.sum(axis=0)
    part_NE = np.where(holds_NE, layer.from_NE, 0.0)
    part_NE[layer.server_E, every_E] += 1 - part_NE.sum(axis=0)
    split_EG = np.zeros((experts, len(limits.server_G)))
    for server, held_E in enumerate(holds_NE):
        gpu_X, expert_X = np.flatnonzero((limits.server_G == server) & (limits.slots_G > 0)), np.flatnonzero(held_E)
        if not len(expert_X):
            continue
        gpu_s_GE = limits.gpu_s_GE[gpu_X][:, expert_X]
        speed_G = gpu_s_GE.sum(axis=1)
        cost_G = speed_G / speed_G[0] if speed_G.all() else np.ones(len(gpu_X))
        load_X = np.maximum(gpu_s_GE[0] * part_NE[server, expert_X], 0.0)
        held_GP, share_GP = make(load_X, GpuSlots(limits.slots_G[gpu_X], cost_G), None, rng)
        for gpu, held, share in zip(gpu_X, held_GP, share_GP, strict=True):
            own_X = expert_X[held[held >= 0]]
            split_EG[own_X, gpu] = share[held >= 0] * share_NE[server, own_X]
    slots = tuple(tuple(np.flatnonzero(split_G).tolist()) for split_G in split_EG.T)
    if sum(map(len, slots)) == experts:
        return Placement((slots,))
    return Placement((slots,), (tuple(tuple(split_EG[list(held), gpu].tolist()) for gpu, held in enumerate(slots)),))


@njit(cache=True, nogil=True)
def _rows_saved(experts_UK: IntArray, server_U: IntArray, serving_E: IntArray, server: int) -> FloatArray:
    """(E,) rows of a server's tokens that a replica of each expert there saves.

    A row that several experts of a token need counts in equal parts for each of them.

    Args:
        experts_UK: (U, K) int64, the experts of each token.
        server_U: (U,) int64, the server that each token starts on, or NONE.
        serving_E: (E,) int64, the server that serves this server's tokens of each expert.
        server: the server.
    """
    saved_E = np.zeros(len(serving_E))
    for u in range(len(experts_UK)):
        if server_U[u] != NONE and server_U[u] != server:
            continue
        for e in experts_UK[u]:
            if serving_E[e] == server:
                continue
            together = 0
            for f in experts_UK[u]:
                together += serving_E[f] == serving_E[e]
            saved_E[e] += 1 / together
    return saved_E
