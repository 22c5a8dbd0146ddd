"""Connections between two hosts: messages arrive, and who has proved nothing is not heard for long."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from aurora.runtime.distributed import host_connection
from aurora.runtime.distributed.host_connection import MESSAGES, HostConnection, HostJob, JoinRun
from aurora.runtime.distributed.signed_messages import LINE_BYTES, Alive, Hello, Refused
from aurora.runtime.distributed.wire_format import WireFormat

SECRET = b"of both hosts and nobody else"
WIRE = WireFormat(*MESSAGES)


@contextmanager
def connected(hosts_secret=SECRET):
    """The sockets of a leader and a host, and their HostConnections."""
    leaders, hosts = socket.socketpair()
    with leaders, hosts, ThreadPoolExecutor(2) as pool:
        leader = pool.submit(HostConnection, leaders, SECRET, Hello(), True, WIRE)
        host = pool.submit(HostConnection, hosts, hosts_secret, Hello("1", "x"), False, WIRE)
        yield (leaders, leader.result(30)), (hosts, host.result(30))


def test_messages_arrive_both_ways_and_may_be_long_when_both_ends_have_proved_the_secret():
    long = HostJob("x" * LINE_BYTES)
    with connected() as ((_, leader), (_, host)), ThreadPoolExecutor(1) as pool:
        assert leader.theirs.process == "x"
        host.send(JoinRun(1, {"the plan": "a"}))
        assert leader.receive() == JoinRun(1, {"the plan": "a"})
        leader.send(Alive())
        assert host.receive() == Alive()
        for sender, receiver in ((leader, host), (host, leader)):
            sent = pool.submit(sender.send, long)
            assert receiver.receive() == long
            sent.result(30)


def test_a_first_message_that_is_long_is_refused():
    with connected() as ((_, leader), (hosts, _)):
        hosts.sendall(struct.pack(">Q", LINE_BYTES + 1))
        with pytest.raises(Refused, match=f"a frame of {LINE_BYTES + 1} bytes"):
            leader.receive()


@pytest.mark.parametrize("about", [1, ["dict", ["tuple", "a", 1]], ["tuple", "a"]])
def test_a_request_that_says_nothing_of_its_host_is_refused(about):
    with pytest.raises(Refused):
        WIRE.unpack(str(["JoinRun", 1, about]).replace("'", '"').encode())


def test_another_secret_is_refused():
    with connected(b"another secret, as long as it is") as ((_, leader), (_, host)):
        host.send(Alive())
        with pytest.raises(Refused, match="the secret is another one"):
            leader.receive()


def test_what_comes_back_to_its_sender_or_again_is_refused():
    with connected() as ((leaders, leader), (hosts, host)):
        leader.send(Alive())
        frame = hosts.recv(1 << 16)
        hosts.sendall(frame)
        with pytest.raises(Refused, match="the secret is another one"):
            leader.receive()
        leaders.sendall(frame + frame)
        assert host.receive() == Alive()
        with pytest.raises(Refused, match="the secret is another one"):
            host.receive()


def test_who_proves_nothing_is_not_heard_for_long_however_much_it_says(monkeypatch):
    monkeypatch.setattr(host_connection, "HELLO_S", 0.2)
    leaders, hosts = socket.socketpair()
    hello = Hello("1", "x").line()
    hosts.sendall(struct.pack(">Q", len(hello)) + hello + struct.pack(">Q", 1000))

    def trickle():
        with suppress(OSError):
            while True:
                hosts.sendall(b"0")
                time.sleep(0.01)

    thread = threading.Thread(target=trickle)
    thread.start()
    with hosts:
        with leaders, pytest.raises(TimeoutError):
            HostConnection(leaders, SECRET, Hello(), True, WIRE).receive()
        thread.join(30)
    assert not thread.is_alive()
