"""Lower bounds on the time of one all-to-all, from ports and NICs; and on the largest cost of a GPU over all placements.

Source: Aurora Thm 4.2 and 5.2 (arXiv:2410.17043).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from aurora.algorithms.network import one_to_one_core as core
from aurora.types import Network
from aurora.types.arrays import FloatArray, IntArray, locked

ROUNDING = 1e-12  # relative error of a sum of floats that cancel


def port_seconds(bytes_GG: IntArray, network: Network) -> FloatArray:
    """Returns (G,) float64 seconds in which each GPU sends or receives all its bytes, whichever takes longer."""
    seconds_G: FloatArray = np.maximum(bytes_GG.sum(axis=1) / network.out_Bps_G, bytes_GG.sum(axis=0) / network.in_Bps_G)
    return seconds_G


def fluid_bound(bytes_GG: IntArray, network: Network) -> float:
    """Returns the fluid bound in seconds: the largest of all ports' bytes / rate.

    Start-ups, NICs and incast do not count. A schedule reaches the bound if it starts all transfers at once, each at the rate
    bytes / bound. On equal ports, one-to-one transfers reach it too.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other, as everywhere in this module.
        network: only its port rates are used.

    Source: Aurora Thm 4.2.
    """
    return float(port_seconds(bytes_GG, network).max(initial=0.0))


def pair_rates(network: Network) -> FloatArray:
    """Returns (G, G) float64, bytes per second of each transfer if it is alone on the network's ports and NICs."""
    return network.pair_Bps_GG if network.servers is None else _rates_by_nics(network)


@lru_cache(maxsize=8)
def _rates_by_nics(network: Network) -> FloatArray:
    """The function above, between servers."""
    assert network.servers is not None
    server_G = np.array(network.servers.server_G)
    far_Bps_GG = network.pair_Bps_GG.clip(max=network.servers.nic_Bps)
    return locked(np.where(server_G[:, None] == server_G, network.pair_Bps_GG, far_Bps_GG))


def pair_seconds(bytes_GG: IntArray, network: Network) -> FloatArray:
    """Returns (G, G) float64, the seconds of each transfer if it is alone on the network, the start-up included."""
    bytes_GG = np.ascontiguousarray(bytes_GG, np.int64)
    return np.asarray(core.pair_seconds(bytes_GG, pair_rates(network), network.pair_startup_s_GG))


def schedule_bounds(bytes_GG: IntArray, network: Network) -> tuple[float, float]:
    """Returns the `fluid_bound` and, if start-ups take no time, the `one_to_one_bound`."""
    bytes_GG = np.ascontiguousarray(bytes_GG, np.int64)
    bounds: tuple[float, float] = core.port_bounds(bytes_GG, pair_rates(network), network.out_Bps_G, network.in_Bps_G)
    return bounds


def one_to_one_bound(bytes_GG: IntArray, network: Network) -> float:
    """Returns the one-to-one bound in seconds: the largest row or column sum of `pair_seconds`.

    It holds for all-to-alls in which each GPU sends to one GPU and receives from one at a time, with one message per pair. It
    is the optimum if there are no start-ups and transfers may be split.

    Source: Gonzalez & Sahni 1976.
    """
    return longest_port(pair_seconds(bytes_GG, network))


def longest_port(seconds_GG: FloatArray) -> float:
    """Returns the largest row or column sum of seconds_GG (G, G): the seconds for which the busiest port is in use."""
    return float(max(seconds_GG.sum(axis=1).max(initial=0.0), seconds_GG.sum(axis=0).max(initial=0.0)))


