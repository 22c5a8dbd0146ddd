"""Links: what is told from known transfers, and what ranks find on ports whose rates are known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from aurora.errors import BadInput
from aurora.profiler import link_timing as probing
from aurora.profiler.link_timing import LinkMeasurements, MeasuredCluster, cluster_of
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.phase_recorder import HostTimer
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclCalls, NcclTransport
from aurora.runtime.transports.process_groups import default_process_group, new_process_group
from aurora.runtime.transports.shaped import Port, ShapedTransport
from aurora.types import Gpu
from tests.conftest import cluster

RATES = (12e6, 8e6, 6e6)
STARTUP_S = 0.002


def found_by(rank_info, machines):
    probing.SPAN_S = 0.5  # beside other tests: 4 ms of a neighbour's turn stay far below what is asserted
    with default_process_group(rank_info):
        return probing.time_links(ShapedTransport(None, Port(machines, rank_info.rank)))


@pytest.mark.full
def test_ranks_find_the_rates_of_shaped_ports():
    """Every pair has the slower of its two ports, every port its own: 12 MB/s beside 8 and 6 is full by both together.

    Nothing passes faster; on a machine that other work slows, each rate is reached in some of several tries.
    """
    machines, between = cluster(*RATES, startup_s=STARTUP_S), ~np.eye(3, dtype=bool)
    expected = np.concatenate([np.minimum.outer(RATES, RATES)[between], RATES, RATES])
    reached = np.zeros(len(expected), bool)
    for _ in range(12):
        found = launch(found_by, 3, machines)
        for other in found[1:]:
            assert np.array_equal(found[0].rate_Bps_GG, other.rate_Bps_GG)  # all come to the same
            assert np.array_equal(found[0].in_Bps_G, other.in_Bps_G)
        links = found[0]
        rates_Bps = np.concatenate([links.rate_Bps_GG[between], links.out_Bps_G, links.in_Bps_G])
        assert (rates_Bps < 1.3 * expected).all()
        reached |= rates_Bps > 0.7 * expected
        if reached.all():
            break
    assert reached.all()
    assert (links.startup_s_GG[between] >= STARTUP_S / 2).all()
    assert links.senders == 2
    assert links.goodput <= 1
    assert not links.rate_Bps_GG.diagonal().any()


class Queueing:
    """A transport of a GPU whose exchanges end when it is waited for: each takes 2 s, and every third of them 1 s."""

    rank, ranks = 0, 2

    def __init__(self):
        self.queued, self.waits, self.now_s = [], 0, 0.0

    def exchange(self, order, sends, recvs, observe):
        self.queued.append((int(order.pairs_X2[0, 1]), observe))

    def wait(self):
        self.waits += 1
        for number, (peer, observe) in enumerate(self.queued):
            end_s = self.now_s + (1.0 if number % 3 == 2 else 2.0)
            observe(peer, peer != 0, 1, self.now_s, end_s)
            self.now_s = end_s
        self.queued = []


def test_messages_of_gpus_are_queued_and_timed_by_their_events():
    """By the host's clock they would take none of this time."""
    timer = probing._LinkTimer(net := Queueing(), "cpu")
    timer._device = "cuda:0"
    assert timer._pings(0, 1, 1 << 10, 3) == [4.0, 3.0, 3.0]
    assert (net.waits, net.queued) == (1, [])
    assert timer._pings(1, 2, 1 << 10, 3) == [0.0] * 3


class LazyCalls(NcclCalls):
    """Grouped calls over gloo whose first one makes the communicator, and so waits for all ranks, as NCCL's does."""

    made = False

    def post(self, ends):
        if not self.made:
            self.made = True
            torch.distributed.barrier(self._group)
        super().post(ends)


def found_over_lazy_calls(rank_info):
    probing.SIZES = (1 << 10, 1 << 12)
    probing.SPAN_S, probing.REPEATS = 0.01, 2
    with default_process_group(rank_info):
        calls = LazyCalls(new_process_group("gloo", rank_info.timeout_s), "cpu", HostTimer(0.0))
        return probing.time_links(NcclTransport(calls, GlooTransport()))


@pytest.mark.full
def test_links_of_three_ranks_are_timed_where_a_communicator_takes_all_of_them_to_make():
    """A pair's messages are calls of two ranks only: the communicator must be there before."""
    for links in launch(found_over_lazy_calls, 3):
        assert (links.rate_Bps_GG[~np.eye(3, dtype=bool)] > 0).all()


