"""Ranks of several hosts under one coordinator: hosts join, are cut off, come back, and are refused. All on loopback."""

import signal
import socket
import ssl
import struct
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from aurora.elastic import hosts
from aurora.elastic.control_channel import CONTROL_MESSAGES, run_member
from aurora.elastic.coordinated_ranks import CoordinatedRanks
from aurora.elastic.host_connection import HOST_MESSAGES, HostAdmitted, HostConnection, JoinRun, RankEnded, WireFormat
from aurora.elastic.hosts import JoiningHost, Lead, LedRanks, lighthouse_of
from aurora.elastic.lighthouse import Lighthouse
from aurora.elastic.processes import RankProcesses
from aurora.errors import AuroraError, BadInput, RankFailed
from tests.elastic.certificates import certificate
from tests.elastic.processes import free_leaders_port
from tests.elastic.test_coordinated_ranks import GOAL, Counting, meets, ranks_left

pytestmark = pytest.mark.full

NODES = (0, 1, 1, 2)
WIRE = WireFormat(*HOST_MESSAGES, *CONTROL_MESSAGES)


def ranks_of(node, nodes=NODES):
    return tuple(rank for rank, its in enumerate(nodes) if its == node)


def joining_host(leader, node, hosts_certificate, about, timeout_s, conduct="good", nodes=NODES):
    """A host that runs the ranks of a node, at a lighthouse that it is told of."""

    def processes(job):
        (said, lighthouse, _), local = job, ranks_of(node, nodes)
        return RankProcesses(run_member, (meets, (said,), 120.0, 60.0), len(nodes), lighthouse, 120.0, local)

    request = JoinRun(f"node {node}", ranks_of(node, nodes) or (99,), about)
    return JoiningHost(leader, hosts_certificate, request, WIRE, processes, timeout_s=timeout_s)


