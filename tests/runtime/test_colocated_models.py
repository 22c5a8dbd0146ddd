"""Three models and more that share GPUs through one arbiter process: priorities, joining and leaving."""

import os
import queue
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from aurora.algorithms.arbitration import MOST_OVERTAKEN
from aurora.runtime.process_port_arbiter import ProcessPortArbiter
from aurora.types import SlicePolicy
from tests.runtime.test_process_port_arbiter import TIMEOUT_S, enter, hear, join, processes  # noqa: F401


def until(condition):
    """Waits until another thread or process has made a condition true."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.0005)


class Waiter:
    """A model that asks for the GPU or the port in a thread, and has it from then until `stop`."""

    def __init__(self, what, arbiter, level=0):
        self.arbiter, self.inside, self.ended = arbiter, threading.Event(), threading.Event()
        self.what, sent, tell = what, threading.Event(), ProcessPortArbiter._tell
        arbiter._tell = lambda *packet: (tell(arbiter, *packet), sent.set())
        self.thread = threading.Thread(target=self.ask, args=(level,))
        self.thread.start()
        assert sent.wait(TIMEOUT_S)
        arbiter.settle()

    def ask(self, level):
        if self.what == "GPU":
            self.arbiter.start_compute(level)
            self.inside.set()
            self.ended.wait(TIMEOUT_S)
            self.arbiter.stop_compute()
        else:
            with self.arbiter.exchange():
                self.inside.set()
                self.ended.wait(TIMEOUT_S)

    def stop(self):
        self.ended.set()
        self.thread.join(TIMEOUT_S)


@pytest.mark.parametrize("what", ["GPU", "port"])
def test_what_was_overtaken_often_goes_before_interactive_models(what, join):  # noqa: F811
    arbiters, batch = [join(interactive=True) for _ in range(2)], join()
    has = Waiter(what, arbiters[0], 2)
    low = Waiter(what, batch, 0)
    assert not low.inside.is_set()
    for overtaken in range(1, MOST_OVERTAKEN + 1):
        after = Waiter(what, arbiters[overtaken % 2], 2)
        has.stop()
        until(lambda: after.inside.is_set() or low.inside.is_set())  # noqa: B023
        assert after.inside.is_set()
        assert not low.inside.is_set()
        has = after
    after = Waiter(what, arbiters[(MOST_OVERTAKEN + 1) % 2], 2)
    has.stop()
    until(low.inside.is_set)
    assert not after.inside.is_set()
    low.stop()
    after.stop()


def test_an_interactive_model_waits_for_one_exchange_of_batch_models_only(join):  # noqa: F811
    first, second, interactive = join(), join(), join(interactive=True)
    has = Waiter("port", first)
    waits, urgent = Waiter("port", second), Waiter("port", interactive)
    has.stop()
    until(urgent.inside.is_set)
    assert not waits.inside.is_set()
    urgent.stop()
    until(waits.inside.is_set)
    waits.stop()


def test_a_begun_exchange_is_finished_everywhere_before_an_interactive_models(join):  # noqa: F811
    """Else the batch model's rank 0 would wait for its rank 1, which would wait for the interactive model, and so on."""
    batch, interactive = join(), join(interactive=True)
    batch_1, interactive_1 = join(1, slot=batch.slot), join(1, slot=interactive.slot, interactive=True)
    has = Waiter("port", batch)
    urgent_1 = Waiter("port", interactive_1)
    has_1 = Waiter("port", batch_1)
    until(has_1.inside.is_set)
    assert not urgent_1.inside.is_set()
    has_1.stop()
    batch_1.settle()
    assert not urgent_1.inside.is_set()
    has.stop()
    until(urgent_1.inside.is_set)
    urgent_1.stop()


