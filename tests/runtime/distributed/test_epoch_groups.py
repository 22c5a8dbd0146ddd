"""What an epoch's connections are, and that they are all shut when it is over."""

import os
import socket
import threading

from aurora.runtime.distributed import epoch_groups
from aurora.runtime.distributed.connections import watched
from aurora.runtime.distributed.launcher import hosted_store


def test_a_lighthouses_connection_made_meanwhile_stays_open(monkeypatch):
    made = []

    def group(*_):
        made.append(socket.create_server(("127.0.0.1", 0)))
        made.append(socket.create_connection(made[0].getsockname()))
        made.append(made[0].accept()[0])

    monkeypatch.setattr(epoch_groups, "_group", group)
    with hosted_store(0) as store:
        groups = epoch_groups.join_epoch(store, 2, 0, 1, 1, 20.0, threading.Event())
    with watched(made[1]), watched(made[2]):
        groups.abort()
    made[1].sendall(b"x")
    assert made[2].recv(1) == b"x"
    for end in made:
        end.close()


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
    with hosted_store(0) as store:
        epoch_groups.join_epoch(store, 2, 0, 1, 1, 20.0, threading.Event()).abort()
    for end in made:
        end.settimeout(300)
        assert end.recv(1) == b""
        os.close(end.detach())