class Cable:
    """Forwards connections to the leader until it is cut, when it ends all of them and takes no more."""

    def __init__(self):
        self.leader = None
        self.whole = threading.Event()
        self.whole.set()
        self._ends = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self.whole.clear()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def close(self):
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                if not self.whole.is_set() or self.leader is None:
                    end.close()
                    continue
                try:
                    other = socket.create_connection(self.leader)
                except OSError:
                    end.close()
                    continue
                self._ends += [end, other]
                for source, sink in ((end, other), (other, end)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    @staticmethod
    def _forward(source, sink):
        with closing(source), suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class Hosts(Counting):
    """A coordinator, and what happened on the hosts."""

    def __init__(self, harm=None, goal=GOAL):
        super().__init__(harm, goal)
        self.ended, self.cables = {}, {}
        self.acts = {}  # by the number of rounds after which they are due

    def on_progress(self, rank, value):
        for moment in [moment for moment in self.acts if moment <= self.rounds]:
            self.acts.pop(moment)()
        return super().on_progress(rank, value)


@contextmanager
def joining(coordinator, nodes, about=None, timeout_s=60.0, nodes_of=NODES):
    """Agents of `nodes` in threads, each behind a cable."""

    def take_part(node):
        agent = joining_host(coordinator.cables[node].address, node, certificate(), about or {}, timeout_s, nodes=nodes_of)
        try:
            agent.run()
            coordinator.ended[node] = agent.admitted
        except AuroraError as error:
            coordinator.ended[node] = error

    coordinator.cables |= {node: Cable() for node in nodes}
    threads = [threading.Thread(target=take_part, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for cable in coordinator.cables.values():
        cable.close()


def ranks_for(coordinator, node=0, conduct="good", refusal=lambda host: None, respawn=0, timeout_s=120.0, nodes=NODES):
    local = () if node is None else ranks_of(node, nodes)
    awaited = {rank: f"node {its}" for rank, its in enumerate(nodes) if its != node}

    def job():
        return conduct, lighthouse_of(lead.address), "long" * 2**20

    lead = Lead(("127.0.0.1", free_leaders_port()), certificate(), local, WIRE, refusal, job, awaited)
    return CoordinatedRanks(
        meets, len(nodes), coordinator, (conduct,), timeout_s=timeout_s, hang_s=120.0, respawn=respawn,
        watch=coordinator.watch, lead=lead,
    )  # fmt: skip


def run(coordinator, **options):
    ranks = ranks_for(coordinator, **options)
    for cable in coordinator.cables.values():
        cable.leader = ranks._lead.address
    return ranks.run()


@pytest.mark.parametrize("node", [0, None])
def test_ranks_of_three_hosts_serve_together(node):
    coordinator = Hosts()
    with joining(coordinator, [1, 2] if node == 0 else [0, 1, 2]):
        assert run(coordinator, node=node) == {rank: rank for rank in range(4)}
    assert coordinator.epochs == [(0, 1, 2, 3)]
    assert set(coordinator.ended.values()) == {1}
    assert not ranks_left()


def test_a_rank_of_another_host_is_killed_and_comes_back():
    coordinator = Hosts({5: [(2, signal.SIGKILL)]}, goal=10**9)
    assign = coordinator.assign

    def until_back(epoch, states):
        if epoch > 1 and len(states) == 4:
            coordinator.goal = coordinator.rounds + GOAL
        return assign(epoch, states)

    coordinator.assign = until_back
    with joining(coordinator, [1, 2]):
        assert run(coordinator, respawn=1) == {rank: rank for rank in range(4)}
    assert coordinator.epochs[0] == coordinator.epochs[-1] == (0, 1, 2, 3)
    assert len(coordinator.epochs) in (2, 3)
    assert coordinator.losses == {2: "killed by signal 9"}
    assert not ranks_left()


def test_a_rank_may_be_started_again_as_soon_as_its_end_is_told(monkeypatch):
    """The leader answers the end of a rank by its start, perhaps before the host goes on with what it does at the end."""
    coordinator = Hosts({5: [(2, signal.SIGKILL)]}, goal=10**9)
    send = HostConnection.send

    def send_and_pause(connection, message):
        send(connection, message)
        if isinstance(message, RankEnded):
            time.sleep(1.0)

    def until_back(epoch, states, assign=coordinator.assign):
        if epoch > 1 and len(states) == 4:
            coordinator.goal = coordinator.rounds + GOAL
        return assign(epoch, states)

    coordinator.assign = until_back
    monkeypatch.setattr(HostConnection, "send", send_and_pause)
    with joining(coordinator, [1, 2]):
        assert run(coordinator, respawn=1) == {rank: rank for rank in range(4)}
    assert coordinator.epochs[-1] == (0, 1, 2, 3)


def test_a_host_that_is_cut_off_loses_all_its_ranks_and_joins_again():
    coordinator = Hosts(goal=10**9)
    coordinator.acts[5] = lambda: coordinator.cables[1].cut()
    assign = coordinator.assign

    def until_back(epoch, states):
        if len(states) == 2:
            coordinator.acts[coordinator.rounds + 5] = coordinator.cables[1].whole.set
        elif epoch > 2 and len(states) == 4:
            coordinator.goal = coordinator.rounds + GOAL
        return assign(epoch, states)

    coordinator.assign = until_back
    with joining(coordinator, [1, 2]):
        assert run(coordinator) == {rank: rank for rank in range(4)}
    assert coordinator.epochs[0] == coordinator.epochs[-1] == (0, 1, 2, 3)
    assert (0, 3) in coordinator.epochs
    assert coordinator.ended == {1: 2, 2: 1}
    assert set(coordinator.losses) == {1, 2}
    assert all("node 1 is lost: its connection ended" in reason for reason in coordinator.losses.values())
    assert not ranks_left()


def test_a_leader_that_comes_back_is_joined_again():
    before, after = Hosts(), Hosts()
    before.acts[5] = lambda: [cable.cut() for cable in before.cables.values()]
    with joining(before, [1, 2]):
        assert run(before) == {0: 0}
        after.cables = before.cables
        for cable in after.cables.values():
            cable.whole.set()
        assert run(after) == {rank: rank for rank in range(4)}
    assert before.ended == {1: 2, 2: 2}
    assert not ranks_left()


def test_an_error_that_the_user_must_mend_is_told_by_another_host_and_ends_the_run_on_all():
    coordinator = Hosts()
    with joining(coordinator, [1, 2]), pytest.raises(BadInput, match="this file is wrong"):
        run(coordinator, conduct="refuses")
    for error in coordinator.ended.values():
        assert isinstance(error, RankFailed)
        assert "ended the run before it was complete" in str(error)
    assert not ranks_left()


def test_what_cannot_travel_to_another_host_ends_the_run_where_it_is_sent():
    coordinator = Hosts()
    coordinator.assignment = lambda rank: Path("work")
    with (
        joining(coordinator, [1], nodes_of=(1,)),
        pytest.raises(AssertionError, match="PosixPath does not travel between hosts"),
    ):
        run(coordinator, node=None, nodes=(1,))
    assert coordinator.losses == {}
    assert isinstance(coordinator.ended[1], RankFailed)
    assert not ranks_left()


def test_hosts_that_do_not_join_in_time_are_lost():
    coordinator = Hosts(goal=300)  # rounds of 10 ms: rank 0 goes on alone after the second in which they may join
    assert run(coordinator, timeout_s=1.0) == {0: 0}
    assert coordinator.losses == {rank: f"did not start: node {NODES[rank]} did not join within 1 s" for rank in (1, 2, 3)}


def test_who_may_not_join_is_told_why_or_not_heard():
    coordinator = Hosts()
    ranks = ranks_for(coordinator, refusal=lambda host: None if host.about == {"plan": "a"} else "the plan is another one")
    serving = threading.Thread(target=ranks.run)
    serving.start()
    address = ranks._lead.address

    def said(node, name="run", plan="a"):
        host = joining_host(address, node, certificate(name), {"plan": plan}, 60.0)
        with pytest.raises(BadInput) as found:
            host.run()
        return str(found.value).removeprefix("`join` {}:{}: ".format(*address))

    assert said(1, "another") == "it has another certificate; is AURORA_CERTIFICATE the same on both hosts?"
    assert said(1, plan="b") == "node 1: the plan is another one"
    assert said(0) == "node 0: expected ranks that no other host has, found 0"
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    with (
        plain.wrap_socket(socket.create_connection(address)) as without,
        pytest.raises(OSError, match="certificate"),
    ):
        without.recv(1)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">Q", 1 << 62)):
        with socket.create_connection(address) as connection:
            connection.sendall(nonsense)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):  # until the leader ends it
                    pass
    with joining(coordinator, [1, 2], about={"plan": "a"}):
        for node in (1, 2):
            coordinator.cables[node].leader = address
        serving.join(60)
    assert coordinator.epochs[-1] == (0, 1, 2, 3)


