"""Link model: rates of pairs and ports from timed transfers, and the Cluster that they describe."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.types import Cluster, Gpu, servers
from aurora.types.arrays import FloatArray, IntArray

TIERS = 1.25  # links inside a server that are this many times as fast as others make a fabric of servers
NOISE = 0.03  # a smaller loss of goodput counts as none


@dataclass(frozen=True)
class LinkMeasurements:
    """Links between ranks, as measured."""

    startup_s_GG: FloatArray  # (G, G) float64, start-up seconds of a message from rank to rank
    rate_Bps_GG: FloatArray  # (G, G) float64, bytes per second from rank to rank
    error_GG: FloatArray  # (G, G) float64, median |predicted / measured - 1| over message sizes
    out_Bps_G: FloatArray  # (G,) float64, bytes per second that a rank's port sends to several others at once
    in_Bps_G: FloatArray  # (G,) float64, bytes per second that a rank's port receives from several others at once
    senders_K: IntArray  # (K,) int64, numbers of senders to one receiver
    goodput_K: FloatArray  # (K,) float64, what that many senders deliver, over what the ports allow; the median over receivers

    @property
    def incast(self) -> float:
        """Share of its rate that a receiving port loses for each sender beyond the first; zero for losses below NOISE."""
        several_K = self.senders_K > 1
        if not several_K.any() or self.goodput_K[several_K].min() > 1 - NOISE:
            return 0.0
        lost_K = (1 - self.goodput_K[several_K]) / (self.senders_K[several_K] - 1)
        return float(np.clip(np.median(lost_K), 0.0, 1.0))


@dataclass(frozen=True)
class RankDevice:
    """The device that a rank computes on."""

    host: str  # the name of its machine
    local_rank: int  # the rank's number on its machine
    kind: str  # the kind of GPU, or "cpu"
    memory_bytes: int  # memory of the GPU, or the rank's part of its machine's


def fair_shares(most_X: FloatArray, total: float) -> FloatArray:
    """Returns (X,) max-min fair shares of a total rate; most_X (X,) is the largest share that each flow wants.

    Source:
        Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    share_X, left = np.zeros(len(most_X)), total
    for place, flow in enumerate(np.argsort(most_X, kind="stable")):
        share_X[flow] = min(most_X[flow], left / (len(most_X) - place))
        left -= share_X[flow]
    return share_X


def cluster_of(
    links: LinkMeasurements, device_G: Sequence[RankDevice], speeds: Mapping[str, float], name: str = "measured"
) -> Cluster:
    """Returns the Cluster that measured links describe.

    It has a fabric of servers if every host has several ranks and links inside hosts are TIERS times as fast as others. A
    rank's start-up is the shortest of its messages: a message takes the longer of its two ends'.
    """
    ranks = len(device_G)
    hosts = list(dict.fromkeys(device.host for device in device_G))
    node_G = [hosts.index(device.host) for device in device_G]
    same_GG = np.equal.outer(node_G, node_G)
    other_GG = ~np.eye(ranks, dtype=bool)
    inside_GG, outside_GG = same_GG & other_GG, ~same_GG
    out_Bps_G, in_Bps_G, fabric = links.out_Bps_G, links.in_Bps_G, None
    if inside_GG.any(axis=1).all() and outside_GG.any():
        outside_Bps = float(np.median(links.rate_Bps_GG[outside_GG]))
        if np.median(links.rate_Bps_GG[inside_GG]) > TIERS * outside_Bps:
            inside_Bps_GG = np.where(inside_GG, links.rate_Bps_GG, 0.0)
            out_Bps_G = np.maximum(out_Bps_G, inside_Bps_GG.max(axis=1))
            in_Bps_G = np.maximum(in_Bps_G, inside_Bps_GG.max(axis=0))
            fabric = servers(node_G, out_Bps_G.tolist(), in_Bps_G.tolist(), outside_Bps)
    pair_startup_s_GG = np.where(other_GG, links.startup_s_GG, np.inf)
    startup_s_G = np.minimum(pair_startup_s_GG.min(axis=0), pair_startup_s_GG.min(axis=1))
    gpus = [
        Gpu(
            f"{device.host}-{device.local_rank}",
            device.kind,
            node,
            float(out_Bps),
            float(in_Bps),
            device.memory_bytes,
            speeds.get(device.kind, 1.0) / speeds.get(device_G[0].kind, 1.0),
            float(startup_s),
        )
        for device, node, out_Bps, in_Bps, startup_s in zip(device_G, node_G, out_Bps_G, in_Bps_G, startup_s_G, strict=True)
    ]
    return Cluster(name, tuple(gpus), fabric, links.incast)


@dataclass(frozen=True)
class MeasuredCluster:
    """A measured Cluster."""

    cluster: Cluster  # the ranks' GPUs and network
    links: LinkMeasurements  # the measurements that it was made from
    transport: str  # "gloo" or "nccl", over which the links were measured

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on the fit and on the goodput of a receiver with several senders, for the cluster's file."""
        links, pairs_GG = self.links, ~np.eye(len(self.cluster), dtype=bool)
        rate_Bps_X, error_X = links.rate_Bps_GG[pairs_GG], links.error_GG[pairs_GG]
        goodput = ", ".join(f"{k}: {part:.0%}" for k, part in zip(links.senders_K, links.goodput_K, strict=True))
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return (
            f"Measured over {self.transport}, {len(self.cluster)} ranks, {today}. Ports: to and from several ranks at once.",
            f"Single pairs: {rate_Bps_X.min():.4g} to {rate_Bps_X.max():.4g} bytes a second; a line through message sizes "
            f"is {np.median(error_X):.1%} off (median), {error_X.max():.1%} at worst.",
            f"Goodput of a receiver by how many send to it at once: {goodput}.",
        )
