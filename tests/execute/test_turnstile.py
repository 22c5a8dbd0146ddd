"""Turns between two models' threads."""

import random
import threading
import time

import pytest

from aurora.errors import RankFailed
from aurora.execute.turnstile import in_threads


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


def served(turnstile, barrier, exchanges, seed, ended):
    """One rank of a model: an all-to-all is over when all ranks of the model are in it; between them it computes, or not."""
    drawn = random.Random(seed)
    for _ in range(exchanges):
        for _ in range(drawn.randrange(3)):
            turnstile.start_compute()
            turnstile.stop_compute()
        if drawn.random() < 0.2:
            time.sleep(drawn.random() * 1e-4)
        with turnstile.exchange():
            barrier.wait(20)
    turnstile.leave()
    ended.append(exchanges)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_whatever_the_models_do_nobody_waits_in_a_circle(ranks):
    """Models with any number of exchanges, that end at any time, some at once: in all some thousands of exchanges."""
    drawn = random.Random(ranks)
    for _ in range(8):
        counts = [drawn.choice((0, 1, drawn.randrange(30))) for _ in range(drawn.randrange(2, 4))]
        turnstiles_G = [in_threads(len(counts)) for _ in range(ranks)]
        ended, threads = [], []
        for model, exchanges in enumerate(counts):
            barrier = threading.Barrier(ranks)
            for rank in range(ranks):
                args = (turnstiles_G[rank][model], barrier, exchanges, drawn.random(), ended)
                threads.append(threading.Thread(target=served, args=args, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert sorted(ended) == sorted(counts * ranks)
