"""Turns between two models' threads."""

import threading

import pytest

from aurora.errors import RankFailed
from aurora.execute.turnstile import Turnstile


def test_exchanges_alternate_and_skip_a_model_that_left():
    turnstile, seen = Turnstile(2), []

    def serve(model, exchanges):
        for _ in range(exchanges):
            with turnstile.exchange(model):
                seen.append(model)
        turnstile.leave(model)

    threads = [threading.Thread(target=serve, args=args) for args in ((1, 5), (0, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert seen == [0, 1, 0, 1, 1, 1, 1]


def test_one_model_at_a_time_computes():
    turnstile, inside, most = Turnstile(2), [], []

    def work():
        for _ in range(200):
            turnstile.start_compute()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            turnstile.stop_compute()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(most) == 400
    assert max(most) == 1


def test_whoever_waits_learns_that_the_other_failed():
    turnstile, caught = Turnstile(2), []

    def wait():
        try:
            with turnstile.exchange(1):
                pass
        except RankFailed as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    turnstile.abort(ValueError("broken pipe"))
    thread.join(timeout=10)
    assert caught == ["stopped, because the other model on this rank failed: broken pipe"]
    with pytest.raises(RankFailed):
        turnstile.start_compute()
