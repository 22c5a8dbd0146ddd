"""Measures links by timed messages, between pairs, from ports to all peers, and over NICs, and makes a Cluster of them."""

import datetime
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.algorithms.network.measured_links import find_servers, fit_link
from aurora.errors import BadInput, plural, shown
from aurora.moe.transport import Observe, Transport
from aurora.profiler.devices import relative_speeds
from aurora.runtime.distributed.launcher import RankInfo, launch
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import nccl_transport
from aurora.runtime.transports.process_groups import default_process_group, device_of, rank_info_from_environment
from aurora.types import Cluster, Gpu, Order, Servers
from aurora.types.arrays import FloatArray, IntArray

NOISE = 0.03  # a smaller loss of goodput counts as none
SHARED = 0.75  # of the rate that a server's ranks have one at a time: less than this together is a shared NIC
SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KB to 64 MB
GPU_SIZES = (*SIZES, 1 << 28, 1 << 30)  # over NVLink 64 MB take 0.15 ms, a few times what a call takes to begin
PATIENCE_S = 0.25  # longest expected time of a message between one pair
SPAN_S = 0.3  # about how long transfers of several pairs at once are timed, at most
REPEATS = 8  # the fastest counts, since other work only slows transfers
SETTLE_S = 0.01  # pause between measurements, in which queues drain


@dataclass(frozen=True)
class LinkMeasurements:
    """Measured links between ranks. With servers, port rates are towards ranks of the same server."""

    startup_s_GG: FloatArray  # (G, G) float64, start-up seconds of a message from rank to rank
    rate_Bps_GG: FloatArray  # (G, G) float64, bytes per second from rank to rank
    error_GG: FloatArray  # (G, G) float64, median |predicted / measured - 1| over message sizes
    out_Bps_G: FloatArray  # (G,) float64, bytes per second that a rank's port sends to several others at once
    in_Bps_G: FloatArray  # (G,) float64, bytes per second that a rank's port receives from several others at once
    senders: int  # most ranks that send to one receiver at once
    goodput: float  # what they deliver, over what the ports allow; the median over receivers
    server_G: IntArray  # (G,) int64, the server of each rank; all zero without servers
    nic_Bps: float = 0.0  # bytes per second of a NIC, each way, the median; zero without servers
    joint: float = 1.0  # rate of the ranks of a server at once / sum of their rates one at a time, to other servers; the median

    @property
    def incast(self) -> float:
        """Share of its rate that a receiving port loses for each sender beyond the first; zero for losses below NOISE."""
        lost = 1 - self.goodput
        return lost / (self.senders - 1) if self.senders > 1 and lost >= NOISE else 0.0

    @property
    def shared_nic(self) -> bool:
        """True if the ranks of a server share one NIC: their joint rate is clearly below the sum of their single rates."""
        return self.joint < SHARED


def cluster_of(links: LinkMeasurements, gpus: Sequence[Gpu], name: str = "measured") -> Cluster:
    """Makes a Cluster from measured links and the ranks' GPUs, whose nodes are the hosts.

    The servers found in the measurements are nodes in place of the hosts. A rank's start-up is the shortest among its measured
    messages, because a message takes the longer start-up of its two ranks.
    """
    node_G, servers = [gpu.node for gpu in gpus], None
    if links.server_G.any():
        node_G = links.server_G.tolist()
        servers = Servers.of(node_G, links.nic_Bps, links.shared_nic)
    pair_startup_s_GG = np.where(np.eye(len(gpus), dtype=bool), np.inf, links.startup_s_GG)
    startup_s_G = np.minimum(pair_startup_s_GG.min(axis=0), pair_startup_s_GG.min(axis=1)).tolist()
    measured_G = zip(node_G, links.out_Bps_G.tolist(), links.in_Bps_G.tolist(), startup_s_G, strict=True)
    measured = (
        replace(gpu, node=node, out_Bps=out_Bps, in_Bps=in_Bps, startup_s=startup_s)
        for gpu, (node, out_Bps, in_Bps, startup_s) in zip(gpus, measured_G, strict=True)
    )
    return Cluster(name, tuple(measured), servers, links.incast)


