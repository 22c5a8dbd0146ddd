"""Routes: how much of each port, link and NIC the traffic of each pair of GPUs uses, and at which rate an order's rows flow."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock

import numpy as np
from scipy.sparse import csr_array

from aurora.types import Fabric, Network, Order
from aurora.types.arrays import FloatArray, IntArray

_ROUTING = Lock()


@dataclass(frozen=True, eq=False)
class Routes:
    """The resources that each pair of GPUs uses: a flow s -> d at rate r takes r * share_GGK[s, d, k] of use_GGK[s, d, k].

    Resources are sending ports, receiving ports and links, and on a fabric a last one without limit.
    """

    capacity_Bps_R: FloatArray
    use_GGK: IntArray  # the resources of each pair; where it uses fewer than K, the last resource fills up
    share_GGK: FloatArray  # the part of the pair's rate that each resource carries; zero where it only fills up

    def load_R(self, bytes_GG: IntArray) -> FloatArray:
        """Returns (R,) float64, the bytes that each resource carries when bytes_GG (G, G) are sent."""
        parts_GGK = self.share_GGK * bytes_GG[:, :, None]
        load_R = np.bincount(self.use_GGK.ravel(), parts_GGK.ravel(), minlength=len(self.capacity_Bps_R))
        return load_R.astype(np.float64)

    def seconds(self, bytes_GG: IntArray) -> float:
        """Returns the seconds until the slowest resource has carried its part of bytes_GG (G, G): the routes' fluid optimum."""
        return float((self.load_R(bytes_GG) / self.capacity_Bps_R).max(initial=0.0))


def route(network: Network) -> Routes:
    """Returns the routes of a network, found once for all threads; see `_routed`."""
    with _ROUTING:
        return _routed(network)


@lru_cache(maxsize=4)
def _routed(network: Network) -> Routes:
    """The routes of a network: a flow uses its two ports, and on a fabric the shortest paths between them too.

    Shortest paths are those with the fewest links. A flow is divided equally over all shortest paths of its pair: equal-cost
    multipath in its ideal form, packet by packet. Hashing whole flows onto one path can only balance worse.
    """
    n, fabric = network.gpus, network.fabric
    sends_GG, recvs_GG = np.broadcast_arrays(np.arange(n)[:, None], n + np.arange(n)[None, :])
    use_GGK = np.stack([sends_GG, recvs_GG], axis=2)
    capacity_Bps_R = np.concatenate([network.out_Bps_G, network.in_Bps_G])
    if fabric is None:
        return Routes(capacity_Bps_R, use_GGK, np.ones(use_GGK.shape))
    link_GGK, share_GGK = _shortest(fabric)
    return Routes(
        np.concatenate([capacity_Bps_R, [link.Bps for link in fabric.links], [np.inf]]),
        np.concatenate([use_GGK, 2 * n + link_GGK], axis=2),
        np.concatenate([np.ones(use_GGK.shape), share_GGK], axis=2),
    )


@lru_cache(maxsize=8)
def _shortest(fabric: Fabric) -> tuple[IntArray, FloatArray]:
    """(G, G, K) links on each pair's shortest paths, and the part of the paths that takes each."""
    n = fabric.gpus
    index = {vertex: at for at, vertex in enumerate((*range(n), *fabric.switches))}
    ends = [(index[link.src], index[link.dst]) for link in fabric.links]
    hops_VV, paths_VV = _paths(len(index), n, ends)
    from_GV, to_VG = paths_VV[:n].copy(), paths_VV[:, :n].copy()
    from_GV[:, :n], to_VG[:n] = np.eye(n), np.eye(n)  # a path has GPUs only at its start and its end
    pairs, links, shares = [], [], []
    for link, (u, v) in enumerate(ends):
        src = np.flatnonzero(hops_VV[:n, u] + 1 == hops_VV[:n, v])  # a part of a shortest path is a shortest path
        dst = np.flatnonzero(hops_VV[u, :n] == 1 + hops_VV[v, :n])
        on = hops_VV[src, u, None] + 1 + hops_VV[v, dst] == hops_VV[np.ix_(src, dst)]
        part = np.where(on, from_GV[src, u, None] * to_VG[v, dst], 0.0)
        at_src, at_dst = np.nonzero(part)
        pairs.append(src[at_src] * n + dst[at_dst])
        links.append(np.full(len(at_src), link))
        shares.append(part[at_src, at_dst] / paths_VV[src[at_src], dst[at_dst]])
    pair_X, link_X, share_X = (np.concatenate(parts) if parts else np.empty(0) for parts in (pairs, links, shares))
    by_pair = np.argsort(pair_X, kind="stable")
    pair_X = pair_X[by_pair].astype(np.int64)
    count_P = np.bincount(pair_X, minlength=n * n)
    nth_X = np.arange(len(pair_X)) - (np.cumsum(count_P) - count_P)[pair_X]
    link_PK = np.full((n * n, int(count_P.max(initial=0))), len(ends), dtype=np.int64)
    share_PK = np.zeros(link_PK.shape)
    link_PK[pair_X, nth_X], share_PK[pair_X, nth_X] = link_X[by_pair], share_X[by_pair]
    return link_PK.reshape(n, n, -1), share_PK.reshape(n, n, -1)


