"""Members on two hosts (network namespaces), of which one disappears: nothing ends its connections, nothing answers any more."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from aurora.elastic.lighthouse import serve
from aurora.elastic.member import Member
from aurora.elastic.steps import run_elastic
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process
from tests.elastic.summed_steps import SummedSteps

NETWORK = str(Path(__file__).parents[2] / "bench" / "network")
sys.path.append(NETWORK)
import net  # noqa: E402

WHY_NOT = net.refusal()
pytestmark = [
    pytest.mark.full,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no network of namespaces here: {WHY_NOT}"),
]
INFO = RankInfo(0, 2, "", 0, 60, 0, 2, True)
STEPS = 300


def stay(connection, rank_info, host):
    """Lighthouse and member on the host that stays; sends when it goes on alone."""
    net.enter(host)
    server, port = serve(f"{net.SUBNET}.1", 0)
    address = f"{net.SUBNET}.1", port
    connection.send(address)
    member = Member(address, "stays", expected=2)

    class Work(SummedSteps):
        def begin(self, epoch, settlement):
            super().begin(epoch, settlement)
            if len(epoch.members) == 1:
                connection.send(time.monotonic())

    def committed(step):
        if step == 20:
            connection.send("begun")
        while step == STEPS - 100 and len(work.log) == 2 and not member.leaving:  # alone: the other one comes back
            time.sleep(0.01)

    work = Work(member, STEPS, 0.005, on_commit=committed)
    run_elastic(member, work)
    connection.send((work.step, work.total, work.log))
    connection.recv()  # the other member needs this process's lighthouse to the end
    server.shutdown()


def vanish(connection, rank_info, host, address):
    """Member on the host that disappears for a while."""
    net.enter(host)
    member = Member(address, "vanishes", expected=2)
    work = SummedSteps(member, STEPS, 0.005)
    run_elastic(member, work)
    connection.send((work.step, work.total, work.log))
    member.close()


def lose_a_host():
    """Returns how many seconds pass until a member goes on without a host that is gone, and what both have done when it is back."""
    children = []

    def received(child):
        assert child[1].poll(60)
        return child[1].recv()

    with net.network([1e9, 1e9], buffer_bytes=1 << 20) as hosts:
        try:
            children.append(start_process(INFO, stay, hosts[0]))
            address = received(children[0])
            children.append(start_process(INFO, vanish, hosts[1], address))
            assert received(children[0]) == "begun"
            switch = ["ip", "-n", f"{net.PREFIX}sw", "rule"]
            subprocess.run([*switch, "add", "pref", "1", "blackhole"], check=True)  # drops packets without a word
            cut_s = time.monotonic()
            alone_s = received(children[0])
            subprocess.run([*switch, "del", "pref", "1"], check=True)
            return alone_s - cut_s, [received(child) for child in children]
        finally:
            end_processes(children)


def test_a_host_that_disappears_costs_no_step_and_comes_back():
    _, ((*stayed, stayed_log), (*vanished, vanished_log)) = lose_a_host()
    assert stayed == vanished == [STEPS, sum(range(STEPS + 1))]
    assert [members for members, _, _ in stayed_log] == [("stays", "vanishes"), ("stays",), ("stays", "vanishes")]
    assert [stale for _, _, stale in vanished_log] == [[], ["vanishes"]]
