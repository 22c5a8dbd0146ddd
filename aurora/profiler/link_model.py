"""Link model: rates of pairs and ports from timed transfers, and the Cluster that they describe."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.types import Cluster, Gpu, TransferCurve, servers
from aurora.types.arrays import FloatArray, IntArray

NOISE = 0.03  # a smaller loss of goodput counts as none
SHARED = 0.75  # of the rate that a server's ranks have one at a time: less than this together is a shared NIC


@dataclass(frozen=True)
class LinkMeasurements:
    """Links between ranks, as measured. Where there are servers, ports are those to other ranks of the server."""

    startup_s_GG: FloatArray  # (G, G) float64, start-up seconds of a message from rank to rank
    rate_Bps_GG: FloatArray  # (G, G) float64, bytes per second from rank to rank
    error_GG: FloatArray  # (G, G) float64, median |predicted / measured - 1| over message sizes
    out_Bps_G: FloatArray  # (G,) float64, bytes per second that a rank's port sends to several others at once
    in_Bps_G: FloatArray  # (G,) float64, bytes per second that a rank's port receives from several others at once
    senders_K: IntArray  # (K,) int64, numbers of senders to one receiver
    goodput_K: FloatArray  # (K,) float64, what that many senders deliver, over what the ports allow; the median over receivers
    server_G: IntArray  # (G,) int64, the server of each rank; all zero without servers
    apart_Bps_N: FloatArray  # (N,) float64, by server of several ranks: sum of the rates of its ranks, each to another server
    together_Bps_N: FloatArray  # (N,) float64, their joint rate, all at once
    curves: tuple[TransferCurve, ...] = ()  # exchanges of all ranks at once; none where there are servers

    @property
    def incast(self) -> float:
        """Share of its rate that a receiving port loses for each sender beyond the first; zero for losses below NOISE."""
        several_K = self.senders_K > 1
        if not several_K.any() or self.goodput_K[several_K].min() > 1 - NOISE:
            return 0.0
        lost_K = (1 - self.goodput_K[several_K]) / (self.senders_K[several_K] - 1)
        return float(np.clip(np.median(lost_K), 0.0, 1.0))

    @property
    def shared_nic(self) -> bool:
        """Whether the ranks of a server share one NIC: together they are clearly slower than each alone."""
        return bool(len(self.apart_Bps_N) and np.median(self.together_Bps_N / self.apart_Bps_N) < SHARED)

    @property
    def nic_Bps(self) -> float:
        """Bytes per second of a NIC each way, the median; only where there are servers."""
        if self.shared_nic:
            return float(np.median(self.together_Bps_N))
        return float(np.median(self.rate_Bps_GG[np.not_equal.outer(self.server_G, self.server_G)]))


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

    Nodes are the servers that were found, and without servers the hosts. A rank's start-up is the shortest of its messages: a
    message takes the longer of its two ends'.
    """
    hosts = list(dict.fromkeys(device.host for device in device_G))
    node_G, fabric = [hosts.index(device.host) for device in device_G], None
    if links.server_G.any():
        node_G = links.server_G.tolist()
        fabric = servers(node_G, links.out_Bps_G.tolist(), links.in_Bps_G.tolist(), links.nic_Bps, links.shared_nic)
    other_GG = ~np.eye(len(device_G), dtype=bool)
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
        for device, node, out_Bps, in_Bps, startup_s in zip(
            device_G, node_G, links.out_Bps_G, links.in_Bps_G, startup_s_G, strict=True
        )
    ]
    incast = 0.0 if links.curves else links.incast  # which curves include
    return Cluster(name, tuple(gpus), fabric, incast, links.curves)


@dataclass(frozen=True)
class MeasuredCluster:
    """A measured Cluster."""

    cluster: Cluster  # the ranks' GPUs and network
    links: LinkMeasurements  # the measurements that it was made from
    transport: str  # "gloo" or "nccl", over which the links were measured

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for the cluster's file: on the fit, the goodput of a receiver with several senders, and the servers."""
        links, pairs_GG = self.links, ~np.eye(len(self.cluster), dtype=bool)
        rate_Bps_X, error_X = links.rate_Bps_GG[pairs_GG], links.error_GG[pairs_GG]
        goodput = ", ".join(f"{k}: {part:.0%}" for k, part in zip(links.senders_K, links.goodput_K, strict=True))
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return (
            f"Measured over {self.transport}, {len(self.cluster)} ranks, {today}. Ports: to and from several ranks at once.",
            f"Single pairs: {rate_Bps_X.min():.4g} to {rate_Bps_X.max():.4g} bytes a second; a line through message sizes "
            f"is {np.median(error_X):.1%} off (median), {error_X.max():.1%} at worst.",
            f"Goodput of a receiver by how many send to it at once: {goodput}.",
            *self._servers(),
            *self._exchanges(),
        )

    def _exchanges(self) -> Iterator[str]:
        """A sentence on the link curves, if there are any."""
        if self.links.curves:
            partners = ", ".join(str(curve.partners) for curve in self.links.curves)
            yield f"Link curves: all ranks at once, each with as many others: {partners}."

    def _servers(self) -> Iterator[str]:
        """A sentence on the servers, if any were found."""
        if not self.links.server_G.any():
            return
        links, sizes = self.links, ", ".join(map(str, np.bincount(self.links.server_G)))
        part = np.median(links.together_Bps_N / links.apart_Bps_N)
        owner = "a server has one NIC" if links.shared_nic else "a rank has a NIC of its own"
        yield (
            f"Servers by the rates of pairs, of {sizes} ranks; {owner}: ranks of a server that send to others at once reach "
            f"{part:.0%} of their rates one at a time."
        )
