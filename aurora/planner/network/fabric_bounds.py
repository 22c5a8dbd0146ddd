"""Lower bound on an all-to-all over a fabric: the worst cut that a search finds, by name."""

import numpy as np

from aurora.planner.network.cuts import SLACK, CutResult, flow_network
from aurora.planner.network.routes import route
from aurora.types import Cut, Network
from aurora.types.arrays import IntArray


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

    Returns:
        The worst cut that was found.

    Source (minimum cut): Ford & Fulkerson 1956.
    """
    assert network.fabric is not None
    graph, routes = flow_network(network), route(network)
    load_A = routes.load_R(bytes_GG)[: len(graph.Bps_A)]
    enough_s = routes.seconds(bytes_GG) * (1 - SLACK)
    best: CutResult = 0.0, 0, np.zeros(len(load_A), dtype=bool)
    for sets in (graph.ports(), graph.hanging(network.fabric)):
        best = graph.worse(best, graph.load(sets, bytes_GG), graph.leaving(sets))
    for arcs in graph.bundles(load_A):
        if load_A[arcs].sum() <= best[0] * graph.Bps_A[arcs].sum() * (1 + SLACK):
            break  # the sets after this one are less busy, so none of them is a worse cut either
        best = graph.worse(best, np.array([graph.cut_off(arcs, bytes_GG)]), arcs[None])
    growing = graph.grown(bytes_GG)
    while best[0] < enough_s and (grown := next(growing, None)) is not None:
        best = graph.worse(best, graph.load(grown, bytes_GG), graph.leaving(grown))
    for gpu in range(graph.gpus):
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
