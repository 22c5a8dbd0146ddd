"""Routes: the part of each port and link that the traffic of each pair of GPUs uses, and the rows of an order that carry bytes.

Also finds cuts of a fabric, which bound the time of an all-to-all from below.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np
from scipy.sparse import csr_array

from aurora.types import Cut, Fabric, Network, Order
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.compiled import njit
from aurora.types.network import named

_ROUTING = Lock()


@dataclass(frozen=True, eq=False)
class Routes:
    """The resources that each pair of GPUs uses: sending ports, receiving ports and links.

    A flow from s to d at rate r takes r * share_GGK[s, d, k] of the capacity of resource use_GGK[s, d, k], for k = 0..K-1. On a
    fabric, the last resource is a dummy without limit.
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
        """Returns the fluid optimum: seconds in which the busiest resource carries its part of bytes_GG (G, G)."""
        return float((self.load_R(bytes_GG) / self.capacity_Bps_R).max(initial=0.0))


def route(network: Network) -> Routes:
    """Returns the routes of a network; the result is cached for all threads."""
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


SLACK = 1e-9  # relative, where a float sum must not count as progress
MOST_BLOCKS = 40  # beyond this, growing sets costs more time than it improves the bound
CutResult = tuple[float, int, BoolArray]  # seconds, the bytes that must cross, the arcs (A,) that they must cross


