"""What an epoch's connections are, and that they are all shut when it is over."""

import gc
import os
import socket
import threading
import weakref

import pytest

from aurora.elastic import epoch_groups
from aurora.elastic.abandoned_calls import unless_stopped
from aurora.errors import RankFailed

EPOCH = epoch_groups.Epoch(2, ("a",), {}, 0)


def test_connections_that_take_over_descriptors_of_the_last_epoch_are_shut_too(monkeypatch):
    old = socket.socketpair()
    numbers = {end.fileno() for end in old}
    made = []

    def group(*_):
        """A new epoch's connection, made while the last one's is given up."""
        for end in old:
            end.close()
        made.extend(socket.socketpair())
        assert {end.fileno() for end in made} == numbers

    monkeypatch.setattr(epoch_groups, "_group", group)
    epoch_groups.connect_groups(EPOCH, 20.0, threading.Event()).abort()
    for end in made:
        end.settimeout(300)
        assert end.recv(1) == b""
        os.close(end.detach())


def test_groups_that_are_made_when_the_next_epoch_has_begun_are_given_up_alone(monkeypatch):
    stopped, go_on = threading.Event(), threading.Event()
    made = []

    def group(*_):
        stopped.set()
        assert go_on.wait(60)
        made.append(threading.current_thread())

    monkeypatch.setattr(epoch_groups, "_group", group)
    with pytest.raises(RankFailed, match="the epoch was over before all had joined"):
        epoch_groups.connect_groups(EPOCH, 20.0, stopped)
    stopped.clear()  # the next epoch, and one of its connections
    ours, others = socket.socketpair()
    taken = []
    monkeypatch.setattr(epoch_groups, "connected", lambda descriptors: taken.append(list(descriptors)) or [])
    go_on.set()
    while not made:
        pass
    made[0].join(60)
    assert taken == []
    for end in (ours, others):
        end.close()


def test_calls_share_a_thread_until_one_is_left_behind():
    stopped, release, threads = threading.Event(), threading.Event(), []

    def note():
        threads.append(threading.current_thread())

    def wait():
        note()
        release.wait()

    for _ in range(3):
        unless_stopped(stopped, note)
    assert len(set(threads)) == 1
    stopped.set()
    with pytest.raises(RankFailed, match="gloo waits on"):
        unless_stopped(stopped, wait)
    stopped.clear()
    unless_stopped(stopped, note)
    assert threads[3] is threads[0] is not threads[4]
    release.set()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_an_error_of_a_call_is_raised_and_forgotten():
    class Broken(Exception):
        pass

    def call():
        raise Broken

    def called():
        try:
            unless_stopped(threading.Event(), call)
        except Broken as error:
            return weakref.ref(error)

    gc.disable()
    try:
        found = called()
        unless_stopped(threading.Event(), int)  # the thread has done with the last call when it begins the next
        assert found() is None
    finally:
        gc.enable()
