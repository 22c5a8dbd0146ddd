"""Lower bounds on one all-to-all, and on the largest cost of a GPU over all placements of experts.

Source: Aurora Thm 4.2 and 5.2 (arXiv:2410.17043).
"""

import numpy as np
from numba import njit

from aurora.planner.network.routes import pair_rates
from aurora.types import Network
from aurora.types.arrays import FloatArray, IntArray

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


def two_tier_bound(bytes_GG: IntArray, node_G: IntArray, nic_Bps: float, inside_Bps: float, shared_nic: bool = False) -> float:
    """Returns a lower bound in seconds on an all-to-all of servers whose GPUs share their NICs by forwarding inside the server.

    The larger of two times: each server's traffic to or from other servers over all of its NICs, and the traffic that stays
    inside a server over the inside ports of its GPUs.

    Args:
        bytes_GG: as in `fluid_bound`.
        node_G: (G,) int64, the server of each GPU.
        nic_Bps: bytes per second of a NIC.
        inside_Bps: bytes per second that a GPU sends, and receives, inside its server.
        shared_nic: whether a server has one NIC, instead of one for each GPU.

    Source: FAST (arXiv:2505.09764).
    """
    nodes, members = np.unique(node_G, return_counts=True)
    outside_GG = np.where(node_G[:, None] != node_G[None, :], bytes_GG, 0)
    inside_GG = bytes_GG - outside_GG
    slowest = 0.0
    for node, gpus in zip(nodes, members, strict=True):
        own = node_G == node
        across = max(outside_GG[own].sum(), outside_GG[:, own].sum()) / ((1 if shared_nic else gpus) * nic_Bps)
        within = max(inside_GG[own].sum(axis=1).max(initial=0), inside_GG[:, own].sum(axis=0).max(initial=0)) / inside_Bps
        slowest = max(slowest, float(across), float(within))
    return slowest


def deduplicated_two_tier_bound(
    sent_GN: IntArray, needed_GG: IntArray, server_G: IntArray, nic_Bps: float, inside_Bps: float, shared_nic: bool = False
) -> float:
    """Returns a lower bound in seconds on a deduplicated dispatch over servers, or on the combine that goes the same way back.

    It holds for every execution in which tokens go from their server to each other server that needs them, in any number of
    copies and by any of its NICs, and in which GPUs forward inside their servers. The largest of these times:

    - Of a server, the tokens that leave for other servers, or that come, once for each server, over all of its NICs.
    - Of a GPU, the tokens of its own server that it needs, over its inside port.
    - Of a GPU, all tokens of others that it needs, over its inside port and a NIC together; and of all GPUs of a server, over
      all of their ports.

    Start-ups do not count. The ports inside and the NICs are taken to be apart.

    Args:
        sent_GN: (G, N) int64, bytes of the tokens of each GPU that each server needs.
        needed_GG: (G, G) int64, bytes of the tokens of each GPU (row) that each GPU needs.
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        nic_Bps: bytes per second of a NIC.
        inside_Bps: bytes per second that a GPU sends, and receives, inside its server.
        shared_nic: whether a server has one NIC, instead of one for each GPU.
    """
    servers = sent_GN.shape[1]
    size_N = np.bincount(server_G, minlength=servers)
    nics_Bps_N = nic_Bps * (np.ones(servers) if shared_nic else size_N)
    between_NN = np.stack([sent_GN[server_G == server].sum(axis=0) for server in range(servers)])
    np.fill_diagonal(between_NN, 0)
    foreign_GG = needed_GG * ~np.eye(len(server_G), dtype=np.bool_)
    own_G = np.where(server_G[:, None] == server_G[None, :], foreign_GG, 0).sum(axis=0)
    needed_G = foreign_GG.sum(axis=0)
    needed_N = np.bincount(server_G, needed_G, minlength=servers)
    seconds = (
        np.maximum(between_NN.sum(axis=0), between_NN.sum(axis=1)) / nics_Bps_N,
        own_G / inside_Bps,
        needed_G / (inside_Bps + nic_Bps),
        needed_N / (size_N * inside_Bps + nics_Bps_N),
    )
    return float(max(each.max(initial=0.0) for each in seconds))


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