@dataclass(frozen=True, eq=False)
class FlowNetwork:
    """Ports and links of a fabric as arcs (A,) between vertices (V,). Sets of them are BoolArrays, (C, V) for C candidates.

    Vertices, in sequence: where each GPU's traffic starts (G), where it ends (G), the GPUs' sending sides (G), their receiving
    sides (G), and the switches. A GPU has separate sides because it does not forward. A cut is a set of vertices; traffic that
    starts inside and ends outside must use the arcs that lead out.
    """

    gpus: int
    tail_A: IntArray  # the vertex where each arc begins
    head_A: IntArray  # the vertex where each arc ends
    Bps_A: FloatArray  # bytes per second of each arc
    names: tuple[str, ...]  # of each arc's port or link
    block_V: IntArray  # sets grow by whole blocks: a switch with the GPUs that have only it, or a GPU with several neighbours

    @property
    def vertices(self) -> int:
        """Number of vertices, V."""
        return len(self.block_V)

    def load(self, sets_CV: BoolArray, bytes_GG: IntArray) -> IntArray:
        """Returns (C,) int64, the bytes of bytes_GG (G, G) that start in each vertex set of sets_CV (C, V) and end outside."""
        n = self.gpus
        begun_CG = sets_CV[:, :n].astype(np.float64) @ bytes_GG.astype(np.float64)  # exact below 2^53 bytes, and by BLAS
        return np.asarray((begun_CG * ~sets_CV[:, n : 2 * n]).sum(axis=1)).astype(np.int64)

    def leaving(self, sets_CV: BoolArray) -> BoolArray:
        """Returns (C, A) bool, the arcs that lead out of each of the sets sets_CV (C, V)."""
        return np.asarray(sets_CV[:, self.tail_A] & ~sets_CV[:, self.head_A])

    def worse(self, best: CutResult, load_C: IntArray, arcs_CA: BoolArray) -> CutResult:
        """Returns the cut with the largest bound among C cuts and `best`; `best` unless another one is clearly larger.

        Args:
            best: the worst cut so far.
            load_C: (C,) bytes that must cross each cut.
            arcs_CA: (C, A) bool, the arcs of each cut.
        """
        seconds_C = self._seconds(load_C, arcs_CA)
        at = int(seconds_C.argmax())
        if seconds_C[at] <= best[0] * (1 + SLACK):
            return best
        return float(seconds_C[at]), int(load_C[at]), arcs_CA[at]

    def _seconds(self, load_C: IntArray, arcs_CA: BoolArray) -> FloatArray:
        """(C,) seconds in which each set of arcs carries its load."""
        return np.divide(load_C, arcs_CA @ self.Bps_A, out=np.zeros(len(load_C)), where=load_C > 0)

    def cut_off(self, arcs_A: BoolArray, bytes_GG: IntArray) -> int:
        """Returns the bytes of all pairs of GPUs that no path connects once the arcs arcs_A (A,) bool are taken away."""
        reached_VG = np.eye(self.vertices, self.gpus, dtype=bool)
        _reach(reached_VG, self.tail_A, self.head_A, ~arcs_A)
        return int(bytes_GG.T[~reached_VG[self.gpus : 2 * self.gpus]].sum())

    def bundles(self, load_A: FloatArray) -> list[BoolArray]:
        """Returns sets of links that may be the limiting cut, each (A,) bool, busiest set first.

        The sets are: all links into each switch, all links out of each switch, the busiest links of each of these sets, and the
        busiest of all links.

        Args:
            load_A: (A,) bytes that each arc carries.
        """
        links_A = np.arange(len(self.Bps_A)) >= 2 * self.gpus
        switches = range(4 * self.gpus, self.vertices)
        around = [links_A & (end_A == switch) for switch in switches for end_A in (self.tail_A, self.head_A)]
        around = [arcs for arcs in around if arcs.any()]
        seconds_A = load_A / self.Bps_A
        busiest = [arcs & (seconds_A >= seconds_A[arcs].max() * (1 - SLACK)) for arcs in (*around, links_A) if arcs.any()]
        return sorted(busiest + around, key=lambda arcs: -float(load_A[arcs].sum() / self.Bps_A[arcs].sum()))

    def grown(self, bytes_GG: IntArray) -> Iterator[BoolArray]:
        """Yields (C, V) bool: every block, then sets grown greedily from each block, and the complements of all of them.

        A set grows by the block that gives the worst cut of bytes_GG (G, G). Yields nothing above MOST_BLOCKS blocks.
        """
        blocks = int(self.block_V.max()) + 1
        if blocks > MOST_BLOCKS:
            return
        one_BV = np.arange(blocks)[:, None] == self.block_V
        yield np.concatenate([one_BV, ~one_BV])
        for inside in one_BV:
            for _ in range(blocks // 2):
                tried = one_BV[~(one_BV & inside).any(axis=1)] | inside
                both = np.concatenate([tried, ~tried])
                yield both
                inside = tried[int(self._seconds(self.load(both, bytes_GG), self.leaving(both)).argmax()) % len(tried)]


@njit(cache=True, nogil=True, allocates=False)
def _reach(reached_VG, tail_A, head_A, kept_A):
    """Adds, to the vertices that are reached from each of G starts, all that kept arcs (A,) lead to."""
    more = True
    while more:
        more = False
        for arc in range(len(tail_A)):
            for start in range(reached_VG.shape[1] if kept_A[arc] else 0):
                if reached_VG[tail_A[arc], start] and not reached_VG[head_A[arc], start]:
                    reached_VG[head_A[arc], start] = more = True


@lru_cache(maxsize=8)
def flow_network(network: Network) -> FlowNetwork:
    """Converts a network with a fabric to a FlowNetwork of arcs and vertices.

    Arcs are in the sequence of the resources of `routes.route`: sending ports, receiving ports, links.
    """
    fabric = network.fabric
    assert fabric is not None
    n = fabric.gpus
    switch = {name: at for at, name in enumerate(fabric.switches)}
    around: list[set[int | str]] = [set() for _ in range(n)]
    for link in fabric.links:
        for gpu, other in ((link.src, link.dst), (link.dst, link.src)):
            if isinstance(gpu, int):
                around[gpu].add(other)
    block_G = [len(switch) + gpu for gpu in range(n)]
    for gpu, others in enumerate(around):
        if len(others) == 1 and isinstance(only := next(iter(others)), str):
            block_G[gpu] = switch[only]
    _, block_V = np.unique([*block_G * 4, *switch.values()], return_inverse=True)
    tail = [2 * n + link.src if isinstance(link.src, int) else 4 * n + switch[link.src] for link in fabric.links]
    head = [3 * n + link.dst if isinstance(link.dst, int) else 4 * n + switch[link.dst] for link in fabric.links]
    gpus = np.arange(n)
    return FlowNetwork(
        n,
        np.concatenate([gpus, 3 * n + gpus, tail]).astype(np.int64),
        np.concatenate([2 * n + gpus, n + gpus, head]).astype(np.int64),
        np.concatenate([network.out_Bps_G, network.in_Bps_G, [link.Bps for link in fabric.links]]),
        (
            *(f"sending port of {named(gpu)}" for gpu in range(n)),
            *(f"receiving port of {named(gpu)}" for gpu in range(n)),
            *map(str, fabric.links),
        ),
        block_V,
    )


def cut_bound(bytes_GG: IntArray, network: Network) -> Cut:
    """Finds the cut that limits an all-to-all most: bytes that must use some ports and links, divided by their summed rate.

    Every cut is a lower bound, however traffic is routed. To find the worst of all cuts is NP-hard in general, and even the
    worst may lie below the fluid optimum (maximum concurrent flow). The search looks at, in this order:

    1. each port;
    2. the links into or out of a switch, and the busiest links on shortest paths: on a tree, the worst cut is one of these,
       as a path enters and leaves a switch once;
    3. on fabrics of up to MOST_BLOCKS switches (and GPUs with several neighbours), sets of these grown one by one, so that
       pairs of switches and arcs of a ring are found.

    The search ends as soon as traffic divided over shortest paths needs no longer than a cut, which proves both optimal. This
    happens at once on trees and on leaf/spine fabrics with equal uplinks, where the bound is the fluid optimum.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other.
        network: a network with a fabric.
    """
    assert network.fabric is not None
    graph, routes = flow_network(network), route(network)
    load_A = routes.load_R(bytes_GG)[: len(graph.Bps_A)]
    enough_s = routes.seconds(bytes_GG) * (1 - SLACK)
    best: CutResult = 0.0, 0, np.zeros(len(load_A), dtype=bool)
    port_bytes = np.concatenate([bytes_GG.sum(axis=1), bytes_GG.sum(axis=0)])
    busiest = int((port_bytes / graph.Bps_A[: len(port_bytes)]).argmax())
    best = graph.worse(best, port_bytes[[busiest]], np.eye(1, len(load_A), busiest, dtype=bool))
    for arcs in graph.bundles(load_A):
        if best[0] >= enough_s or load_A[arcs].sum() <= best[0] * graph.Bps_A[arcs].sum() * (1 + SLACK):
            break  # the sets after this one are less busy, so none of them is a worse cut either
        best = graph.worse(best, np.array([graph.cut_off(arcs, bytes_GG)]), arcs[None])
    growing = graph.grown(bytes_GG)
    while best[0] < enough_s and (grown := next(growing, None)) is not None:
        best = graph.worse(best, graph.load(grown, bytes_GG), graph.leaving(grown))
    return Cut(best[0], best[1], tuple(np.array(graph.names)[best[2]].tolist()))
