"""Routes: the ports and NICs that the traffic of each pair of GPUs uses, and the rows of an order that carry bytes."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from aurora.types import Cut, Network, Order
from aurora.types.arrays import FloatArray, IntArray

NONE = -1  # where a pair uses fewer resources than others


@dataclass(frozen=True, eq=False)
class Routes:
    """The resources that each pair of GPUs uses: sending ports, receiving ports, NICs that send and NICs that receive.

    A flow from s to d at rate r takes r of the capacity of each resource use_GGK[s, d, k] other than NONE, for k = 0..K-1.
    """

    capacity_Bps_R: FloatArray
    use_GGK: IntArray

    def load_R(self, bytes_GG: IntArray) -> FloatArray:
        """Returns (R,) float64, the bytes that each resource carries when bytes_GG (G, G) are sent."""
        bytes_GGK = np.where(self.use_GGK == NONE, 0, bytes_GG[:, :, None])
        load_R = np.bincount(np.maximum(self.use_GGK, 0).ravel(), bytes_GGK.ravel(), minlength=len(self.capacity_Bps_R))
        return load_R.astype(np.float64)

    def seconds(self, bytes_GG: IntArray) -> float:
        """Returns the fluid optimum: seconds in which the busiest resource carries its part of bytes_GG (G, G)."""
        return float((self.load_R(bytes_GG) / self.capacity_Bps_R).max(initial=0.0))


@lru_cache(maxsize=4)
def route(network: Network) -> Routes:
    """Returns the routes of a network: a flow uses its two ports, and between servers its two NICs too."""
    n, servers = network.gpus, network.servers
    use_GGK = np.stack(np.broadcast_arrays(np.arange(n)[:, None], n + np.arange(n)[None, :]), axis=2)
    capacity_Bps_R = np.concatenate([network.out_Bps_G, network.in_Bps_G])
    if servers is None:
        return Routes(capacity_Bps_R, use_GGK)
    server_G, nic_G = np.array(servers.server_G), np.array(servers.nic_G)
    nics, far_GG1 = int(nic_G.max()) + 1, (server_G[:, None] != server_G)[:, :, None]
    nics_GG2 = np.stack(np.broadcast_arrays(2 * n + nic_G[:, None], 2 * n + nics + nic_G), axis=2)
    capacity_Bps_R = np.concatenate([capacity_Bps_R, np.full(2 * nics, servers.nic_Bps)])
    return Routes(capacity_Bps_R, np.concatenate([use_GGK, np.where(far_GG1, nics_GG2, NONE)], axis=2))


def rows_to_send(order: Order, bytes_GG: IntArray, routes: Routes) -> tuple[IntArray, IntArray, FloatArray]:
    """Returns (indices, bytes, rate limits in bytes per second) of the rows of an order that carry bytes, (X,) each.

    The limit of a row of a paced order is its bytes / fluid optimum on the routes (coflow MADD); of other rows it is infinite.
    """
    cuts_X2 = order.cuts(bytes_GG[*order.pairs_X2.T])
    size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
    limit_Bps_X = np.full(len(size_X), np.inf)
    if order.paced and (optimum_s := routes.seconds(bytes_GG)) > 0:
        limit_Bps_X = size_X / optimum_s
    row_X = np.flatnonzero(size_X)
    return row_X, size_X[row_X], limit_Bps_X[row_X]


def cut_bound(bytes_GG: IntArray, network: Network) -> Cut:
    """Returns the port or NIC that limits an all-to-all over servers most; its bytes / rate is the fluid optimum.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other.
        network: a network with servers.
    """
    assert network.servers is not None
    n, routes = network.gpus, route(network)
    load_R = routes.load_R(bytes_GG)
    busiest = int((load_R / routes.capacity_Bps_R).argmax())
    ways = ("sending port", "receiving port") if busiest < 2 * n else ("sending NIC", "receiving NIC")
    if busiest < 2 * n:
        way, ranks = busiest // n, [busiest % n]
    else:
        way, nic = divmod(busiest - 2 * n, (len(load_R) - 2 * n) // 2)
        ranks = [rank for rank, own in enumerate(network.servers.nic_G) if own == nic]
    name = f"{ways[way]} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return Cut(float(load_R[busiest] / routes.capacity_Bps_R[busiest]), int(load_R[busiest]), (name,))