def spread(cost_GE: FloatArray, replicas: bool, fixed_G: FloatArray | None = None) -> float:
    """Returns a lower bound on the largest cost of a GPU, over all assignments of experts to GPUs.

    With replicas, experts may be divided: a share x of expert e on GPU g costs x * cost_GE[g, e]. A GPU's cost is the sum over
    its shares. The bound is a dual solution of this fractional assignment: sum_e min_g v_g cost_ge for weights v_g >= 0 that
    sum to one, with v_g inverse to the cost of all experts on GPU g. If GPUs differ only in speed, it is total work / total
    speed. Without replicas, the costliest expert on its cheapest GPU counts, too.

    Args:
        cost_GE: (G, E) float64, the cost that expert e adds on GPU g; may be negative.
        replicas: whether experts may be divided over GPUs.
        fixed_G: (G,) float64, the cost of each GPU without experts; None: zero.
    """
    fixed_G = np.zeros(len(cost_GE)) if fixed_G is None else fixed_G
    total_G = np.abs(cost_GE).sum(axis=1)
    weight_G = total_G.min() / total_G if (total_G > 0).all() else np.ones(len(fixed_G))
    weight_G /= weight_G.sum()
    fixed = float(weight_G @ fixed_G)
    bound = fixed + float((cost_GE * weight_G[:, None]).min(axis=0).sum())
    if (cost_GE < 0).any():
        return max(0.0, bound - ROUNDING * fixed)
    whole = 0.0 if replicas else float((fixed_G[:, None] + cost_GE).min(axis=0).max(initial=0.0))
    return max(bound, whole, float(fixed_G.max(initial=0.0)))


@dataclass(frozen=True, eq=False)
class Nics:
    """The NICs by which GPUs reach GPUs of other servers.

    Attributes:
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        Bps_G: (G,) float64, bytes per second, each way, of the NIC that each GPU uses.
        nic_G: (G,) int64, the NIC of each GPU, numbered from zero; GPUs of one server may share it.
    """

    server_G: IntArray
    Bps_G: FloatArray
    nic_G: IntArray

    @cached_property
    def members_NG(self) -> FloatArray:
        """(N, G) float64: 1 where a GPU is in a server."""
        return np.asarray(self.server_G == np.arange(self.server_G.max() + 1)[:, None], dtype=np.float64)

    @cached_property
    def sharing_GG(self) -> FloatArray:
        """(G, G) float64: 1 where two GPUs use the same NIC."""
        return np.asarray(self.nic_G[:, None] == self.nic_G, dtype=np.float64)

    @property
    def size_N(self) -> FloatArray:
        """(N,) float64: GPUs of each server."""
        return np.asarray(self.members_NG.sum(axis=1))

    @property
    def server_Bps_N(self) -> FloatArray:
        """(N,) float64: bytes per second that all NICs of a server send, and receive."""
        return np.asarray(self.members_NG @ (self.Bps_G / self.sharing_GG.sum(axis=1)))

    @property
    def as_ports_Bps_G(self) -> FloatArray:
        """(G,) float64: each GPU's total send rate, limited by its NIC, if it sends equally much to every other GPU.

        Each GPU has an equal part of a NIC that it shares.
        """
        size_G = self.size_N[self.server_G]
        far_G = (len(size_G) - size_G) / (len(size_G) - 1)
        return np.asarray(self.Bps_G / self.sharing_GG.sum(axis=1) / far_G)

    def across(self, rows_XGG: IntArray) -> IntArray:
        """Returns rows_XGG (X, G, G), from GPU to GPU, with zeros where both GPUs are on the same server."""
        return np.where(self.server_G[:, None] != self.server_G, rows_XGG, 0)

    def seconds(self, bytes_GG: IntArray) -> FloatArray:
        """Returns (G,) float64 seconds in which each GPU's NIC sends or receives all its bytes, whichever takes longer.

        Args:
            bytes_GG: (G, G) int64, bytes from each GPU to each other.
        """
        (far_GG,) = self.across(bytes_GG[None])
        return np.asarray(np.maximum(self.carried(far_GG.sum(axis=1)), self.carried(far_GG.sum(axis=0))) / self.Bps_G)

    def carried(self, load_XG: IntArray | FloatArray) -> FloatArray:
        """Returns (X, G) float64, the load of the NIC that each GPU uses.

        Args:
            load_XG: (X, G), what each GPU itself sends, or receives, through its NIC.
        """
        return np.asarray(load_XG @ self.sharing_GG if len(np.unique(self.nic_G)) < len(self.nic_G) else load_XG)


def nics_of(network: Network) -> Nics | None:
    """Returns the NICs of a network of two servers or more; None for other networks."""
    servers = network.servers
    if servers is None or len(set(servers.server_G)) < 2:
        return None
    return Nics(np.array(servers.server_G), np.full(network.gpus, servers.nic_Bps), np.array(servers.nic_G))