@dataclass(frozen=True)
class MeasuredCluster:
    """Result of `measure_links`: the Cluster and its measurements."""

    cluster: Cluster  # the ranks' GPUs and network
    links: LinkMeasurements  # the measurements that it was made from
    transport: str  # "gloo" or "nccl", over which the links were measured

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for the cluster's file: on the fit, the goodput of a receiver with several senders, and servers."""
        links, pairs_GG = self.links, ~np.eye(len(self.cluster), dtype=bool)
        rate_Bps_X, error_X = links.rate_Bps_GG[pairs_GG], links.error_GG[pairs_GG]
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        said = [
            f"Measured over {self.transport}, {len(self.cluster)} ranks, {today}. Ports: to and from several ranks at once.",
            f"Single pairs: {rate_Bps_X.min():.4g} to {rate_Bps_X.max():.4g} bytes a second; a line through message sizes "
            f"is {np.median(error_X):.1%} off (median), {error_X.max():.1%} at worst.",
            f"Goodput of a receiver with {plural(links.senders, 'sender')} at once: {links.goodput:.0%}.",
        ]
        if links.server_G.any():
            owner = "a server has one NIC" if links.shared_nic else "a rank has a NIC of its own"
            said.append(f"Servers are the hosts; {owner}: its ranks together reach {links.joint:.0%} of their rates alone.")
        return tuple(said)


def measure_links(
    ranks: int | None = None,
    *,
    timeout_s: float = 300.0,
) -> MeasuredCluster | None:
    """Measures the links between ranks, over NCCL where every rank has a GPU, else over gloo, and makes a Cluster of them.

    Under torchrun every rank calls this, and all but rank 0 get None. Otherwise `ranks` local processes are started.

    Args:
        ranks: the number of ranks; None: as many as torchrun has started.
        timeout_s: seconds that a rank waits for a peer.

    Returns:
        The Cluster with its measurements; None on ranks of torchrun other than 0.

    Raises:
        BadInput: if `ranks` is below 2 or not torchrun's.
        RankFailed: if a rank fails.

    Example:
        >>> measured = measure_links(2)
        >>> len(measured.cluster), measured.transport
        (2, 'gloo')
    """
    rank_info = rank_info_from_environment(timeout_s)
    count = rank_info.ranks if rank_info is not None else ranks
    if rank_info is not None and ranks not in (None, count):
        raise BadInput(f"`ranks`: expected as many as torchrun started, {count}, or none, found {ranks}")
    if count is None or count < 2:
        raise BadInput(f"`ranks`: expected two or more, found {shown(count)}")
    if rank_info is not None:
        measured = _measure_rank(rank_info)
        return measured if rank_info.rank == 0 else None
    results: list[MeasuredCluster] = launch(_measure_rank, count, timeout_s=timeout_s)
    return results[0]


def _measure_rank(rank_info: RankInfo) -> MeasuredCluster:
    """One rank's part: returns the same on all ranks."""
    device, host = device_of(rank_info), socket.gethostname()
    kind, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // rank_info.local_ranks
    if device != "cpu":
        card = torch.cuda.get_device_properties(device)
        kind, memory = card.name, int(card.total_memory)
    own = Gpu(f"{host}-{rank_info.local_rank}", kind, 0, 1.0, 1.0, memory)
    told_G: list[Any] = [None] * rank_info.ranks
    with default_process_group(rank_info) as heartbeats:
        dist.all_gather_object(told_G, (own, host, host_id(device != "cpu")))
        gpus, names_G, hosts_G = zip(*told_G, strict=True)
        kinds = [gpu.kind for gpu in gpus]
        over = "gloo" if "cpu" in kinds else "nccl"
        if over == "gloo":
            links = time_links(GlooTransport(), hosts_G)
        else:
            torch.cuda.set_device(device)
            links = time_links(nccl_transport(device, rank_info.timeout_s, heartbeats), hosts_G, device)
    nodes_G, speeds_G = _numbered(names_G), relative_speeds(kinds)
    placed = [replace(gpu, node=node, speed=speed) for gpu, node, speed in zip(gpus, nodes_G, speeds_G, strict=True)]
    return MeasuredCluster(cluster_of(links, placed), links, over)


def _numbered(names: Sequence[str]) -> list[int]:
    """The number of each name, from zero, by first occurrence."""
    return [[*dict.fromkeys(names)].index(name) for name in names]


