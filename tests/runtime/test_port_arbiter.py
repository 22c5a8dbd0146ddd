"""Turns between two models' threads."""

import random
import threading
import time

import pytest

from aurora.errors import RankFailed
from aurora.runtime.port_arbiter import in_threads


def test_exchanges_alternate_and_skip_a_model_that_left():
    turnstiles, seen = in_threads(2), []

    def serve(model, exchanges):
        for _ in range(exchanges):
            with turnstiles[model].exchange():
                seen.append(model)
        turnstiles[model].leave()

    threads = [threading.Thread(target=serve, args=args) for args in ((1, 5), (0, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert seen == [0, 1, 0, 1, 1, 1, 1]


def test_one_model_at_a_time_computes():
    turnstiles, inside, most = in_threads(2), [], []

    def work(turnstile):
        for _ in range(200):
            turnstile.start_compute()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            turnstile.stop_compute()

    threads = [threading.Thread(target=work, args=(turnstile,)) for turnstile in turnstiles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(most) == 400
    assert max(most) == 1


def test_whoever_waits_learns_that_the_other_failed():
    turnstiles, caught = in_threads(2), []

    def wait():
        try:
            with turnstiles[1].exchange():
                pass
        except RankFailed as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    turnstiles[0].abort(ValueError("broken pipe"))
    thread.join(timeout=10)
    assert caught == ["stopped, because the other model on this rank failed: broken pipe"]
    with pytest.raises(RankFailed):
        turnstiles[0].start_compute()


def in_threads_of_their_own(*jobs):
    """Each job a function and its arguments; all have ended."""
    threads = [threading.Thread(target=job, args=args, daemon=True) for job, *args in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_kept_port_stays_through_the_next_exchange():
    turnstiles, seen = in_threads(2), []

    def serve(model, kept):
        for hold_port in kept:
            with turnstiles[model].exchange(hold_port):
                seen.append(model)
        turnstiles[model].leave()

    in_threads_of_their_own((serve, 1, [False, True, False, False]), (serve, 0, [True, True, False, False]))
    assert seen == [0, 0, 0, 1, 0, 1, 1, 1]


def test_brief_work_goes_before_what_waits_and_between_parts():
    turnstiles, seen, wait = in_threads(3), [], threading.Event()
    first = turnstiles[0]
    first.start_compute()

    def work(model, brief):
        wait.wait(10)
        time.sleep(0.05 * model)  # one after the other
        turnstiles[model].start_compute(brief)
        seen.append(model)
        turnstiles[model].stop_compute()

    def parts():
        assert not first.part(lambda: seen.append("nobody waits"))
        wait.set()
        while not first.part(lambda: seen.append("stopped")):
            time.sleep(0.01)
        seen.append("again")
        assert not first.part(lambda: seen.append("only more work waits"))
        first.stop_compute()

    in_threads_of_their_own((work, 1, False), (work, 2, True), (parts,))
    assert seen == ["stopped", 2, "again", 1]


class Event:
    def __init__(self, waited):
        self.waited = waited

    def wait(self):
        self.waited.append(self)


def test_on_a_gpu_brief_work_waits_for_nothing_that_was_handed_over():
    waited = []
    turnstiles = in_threads(2, lambda: Event(waited))
    for turnstile, brief in ((turnstiles[0], False), (turnstiles[1], True), (turnstiles[0], True), (turnstiles[1], False)):
        turnstile.start_compute(brief)
        turnstile.stop_compute()
        assert len(waited) == (turnstile is turnstiles[1] and not brief)


def served(turnstile, barrier, exchanges, seed, ended, by_layer):
    """One rank of a model: an all-to-all is over when all ranks of the model are in it; between them it computes, or not."""
    drawn = random.Random(seed)
    for number in range(exchanges):
        for _ in range(drawn.randrange(3)):
            turnstile.start_compute(by_layer and drawn.random() < 0.5)
            turnstile.part(lambda: None)
            turnstile.stop_compute()
        if drawn.random() < 0.2:
            time.sleep(drawn.random() * 1e-4)
        with turnstile.exchange(by_layer and number % 2 == 1 and number + 1 < exchanges):
            barrier.wait(20)
    turnstile.leave()
    ended.append(exchanges)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_whatever_the_models_do_nobody_waits_in_a_circle(ranks, by_layer):
    """Models with any number of exchanges, that end at any time, some at once: in all some thousands of exchanges."""
    drawn = random.Random(ranks)
    for _ in range(8):
        counts = [drawn.choice((0, 1, drawn.randrange(30))) for _ in range(drawn.randrange(2, 4))]
        turnstiles_G = [in_threads(len(counts)) for _ in range(ranks)]
        ended, threads = [], []
        for model, exchanges in enumerate(counts):
            barrier = threading.Barrier(ranks)
            for rank in range(ranks):
                args = (turnstiles_G[rank][model], barrier, exchanges, drawn.random(), ended, by_layer)
                threads.append(threading.Thread(target=served, args=args, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert sorted(ended) == sorted(counts * ranks)