def _paths(vertices: int, gpus: int, ends: list[tuple[int, int]]) -> tuple[FloatArray, FloatArray]:
    """(V, V) number of links on the shortest paths between vertices, infinite if there is none, and number of such paths."""
    src_X, dst_X = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    front_VV = np.zeros((vertices, vertices))
    front_VV[src_X, dst_X] = 1.0
    switch_X = src_X >= gpus
    forward_VV = csr_array((np.ones(switch_X.sum()), (src_X[switch_X], dst_X[switch_X])), shape=(vertices, vertices))
    hops_VV = np.where(np.eye(vertices) > 0, 0.0, np.inf)
    paths_VV = np.eye(vertices)
    hops = 1
    while (fresh := (front_VV > 0) & np.isinf(hops_VV)).any():
        hops_VV[fresh], paths_VV[fresh] = hops, front_VV[fresh]
        front_VV, hops = np.where(fresh, front_VV, 0.0) @ forward_VV, hops + 1
    return hops_VV, paths_VV


def rows_to_send(order: Order, bytes_GG: IntArray, routes: Routes) -> tuple[IntArray, IntArray, FloatArray]:
    """Returns, for the rows of an order that carry bytes, (their indices, their bytes, their rate limits), (X,) each.

    A row's limit is its sub-channels' share of the slower port if the order has sub-channels, the row's bytes over the fluid
    optimum if it is paced (coflow MADD), and infinite otherwise.
    """
    n = len(bytes_GG)
    src_X, dst_X = order.pairs_X2.T
    cuts_X2 = order.cuts(bytes_GG[src_X, dst_X])
    size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
    limit_Bps_X = np.full(len(size_X), np.inf)
    if order.sub_channels is not None:
        out_Bps, in_Bps = routes.capacity_Bps_R[:n], routes.capacity_Bps_R[n : 2 * n]
        per_channel_Bps_X = np.minimum((out_Bps / order.sub_channels.out_G)[src_X], (in_Bps / order.sub_channels.in_G)[dst_X])
        limit_Bps_X = order.sub_channels.row_X * per_channel_Bps_X
    elif order.paced and (optimum_s := routes.seconds(bytes_GG)) > 0:
        limit_Bps_X = size_X / optimum_s
    row_X = np.flatnonzero(size_X)
    return row_X, size_X[row_X], limit_Bps_X[row_X]


