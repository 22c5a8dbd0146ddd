"""Lower bounds on an all-to-all over a fabric: by minimum cut, with the cut's name, and the fluid optimum as an LP."""

from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import LinearConstraint, milp

from aurora.plan.routes import route
from aurora.types import Cut, Fabric
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.fabric import named

SLACK = 1e-9  # relative, where a float sum must not count as progress
EXACT = 2**40  # parts of a byte: flows in whole numbers, as push-relabel needs
BoolArray = NDArray[np.bool_]  # sets of vertices: (V,), or (C, V) for C candidates


def cut_bound(bytes_GG: IntArray, fabric: Fabric, out_Bps: FloatArray, in_Bps: FloatArray) -> Cut:
    """The worst cut that was found: bytes that must leave a set of vertices over the rate of the ports and links out of it.

    bytes_GG (G, G) int64 with a zero diagonal, rates (G,) bytes per second. Every cut is a lower bound, however traffic is
    routed. The worst of all is NP-hard to find in general, and may lie below `fluid_optimum`; looked at are, in this order:
    each port; what hangs together behind one switch; sets of switches with their GPUs grown one by one from each, as pairs
    and arcs; and for each GPU the exact minimum cut of all that it sends, and of all that it receives (one commodity,
    Ford & Fulkerson 1956). The search ends as soon as traffic divided over shortest paths needs no longer than a cut, which
    proves both optimal: at once on trees and on leaf/spine whose uplinks are equal, where the bound is the fluid optimum.
    """
    network = _network(fabric, out_Bps, in_Bps)
    routes = route(out_Bps, in_Bps, fabric)
    worst, worst_s = np.zeros(network.vertices, dtype=bool), 0.0
    for candidates in (network.ports(), network.hanging(fabric)):
        worst, worst_s = network.worse(candidates, bytes_GG, worst, worst_s)
    enough_s = routes.seconds(bytes_GG) * (1 - SLACK)
    growing = network.grown(bytes_GG)
    while worst_s < enough_s and (grown := next(growing, None)) is not None:
        worst, worst_s = network.worse(grown, bytes_GG, worst, worst_s)
    for gpu in range(fabric.gpus):
        for alone_GG in (_only(bytes_GG, (gpu, slice(None))), _only(bytes_GG, (slice(None), gpu))):
            while worst_s < min(enough_s, routes.seconds(alone_GG) * (1 - SLACK)):  # else this GPU alone fits in
                found = network.minimum(alone_GG, worst_s)
                before_s = worst_s
                worst, worst_s = network.worse(found[None], bytes_GG, worst, worst_s)
                if worst_s <= before_s * (1 + SLACK):
                    break
    load_bytes = int(network.load(worst[None], bytes_GG)[0])
    return Cut(worst_s, load_bytes, tuple(np.array(network.names)[network.leaving(worst[None])[0]].tolist()))


def fluid_optimum(bytes_GG: IntArray, fabric: Fabric, out_Bps: FloatArray, in_Bps: FloatArray) -> float:
    """The shortest all-to-all when traffic may be routed and divided at will, in seconds: maximum concurrent flow.

    An LP over what each source sends through each port and link, G * (links + 2 G) variables, solved by HiGHS; exact to its
    tolerance. Source: Shahrokhi & Matula 1990, with the commodities of one source in one.
    """
    network = _network(fabric, out_Bps, in_Bps)
    total = int(bytes_GG.sum())
    if total == 0:
        return 0.0
    n, arcs, fastest = fabric.gpus, len(network.Bps_A), float(network.Bps_A.max())
    sources = np.flatnonzero(bytes_GG.sum(axis=1))
    ends = np.concatenate([network.tail_A, network.head_A])
    signs = np.repeat([1.0, -1.0], arcs)
    leaving_VA = sparse.coo_array((signs, (ends, np.tile(np.arange(arcs), 2))), shape=(network.vertices, arcs))
    supply_SV = np.zeros((len(sources), network.vertices))
    supply_SV[np.arange(len(sources)), sources] = bytes_GG[sources].sum(axis=1) / total
    supply_SV[:, n : 2 * n] -= bytes_GG[sources] / total
    supply = supply_SV.ravel()
    conserve = sparse.kron(sparse.eye_array(len(sources)), leaving_VA)
    within = sparse.kron(sparse.csr_array(np.ones((1, len(sources)))), sparse.eye_array(arcs))
    rates = sparse.csr_array(-network.Bps_A[:, None] / fastest)
    found = milp(
        np.append(np.zeros(len(sources) * arcs), 1.0),
        constraints=[
            LinearConstraint(sparse.hstack([conserve, sparse.csr_array((len(supply), 1))]), supply, supply),
            LinearConstraint(sparse.hstack([within, rates]), -np.inf, 0.0),
        ],
    )
    assert found.status == 0, found.message
    return float(found.fun) * total / fastest


def _only(bytes_GG: IntArray, kept: tuple[int | slice, int | slice]) -> IntArray:
    alone_GG = np.zeros_like(bytes_GG)
    alone_GG[kept] = bytes_GG[kept]
    return alone_GG


