"""Lower bounds on one all-to-all, on ports, between servers and over a fabric; and on the largest cost of a GPU.

The last holds over all placements of experts.

Source: Aurora Thm 4.2 and 5.2 (arXiv:2410.17043).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from aurora.planner.network.routes import route
from aurora.types import Cut, Fabric, Network
from aurora.types.arrays import BoolArray, FloatArray, IntArray, locked
from aurora.types.compiled import njit
from aurora.types.network import named

ROUNDING = 1e-12  # relative error of a sum of floats that cancel


def port_seconds(bytes_GG: IntArray, network: Network) -> FloatArray:
    """Returns (G,) float64, the longer of the seconds in which each GPU sends, and receives, all its bytes."""
    return _port_seconds(bytes_GG, network.out_Bps_G, network.in_Bps_G)


@njit(cache=True)
def _port_seconds(bytes_GG, out_Bps_G, in_Bps_G):
    """The function above, compiled."""
    out_G, in_G = _sums(bytes_GG)
    return np.maximum(out_G / out_Bps_G, in_G / in_Bps_G)


@njit(cache=True)
def _sums(amount_GG):
    """The sums of the rows and of the columns of a matrix."""
    row_G, column_G = np.zeros((2, len(amount_GG)), amount_GG.dtype)
    for i in range(len(amount_GG)):
        for j in range(len(amount_GG)):
            column_G[j] += amount_GG[i, j]
        row_G[i] = amount_GG[i].sum()
    return row_G, column_G


def fluid_bound(bytes_GG: IntArray, network: Network) -> float:
    """Returns the fluid bound in seconds: the largest of all ports' bytes / rate.

    Start-ups, fabric and incast do not count. Flows that are all paced at their bytes / bound reach it. On equal ports,
    one-to-one slots reach it too.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other, as everywhere here.
        network: its port rates.

    Source: Aurora Thm 4.2.
    """
    return float(port_seconds(bytes_GG, network).max(initial=0.0))


def pair_rates(network: Network) -> FloatArray:
    """Returns (G, G) float64, bytes per second of each transfer that has the network, ports and links, to itself."""
    return network.pair_Bps_GG if network.fabric is None else _fabric_rates(network)


@lru_cache(maxsize=8)
def _fabric_rates(network: Network) -> FloatArray:
    """The function above, on a fabric."""
    if network.fabric is not None and network.fabric.nic_Bps is not None:
        server_G = np.array(network.fabric.server_G)
        far_Bps_GG = network.pair_Bps_GG.clip(max=network.fabric.nic_Bps)
        return locked(np.where(server_G[:, None] == server_G, network.pair_Bps_GG, far_Bps_GG))
    routes = route(network)
    with np.errstate(divide="ignore"):
        alone_GGK = routes.capacity_Bps_R[routes.use_GGK] / routes.share_GGK
    return locked(alone_GGK.min(axis=2))


def pair_seconds(bytes_GG: IntArray, network: Network) -> FloatArray:
    """Returns (G, G) float64, the seconds of each transfer if it has the network to itself, with its slower end's start-up."""
    return _pair_seconds(bytes_GG, pair_rates(network), network.pair_startup_s_GG)


@njit(cache=True, error_model="numpy")
def _pair_seconds(bytes_GG, Bps_GG, startup_s_GG):
    """The function above, compiled."""
    seconds_GG = np.empty(bytes_GG.shape)
    for i in range(len(bytes_GG)):
        for j in range(len(bytes_GG)):
            seconds_GG[i, j] = bytes_GG[i, j] / Bps_GG[i, j] + startup_s_GG[i, j] if bytes_GG[i, j] > 0 else 0.0
    return seconds_GG


def one_to_one_bound(bytes_GG: IntArray, network: Network) -> float:
    """Returns the one-to-one bound in seconds: the largest row or column sum of `pair_seconds`.

    It bounds all-to-alls in which each GPU sends to one GPU and receives from one at a time, with one message per pair. Without
    start-ups, and if transfers may be split, it is the optimum.

    Source: Gonzalez & Sahni 1976.
    """
    return longest_port(pair_seconds(bytes_GG, network))


@njit(cache=True)
def longest_port(seconds_GG: FloatArray) -> float:
    """Returns the largest row or column sum of seconds_GG (G, G): the seconds of the port that has the most to do."""
    out_s_G, in_s_G = _sums(seconds_GG)
    return max(out_s_G.max(), in_s_G.max()) if len(seconds_GG) else 0.0


