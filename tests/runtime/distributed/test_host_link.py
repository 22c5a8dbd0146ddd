"""Links of hosts to the leader's lighthouse: greetings, messages both ways, losses, and who is not heard."""

import socket
import time
from queue import SimpleQueue

import pytest

from aurora.errors import BadInput
from aurora.runtime.distributed.host_link import HostLink
from aurora.runtime.distributed.lighthouse import Lighthouse

SECRET = b"of all hosts, and of nobody else"


def greeting(address):
    return {"from": address}


def lead(said, port=0):
    return Lighthouse(
        SECRET, 1, port=port, on_host=lambda *heard: said.put(heard), on_lost=lambda *lost: said.put(("lost", *lost))
    )


def test_messages_go_both_ways_and_each_connection_begins_with_the_greeting():
    said = SimpleQueue()
    with lead(said) as first:
        link = HostLink(first.address, "b", SECRET, greeting)
        assert said.get(timeout=30) == ("b", {"from": "127.0.0.1"})
        first.send_to_host("b", {"number": 1})
        first.send_to_host("nobody", {"number": 2})
        assert link.messages(30) == [{"number": 1}]
        link.send({"x": [1, None]})
        assert said.get(timeout=30) == ("b", {"x": [1, None]})
        assert link.silence()[0] < 30
    link.messages(0.2)
    seconds, why = link.silence()
    assert seconds >= 0
    assert why.startswith(f"127.0.0.1:{first.address[1]}: ")
    with lead(said, first.address[1]):
        assert said.get(timeout=30) == ("b", {"from": "127.0.0.1"})
        link.close()
        time.sleep(0.3)
    assert said.empty(), "who says goodbye is not lost"


def test_a_host_that_is_lost_is_named():
    said = SimpleQueue()
    with lead(said) as lighthouse:
        link = HostLink(lighthouse.address, "b", SECRET, greeting)
        assert said.get(timeout=30)[0] == "b"
        link._closed.set()
        link._connection.shutdown(socket.SHUT_RDWR)
        assert said.get(timeout=30) == ("lost", "b", "its connection ended")


def test_a_host_with_another_secret_is_told_so_and_not_heard():
    said = SimpleQueue()
    with lead(said) as lighthouse:
        link = HostLink(lighthouse.address, "b", b"another secret, as long as it is", greeting)
        with pytest.raises(BadInput, match=r"AURORA_SECRET: is not that of the run which 127.0.0.1:\d+ leads"):
            link.messages(30)
        link.close()
    assert said.empty()
