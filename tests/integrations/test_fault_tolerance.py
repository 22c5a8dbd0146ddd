"""Going on without lost ranks, as far as it needs no vLLM: what a change says, connections that it shuts, processes that end."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from aurora_vllm.peer_ranks import end_with_parent
from aurora_vllm.vllm_internals import fault_tolerance
from aurora_vllm.vllm_internals.close_group_connections import GroupConnections, RankLost, announce, connect
from aurora_vllm.vllm_internals.fault_tolerance import RanksChange
from vllm_on_cpu import PART_S, end_waits

from aurora.errors import BadInput

SPAWN = multiprocessing.get_context("spawn")
PARAMS = {"change": 2, "dead": [2], "alive": [3, 0, 1], "within_s": 5}


def test_a_change_names_every_rank_once():
    change = RanksChange.read(PARAMS, 4)
    assert change == RanksChange(2, (2,), (0, 1, 3), timedelta(seconds=5))
    assert RanksChange.read({**PARAMS, "changed": "file"}, 4).changed == "file"
    for wrong in ({"alive": [0, 1]}, {"dead": [1, 2]}, {"alive": [0, 1, 4]}, {"alive": [], "dead": [0, 1, 2, 3]}):
        with pytest.raises(BadInput, match="expected ranks 0 to 3, each dead or alive"):
            RanksChange.read({**PARAMS, **wrong}, 4)
    for wrong in ({"change": "two"}, {"within_s": None}, {"dead": 2}):
        with pytest.raises(BadInput, match="change_ranks: expected change, dead, alive and within_s, found"):
            RanksChange.read({**PARAMS, **wrong}, 4)


class Sentinel:
    """vLLM's, as one that has a recovery of its own."""

    def __init__(self, engine, parallel_config):
        self.engine, self.parallel_config = engine, parallel_config

    def scale_down(self, request):
        return "vLLM's"


def test_where_vllm_has_a_recovery_of_its_own_one_alone_decides(monkeypatch):
    monkeypatch.setattr(fault_tolerance, "find", lambda _where: None)
    engine = SimpleNamespace()
    engine.ft_sentinel = Sentinel(engine, SimpleNamespace(data_parallel_rank=1, data_parallel_size=4))
    made = fault_tolerance.engine_sentinel(engine, GroupConnections(), "127.0.0.1:1")
    assert isinstance(made, Sentinel)
    with pytest.raises(BadInput, match=r"scale_down: expected change_ranks, as `aurora vllm` decides which ranks serve"):
        made.scale_down(SimpleNamespace(instruction="scale_down"))
    assert made.stops(None) is False
    with pytest.raises(RankLost, match="ranks 2 are lost"):
        made.stops(RanksChange.read(PARAMS, 4))
    made._tried = 2
    assert made.stops(RanksChange.read(PARAMS, 4)), "which it has noticed by itself"