def test_ranks_of_a_machine_share_its_host_id_and_over_sockets_their_network_namespace(monkeypatch):
    own = probing.host_id(False), probing.host_id(True)
    monkeypatch.setattr(probing.os, "readlink", lambda path: "net:[1]")
    assert (probing.host_id(False) != own[0], probing.host_id(True) == own[1]) == (True, True)


def test_remarks_say_how_it_was_measured():
    links = replace(SOME, error_GG=np.full((4, 4), 0.02), goodput=0.9)
    over, fit, goodput = MeasuredCluster(cluster_of(links, SERVERS), links, "gloo").remarks
    assert over.startswith("Measured over gloo, 4 ranks, ")
    assert fit.startswith("Single pairs: 100 to 100 bytes a second;")
    assert fit.endswith("is 2.0% off (median), 2.0% at worst.")
    assert goodput == "Goodput of a receiver with 3 senders at once: 90%."


@pytest.mark.parametrize("ranks", [None, 1])
def test_what_cannot_be_measured(ranks):
    with pytest.raises(BadInput, match="`ranks`: expected two or more, found"):
        probing.measure_links(ranks, timeout_s=60)


SOME = LinkMeasurements(
    np.full((4, 4), 1e-5),
    np.full((4, 4), 100.0),
    np.zeros((4, 4)),
    np.full(4, 100.0),
    np.full(4, 90.0),
    3,
    1.0,
    np.zeros(4, dtype=np.int64),
)
SERVERS = [
    Gpu(f"host-{rank // 2}-{rank % 2}", "kind", rank // 2, 1.0, 1.0, 1000, 1.0 if rank < 2 else 0.5) for rank in range(4)
]


def test_equal_links_are_one_switch():
    made = cluster_of(SOME, SERVERS)
    assert made.servers is None
    assert made.incast == 0.0
    assert [gpu.node for gpu in made.gpus] == [0, 0, 1, 1]
    assert [gpu.speed for gpu in made.gpus] == [1.0, 1.0, 0.5, 0.5]
    assert [gpu.name for gpu in made.gpus] == ["host-0-0", "host-0-1", "host-1-0", "host-1-1"]
    assert made.out_Bps_G.tolist() == [100.0] * 4
    assert made.in_Bps_G.tolist() == [90.0] * 4
    assert made.startup_s_G.tolist() == [1e-5] * 4


BETWEEN_GG = np.where(np.kron(np.eye(2), np.ones((2, 2))), 900.0, 50.0) * (1 - np.eye(4))
FOUND = replace(
    SOME,
    rate_Bps_GG=BETWEEN_GG,
    out_Bps_G=np.full(4, 900.0),
    in_Bps_G=np.full(4, 900.0),
    server_G=np.array([0, 0, 1, 1]),
    nic_Bps=50.0,
    joint=0.97,
)


def test_servers_that_were_found_are_nodes_and_have_a_nic_for_each_rank():
    on_one_host = [replace(gpu, node=0) for gpu in SERVERS]
    made = cluster_of(FOUND, on_one_host)
    assert made.servers is not None
    assert (made.servers.nic_Bps, made.servers.shared, made.servers.server_G) == (50.0, False, (0, 0, 1, 1))
    assert [gpu.node for gpu in made.gpus] == [0, 0, 1, 1]
    assert made.out_Bps_G.tolist() == made.in_Bps_G.tolist() == [900.0] * 4


def test_ranks_that_are_slower_together_share_a_nic():
    shared = replace(FOUND, nic_Bps=53.0, joint=0.53)
    made = cluster_of(shared, SERVERS)
    assert made.servers is not None
    assert (made.servers.nic_Bps, made.servers.shared) == (53.0, True)
    assert MeasuredCluster(made, shared, "gloo").remarks[-1] == (
        "Servers are the hosts; a server has one NIC: its ranks together reach 53% of their rates alone."
    )


@pytest.mark.parametrize(("senders", "goodput", "incast"), [(1, 1.0, 0.0), (3, 0.99, 0.0), (3, 0.8, 0.1), (3, 0.4, 0.3)])
def test_incast_is_the_loss_a_further_sender(senders, goodput, incast):
    assert replace(SOME, senders=senders, goodput=goodput).incast == pytest.approx(incast)
