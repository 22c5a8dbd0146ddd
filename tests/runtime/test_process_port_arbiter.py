"""Port arbiter of models in separate processes: real processes, some of them killed."""

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest

from aurora.errors import BadInput
from aurora.runtime import colocation_table as colocated
from aurora.runtime.process_port_arbiter import ProcessPortArbiter
from aurora.types import SlicePolicy

CONTEXT = multiprocessing.get_context("forkserver")  # a fork of this process, with all that tests import, may crash
TIMEOUT_S = 120.0  # longer than any process waits for a core of a busy machine


@contextmanager
def processes(*jobs):
    """Each (function, *args) in a process of its own with a queue to tell the test something; all are gone afterwards."""
    told = CONTEXT.Queue()
    started = [CONTEXT.Process(target=job, args=(told, *args)) for job, *args in jobs]
    try:
        for process in started:
            process.start()
        yield started, told
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.fixture
def join(tmp_path):
    """A port arbiter of this process in the test's folder."""
    made = []

    def arbiter(gpu=0, slot=None, turn_s=TIMEOUT_S, **policy):
        made.append(ProcessPortArbiter(tmp_path, gpu, slot, turn_s=turn_s, policy=SlicePolicy(**policy)))
        return made[-1]

    yield arbiter
    for each in made:
        each.leave()


def hear(told, count):
    return [told.get(timeout=TIMEOUT_S) for _ in range(count)]


def enter(told, folder, what, gpu=0, slot=None):
    arbiter = ProcessPortArbiter(folder, gpu, slot, turn_s=TIMEOUT_S)
    if what == "GPU":
        arbiter.start_compute()
    else:
        inside = arbiter.exchange()
        inside.__enter__()
    told.put("inside")
    time.sleep(2 * TIMEOUT_S)


@pytest.mark.parametrize("what", ["GPU", "port"])
def test_what_a_killed_process_held_is_free(tmp_path, join, what):
    with processes((enter, tmp_path, what)) as ((victim,), told):
        assert hear(told, 1) == ["inside"]
        arbiter = join()
        os.kill(victim.pid, signal.SIGKILL)
        for _ in range(3):
            arbiter.start_compute()
            arbiter.stop_compute()
            with arbiter.exchange():
                pass


def test_what_a_stopped_process_has_is_passed_on_and_that_is_said_once(tmp_path, join, caplog):
    with processes((enter, tmp_path, "GPU"), (enter, tmp_path, "port")) as (stopped, told):
        hear(told, 2)
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        arbiters = [join(turn_s=0.2), join(turn_s=0.2)]
        for arbiter in arbiters * 2:
            arbiter.start_compute()
            arbiter.stop_compute()
            with arbiter.exchange():
                pass
        assert [len(arbiter._passed_on) for arbiter in arbiters] == [2, 2], "each turn is waited for once"
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2
        for process, what, text in zip(stopped, ("GPU", "port"), said, strict=True):
            assert text.startswith(f"process {process.pid} has had the {what} of rank 0 for more than 0.2 s")


def test_who_comes_back_is_waited_for_in_its_next_turn(join):
    slow, other = join(), join(turn_s=0.05)
    slow.start_compute()
    other.start_compute()
    other.stop_compute()
    slow.stop_compute()
    slow.start_compute()
    seen, other._turn_s = [], TIMEOUT_S

    def compute():
        other.start_compute()
        seen.append("other")

    waiting = threading.Thread(target=compute)
    waiting.start()
    time.sleep(0.2)
    seen.append("slow")
    slow.stop_compute()
    waiting.join(TIMEOUT_S)
    assert seen == ["slow", "other"]


def work(told, folder, rounds, pause_s, here):
    arbiter = ProcessPortArbiter(folder, 0, turn_s=TIMEOUT_S)
    here.wait(TIMEOUT_S)
    for _ in range(rounds):
        arbiter.start_compute()
        began = time.monotonic()
        time.sleep(0.002)
        told.put((os.getpid(), began, time.monotonic()))
        arbiter.stop_compute()
        time.sleep(pause_s)
    arbiter.leave()


def test_three_processes_compute_one_at_a_time_and_in_turn(tmp_path):
    """Whoever always wants the GPU gets every third turn, while all three do."""
    rounds = 30
    with processes(*[(work, tmp_path, rounds, 0.0, CONTEXT.Barrier(3, timeout=60))] * 3) as (_, told):
        spans = sorted(hear(told, 3 * rounds), key=lambda span: span[1])
    assert all(before[2] <= after[1] for before, after in pairwise(spans))
    first = max(next(i for i, span in enumerate(spans) if span[0] == pid) for pid in {span[0] for span in spans})
    last = min(max(i for i, span in enumerate(spans) if span[0] == pid) for pid in {span[0] for span in spans})
    together = [span[0] for span in spans[first : last + 1]]
    counts = [together.count(pid) for pid in set(together)]
    assert max(counts) - min(counts) <= 2


class ModelExchange:
    """An all-to-all is over for a rank when all ranks of its model are in it."""

    def __init__(self, ranks):
        self.barrier = CONTEXT.Barrier(ranks, timeout=60)


def _held(number, exchanges):
    return number % 3 == 1 and number + 1 < exchanges


