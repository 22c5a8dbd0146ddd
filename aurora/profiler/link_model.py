"""Link model: the rates of pairs and ports that timed transfers give, and the Cluster they describe."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.types import Cluster, Gpu, servers
from aurora.types.arrays import FloatArray, IntArray

TIERS = 1.25  # from how much faster inside a server than outside the two are told apart
NOISE = 0.03  # of a goodput: less is not called a loss


@dataclass(frozen=True)
class LinkMeasurements:
    """What ranks have measured of their network.

    startup_s_GG, rate_Bps_GG (G, G): of messages from a rank to another. error_GG (G, G): median
    |predicted / measured - 1| over message sizes. out_Bps_G, in_Bps_G (G,): of a rank's port, to and from several others at
    once. goodput_K (K,): what senders_K (K,) at once bring to one receiver, over what its port and theirs allow, the median
    over receivers.
    """

    startup_s_GG: FloatArray
    rate_Bps_GG: FloatArray
    error_GG: FloatArray
    out_Bps_G: FloatArray
    in_Bps_G: FloatArray
    senders_K: IntArray
    goodput_K: FloatArray

    @property
    def incast(self) -> float:
        """Part of its rate that a receiving port loses for each sender beyond the first; zero within the noise."""
        several_K = self.senders_K > 1
        if not several_K.any() or self.goodput_K[several_K].min() > 1 - NOISE:
            return 0.0
        lost_K = (1 - self.goodput_K[several_K]) / (self.senders_K[several_K] - 1)
        return float(np.clip(np.median(lost_K), 0.0, 1.0))


@dataclass(frozen=True)
class RankDevice:
    """What a rank computes on. host: its machine. kind: of GPU, or "cpu"."""

    host: str
    local_rank: int
    kind: str
    memory_bytes: int


def fair_shares(most_X: FloatArray, together: float) -> FloatArray:
    """(X,) parts of `together` for flows that could have most_X (X,) alone, as even as that allows: max-min fairness.

    Where `together` is more than all of them, each has its most. Source: Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    share_X, left = np.zeros(len(most_X)), together
    for place, flow in enumerate(np.argsort(most_X, kind="stable")):
        share_X[flow] = min(most_X[flow], left / (len(most_X) - place))
        left -= share_X[flow]
    return share_X


def cluster_of(
    links: LinkMeasurements, device_G: Sequence[RankDevice], speeds: Mapping[str, float], name: str = "measured"
) -> Cluster:
    """The Cluster that the measured links describe.

    It has a fabric of servers where hosts hold several ranks each and links inside a host are TIERS times as fast as others. A
    message's start-up is the slower of its two ends'.

    Args:
        links: as measured.
        device_G: the ranks' devices.
        speeds: of kinds, in any unit; a kind without one counts as 1.
        name: the cluster's.
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
    alone_GG = np.where(other_GG, links.startup_s_GG, np.inf)
    startup_s_G = np.minimum(alone_GG.min(axis=0), alone_GG.min(axis=1))
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
    """A measured Cluster, the links it was made from, and the transport ("gloo" or "nccl") that they were measured over."""

    cluster: Cluster
    links: LinkMeasurements
    transport: str

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for its file: how well the model fits, and how receivers bear several senders."""
        links, pairs_GG = self.links, ~np.eye(len(self.cluster), dtype=bool)
        rate_Bps_X, error_X = links.rate_Bps_GG[pairs_GG], links.error_GG[pairs_GG]
        goodput = ", ".join(f"{k}: {part:.0%}" for k, part in zip(links.senders_K, links.goodput_K, strict=True))
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return (
            f"Measured over {self.transport}, {len(self.cluster)} ranks, {today}. Ports: to and from several at once.",
            f"Pairs alone: {rate_Bps_X.min():.4g} to {rate_Bps_X.max():.4g} bytes a second; a line through their message sizes "
            f"is {np.median(error_X):.1%} off (median), {error_X.max():.1%} at worst.",
            f"Goodput of a receiver by how many send to it at once: {goodput}.",
        )