def host_id(on_gpus: bool) -> str:
    """Returns an id that is equal on all ranks of a host: the machine's name and boot id, as in NCCL.

    For sockets it includes the network namespace, because ranks in different namespaces communicate through interfaces.

    Args:
        on_gpus: whether ranks communicate by NCCL, between GPUs.
    """
    parts, namespace = [socket.gethostname()], Path("/proc/self/ns/net")
    with suppress(OSError):  # where there is no Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [] if on_gpus else [os.readlink(namespace)]
    return " ".join(parts)


def time_links(transport: Transport, hosts_G: Sequence[str] = (), device: str = "cpu") -> LinkMeasurements:
    """Measures the links of a transport. All ranks must call it; all get the same measurements.

    - Pairs: messages of SIZES (between GPUs of GPU_SIZES) that take at most PATIENCE_S, each with a small reply; half of the
      smallest round trip is subtracted. Their rates tell whether hosts are servers.
    - Ports: each rank sends to all others of its server at once; then all others send to each rank.
    - NICs: all ranks of a server send to ranks of other servers at the same time.

    Rates of several pairs at once are the slopes of lines through the seconds of several amounts, as those of one pair are.

    Args:
        transport: the transport.
        hosts_G: (G,) the host of each rank, from `host_id`; empty: all are on one.
        device: device of the messages.
    """
    return _LinkTimer(transport, device).measure(np.array(_numbered(hosts_G) or [0] * transport.ranks))