def exchange_at_random(told, folder, exchange, model, rank, ranks, slots, exchanges, seed):
    """One rank of a model: between exchanges it computes for random times, by itself or with the GPU that the arbiter grants."""
    if rank == 0:
        arbiter = ProcessPortArbiter(folder, 0, turn_s=TIMEOUT_S)
        for _ in range(ranks - 1):
            slots.put(arbiter.slot)
    else:
        arbiter = ProcessPortArbiter(folder, rank, slots.get(timeout=TIMEOUT_S), turn_s=TIMEOUT_S)
    exchange.barrier.wait(TIMEOUT_S)
    drawn = random.Random(seed)
    for number in range(exchanges):
        if drawn.random() < 0.5:
            arbiter.start_compute(drawn.randrange(3))
            time.sleep(drawn.random() * 0.001)
            arbiter.yield_to_priority(lambda: None)
            arbiter.stop_compute()
        with arbiter.exchange(_held(number, exchanges)):
            told.put((rank, time.monotonic(), model, number))
            exchange.barrier.wait(TIMEOUT_S)
    arbiter.leave()


def test_ports_go_to_models_in_one_sequence_and_nobody_waits_in_a_circle(tmp_path):
    """Three models of two ranks with different numbers of exchanges, starting when they like."""
    counts, ranks = (40, 25, 10), 2
    jobs = []
    for model, exchanges in enumerate(counts):
        shared = (ModelExchange(ranks), model)
        slots = CONTEXT.Queue()
        jobs += [
            (exchange_at_random, tmp_path, *shared, rank, ranks, slots, exchanges, 10 * model + rank) for rank in range(ranks)
        ]
    with processes(*jobs) as (_, told):
        seen = sorted(hear(told, ranks * sum(counts)))
    sequences = [[entry[2:] for entry in seen if entry[0] == rank] for rank in range(ranks)]
    assert sequences[0] == sequences[1]
    for (model, number), after in zip(sequences[0], sequences[0][1:], strict=False):
        if _held(number, counts[model]):
            assert after == (model, number + 1)
    assert sorted(sequences[0]) == [(model, number) for model, count in enumerate(counts) for number in range(count)]


def test_a_killed_rank_lets_the_other_model_go_on_everywhere(tmp_path, join):
    """Model a's rank 1 dies inside an exchange, rank 0 gives up: model b's exchanges need both ports."""
    a = join()
    with processes((enter, tmp_path, "port", 1, a.slot)) as ((victim,), told):
        hear(told, 1)
        inside = a.exchange()
        inside.__enter__()
        b = join()
        other = join(1, slot=b.slot)
        os.kill(victim.pid, signal.SIGKILL)
        with other.exchange():
            pass
        a.abort(RuntimeError("lost rank 1"))
        with b.exchange():
            pass


def test_priority_work_runs_before_what_waits_and_at_preemption_points(join):
    first, low, high = (join() for _ in range(3))
    seen = []
    first.start_compute()

    def work(arbiter, name, level):
        arbiter.start_compute(level)
        seen.append(name)
        arbiter.stop_compute()

    assert not first.yield_to_priority(lambda: seen.append("nobody waits"))
    threads = [threading.Thread(target=work, args=each) for each in ((low, "low", 0), (high, "high", 1))]
    for thread in threads:
        thread.start()
    while not first.yield_to_priority(lambda: seen.append("yielded")):
        time.sleep(0.01)
    seen.append("again")
    first.stop_compute()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert seen == ["yielded", "high", "again", "low"]


def test_who_dies_before_the_exchange_that_it_holds_the_port_for_is_not_waited_for(tmp_path, join):
    with processes((hold, tmp_path)) as ((victim,), told):
        hear(told, 1)
        other, killed = join(), []
        waiting = threading.Timer(0.2, lambda: killed.append(os.kill(victim.pid, signal.SIGKILL)))
        waiting.start()
        with other.exchange():
            assert killed == [None]


def hold(told, folder):
    arbiter = ProcessPortArbiter(folder, 0)
    with arbiter.exchange(hold_port=True):
        pass
    told.put("held")
    time.sleep(2 * TIMEOUT_S)


def test_an_idle_model_is_not_waited_for(tmp_path, join):
    busy, idle = join(), join()
    for _ in range(20):
        with busy.exchange():
            pass
    with idle.exchange():
        pass


def test_a_folder_that_the_dead_left_is_used_again(tmp_path, join):
    with processes((enter, tmp_path, "GPU"), (enter, tmp_path, "port")) as (dead, told):
        hear(told, 2)
        for process in dead:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        again = [join() for _ in range(colocated.SLOTS)]
        assert sorted(arbiter.slot for arbiter in again) == list(range(colocated.SLOTS))
        with pytest.raises(BadInput, match=f"has {colocated.SLOTS} models already"):
            ProcessPortArbiter(tmp_path, 0)
        with pytest.raises(BadInput, match=rf"GPU 0 of slot 3 in .* is taken by process {os.getpid()}"):
            ProcessPortArbiter(tmp_path, 0, slot=3)
        for arbiter in again:
            arbiter.start_compute()
            arbiter.stop_compute()
            arbiter.leave()


def test_a_path_longer_than_a_sockets_may_be(tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    first, second = (ProcessPortArbiter(folder, 0) for _ in range(2))
    first.start_compute()
    waiting = threading.Thread(target=second.start_compute)
    waiting.start()
    first.stop_compute()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    for arbiter in (first, second):
        arbiter.leave()
