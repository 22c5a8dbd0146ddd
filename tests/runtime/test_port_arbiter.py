"""Port arbiter of models that are threads of one process."""

import random
import threading
import time

import pytest

from aurora.algorithms.arbitration import MOST_OVERTAKEN, PortSlices
from aurora.errors import RankFailed
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.types import SlicePolicy


def in_threads(*jobs):
    """Each job a function and its arguments; all have ended."""
    threads = [threading.Thread(target=job, args=args, daemon=True) for job, *args in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)


def exchanged(arbiters, held_M):
    """The models whose exchanges follow each other: of each model, for each exchange, whether it holds the port through the next."""
    seen = []

    def serve(model):
        for hold_port in held_M[model]:
            with arbiters[model].exchange(hold_port):
                seen.append(model)
        arbiters[model].leave()

    in_threads(*((serve, model) for model in range(len(held_M))))
    return seen


@pytest.mark.parametrize(
    ("held_M", "seen"),
    [
        (([False] * 2, [False] * 5), [0, 1, 0, 1, 1, 1, 1]),
        (([True, True, False, False], [False, True, False, False]), [0, 0, 0, 1, 0, 1, 1, 1]),
    ],
    ids=["a-model-leaves", "a-port-is-held"],
)
def test_exchanges_of_two_models_follow_each_other_by_the_rules(held_M, seen):
    assert exchanged(thread_port_arbiters(2), held_M) == seen


def test_one_model_at_a_time_computes():
    arbiters, inside, most = thread_port_arbiters(2), [], []

    def work(arbiter):
        for _ in range(200):
            arbiter.start_compute()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            arbiter.stop_compute()

    in_threads(*((work, arbiter) for arbiter in arbiters))
    assert len(most) == 400
    assert max(most) == 1


def test_whoever_waits_learns_that_the_other_failed():
    arbiters, caught = thread_port_arbiters(2), []

    def wait():
        try:
            with arbiters[1].exchange():
                pass
        except RankFailed as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    arbiters[0].abort(ValueError("broken pipe"))
    thread.join(timeout=120)
    assert caught == ["stopped, because another model on this rank failed: broken pipe"]
    with pytest.raises(RankFailed):
        arbiters[0].start_compute()


def test_work_yields_only_to_more_urgent_work():
    arbiters, seen = thread_port_arbiters(2), []
    arbiters[0].start_compute(1)

    def work(level):
        arbiters[1].start_compute(level)
        seen.append(level)
        arbiters[1].stop_compute()

    for level in (1, 2):
        thread = threading.Thread(target=work, args=(level,))
        thread.start()
        while not arbiters[0]._rank.gpu.waiting:
            time.sleep(0.001)
        if level == 1:
            assert not arbiters[0].yield_to_priority(lambda: seen.append("as urgent"))
            arbiters[0].stop_compute()
            thread.join(timeout=120)
            arbiters[0].start_compute(1)
        else:
            assert arbiters[0].yield_to_priority(lambda: seen.append("yielded"))
            thread.join(timeout=120)
    assert seen == [1, "yielded", 2]


def joined(arbiter, barrier, told, rank, exchanges, seed, ended):
    """One rank of a batch model: it joins the sequence for each all-to-all, which takes several slices."""
    drawn = random.Random(seed)

    def gather(number):
        told[rank] = number
        barrier.wait(60)
        found = list(told)
        barrier.wait(60)
        return found

    for number in range(exchanges):
        if drawn.random() < 0.3:
            time.sleep(drawn.random() * 1e-3)
        slices = number % 4 + 1  # the same on all ranks
        if arbiter.joins:
            arbiter.join(gather, rank == 0, slices)
        for _ in range(slices):
            with arbiter.exchange():
                barrier.wait(60)
    arbiter.leave()
    ended.append(exchanges)


@pytest.mark.parametrize("submitted", [None, lambda: None])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_models_that_join_for_each_exchange_wait_in_no_circle(ranks, submitted):
    """One or two models that are in the sequence all the time and end at any time, beside one to three that join one."""
    drawn = random.Random(ranks)
    for _ in range(12):
        present, joining = drawn.randrange(1, 3), drawn.randrange(1, 4)
        policies = [SlicePolicy(True)] * present + [SlicePolicy(slice_s=1)] * joining
        arbiters_G = [thread_port_arbiters(policies, submitted) for _ in range(ranks)]
        counts, ended, jobs = [drawn.randrange(12) for _ in policies], [], []
        for model, exchanges in enumerate(counts):
            barrier, told = threading.Barrier(ranks, timeout=60), [0.0] * ranks
            for rank in range(ranks):
                arbiter, seed = arbiters_G[rank][model], drawn.random()
                if model < present:
                    jobs.append((gathering, arbiter, barrier, exchanges, seed, ended))
                else:
                    jobs.append((joined, arbiter, barrier, told, rank, exchanges, seed, ended))
        in_threads(*jobs)
        assert sorted(ended) == sorted(counts * ranks)


