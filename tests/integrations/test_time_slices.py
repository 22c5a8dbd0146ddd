"""Colocated servers: one of them computes on a GPU at a time, and a rank that waits for others holds no GPU."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("prometheus_client")
from aurora_vllm.settings import Settings
from aurora_vllm.time_slices import TimeSlices, join_port_arbiter
from aurora_vllm.worker_integration import WorkerIntegration

from aurora.errors import BadInput
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.runtime.transports.ordered import Memory, MemoryTransport

SLOTS_G = ((0, 1), (2, 3))


class Watched(MemoryTransport):
    """Whoever comes here may wait for other ranks."""

    time_slices, exchanges = None, 0

    def gather(self, row):
        assert not self.time_slices._holds_gpu
        return super().gather(row)

    def exchange(self, *args):
        assert not self.time_slices._holds_gpu
        super().exchange(*args)
        self.exchanges += 1


@pytest.mark.parametrize(("holds_between_layers", "slice_s"), [(False, float("inf")), (True, float("inf")), (True, 2.0)])
def test_two_servers_of_two_ranks_take_turns(holds_between_layers, slice_s, tmp_path):
    """Ranks of one begin in another order than those of the other. Ports of unknown rates count as 1 B/s in slices."""
    computing_G, joined = [threading.Lock() for _ in SLOTS_G], threading.Barrier(4)

    def serve(memory, store, rank):
        arbiter = join_port_arbiter(store, "k", rank, tmp_path, 120.0)
        joined.wait(120.0)  # else one server may have left before the other comes, which then takes its place
        start, stop = arbiter.start_compute, arbiter.stop_compute
        arbiter.start_compute = lambda: (start(), computing_G[rank].acquire(blocking=False) or pytest.fail("two compute"))
        arbiter.stop_compute = lambda: (computing_G[rank].release(), stop())
        integration = WorkerIntegration(Settings(order="online"), rank, 2, None, None)
        integration.time_slices = TimeSlices(arbiter, holds_between_layers, slice_s)
        transport = Watched(memory, rank)
        transport.time_slices = integration.time_slices
        integration.connect(lambda: transport)
        transport.gather(torch.zeros(1))  # all have theirs
        hidden = torch.arange(12.0).reshape(3, 4) + rank
        weights, index = torch.full((3, 2), 0.5), torch.tensor([[0, 2], [1, 3], [2, 3]], dtype=torch.int32)
        for number in range(20):
            with integration.forward_pass(3 if (number + rank) % 3 else 0):  # now and then a rank only keeps the other company
                integration.hold_gpu()
                for layer in range(2):
                    with integration.moe_layer(layer, index, False):
                        rows, found, _ = integration.dispatch(hidden, weights, index, lambda _layer: SLOTS_G)
                        assert integration.time_slices._holds_gpu
                        answer = integration.combine(rows * found.sum(dim=1, keepdim=True))
                    torch.testing.assert_close(answer, hidden, rtol=0, atol=0)
                integration.time_slices.release_gpu()
        arbiter.leave()
        assert (transport.exchanges > 20 * 2 * 2 * 16) == (slice_s < float("inf"))
        return arbiter.slot

    with ThreadPoolExecutor(4) as pool:
        servers = [(Memory(2, 120.0), dist.HashStore()) for _ in range(2)]
        made = [pool.submit(serve, *servers[server], rank) for server, rank in ((0, 1), (1, 0), (0, 0), (1, 1))]
        slots = [each.result() for each in made]
    assert slots[0] == slots[2] != slots[1] == slots[3]


def test_without_an_arbiter_all_ranks_refuse(tmp_path):
    store = dist.HashStore()
    with pytest.raises(BadInput, match="none cannot be used: No such file or directory"):
        join_port_arbiter(store, "k", 0, tmp_path / "none", 1.0)
    with pytest.raises(BadInput, match="rank 0 has no slot"):
        join_port_arbiter(store, "k", 1, tmp_path / "none", 1.0)
    with pytest.raises(BadInput, match=r"rank 0 published no slot within 0.1 s"):
        join_port_arbiter(dist.HashStore(), "k", 1, tmp_path, 0.1)


@pytest.mark.parametrize(("servers", "waits"), [(0, 0), (1, 0), (2, 1)])
def test_a_server_waits_for_its_transfers_only_where_others_use_the_port(servers, waits):
    """On a GPU transfers are queued: a wait after each exchange would keep the host from running ahead."""
    waited = []
    slices = TimeSlices(thread_port_arbiters(servers)[0] if servers else None)
    with slices.exchanging(types.SimpleNamespace(wait=lambda: waited.append("waited"))):
        assert not waited
    assert len(waited) == waits