def spread_split(cost_GE: FloatArray) -> float:
    """Returns a lower bound on the largest summed expert cost of a GPU, over all ways to split experts over GPUs.

    A part of an expert costs that part of cost_GE. The bound is a dual solution of the fractional assignment,
    sum_e min_g v_g cost_ge for weights v_g >= 0 that sum to one, with v inverse to each GPU's cost of all experts. On GPUs that
    differ only in speed it is total work over total speed.

    Args:
        cost_GE: (G, E) float64, what expert e costs on GPU g.
    """
    total_G = cost_GE.sum(axis=1)
    if cost_GE.size == 0 or (total_G <= 0).any():
        return 0.0
    weight_G = total_G.min() / total_G
    weight_G /= weight_G.sum()
    return float((cost_GE * weight_G[:, None]).min(axis=0).sum())


def spread(cost_GE: FloatArray) -> float:
    """Returns the bound of `spread_split` if experts are whole: at least the costliest expert on its cheapest GPU."""
    return max(float(cost_GE.min(axis=0).max(initial=0.0)), spread_split(cost_GE)) if cost_GE.size else 0.0


def spread_beside(fixed_G: FloatArray, cost_GE: FloatArray, replicas: bool) -> float:
    """Returns the bound of `spread_split` if each GPU has a fixed cost as well, and experts may lower a GPU's cost.

    Args:
        fixed_G: (G,) float64, what each GPU costs without experts.
        cost_GE: (G, E) float64, what expert e adds on GPU g; may be negative.
        replicas: whether experts may be split over GPUs.
    """
    total_G = np.abs(cost_GE).sum(axis=1)
    weight_G = total_G.min() / total_G if (total_G > 0).all() else np.ones(len(fixed_G))
    weight_G /= weight_G.sum()
    fixed = float(weight_G @ fixed_G)
    bound = fixed + float((cost_GE * weight_G[:, None]).min(axis=0).sum())
    if (cost_GE < 0).any():
        return max(0.0, bound - ROUNDING * fixed)
    whole = 0.0 if replicas else float((fixed_G[:, None] + cost_GE).min(axis=0).max(initial=0.0))
    return max(bound, whole, float(fixed_G.max(initial=0.0)))