def gathering(arbiter, barrier, layers, seed, ended):
    """One rank of a model as a MoE layer has it: counts are gathered from all before two all-to-alls.

    A rank that has sent and received all its own goes on before the others have; here the second ends without them.
    """
    drawn = random.Random(seed)
    for _ in range(layers):
        barrier.wait(60)
        if drawn.random() < 0.3:
            time.sleep(drawn.random() * 1e-3)
        with arbiter.exchange():
            barrier.wait(60)
        with arbiter.exchange():
            pass
    arbiter.leave()
    ended.append(layers)


def test_on_a_gpu_a_batch_model_has_a_slice_for_each_of_the_interactive_models():
    arbiters = thread_port_arbiters([SlicePolicy(interactive=True), SlicePolicy(slice_s=1)], lambda: None)
    arbiters[1].join(lambda number: [number], True, 5)
    ahead = 2  # slices that another rank may have had before it learns of the batch model
    assert exchanged(arbiters, ([False] * 10, [False] * 5)) == [0] * ahead + [0, 1] * 5 + [0] * 3


def test_a_batch_models_slice_begins_while_no_interactive_exchange_waits_or_is_under_way():
    """By the state of the rank alone, whatever others do; the interactive exchange waits for no slice."""
    interactive, batch = thread_port_arbiters([SlicePolicy(interactive=True), SlicePolicy(slice_s=1)])
    assert (interactive.joins, batch.joins) == (False, False)
    began = threading.Event()

    def slice_of_batch():
        with batch.exchange():
            began.set()

    with batch.exchange(), interactive.exchange():  # at once, although a slice is under way
        pass
    with interactive.exchange():
        thread = threading.Thread(target=slice_of_batch)
        thread.start()
        assert not began.wait(0.05)
    thread.join(timeout=120)
    assert began.is_set()
    with interactive.exchange(hold_port=True):  # through its next one; between the two the port is free
        pass
    slice_of_batch()
    with interactive.exchange():
        pass


def test_a_batch_models_slice_that_was_overtaken_often_begins_beside_an_interactive_exchange():
    policies = [SlicePolicy(interactive=True), SlicePolicy(interactive=True), SlicePolicy(slice_s=1)]
    slices = PortSlices(policies, overlapping=True)
    assert slices.joins_M == (False, False, False)
    slices.ask(0)
    slices.begin(0)
    slices.ask(2)
    for number in range(MOST_OVERTAKEN):  # two models in turn, one of which has the port or waits for it at any time
        assert not slices.may_begin(2)
        slices.ask((number + 1) % 2)
        slices.end(number % 2)
        assert slices.may_begin((number + 1) % 2)
        slices.begin((number + 1) % 2)
    assert slices.may_begin(2)


def test_the_only_batch_model_begins_after_a_pause_whoever_else_has_left():
    """It joins no sequence again, as no other model is in its own."""
    slices = PortSlices([SlicePolicy(interactive=True), SlicePolicy(slice_s=1)], overlapping=True)
    assert slices.single(1)
    slices.leave(1)
    assert slices.may_begin(1)
    slices.leave(0)
    slices.ask(1)
    assert slices.may_begin(1)


class Event:
    def __init__(self, waited):
        self.waited = waited

    def wait(self):
        self.waited.append(self)


def test_on_a_gpu_priority_work_waits_for_no_submitted_work():
    waited = []
    arbiters = thread_port_arbiters(2, lambda: Event(waited))
    for arbiter, level in ((arbiters[0], 0), (arbiters[1], 1), (arbiters[0], 2), (arbiters[1], 0)):
        arbiter.start_compute(level)
        arbiter.stop_compute()
        assert len(waited) == (arbiter is arbiters[1] and not level)


def served(arbiter, barrier, exchanges, seed, ended, by_layer):
    """One rank of a model: an all-to-all is over when all ranks of the model are in it; between them it computes, or not."""
    drawn = random.Random(seed)
    for number in range(exchanges):
        for _ in range(drawn.randrange(3)):
            arbiter.start_compute(by_layer and drawn.random() < 0.5)
            arbiter.yield_to_priority(lambda: None)
            arbiter.stop_compute()
        if drawn.random() < 0.2:
            time.sleep(drawn.random() * 1e-4)
        with arbiter.exchange(by_layer and number % 2 == 1 and number + 1 < exchanges):
            barrier.wait(60)
    arbiter.leave()
    ended.append(exchanges)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_whatever_the_models_do_nobody_waits_in_a_circle(ranks, by_layer):
    """Models with any number of exchanges, that end at any time, some at once: in all some thousands of exchanges."""
    drawn = random.Random(ranks)
    for _ in range(8):
        counts = [drawn.choice((0, 1, drawn.randrange(30))) for _ in range(drawn.randrange(2, 4))]
        arbiters_G = [thread_port_arbiters(len(counts)) for _ in range(ranks)]
        ended, jobs = [], []
        for model, exchanges in enumerate(counts):
            barrier = threading.Barrier(ranks, timeout=60)
            for arbiters in arbiters_G:
                jobs.append((served, arbiters[model], barrier, exchanges, drawn.random(), ended, by_layer))
        in_threads(*jobs)
        assert sorted(ended) == sorted(counts * ranks)
