"""Ranks of a real vLLM on the CPU that are lost by `kill -9`: the others serve on, and every answer stays as it was.

`make test-vllm` runs it.
"""

import importlib.util
import json
import os
import random
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integrations.survivors import Command, left
from tests.integrations.test_vllm import PROMPTS, Ranks, checkpoints, slow  # noqa: F401
from tests.integrations.test_vllm import pytestmark as needs_vllm

NEW, RANKS = 60, 4
WAIT_S = 1200  # only a server that hangs takes as long
ON_ALL_RANKS = {"num_redundant_experts": 24, "step_interval": 10**12}  # of eight experts; they stay where they are
HANG_S = "60"  # a busy machine is no lost rank
pytestmark = [
    *needs_vllm,
    pytest.mark.skipif(
        sys.platform != "linux" or importlib.util.find_spec("vllm_router") is None, reason="needs Linux and vllm-router"
    ),
]

READ_ANEW = """
if number == 1:
    import torch
    from aurora_vllm.vllm_internals.held_experts import read_experts
    from vllm.config import set_current_vllm_config
    from vllm.utils import is_moe_layer

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = [module for module in worker.get_model().modules() if is_moe_layer(module)]
    held = {index: torch.arange(8).numpy() for index in (0, 2)}
    weights = [weight for index in held for weight in layers[index].routed_experts.parameters()]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.fill_(7)
    with set_current_vllm_config(worker.vllm_config):
        read_experts(worker, held, slice(0, 8), layers)
    assert all(map(torch.equal, weights, before))
"""


class Course:
    """Losses of ranks of one server, and answers before and after."""

    def __init__(self, command, pool):
        self.command, self.pool = command, pool
        command.said("ready on", 0.0, WAIT_S)
        self.expected = self.answers()
        assert [len(tokens) for tokens in self.expected] == [NEW] * len(PROMPTS)

    def answers(self):
        return list(self.pool.map(lambda prompt: self.command.stream(prompt, NEW), PROMPTS))

    def lose(self, rank, kind, busy):
        """Kills a process of a rank, while nothing streams or while all prompts do. Returns when."""
        self.command.find_servers()
        streams = [self.pool.submit(self.command.stream, prompt, NEW) for prompt in PROMPTS] if busy else []
        time.sleep(0.5)
        began_s = time.monotonic()
        os.kill(self.command.processes(rank)[kind], signal.SIGKILL)
        self.command.said("ranks serve on, after", began_s, WAIT_S)
        assert [stream.result() for stream in streams] == self.expected[: len(streams)], "whole, and without a trace"
        assert self.answers() == self.expected
        assert not left(self.command.servers[rank])
        return began_s


@pytest.fixture
def course(tmp_path, checkpoints, request):  # noqa: F811
    """Four ranks that serve, each expert on two of them, or as the parameter says; no process is left."""
    more = getattr(request, "param", ())
    command = Command(checkpoints("qwen3moe"), tmp_path / "state", RANKS, "--hang", HANG_S, *more)
    try:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            yield Course(command, pool)
    finally:
        assert command.end() == 0, "processes left over"


@pytest.mark.parametrize("course", [("--eplb-config", json.dumps(ON_ALL_RANKS))], indirect=True)
def test_three_of_four_ranks_are_lost_one_after_the_other(course):
    """The first while nothing streams, the others while all do; the last rank, which holds all experts, serves alone.

    A rank whose step a loss does not end is lost with it.
    """
    rng, alive = random.Random(2), list(range(RANKS))
    for busy in (False, True, True):
        if len(alive) > 1:
            course.lose(rng.choice(alive), rng.choice(["server", "Engine", "Worker"]), busy)
        said = [re.search(r"rank (\d) is lost", line) for _, line in course.command.lines]
        alive = sorted(set(range(RANKS)) - {int(match[1]) for match in said if match})
    assert len(alive) == 1
    assert not [line for _, line in course.command.lines if "started anew" in line]


def test_experts_that_are_read_from_the_checkpoint_are_as_vllm_packs_them(tmp_path, checkpoints):  # noqa: F811
    Ranks(tmp_path / "run", model=str(checkpoints("qwen3moe")), repeat=2, between=READ_ANEW).answers()


@slow
def test_lost_ranks_come_back_and_experts_that_nobody_holds_are_read(course):
    """Ranks 1 and 3 hold the same experts, and so do 0 and 2."""
    course.lose(1, "Worker", True)
    began_s = course.lose(3, "Engine", True)
    for _ in range(2):
        course.command.said(f"{RANKS} of {RANKS} ranks serve on", began_s, WAIT_S)
        assert course.answers() == course.expected
        began_s = course.lose(0, "server", True)
    assert not [line for _, line in course.command.lines if "started anew" in line]
