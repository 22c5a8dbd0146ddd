"""Lower bounds: on one all-to-all (Aurora Thm 4.2 and 5.2, arXiv:2410.17043) and on spreading experts over GPUs."""

import numpy as np

from aurora.types import Network
from aurora.types.arrays import FloatArray, IntArray


def port_seconds(bytes_GG: IntArray, network: Network) -> FloatArray:
    """(G,) seconds that each port needs for what it sends or receives, whichever takes longer."""
    return np.asarray(np.maximum(bytes_GG.sum(axis=1) / network.out_Bps_G, bytes_GG.sum(axis=0) / network.in_Bps_G))


def fluid_bound(bytes_GG: IntArray, network: Network) -> float:
    """max over ports of bytes / rate. bytes_GG (G, G) int64 with a zero diagonal; start-ups, fabric and incast do not count.

    Reached by flows paced at bytes / T. On equal ports also by one-to-one slots (Aurora Thm 4.2).
    """
    return float(port_seconds(bytes_GG, network).max(initial=0.0))


def pair_seconds(bytes_GG: IntArray, network: Network) -> FloatArray:
    """(G, G) seconds of each transfer when it has both of its ports to itself, with the start-up of its slower end."""
    seconds_GG = bytes_GG / network.pair_Bps_GG
    return np.where(bytes_GG > 0, seconds_GG + network.pair_startup_s_GG, 0.0)


def one_to_one_bound(bytes_GG: IntArray, network: Network) -> float:
    """max row or column sum of `pair_seconds`: below any all-to-all with one partner at a time and a message a pair.

    Without start-ups it is the optimum where transfers may be split (Gonzalez & Sahni 1976).
    """
    seconds_GG = pair_seconds(bytes_GG, network)
    return float(max(seconds_GG.sum(axis=1).max(initial=0.0), seconds_GG.sum(axis=0).max(initial=0.0)))


def two_tier_bound(bytes_GG: IntArray, node_G: IntArray, nic_Bps: float, inside_Bps: float) -> float:
    """Below any all-to-all of servers whose GPUs share their NICs by forwarding inside, one NIC of nic_Bps a GPU.

    The larger of each server's traffic to or from other servers over all of its NICs, and the traffic that stays inside over
    the inside ports, inside_Bps a GPU. node_G (G,) int64: the server of each GPU. Source: FAST (arXiv:2505.09764).
    """
    nodes, members = np.unique(node_G, return_counts=True)
    outside_GG = np.where(node_G[:, None] != node_G[None, :], bytes_GG, 0)
    inside_GG = bytes_GG - outside_GG
    slowest = 0.0
    for node, gpus in zip(nodes, members, strict=True):
        own = node_G == node
        across = max(outside_GG[own].sum(), outside_GG[:, own].sum()) / (gpus * nic_Bps)
        within = max(inside_GG[own].sum(axis=1).max(initial=0), inside_GG[:, own].sum(axis=0).max(initial=0)) / inside_Bps
        slowest = max(slowest, float(across), float(within))
    return slowest


def spread(cost_GE: FloatArray) -> float:
    """Below max over GPUs of the summed cost of their experts, however the experts are placed.

    cost_GE (G, E) float64: what expert e costs on GPU g. The larger of the costliest expert on its cheapest GPU and a
    dual solution of the fractional assignment: sum_e min_g v_g cost_ge for weights v_g >= 0 that sum to one, with v
    inverse to each GPU's cost of everything. On GPUs that differ only in speed this is total work over total speed.
    """
    return max(float(cost_GE.min(axis=0).max(initial=0.0)), spread_split(cost_GE)) if cost_GE.size else 0.0


def spread_split(cost_GE: FloatArray) -> float:
    """`spread` where an expert may also be divided over GPUs, each part for its part of the cost."""
    everything_G = cost_GE.sum(axis=1)
    if cost_GE.size == 0 or (everything_G <= 0).any():
        return 0.0
    weight_G = everything_G.min() / everything_G
    weight_G /= weight_G.sum()
    return float((cost_GE * weight_G[:, None]).min(axis=0).sum())