def row_pacing(order: Order, bytes_GG: IntArray, network: Network) -> tuple[FloatArray, FloatArray]:
    """Computes when each row of a paced order, or of one with sub-channels, starts and at which rate it flows.

    All rows of a paced order start at once, each at its bytes over the fluid optimum on its routes (coflow MADD). With
    sub-channels, a row starts when the rows before it have left enough sub-channels of both of its ports, and flows at its
    sub-channels' share of the slower port.

    Returns (start_s_X, rate_Bps_X), (X,) float64 each: seconds from the common start, and bytes per second. A row without bytes
    has start zero and an infinite rate.
    """
    row_X, size_X, limit_Bps_X = rows_to_send(order, bytes_GG, route(network))
    start_s_X, rate_Bps_X = np.zeros(len(order.pairs_X2)), np.full(len(order.pairs_X2), np.inf)
    rate_Bps_X[row_X] = limit_Bps_X
    if order.sub_channels is not None:
        count = [*order.sub_channels.out_G.tolist(), *order.sub_channels.in_G.tolist()]  # sub-channels of each port
        taken: list[list[tuple[float, int]]] = [[] for _ in count]  # of each port: when rows end, and their sub-channels
        for row, size in zip(row_X.tolist(), size_X.tolist(), strict=True):
            src, dst = order.pairs_X2[row].tolist()
            sub_channels, ports = int(order.sub_channels.row_X[row]), (src, len(bytes_GG) + dst)
            start_s_X[row] = max(_free_from(taken[port], count[port] - sub_channels) for port in ports)
            end_s = start_s_X[row] + size / rate_Bps_X[row]
            for port in ports:
                taken[port].append((end_s, sub_channels))
    return start_s_X, rate_Bps_X


def _free_from(taken: list[tuple[float, int]], most: int) -> float:
    """The first time, in seconds, from which a port's rows take at most `most` of its sub-channels."""
    total, since_s = sum(sub_channels for _, sub_channels in taken), 0.0
    for end_s, sub_channels in sorted(taken):
        if total <= most:
            break
        total, since_s = total - sub_channels, end_s
    return since_s


@dataclass(frozen=True, eq=False)
class Nics:
    """The NICs by which GPUs reach GPUs of other servers.

    Attributes:
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        Bps_G: (G,) float64, bytes per second, each way, of the NIC that each GPU uses.
        shared: whether the GPUs of a server use one NIC, instead of one each.
    """

    server_G: IntArray
    Bps_G: FloatArray
    shared: bool

    @cached_property
    def members_NG(self) -> FloatArray:
        """(N, G) float64: 1 where a GPU is in a server."""
        return np.asarray(self.server_G == np.arange(self.server_G.max() + 1)[:, None], dtype=np.float64)

    @property
    def size_N(self) -> FloatArray:
        """(N,) float64: GPUs of each server."""
        return np.asarray(self.members_NG.sum(axis=1))

    @property
    def server_Bps_N(self) -> FloatArray:
        """(N,) float64: bytes per second that all NICs of a server send, and receive."""
        total_N = self.members_NG @ self.Bps_G
        return np.asarray(total_N / self.size_N if self.shared else total_N)

    @property
    def as_ports_Bps_G(self) -> FloatArray:
        """(G,) float64: bytes per second of each GPU to all others, if its NIC limits it and all are sent equally much.

        Of a NIC that its server shares, a GPU has an equal part.
        """
        size_G = self.size_N[self.server_G]
        far_G = (len(size_G) - size_G) / (len(size_G) - 1)
        return np.asarray(self.Bps_G / (size_G if self.shared else 1.0) / far_G)

    def across(self, rows_XGG: IntArray) -> IntArray:
        """Returns (X, G, G) int64, the rows from GPU to GPU that go between servers, zero elsewhere."""
        return np.where(self.server_G[:, None] != self.server_G, rows_XGG, 0)

    def seconds(self, bytes_GG: IntArray) -> FloatArray:
        """Returns (G,) float64, the longer of the seconds in which the NIC that each GPU uses sends, and receives, its bytes.

        Args:
            bytes_GG: (G, G) int64, bytes from each GPU to each other.
        """
        (far_GG,) = self.across(bytes_GG[None])
        return np.asarray(np.maximum(self.carried(far_GG.sum(axis=1)), self.carried(far_GG.sum(axis=0))) / self.Bps_G)

    def carried(self, load_XG: IntArray | FloatArray) -> FloatArray:
        """Returns (X, G) float64, what the NIC that each GPU uses carries, from what each GPU sends (or receives) by NIC."""
        return np.asarray((load_XG @ self.members_NG.T)[..., self.server_G] if self.shared else load_XG)


def nics_of(network: Network) -> Nics | None:
    """Returns the NICs of a network with a fabric of two servers or more; None for other networks."""
    fabric = network.fabric
    if fabric is None or fabric.nic_Bps is None or len(set(fabric.server_G)) < 2:
        return None
    return Nics(np.array(fabric.server_G), np.full(network.gpus, fabric.nic_Bps), fabric.shared_nic)