@dataclass(frozen=True, eq=False)
class _Network:
    """Ports and links as arcs. Vertices: where traffic starts (G), where it ends (G), the GPUs' sending sides (G) and receiving
    sides (G), so that none forwards, and the switches.

    tail_A, head_A (A,): arcs; block_V (V,): a switch with the GPUs that have no other, or one GPU.
    """

    gpus: int
    tail_A: IntArray
    head_A: IntArray
    Bps_A: FloatArray
    names: tuple[str, ...]
    block_V: IntArray

    @property
    def vertices(self) -> int:
        return len(self.block_V)

    def load(self, sets_CV: BoolArray, bytes_GG: IntArray) -> IntArray:
        """(C,) bytes that start in the set and end outside."""
        n = self.gpus
        return np.asarray(((sets_CV[:, :n].astype(np.int64) @ bytes_GG) * ~sets_CV[:, n : 2 * n]).sum(axis=1))

    def leaving(self, sets_CV: BoolArray) -> BoolArray:
        """(C, A) which arcs lead out of the set."""
        return np.asarray(sets_CV[:, self.tail_A] & ~sets_CV[:, self.head_A])

    def seconds(self, sets_CV: BoolArray, bytes_GG: IntArray) -> FloatArray:
        """(C,) what the bytes that leave each set take at least."""
        load_C = self.load(sets_CV, bytes_GG)
        return np.divide(load_C, self.leaving(sets_CV) @ self.Bps_A, out=np.zeros(len(load_C)), where=load_C > 0)

    def worse(self, sets_CV: BoolArray, bytes_GG: IntArray, worst: BoolArray, worst_s: float) -> tuple[BoolArray, float]:
        """The worst set of all and its seconds; the one before unless another is clearly worse."""
        seconds_C = self.seconds(sets_CV, bytes_GG)
        at = int(seconds_C.argmax())
        return (sets_CV[at], float(seconds_C[at])) if seconds_C[at] > worst_s * (1 + SLACK) else (worst, worst_s)

    def ports(self) -> BoolArray:
        """Each GPU's sending side by itself, and everything but its receiving side."""
        ends = np.eye(self.vertices, dtype=bool)[: 2 * self.gpus]
        return np.concatenate([ends[: self.gpus], ~ends[self.gpus :]])

    def hanging(self, fabric: Fabric) -> BoolArray:
        """Where taking one switch away parts the fabric: each part, and all but it. On a tree: every link, both ways."""
        graph = nx.Graph([(link.src, link.dst) for link in fabric.links])
        place = {name: 4 * self.gpus + at for at, name in enumerate(fabric.switches)}
        parts = [np.zeros(self.vertices, dtype=bool)]
        for middle in sorted(v for v in nx.articulation_points(graph) if isinstance(v, str)):
            for part in nx.connected_components(graph.subgraph(set(graph) - {middle})):
                inside = np.zeros(self.vertices, dtype=bool)
                inside[[gpu + side * self.gpus for gpu in part if isinstance(gpu, int) for side in range(4)]] = True
                inside[[place[name] for name in part if isinstance(name, str)]] = True
                parts.append(inside)
        return np.concatenate([np.array(parts), ~np.array(parts)])

    def grown(self, bytes_GG: IntArray) -> Iterator[BoolArray]:
        """Every block, then from each the sets that grow by the block that leaves the worst cut; and all but those sets."""
        blocks = int(self.block_V.max()) + 1
        one_BV = np.arange(blocks)[:, None] == self.block_V
        yield np.concatenate([one_BV, ~one_BV])
        for inside in one_BV:
            for _ in range(blocks // 2):
                tried = one_BV[~(one_BV & inside).any(axis=1)] | inside
                both = np.concatenate([tried, ~tried])
                yield both
                inside = tried[int(self.seconds(both, bytes_GG).argmax()) % len(tried)]

    def minimum(self, bytes_GG: IntArray, within_s: float) -> BoolArray:
        """The set that most stops bytes_GG, all of one source or all to one destination, from crossing within within_s."""
        graph = nx.DiGraph()
        for tail, head, rate in zip(self.tail_A.tolist(), self.head_A.tolist(), self.Bps_A.tolist(), strict=True):
            graph.add_edge(tail, head, capacity=int(rate * within_s * EXACT))
        for gpu in range(self.gpus):
            graph.add_edge("all", gpu, capacity=int(bytes_GG[gpu].sum()) * EXACT)
            graph.add_edge(self.gpus + gpu, "over", capacity=int(bytes_GG[:, gpu].sum()) * EXACT)
        _, (inside, _) = nx.minimum_cut(graph, "all", "over")
        return np.isin(np.arange(self.vertices), [v for v in inside if v != "all"])


def _network(fabric: Fabric, out_Bps: FloatArray, in_Bps: FloatArray) -> _Network:
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
    return _Network(
        n,
        np.concatenate([gpus, 3 * n + gpus, tail]).astype(np.int64),
        np.concatenate([2 * n + gpus, n + gpus, head]).astype(np.int64),
        np.concatenate([out_Bps, in_Bps, [link.Bps for link in fabric.links]]),
        (
            *(f"sending port of {named(gpu)}" for gpu in range(n)),
            *(f"receiving port of {named(gpu)}" for gpu in range(n)),
            *map(str, fabric.links),
        ),
        block_V,
    )