def test_without_a_leader_a_host_gives_up():
    coordinator = Hosts()
    with joining(coordinator, [1], timeout_s=0.5):
        pass
    assert isinstance(coordinator.ended[1], RankFailed)
    assert "no leader at 127.0.0.1" in str(coordinator.ended[1])


def test_an_address_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lead = Lead(taken.getsockname(), certificate(), (0,), WIRE, lambda about: None, lambda: "good")
        ranks = CoordinatedRanks(meets, 1, Counting(), ("good",), timeout_s=9.0, hang_s=9.0, lead=lead)
        with pytest.raises(BadInput, match=r"port \d+ on 127.0.0.1 cannot be used: Address already in use"):
            ranks.run()


def test_however_many_connect_few_are_heard():
    """Of a thousand connections without a certificate the leader serves a bounded number, and a host joins when they are gone."""
    lead = Lead(("127.0.0.1", 0), certificate(), (), WIRE, lambda host: None, lambda: None)
    led = LedRanks(run_member, (), 0, lead, 60.0)

    def heard():
        return sum(thread.name.startswith("aurora-host-") for thread in threading.enumerate())

    with ExitStack() as stack:
        stack.callback(led.close)
        crowd = [stack.enter_context(socket.create_connection(led.address)) for _ in range(1000)]
        assert 0 < heard() <= hosts.MOST_UNPROVED
        for connection in crowd:
            connection.close()
        while heard():
            time.sleep(0.01)
        leader, ours = socket.create_connection(led.address), JoinRun("a", (1,), {})
        connection = stack.enter_context(closing(HostConnection(leader, certificate(), False, WIRE)))
        connection.send(ours)
        assert isinstance(connection.receive(), HostAdmitted)
        assert led.joined == [ours]


def test_a_leader_needs_the_port_after_its_own():
    assert lighthouse_of(("::1", 29600)) == ("::1", 29601)
    with pytest.raises(
        BadInput, match="expected a leader's port with one after it for the lighthouse, at most 65534, found 65535"
    ):
        lighthouse_of(("10.0.0.1", 65535))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, port = taken.getsockname()
        with pytest.raises(BadInput, match=f"^the lighthouse: port {port} on 127.0.0.1 cannot be used"):
            Lighthouse(port=port)
