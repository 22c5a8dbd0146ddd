"""NCCL communicator of epochs on an emulated GPU: what waits for a lost peer is aborted, once, and the next epoch goes on."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from aurora.algorithms.alltoall.registry import ORDER
from aurora.elastic import epoch_nccl
from aurora.elastic.epoch_nccl import EpochCommunicator, EpochNcclTransport, NcclGpu
from aurora.errors import RankFailed
from aurora.runtime.transports import nccl
from aurora.types import Network
from tests.elastic.emulated_gpu import EmulatedGpu, die, gloo_group
from tests.elastic.processes import Threads
from tests.elastic.summed_steps import SummedSteps


class ExchangedSteps(SummedSteps):
    """Each step also exchanges, over the GPUs, the step's number between all members; and each epoch begins with one."""

    def begin(self, epoch, settlement):
        super().begin(epoch, settlement)
        self._transport = self.member.transport()
        self._exchange(-1)

    def prepare(self):
        self._exchange(self.step)
        super().prepare()

    def _exchange(self, number):
        transport = self._transport
        everyone_RR = 1 - np.eye(transport.ranks, dtype=np.int64)
        order = ORDER["openshop"](everyone_RR, Network.equal(transport.ranks), rng=np.random.default_rng(0))
        sends = [torch.full((3,), number) for _ in range(transport.ranks)]
        recvs = [torch.full_like(each, -9) for each in sends]
        transport.exchange(order, sends, recvs, lambda *_: None)
        transport.wait()
        assert all((each == number).all() for peer, each in enumerate(recvs) if peer != transport.rank)


def exchanging(members, name, steps, dies=None, on_commit=lambda step: None, waits=False):
    """Makes a member that ends when its GPU is about to make the call `dies`: the numbers of its group and of the call."""

    def on_call(*call):
        if call == dies:
            die(member)

    gpu = EmulatedGpu(on_call, waits)
    member = members.make(name, lambda member: ExchangedSteps(member, steps, on_commit=on_commit), gpu)
    return gpu


def check_aborted_once(gpu):
    """Each communicator that was made was aborted once; an abort's thread may still be about to."""
    end_s = time.monotonic() + 60
    while any(group.aborts == 0 for group in gpu.groups) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert [group.aborts for group in gpu.groups if group.made] == [1] * sum(group.made for group in gpu.groups)


@pytest.mark.parametrize("waits", [False, True])
def test_members_that_wait_for_a_lost_one_are_freed_and_go_on_with_new_communicator(lighthouse, waits):
    members = Threads(lighthouse)
    dies = {"b": (0, 6)}  # in the second call of an exchange
    gpus = {name: exchanging(members, name, 20, dies.get(name), waits=waits) for name in "abc"}
    members.start(*"abc")
    works = members.results()
    for name in "ac":
        assert (works[name].step, works[name].total) == (20, 210.0)
        assert [members for members, *_ in works[name].log] == [("a", "b", "c"), ("a", "c")]
        check_aborted_once(gpus[name])
        assert len(gpus[name].groups) == 2


def test_a_member_that_is_lost_while_communicator_are_made_costs_no_step(lighthouse, monkeypatch):
    monkeypatch.setattr("aurora.elastic.member.ROUND_S", 0.1)  # the steps are over soon
    joined, members = threading.Event(), Threads(lighthouse)

    def join(step):
        if step == 5 and not joined.is_set():
            joined.set()
            members.start("late")

    dies = {"late": (0, 0)}
    gpus = {name: exchanging(members, name, 30, dies.get(name), join) for name in (*"abc", "late")}
    members.start(*"abc")
    works = members.results()
    for name in "abc":
        assert (works[name].step, works[name].total) == (30, 465.0)
        assert [members for members, *_ in works[name].log] == [("a", "b", "c"), ("a", "b", "c")]
        made = [group.made for group in gpus[name].groups]
        assert made in ([True, False, True], [True, True])  # its end may be heard of before


class Stuck(EmulatedGpu):
    """A GPU on which calls do not end, not even aborted ones."""

    def reached(self, mark):
        return mark == 0

    def synchronize(self):
        time.sleep(60)


def alone(gpu, ranks=1):
    communicator = EpochCommunicator(gpu)
    communicator.make("", 1, 0, ranks, 60.0, threading.Event())
    return communicator


def test_who_waits_goes_on_although_an_aborted_call_does_not_end(monkeypatch):
    monkeypatch.setattr(epoch_nccl, "DRAIN_S", 0.05)
    gpu = Stuck(waits=False)
    communicator = alone(gpu)
    transport = EpochNcclTransport(communicator.calls, None, 60.0)
    gpu.post(lambda: None)
    threading.Timer(0.05, communicator.abort, [RankFailed("the epoch is over")]).start()
    with pytest.raises(RankFailed, match="the epoch is over"):
        transport.wait()
    with pytest.raises(RuntimeError, match=r"aborted calls did not end within 0\.05 s"):
        communicator.drain()


def test_an_error_of_the_gpu_shows_before_a_vote():
    class Broken(EmulatedGpu):
        def reached(self, mark):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")

    transport = EpochNcclTransport(alone(Broken()).calls, None, 60.0)
    with pytest.raises(RankFailed, match=r"rank 0 lost the others: CUDA error: an illegal memory access was encountered$"):
        transport.wait()


def test_what_was_received_by_an_aborted_call_is_not_given_to_anyone():
    """The call is aborted and has ended before its receiver looks."""
    communicator = alone(EmulatedGpu())
    transport = EpochNcclTransport(communicator.calls, None, 60.0)
    communicator.abort(RankFailed("first"))
    communicator.abort(RankFailed("second"))
    with pytest.raises(RankFailed, match="first"):
        transport.wait()


def test_a_grouped_call_that_fails_leaves_no_group_open():
    class Failing:
        open = 0

        def _start_coalescing(self, device):
            self.open += 1

        @property
        def parent(self):
            return self

        def send(self, *_):
            raise RuntimeError("NCCL communicator was aborted")

        def _end_coalescing(self, device):
            self.open -= 1

    group = Failing()
    calls = epoch_nccl.EpochCalls(EpochCommunicator(EmulatedGpu()), group, 0, 2)
    with pytest.raises(RuntimeError, match="was aborted"):
        calls.post([nccl.End(1, True, torch.zeros(1))])
    assert group.open == 0


def test_nccl_gpus_make_groups_of_torchft(monkeypatch):
    """With gloo's backend in the place of NCCL's, which only torch for GPUs has."""
    made = []

    def backend(store, rank, ranks, options):
        made.append(options)
        return gloo_group(store, rank, ranks)

    backend.Options = lambda: SimpleNamespace(config=SimpleNamespace(blocking=None))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "")  # so that they are as before in the end
        monkeypatch.delenv(f"TORCH_NCCL_{name}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = NcclGpu("cuda:0").new_group(f"127.0.0.1:{store.port}/epoch3/nccl0", 3, 0, 1, 60.0)
    with pytest.raises(RuntimeError, match="gloo does not implement startCoalescing"):
        group.parent._start_coalescing(torch.device("cuda"))
    group.abort()
    assert [options.config.blocking for options in made] == [False]
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60.0"