SLACK = 1e-9  # relative, where a float sum must not count as progress
EXACT = 2**40  # units of a byte: push-relabel needs integer flows
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
    fabric: Fabric

    @property
    def vertices(self) -> int:
        """Number of vertices, V."""
        return len(self.block_V)

    def load(self, sets_CV: BoolArray, bytes_GG: IntArray) -> IntArray:
        """Returns (C,) int64, the bytes of bytes_GG (G, G) that start in each set of sets_CV (C, V) and end outside of it."""
        n = self.gpus
        begun_CG = sets_CV[:, :n].astype(np.float64) @ bytes_GG.astype(np.float64)  # exact below 2^53 bytes, and by BLAS
        return np.asarray((begun_CG * ~sets_CV[:, n : 2 * n]).sum(axis=1)).astype(np.int64)

    def leaving(self, sets_CV: BoolArray) -> BoolArray:
        """Returns (C, A) bool, the arcs that lead out of each of the sets sets_CV (C, V)."""
        return np.asarray(sets_CV[:, self.tail_A] & ~sets_CV[:, self.head_A])

    def worse(self, best: CutResult, load_C: IntArray, arcs_CA: BoolArray) -> CutResult:
        """Returns the slowest of C cuts that load_C (C,) bytes cross by arcs_CA (C, A), or `best` if none is clearly slower."""
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
        """Returns candidate sets of links, each (A,) bool, busiest set first; load_A (A,) are the bytes that arcs carry.

        The sets are: all links into each switch, all links out of each switch, the busiest links of each of these sets, and the
        busiest of all links.
        """
        links_A = np.arange(len(self.Bps_A)) >= 2 * self.gpus
        switches = range(4 * self.gpus, self.vertices)
        around = [links_A & (end_A == switch) for switch in switches for end_A in (self.tail_A, self.head_A)]
        around = [arcs for arcs in around if arcs.any()]
        seconds_A = load_A / self.Bps_A
        busiest = [arcs & (seconds_A >= seconds_A[arcs].max() * (1 - SLACK)) for arcs in (*around, links_A) if arcs.any()]
        return sorted(busiest + around, key=lambda arcs: -float(load_A[arcs].sum() / self.Bps_A[arcs].sum()))

    @cached_property
    def hanging(self) -> BoolArray:
        """(C, V) bool, the parts into which removing one switch splits the fabric, and the complement of each part.

        On a tree, every link is the cut of one of these sets in either direction.
        """
        import networkx as nx  # a fifth of a second, which only fabrics are worth

        graph = nx.Graph([(link.src, link.dst) for link in self.fabric.links])
        index = {name: 4 * self.gpus + at for at, name in enumerate(self.fabric.switches)}
        parts = [np.zeros(self.vertices, dtype=bool)]
        for middle in sorted(v for v in nx.articulation_points(graph) if isinstance(v, str)):
            for part in nx.connected_components(graph.subgraph(set(graph) - {middle})):
                inside = np.zeros(self.vertices, dtype=bool)
                inside[[gpu + side * self.gpus for gpu in part if isinstance(gpu, int) for side in range(4)]] = True
                inside[[index[name] for name in part if isinstance(name, str)]] = True
                parts.append(inside)
        return np.concatenate([np.array(parts), ~np.array(parts)])

    @cached_property
    def hanging_arcs(self) -> BoolArray:
        """(C, A) bool, the arcs that lead out of the sets of `hanging`."""
        return self.leaving(self.hanging)

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

    def minimum(self, bytes_GG: IntArray, within_s: float) -> BoolArray:
        """Returns (V,) bool, the source side of the minimum cut if bytes_GG, all from or to one GPU, take within_s seconds."""
        import networkx as nx  # a fifth of a second, which only fabrics are worth

        graph = nx.DiGraph()
        for tail, head, rate in zip(self.tail_A.tolist(), self.head_A.tolist(), self.Bps_A.tolist(), strict=True):
            graph.add_edge(tail, head, capacity=int(rate * within_s * EXACT))
        for gpu in range(self.gpus):
            graph.add_edge("source", gpu, capacity=int(bytes_GG[gpu].sum()) * EXACT)
            graph.add_edge(self.gpus + gpu, "sink", capacity=int(bytes_GG[:, gpu].sum()) * EXACT)
        _, (inside, _) = nx.minimum_cut(graph, "source", "sink")
        return np.isin(np.arange(self.vertices), [v for v in inside if v != "source"])


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
    """Returns the flow network of a network that has a fabric.

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
        fabric,
    )


def cut_bound(bytes_GG: IntArray, network: Network) -> Cut:
    """Finds the cut that limits an all-to-all most: bytes that must use some ports and links, divided by their summed rate.

    Every cut is a lower bound, however traffic is routed. To find the worst of all cuts is NP-hard in general, and even the
    worst may lie below the fluid optimum (maximum concurrent flow). The search looks at, in this order:

    1. each port;
    2. the parts into which removing one switch splits the fabric;
    3. the links into or out of a switch, and the busiest links on shortest paths;
    4. on fabrics of up to MOST_BLOCKS switches (and GPUs with several neighbours), sets of these grown one by one, so that
       pairs of switches and arcs of a ring are found;
    5. for each GPU, the exact minimum cut of all that it sends, and of all that it receives (one commodity).

    The search ends as soon as traffic divided over shortest paths needs no longer than a cut, which proves both optimal. This
    happens at once on trees and on leaf/spine fabrics with equal uplinks, where the bound is the fluid optimum.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other.
        network: a network with a fabric.

    Source (minimum cut): Ford & Fulkerson 1956.
    """
    assert network.fabric is not None
    graph, routes = flow_network(network), route(network)
    load_A = routes.load_R(bytes_GG)[: len(graph.Bps_A)]
    enough_s = routes.seconds(bytes_GG) * (1 - SLACK)
    best: CutResult = 0.0, 0, np.zeros(len(load_A), dtype=bool)
    port_bytes = np.concatenate([bytes_GG.sum(axis=1), bytes_GG.sum(axis=0)])
    busiest = int((port_bytes / graph.Bps_A[: len(port_bytes)]).argmax())
    best = graph.worse(best, port_bytes[[busiest]], np.eye(1, len(load_A), busiest, dtype=bool))
    best = graph.worse(best, graph.load(graph.hanging, bytes_GG), graph.hanging_arcs)
    for arcs in graph.bundles(load_A):
        if best[0] >= enough_s or load_A[arcs].sum() <= best[0] * graph.Bps_A[arcs].sum() * (1 + SLACK):
            break  # the sets after this one are less busy, so none of them is a worse cut either
        best = graph.worse(best, np.array([graph.cut_off(arcs, bytes_GG)]), arcs[None])
    growing = graph.grown(bytes_GG)
    while best[0] < enough_s and (grown := next(growing, None)) is not None:
        best = graph.worse(best, graph.load(grown, bytes_GG), graph.leaving(grown))
    for gpu in range(graph.gpus) if best[0] < enough_s else ():
        for own_GG in (_only(bytes_GG, (gpu, slice(None))), _only(bytes_GG, (slice(None), gpu))):
            while best[0] < min(enough_s, routes.seconds(own_GG) * (1 - SLACK)):  # else this GPU's traffic cannot be worse
                before_s, least = best[0], graph.minimum(own_GG, best[0])[None]
                best = graph.worse(best, graph.load(least, bytes_GG), graph.leaving(least))
                if best[0] == before_s:
                    break
    return Cut(best[0], best[1], tuple(np.array(graph.names)[best[2]].tolist()))


def _only(bytes_GG: IntArray, kept: tuple[int | slice, int | slice]) -> IntArray:
    """(G, G) the traffic at `kept`, zero elsewhere."""
    own_GG = np.zeros_like(bytes_GG)
    own_GG[kept] = bytes_GG[kept]
    return own_GG
