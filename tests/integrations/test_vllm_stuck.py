"""Ranks of a real vLLM on the CPU that are stuck, and what its log, its metrics and `aurora doctor --vllm` say of them."""

import os
import re
import signal
import threading
import time

import pytest

from aurora.profiler.doctor import BROKEN, WORKS, examine_server
from tests.integrations.test_vllm import (  # noqa: F401
    LIMIT_S,
    Ranks,
    Server,
    alone,
    check_same,
    checkpoints,
    eplb,
    expected,
    nothing_goes_on,
    pytestmark,
)

slow = pytest.mark.slow


def until(condition, server):
    """Waits for a condition, which it returns."""
    end_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end_s, server.log.read_text()[-3000:]
        time.sleep(0.1)
    return found


def process(server, kind, rank):
    """The id of a process of a server, by its name in the log."""
    return int(re.search(rf"{kind}_DP{rank}\w* pid=(\d+)", server.log.read_text())[1])


def stuck(server):
    """What the doctor finds broken."""
    return [(each.name, each.found) for each in examine_server(f"http://127.0.0.1:{server.port}") if each.state == BROKEN]


@slow
def test_a_stopped_rank_is_named_while_it_is_stopped(tmp_path, checkpoints, alone):  # noqa: F811
    """One API server shows the workers' metrics. All requests are answered as one rank would, the stopped rank's too."""
    with Server(tmp_path, checkpoints("qwen3moe"), {"required": True}, "--api-server-count", "1") as server:
        server.wait_until_ready()
        until(lambda: [each.state for each in examine_server(f"http://127.0.0.1:{server.port}")] == [WORKS, WORKS], server)
        answers = {}
        asking = [
            threading.Thread(target=lambda index=index: answers.update({index: server.complete(index)})) for index in range(12)
        ]
        os.kill(worker := process(server, "Worker", 1), signal.SIGSTOP)
        for each in asking:
            each.start()
        until(lambda: ("rank 1", "is stopped: its process is stopped") in stuck(server), server)
        assert "aurora: rank 1 is stopped: its process is stopped" in server.log.read_text()
        os.kill(worker, signal.SIGCONT)
        for each in asking:
            each.join()
        until(lambda: not stuck(server), server)
        assert [answers[index] for index in range(12)] == expected(alone("qwen3moe"), 12)


@slow
def test_the_rank_of_a_killed_engine_is_named(tmp_path, checkpoints):  # noqa: F811
    """Its worker ends by itself then, as vLLM's workers do."""
    server = Server(tmp_path, checkpoints("qwen3moe"), {})
    with server:
        server.wait_until_ready()
        asking = [threading.Thread(target=ask, args=(server, index), daemon=True) for index in range(8)]
        for each in asking:
            each.start()
        until(lambda: server.log.read_text().count('completions HTTP/1.1" 200') > len(asking), server)
        os.kill(process(server, "EngineCore", 1), signal.SIGKILL)
        server.process.wait(LIMIT_S)
    assert re.search("rank 1 is gone", server.log.read_text())


def ask(server, index):
    """Asks until the server is gone."""
    while True:
        try:
            server.complete(index)
        except (OSError, ValueError, KeyError):
            return


SLOW_EXPERTS = """
import time
from contextlib import contextmanager
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup
start = WorkerStartup.start
def start_and_slow_down(self):
    started = start(self)
    integration = self.integration
    moe_layer = integration.moe_layer
    @contextmanager
    def slow_layer(*args):
        with moe_layer(*args):
            yield
        time.sleep(0.02 if integration._step < 100 else 0.02 * FACTOR)  # to the plugin it is compute
    integration.moe_layer = slow_layer
    return started
WorkerStartup.start = start_and_slow_down
"""


@slow
def test_a_slow_rank_is_named(tmp_path, checkpoints, alone):  # noqa: F811
    job = {"model": str(checkpoints("qwen3moe")), "dp": 2, "repeat": 25, "additional_config": {"aurora": {}}}
    before = {f"before_{rank}": SLOW_EXPERTS.replace("FACTOR", factor) for rank, factor in enumerate(("1", "3"))}
    run = Ranks(tmp_path / "slow", 2, **job, **before)
    check_same(run.answers(), alone("qwen3moe"))
    said = "".join(run.said())
    assert re.search(r"rank 1 is slow: it computes [23]\.\d times as long as ranks with as many tokens", said)
    assert not re.search("rank 0 is", said)


EVEN = SLOW_EXPERTS.replace("FACTOR", "1")  # passes of 60 ms on both ranks
BALANCER = """
import time
from vllm.distributed.eplb.policy import DefaultEplbPolicy as Policy
plan, plans = Policy.rebalance_experts.__func__, []
def plan_and_stop(cls, *given):
    plans.append(0)
    if len(plans) == 3:  # the first one is that of the warm-up
        time.sleep(8)
    return plan(cls, *given)
Policy.rebalance_experts = classmethod(plan_and_stop)
"""


@slow
def test_a_balancer_that_stands_still_is_named(tmp_path, checkpoints, alone):  # noqa: F811
    """vLLM's own asynchronous balancer, whose thread on rank 1 stands still for some seconds, while passes go on."""
    job = {"model": str(checkpoints("qwen3moe")), "dp": 2, "repeat": 60, "additional_config": {"aurora": {}}}
    run = Ranks(
        tmp_path / "balancer",
        2,
        **job,
        llm=eplb(2, use_async=True),
        before_1=EVEN + BALANCER,
        before_0=EVEN,
    )
    check_same(run.answers(), alone("qwen3moe"))
    assert "rank 1 stands still: EPLB's background thread plans, and the others' are further" in "".join(run.said())
