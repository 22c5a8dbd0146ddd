"""Connections between two hosts: messages arrive, and who has not shown the certificate is not heard for long."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec
import pytest

from aurora.elastic import host_connection
from aurora.elastic.host_connection import (
    FRAME_BYTES,
    HOST_MESSAGES,
    Alive,
    HostAdmitted,
    HostConnection,
    JoinRun,
    Refused,
    WireFormat,
    certificate_of_hosts,
    load_certificate,
)
from aurora.errors import BadInput
from tests.elastic.certificates import certificate, certificate_file

WIRE = WireFormat(*HOST_MESSAGES)


@contextmanager
def connected(hosts="run"):
    """The HostConnections of a leader and a host, in futures."""
    leader, host = socket.socketpair()
    with leader, host, ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(HostConnection, leader, certificate(), True, WIRE),
            pool.submit(HostConnection, host, certificate(hosts), False, WIRE),
        ]
        yield ends
        for end in ends:
            if end.exception() is None:
                end.result().close()


def test_messages_arrive_both_ways_at_the_same_time_and_may_be_long():
    long = HostAdmitted("x" * 2**24)
    with connected() as ends, ThreadPoolExecutor(4) as pool:
        leader, host = (end.result(30) for end in ends)
        host.send(request := JoinRun("node 1", (1, 2), {"the plan": "a"}))
        assert leader.receive() == request
        sent = [pool.submit(end.send, long) for end in (leader, host)]
        received = [pool.submit(end.receive) for end in (leader, host)]
        assert [each.result(60) for each in sent + received] == [None, None, long, long]
        waiting = pool.submit(host.receive)
        for _ in range(100):  # while the other thread waits
            host.send(Alive())
            assert leader.receive() == Alive()
        leader.end()
        with pytest.raises(OSError, match=r"ended|reset|EOF"):
            waiting.result(30)


def test_another_certificate_is_refused_at_both_ends():
    with connected("another") as (leader, host):
        with pytest.raises(Refused, match=r"another certificate; is AURORA_CERTIFICATE the same on both hosts\?"):
            host.result(30)
        with pytest.raises((Refused, OSError)):
            leader.result(30)


@pytest.mark.parametrize(("ranks", "about"), [
    (["tuple", 1], 1), (["tuple", 1], ["dict", ["tuple", "a", 1]]), (["tuple", 1], ["tuple", "a"]), (["tuple", "1"], ["dict"]),
    (["tuple"], ["dict"]), (["tuple", *range(5000)], ["dict"]),
])  # fmt: skip
def test_a_request_that_says_nothing_of_its_host_is_refused(ranks, about):
    assert WIRE.unpack(msgspec.msgpack.encode(["JoinRun", "node 1", ["tuple", 1], ["dict"], 0, "a"])).ranks == (1,)
    with pytest.raises(Refused):
        WIRE.unpack(msgspec.msgpack.encode(["JoinRun", "node 1", ranks, about, 0, "a"]))


def test_a_frame_that_is_too_long_is_refused():
    with connected() as ends:
        leader, host = (end.result(30) for end in ends)
        host._perform(lambda: host._socket.send(struct.pack(">Q", FRAME_BYTES + 1)))
        with pytest.raises(Refused, match=f"a frame of {FRAME_BYTES + 1} bytes"):
            leader.receive()


def test_who_shows_no_certificate_is_not_heard_for_long_however_much_it_says(monkeypatch):
    monkeypatch.setattr(host_connection, "HELLO_S", 0.3)
    leader, host = socket.socketpair()
    hello = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03"  # the beginning of a long one

    def trickle():
        with suppress(OSError):
            host.sendall(hello)
            while True:
                host.sendall(b"0")
                time.sleep(0.01)

    thread = threading.Thread(target=trickle)
    thread.start()
    with host:
        with pytest.raises(TimeoutError):
            HostConnection(leader, certificate(), True, WIRE)
        thread.join(60)
    assert not thread.is_alive()


def test_a_certificate_that_is_missing_or_none_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("AURORA_SECRET", raising=False)
    monkeypatch.delenv("AURORA_CERTIFICATE", raising=False)
    expected = "`lead`: expected the file of a certificate that all hosts share in AURORA_CERTIFICATE"
    with pytest.raises(BadInput, match=f"{expected}, found none"):
        certificate_of_hosts("lead")
    monkeypatch.setenv("AURORA_SECRET", "as hosts once shared it")
    with pytest.raises(BadInput, match=f"{expected} in place of AURORA_SECRET, found none"):
        certificate_of_hosts("lead")
    monkeypatch.setenv("AURORA_CERTIFICATE", str(certificate_file()))
    certificate_of_hosts("lead")
    for wrong in (tmp_path / "none.pem", tmp_path, tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("")
        with pytest.raises(BadInput, match="AURORA_CERTIFICATE: expected a PEM file with a certificate and its key, found "):
            load_certificate(str(wrong))