def test_ports_go_in_turn_among_models_that_always_wait(join):  # noqa: F811
    """Each has at most every second exchange, as it asks for the next one when its last one is over."""
    arbiters = [join() for _ in range(3)]
    seen, has = [], Waiter("port", arbiters[0])
    waiting = {1: Waiter("port", arbiters[1]), 2: Waiter("port", arbiters[2])}
    last = 0
    while len(seen) < 24:
        has.stop()
        until(lambda: any(each.inside.is_set() for each in waiting.values()))
        (now,) = (model for model, each in waiting.items() if each.inside.is_set())
        seen.append(now)
        has = waiting.pop(now)
        waiting[last] = Waiter("port", arbiters[last])
        last = now
    for each in waiting.values():
        each.ended.set()
    for each in [has, *waiting.values()]:
        each.stop()
    assert tuple(seen[12:].count(model) for model in range(3)) == (4, 4, 4)


def test_what_a_model_does_alone_keeps_its_place_when_another_joins(join):  # noqa: F811
    """Rank 0 of a model is in an exchange that its rank 1 has not come to when another model joins, and begins at rank 1."""
    rank_0, computes = join(), join(1, slot=0)
    assert rank_0.exclusive
    inside = rank_0.exchange()
    inside.__enter__()
    computes.start_compute()
    other_0, other_1 = join(), None
    other_1 = join(1, slot=other_0.slot)
    assert not rank_0.exclusive
    port, gpu = Waiter("port", other_1), Waiter("GPU", join(1))
    assert not port.inside.is_set()
    assert not gpu.inside.is_set()
    computes.stop_compute()
    until(gpu.inside.is_set)
    with computes.exchange():
        assert not port.inside.is_set()
        inside.__exit__(None, None, None)
    until(port.inside.is_set)
    port.stop()
    gpu.stop()


def test_a_model_is_alone_again_when_the_others_were_killed(tmp_path, join):  # noqa: F811
    arbiter = join()
    with processes((enter, tmp_path, "GPU"), (enter, tmp_path, "port", 1)) as (victims, told):
        hear(told, 2)
        assert not arbiter.exclusive
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
        until(lambda: arbiter.exclusive)
        arbiter.start_compute()
        arbiter.stop_compute()


def join_and_leave(folder, model, rank, ranks, barrier, slots, policy, seed, seen):
    """One rank of a model that joins, exchanges and leaves, three times; an exchange ends when all ranks are in it."""
    drawn, common = random.Random(seed), random.Random(model)
    number = 0
    for _ in range(3):
        barrier.wait(TIMEOUT_S)
        time.sleep(common.random() * 0.05)
        slot = None if rank == 0 else slots.get(timeout=TIMEOUT_S)
        arbiter = ProcessPortArbiter(folder, rank, slot, turn_s=TIMEOUT_S, policy=policy)
        for _ in range(ranks - 1 if rank == 0 else 0):
            slots.put(arbiter.slot)
        barrier.wait(TIMEOUT_S)
        exchanges = common.randrange(1, 25)
        for index in range(exchanges):
            if drawn.random() < 0.5:
                arbiter.start_compute(drawn.randrange(3))
                time.sleep(drawn.random() * 0.001)
                arbiter.yield_to_priority(lambda: None)
                arbiter.stop_compute()
            held = index % 3 == 1 and index + 1 < exchanges
            with arbiter.exchange(held):
                seen[rank].append((model, number, held))
                barrier.wait(TIMEOUT_S)
            number += 1
        arbiter.leave()
    return number


@pytest.mark.parametrize("models", [3, 5])
def test_models_join_and_leave_while_others_exchange_in_one_sequence(models, tmp_path):
    """Nobody waits in a circle, whoever is interactive, alone or new, and nobody comes to a port that is held."""
    ranks, seen = 3, [[], [], []]
    with ThreadPoolExecutor(models * ranks) as pool:
        jobs = []
        for model in range(models):
            shared = threading.Barrier(ranks, timeout=60), queue.Queue(), SlicePolicy(model % 2 == 1)
            jobs += [
                pool.submit(join_and_leave, tmp_path, model, rank, ranks, *shared, 10 * model + rank, seen)
                for rank in range(ranks)
            ]
        counts = [job.result() for job in jobs][::ranks]
    assert seen[0] == seen[1] == seen[2]
    for (model, number, held), after in pairwise(seen[0]):
        assert not held or after[:2] == (model, number + 1)
    assert sorted(each[:2] for each in seen[0]) == [(m, number) for m, count in enumerate(counts) for number in range(count)]
