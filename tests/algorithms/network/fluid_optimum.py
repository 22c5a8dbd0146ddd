"""The shortest all-to-all on a fabric as a linear program, beside which the cut bound is tested."""

import numpy as np
from scipy import sparse
from scipy.optimize import LinearConstraint, milp

from aurora.algorithms.network.routes import flow_network
from aurora.types import Network
from aurora.types.arrays import IntArray


def fluid_optimum(bytes_GG: IntArray, network: Network) -> float:
    """Computes the shortest time of an all-to-all when traffic may be routed and divided at will (maximum concurrent flow).

    A linear program over what each source sends through each port and link: G * (links + 2 G) variables, solved by HiGHS, exact
    to its tolerance.

    Args:
        bytes_GG: (G, G) int64, as in `cut_bound`.
        network: a network with a fabric.

    Returns:
        Seconds.

    Source: Shahrokhi & Matula 1990, with the commodities of one source in one.
    """
    graph = flow_network(network)
    total = int(bytes_GG.sum())
    if total == 0:
        return 0.0
    n, arcs, fastest = graph.gpus, len(graph.Bps_A), float(graph.Bps_A.max())
    sources = np.flatnonzero(bytes_GG.sum(axis=1))
    ends = np.concatenate([graph.tail_A, graph.head_A])
    signs = np.repeat([1.0, -1.0], arcs)
    leaving_VA = sparse.coo_array((signs, (ends, np.tile(np.arange(arcs), 2))), shape=(graph.vertices, arcs))
    supply_SV = np.zeros((len(sources), graph.vertices))
    supply_SV[np.arange(len(sources)), sources] = bytes_GG[sources].sum(axis=1) / total
    supply_SV[:, n : 2 * n] -= bytes_GG[sources] / total
    supply = supply_SV.ravel()
    conserve = sparse.kron(sparse.eye_array(len(sources)), leaving_VA)
    within = sparse.kron(sparse.csr_array(np.ones((1, len(sources)))), sparse.eye_array(arcs))
    rates = sparse.csr_array(-graph.Bps_A[:, None] / fastest)
    found = milp(
        np.append(np.zeros(len(sources) * arcs), 1.0),
        constraints=[
            LinearConstraint(sparse.hstack([conserve, sparse.csr_array((len(supply), 1))]), supply, supply),
            LinearConstraint(sparse.hstack([within, rates]), -np.inf, 0.0),
        ],
    )
    assert found.status == 0, found.message
    return float(found.fun) * total / fastest
