"""Replicas of experts on servers: which servers hold one so that fewer rows cross, and how their GPUs share what they serve."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.algorithms.placement.server_search import NONE, TINY, ServerLimits
from aurora.algorithms.replicas.registry import ReplicaStrategy
from aurora.algorithms.workload.serving_gpus import serving_servers
from aurora.types import GpuSlots, Placement
from aurora.types.arrays import BoolArray, FloatArray, IntArray


class Homes(NamedTuple):
    """A layer in which each expert has a home: the server that serves it for all servers that hold no replica of it.

    Attributes:
        experts_UK: (U, K) int64, the experts of each token.
        server_U: (U,) int64, the server that each token starts on; NONE if tokens are taken to start on all servers alike.
        limits: limits of placements.
        server_E: (E,) int64, the home of each expert.
        from_NE: (N, E) the part of each expert's tokens that starts on each server.
    """

    experts_UK: IntArray
    server_U: IntArray
    limits: ServerLimits
    server_E: IntArray
    from_NE: FloatArray

    @property
    def weight_N(self) -> FloatArray:
        """(N,) number of ranks of each server / number of all ranks."""
        return np.bincount(self.limits.server_G) / len(self.limits.server_G)

    @property
    def spare_N(self) -> IntArray:
        """(N,) int64, number of slots of each server minus number of experts whose home it is."""
        slots_N = np.bincount(self.limits.server_G, weights=self.limits.slots_G, minlength=len(self.from_NE)).astype(np.int64)
        return slots_N - np.bincount(self.server_E, minlength=len(slots_N))

    def shares(self, serving_NE: IntArray) -> FloatArray:
        """Returns (N, E), the share of each expert's tokens that each server computes. Inverse of `serving_servers`.

        Args:
            serving_NE: (N, E) int64, the server that serves expert e for tokens that start on server n.
        """
        share_NE = np.zeros(serving_NE.shape)
        np.add.at(share_NE, (serving_NE, np.arange(len(self.server_E))), self.weight_N[:, None])
        return share_NE

    def seconds(self, serving_NE: IntArray) -> FloatArray:
        """Returns (N,) seconds of expert compute of each server, balanced over its GPUs; serving_NE as in `shares`."""
        server_s_N = np.zeros(len(serving_NE))
        np.add.at(server_s_N, serving_NE, self.from_NE * self.limits.server_s_NE[serving_NE, np.arange(len(self.server_E))])
        return server_s_N

    def tokens(self, server: int) -> IntArray:
        """Returns (V, K) int64, the experts of each token that starts on a server, or on all servers alike."""
        return np.asarray(self.experts_UK[(self.server_U == server) | (self.server_U == NONE)])


def server_replicas(layer: Homes, most_N: IntArray, least: int = 1) -> FloatArray | None:
    """Chooses the servers that hold replicas of each expert, and the share of the expert's tokens that each of them takes.

    First, each expert is put on `least` servers, those that save the most rows. Then each server adds, one by one, the experts
    that save the most rows that it sends. Last, servers above their time limit give work away: another holder of an expert
    serves one more server in their place, or they drop a replica; each time the change that adds the fewest rows per second.

    Args:
        layer: the experts' homes.
        most_N: (N,) int64, maximum number of replicas on each server; exceeded if `least` needs it.
        least: minimum number of servers that hold each expert.

    Returns:
        (N, E) float64, the share of each expert that each server takes, zero if the server does not hold it; None if the slots
        do not suffice for `least`.
    """
    servers, every_E = len(layer.from_NE), np.arange(len(layer.server_E))
    every_N1, spare_N = np.arange(servers)[:, None], layer.spare_N
    serving_NE, left_N = np.tile(layer.server_E, (servers, 1)), np.minimum(most_N, spare_N)
    own_N = [layer.tokens(server) for server in range(servers)]

    def saved(server: int) -> FloatArray:
        return _rows_saved(own_N[server], serving_NE[server], server)

    for _ in range(least - 1):
        saved_NE = np.stack([saved(server) for server in range(servers)])
        saved_NE[serving_NE == every_N1] = -np.inf
        at_X = np.repeat(np.arange(servers), spare_N)
        if len(at_X) < len(every_E):
            return None
        try:
            expert_X, slot_X = linear_sum_assignment(saved_NE[at_X].T, maximize=True)
        except ValueError:  # an expert is on all servers with spare slots
            return None
        serving_NE[at_X[slot_X], expert_X] = at_X[slot_X]
        taken_N = np.bincount(at_X[slot_X], minlength=servers)
        spare_N, left_N = spare_N - taken_N, np.maximum(left_N - taken_N, 0)
    least_NE = serving_NE == every_N1
    for server in range(servers):
        for _ in range(int(left_N[server])):
            if (saved_E := saved(server)).any():
                serving_NE[server, saved_E.argmax()] = server
    return _within_limit(layer, own_N, serving_NE, least_NE)


def _within_limit(layer: Homes, own_N: list[IntArray], serving_NE: IntArray, kept_NE: BoolArray) -> FloatArray:
    """Shares (N, E) by which no server is above its limit, if that can be reached; kept_NE are held in any case.

    Args:
        layer: the experts' homes.
        own_N: the tokens of each server, as `Homes.tokens` returns them.
        serving_NE: (N, E) int64, the server that serves each server's tokens of each expert.
        kept_NE: (N, E) bool, experts that a server keeps.
    """
    share_NE, weight_N, limit_s = layer.shares(serving_NE), layer.weight_N, layer.limits.most_server_s * (1 - TINY)
    while (server_s_N := layer.seconds(serving_NE)).max() > limit_s:
        full = int(server_s_N.argmax())
        best, least_cost = None, np.inf
        for expert in np.flatnonzero((share_NE[full] > 0) & ((share_NE > 0).sum(axis=0) > 1)).tolist():
            for then_N in _given_away(share_NE[:, expert], weight_N, full, server_s_N, bool(kept_NE[full, expert])):
                then_NE = serving_NE.copy()
                then_NE[:, expert] = serving_servers(then_N[None], weight_N)[:, 0]
                then_s_N = layer.seconds(then_NE)
                eased_s = np.maximum(server_s_N - limit_s, 0).sum() - np.maximum(then_s_N - limit_s, 0).sum()
                if eased_s <= TINY * limit_s:
                    continue
                rows = 0
                for server in np.flatnonzero(then_NE[:, expert] != serving_NE[:, expert]).tolist():
                    own_VK = own_N[server][(own_N[server] == expert).any(axis=1)]
                    rows += _rows(own_VK, then_NE[server], server) - _rows(own_VK, serving_NE[server], server)
                cost = rows / eased_s
                if cost < least_cost:
                    best, least_cost = (expert, then_N, then_NE), cost
        if best is None:
            break
        share_NE[:, best[0]], serving_NE = best[1], best[2]
    return share_NE


def _given_away(share_N: FloatArray, weight_N: FloatArray, full: int, server_s_N: FloatArray, fixed: bool) -> list[FloatArray]:
    """Shares (N,) of an expert that relieve a full server: it serves one server less or, unless fixed, gives its replica up."""
    others_N = np.where((share_N > 0) & (np.arange(len(share_N)) != full), server_s_N, np.inf)
    to, shares = int(others_N.argmin()), []
    served = serving_servers(share_N[None], weight_N)[:, 0] == full
    if len(foreign := np.flatnonzero(served & (share_N == 0))):
        moved = share_N.copy()
        moved[[full, to]] += [-weight_N[foreign[-1]], weight_N[foreign[-1]]]
        shares.append(moved)
    if not fixed:
        moved = share_N.copy()
        moved[to] += moved[full]
        moved[full] = 0
        shares.append(moved)
    return shares


def levelled(layer: Homes, share_NE: FloatArray, make: ReplicaStrategy, rng: np.random.Generator) -> Placement:
    """Places experts on the GPUs of each server so that loads are balanced; share_NE gives each server's share of each expert.

    Spare slots of a server get further replicas of its experts.

    Args:
        layer: the experts' homes.
        share_NE: (N, E) float64, as `server_replicas` returns them; a server has at most as many experts as slots.
        make: a replica strategy, which places the experts of one server on its GPUs.
        rng: for `make`.
    """
    limits, experts = layer.limits, len(layer.server_E)
    serving_NE = serving_servers(share_NE.T, layer.weight_N)
    part_NE = np.zeros(serving_NE.shape)
    np.add.at(part_NE, (serving_NE, np.arange(experts)), layer.from_NE)
    split_EG = np.zeros((experts, len(limits.server_G)))
    for server, own_E in enumerate(share_NE):
        gpu_X, expert_X = np.flatnonzero((limits.server_G == server) & (limits.slots_G > 0)), np.flatnonzero(own_E)
        if not len(expert_X):
            continue
        gpu_s_GE = limits.gpu_s_GE[gpu_X][:, expert_X]
        speed_G = gpu_s_GE.sum(axis=1)
        cost_G = speed_G / speed_G[0] if speed_G.all() else np.ones(len(gpu_X))
        load_X = np.maximum(gpu_s_GE[0] * part_NE[server, expert_X], 0.0)
        held_GP, share_GP = make(load_X, GpuSlots(limits.slots_G[gpu_X], cost_G), None, rng)
        for gpu, held_P, share_P in zip(gpu_X, held_GP, share_GP, strict=True):
            own_X = expert_X[held_P[held_P >= 0]]
            split_EG[own_X, gpu] = share_P[held_P >= 0] * own_E[own_X]
    return Placement.divided(tuple(tuple(np.flatnonzero(split_G).tolist()) for split_G in split_EG.T), split_EG)


def _rows_saved(own_VK: IntArray, serving_E: IntArray, server: int) -> FloatArray:
    """(E,) rows of a server's tokens that a replica of each expert there saves.

    A row that several experts of a token need counts in equal parts for each of them.

    Args:
        own_VK: (V, K) int64, the experts of each token that may start on the server.
        serving_E: (E,) int64, the server that serves this server's tokens of each expert.
        server: the server.
    """
    serving_VK, servers = serving_E[own_VK], int(serving_E.max()) + 1
    needed_X = (serving_VK + servers * np.arange(len(own_VK))[:, None]).ravel()
    part_X = np.where(serving_VK.ravel() == server, 0.0, 1 / np.bincount(needed_X)[needed_X])
    return np.bincount(own_VK.ravel(), part_X, len(serving_E)).astype(np.float64)


def _rows(own_VK: IntArray, serving_E: IntArray, server: int) -> int:
    """Rows of a server's tokens that cross; arguments as in `_rows_saved`."""
    needs_VN = np.zeros((len(own_VK), max(int(serving_E.max()), server) + 1), dtype=np.bool_)
    needs_VN[np.arange(len(own_VK))[:, None], serving_E[own_VK]] = True
    needs_VN[:, server] = False
    return int(np.count_nonzero(needs_VN))