class _LinkTimer:
    """One rank's part in timing the links."""

    def __init__(self, transport: Transport, device: str) -> None:
        self._net = transport
        self._device, self._sizes = device, SIZES if device == "cpu" else GPU_SIZES
        self._buffer = torch.zeros(self._sizes[-1], dtype=torch.uint8, device=device)

    def measure(self, host_G: IntArray) -> LinkMeasurements:
        """Times all pairs, then all ports, then the NICs, of ranks on the hosts host_G (G,)."""
        ranks = self._net.ranks
        fitted_GG3 = np.zeros((ranks, ranks, 3))
        for pair in permutations(range(ranks), 2):
            fitted_GG3[pair] = self._pair(*pair)
        startup_s_GG, rate_Bps_GG, error_GG = np.moveaxis(fitted_GG3, 2, 0)
        server_G = find_servers(rate_Bps_GG, host_G)
        out_Bps_G, into_Bps_G, sent_Bps_G = np.zeros((3, ranks))
        others = [[(rank + step) % ranks for step in range(1, ranks)] for rank in range(ranks)]  # the next first
        # A rank that is alone on its server has all others as peers.
        peers = [[to for to in others[rank] if server_G[to] == server_G[rank]] or others[rank] for rank in range(ranks)]
        for rank, own in enumerate(peers):
            out_Bps_G[rank] = self._joint_Bps([(rank, peer) for peer in own], rate_Bps_GG)
            into_Bps_G[rank] = self._joint_Bps([(peer, rank) for peer in own], rate_Bps_GG)
            sent_Bps_G[rank] = rate_Bps_GG[own, rank].sum()
        joint, nic_Bps = 1.0, float(np.median(rate_Bps_GG[np.not_equal.outer(server_G, server_G)])) if server_G.any() else 0.0
        apart_Bps_N, together_Bps_N = [], []
        for server in np.unique(server_G):
            members = np.flatnonzero(server_G == server).tolist()
            pairs = list(zip(members, [to for to in others[members[-1]] if server_G[to] != server], strict=False))
            if len(pairs) > 1:
                apart_Bps_N.append(sum(rate_Bps_GG[pair] for pair in pairs))
                together_Bps_N.append(self._joint_Bps(pairs, rate_Bps_GG))
        if together_Bps_N and (joint := float(np.median(np.divide(together_Bps_N, apart_Bps_N)))) < SHARED:
            nic_Bps = float(np.median(together_Bps_N))
        in_Bps_G = np.maximum(into_Bps_G, rate_Bps_GG.max(axis=0))
        return LinkMeasurements(
            startup_s_GG,
            rate_Bps_GG,
            error_GG,
            np.maximum(out_Bps_G, rate_Bps_GG.max(axis=1)),
            in_Bps_G,
            max(map(len, peers)),
            min(float(np.median(into_Bps_G / np.minimum(in_Bps_G, sent_Bps_G))), 1.0),
            server_G,
            nic_Bps,
            joint,
        )

    def _pair(self, src: int, dst: int) -> tuple[float, float, float]:
        """Start-up, rate and error of messages from src to dst."""
        seconds: list[float] = []
        for before, size in pairwise((self._sizes[0], *self._sizes)):
            if seconds and seconds[-1] * size / before > PATIENCE_S:
                break
            took = min(self._pings(src, dst, size, REPEATS + 1)[1:])
            seconds.append(float(self._net.gather(torch.tensor([took], dtype=torch.float64))[src]))
        one_way_X = np.maximum(np.array(seconds) - seconds[0] / 2, 1e-9)
        fit = fit_link(self._sizes[: len(seconds)], one_way_X)
        return fit.startup_s, fit.rate_Bps, fit.median_error

    def _pings(self, src: int, dst: int, size: int, count: int) -> list[float]:
        """Seconds until src has the answer to each of `count` messages; of no meaning on other ranks.

        On GPUs all are queued, and timed by the events between them: the host's calls are no part of what a link takes.
        """
        took_s: list[float] = []
        seen_s: list[tuple[float, float]] = []  # start and end of each transfer of this rank
        for _ in range(count if self._net.rank in (src, dst) else 0):
            began_s = time.perf_counter()
            for flow in ((src, dst, size), (dst, src, SIZES[0])):
                self._exchange([flow], lambda *seen: seen_s.append(seen[-2:]), wait=self._device == "cpu")
            took_s.append(time.perf_counter() - began_s)
        self._net.wait()
        if self._device != "cpu":
            took_s = [answered_s - sent_s for (sent_s, _), (_, answered_s) in zip(seen_s[::2], seen_s[1::2], strict=True)]
        return took_s or [0.0] * count

    def _joint_Bps(self, pairs: Sequence[tuple[int, int]], rate_Bps_GG: FloatArray) -> float:
        """The joint rate, in bytes per second, of several pairs at once.

        Each gets bytes in proportion to its own rate, so that on ports which are shared evenly all end at about the same time.
        """
        single_Bps_X = np.array([rate_Bps_GG[pair] for pair in pairs])
        if len(pairs) == 1:
            return float(single_Bps_X[0])
        most_X = np.clip(single_Bps_X * SPAN_S / len(pairs), 4 * SIZES[0], self._sizes[-1]).astype(np.int64)
        bytes_SX = np.stack([most_X // 4, most_X // 2, most_X])
        took_NS = [[self._flow(pairs, bytes_X) for bytes_X in bytes_SX] for _ in range(REPEATS)]
        return fit_link(bytes_SX.sum(axis=1), np.min(took_NS, axis=0)).rate_Bps

    def _flow(self, pairs: Sequence[tuple[int, int]], bytes_X: IntArray) -> float:
        """Seconds from the start on all ranks until the last receiver has its bytes."""
        time.sleep(SETTLE_S)
        self._net.gather(torch.zeros(1))
        began_s = time.perf_counter()
        flows = [(src, dst, size) for (src, dst), size in zip(pairs, bytes_X.tolist(), strict=True)]
        if any(self._net.rank in pair for pair in pairs):
            self._exchange(flows)
        took_s = time.perf_counter() - began_s
        received = any(self._net.rank == dst for _, dst in pairs)
        return float(self._net.gather(torch.tensor([took_s if received else 0.0], dtype=torch.float64)).max())

    def _exchange(self, flows: Sequence[tuple[int, int, int]], observe: Observe = lambda *_: None, wait: bool = True) -> None:
        """Transfers all flows (source, destination, bytes), posted at once, or queues them; see `Transport.exchange`."""
        order = Order("probe", np.array([flow[:2] for flow in flows]), self._net.ranks, self._net.ranks)
        sends, recvs = ([self._buffer[:0]] * self._net.ranks for _ in range(2))
        for src, dst, size in flows:
            if src == self._net.rank:
                sends[dst] = self._buffer[:size]
            if dst == self._net.rank:
                recvs[src] = self._buffer[:size]
        self._net.exchange(order, sends, recvs, observe)
        if wait:
            self._net.wait()