def told_by_three(target, number, within_s):
    """Runs `target` on three ranks, with the port of a store and a queue. Returns the `number` things that they tell."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = SPAWN.Queue()
    processes = [SPAWN.Process(target=target, args=(rank, store.port, told)) for rank in range(3)]
    for process in processes:
        process.start()
    found = [told.get(timeout=within_s) for _ in range(number)]
    for process in processes:
        process.join(60)
        process.kill()
    return found


def wait_for_one_that_left(rank, port, told):
    """Ranks 1 and 2 broadcast with rank 0, which is in no collective; all connections are shut by the change."""
    address, within = f"127.0.0.1:{port}", timedelta(seconds=60)
    connections = GroupConnections()
    connections.watch(address)
    connections.begin(0)
    store = connect(address, within)
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=3, timeout=within)
    dist.all_reduce(torch.ones(1))
    began_s = time.monotonic()
    try:
        if rank == 0:
            time.sleep(1)
            announce(connect(address, within), 1)
        else:
            dist.broadcast(torch.ones(10), src=0)
            told.put((rank, "ended", 0.0, 0.0))
    except RuntimeError as error:
        freed_s = time.monotonic() - began_s
        dist.destroy_process_group()
        connections.begin(1)
        alive = dist.PrefixStore("second", connect(address, within))
        dist.init_process_group("gloo", store=alive, rank=rank - 1, world_size=2, timeout=within)
        total = torch.full((1,), float(rank))
        dist.all_reduce(total)
        connections.shut(1)  # it is that of these connections
        dist.all_reduce(total)
        told.put((rank, str(error), freed_s, float(total)))


def test_a_change_frees_those_that_wait_for_a_rank_that_has_left():
    found = sorted(told_by_three(wait_for_one_that_left, 2, 120))
    assert [rank for rank, _, _, _ in found] == [1, 2]
    for _, error, freed_s, total in found:
        assert "losed" in error, error  # connection closed
        assert 0.5 < freed_s < 30, "before gloo's time-out"
        assert total == 6.0


CHANGES, WITHIN_S = 40, 20


def exchange_until_shut(rank, port, told):
    """Three ranks exchange without pause; in each change all shut their connections within a few milliseconds."""
    rng, connections, longest_s = random.Random(rank), GroupConnections(), 0.0
    end_waits()
    within, rows = timedelta(seconds=WITHIN_S), torch.zeros(60_000)
    for change in range(1, CHANGES + 1):
        connections.begin(change)
        store = dist.PrefixStore(str(change), connect(f"127.0.0.1:{port}", within))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=within)
        dist.barrier()
        shut = threading.Timer(0.03 + rng.uniform(0, 0.004), connections.shut, (change + 1,))
        shut.start()
        began_s = time.monotonic()
        with suppress(RuntimeError):
            while True:
                dist.all_to_all_single(torch.empty_like(rows), rows)
        longest_s = max(longest_s, time.monotonic() - began_s)
        shut.join()
        connections.keep(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    told.put(longest_s)
    told.close()
    told.join_thread()
    os._exit(0)  # the end of a process waits for groups


def test_a_change_ends_every_exchange_wherever_it_is():
    """Gloo's own thread, which sends once a peer is ready, forgets a send that fails: its exchange would end by time-out."""
    assert max(told_by_three(exchange_until_shut, 3, 240)) < WITHIN_S / 2


def wait_longer_than_a_part(rank, port, told):
    connections, within = GroupConnections(), timedelta(seconds=60)
    connections.begin(0)
    end_waits()
    dist.init_process_group("gloo", store=connect(f"127.0.0.1:{port}", within), rank=rank, world_size=3, timeout=within)
    total, late_s = torch.ones(1), 1.3 * PART_S
    time.sleep(late_s * (rank == 0))
    dist.all_reduce(total)
    time.sleep(late_s * (rank == 0))
    if rank < 2:
        dist.send(total, 1) if rank == 0 else dist.recv(total, 0)
    dist.all_reduce(total)
    told.put(float(total))


def test_waits_that_take_long_go_on_while_there_is_no_change():
    """A time-out of a point-to-point operation would close the connection of its ranks."""
    assert told_by_three(wait_longer_than_a_part, 3, 120) == [9.0] * 3


def have_a_child(told):
    child = SPAWN.Process(target=outlive)
    child.start()
    told.put(child.pid)
    time.sleep(600)


def outlive():
    end_with_parent()
    time.sleep(600)


def runs(pid):
    stat = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(stat.strip()) and stat[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_worker_ends_with_its_engine():
    told = SPAWN.Queue()
    engine = SPAWN.Process(target=have_a_child, args=(told,))
    engine.start()
    worker = told.get(timeout=60)
    time.sleep(0.5)
    assert runs(worker)
    os.kill(engine.pid, signal.SIGKILL)
    engine.join()
    until = time.monotonic() + 60
    while runs(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(worker)
