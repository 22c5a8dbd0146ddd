"""Ranks of a real vLLM on the CPU that are lost by `kill -9`: the others serve on, and every answer stays as it was.

`make test-vllm` runs it.
"""

import importlib.util
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integrations.survivors import Command, left
from tests.integrations.test_vllm import PROMPTS, checkpoints, pytestmark  # noqa: F401

NEW = 60
START_S = SERVED_S = 1200  # only a server that hangs takes as long
HANG_S = "60"  # a busy machine is no lost rank


@pytest.mark.skipif(sys.platform != "linux" or importlib.util.find_spec("vllm_router") is None, reason="needs vllm-router")
def test_two_of_four_ranks_are_lost_one_after_the_other(tmp_path, checkpoints):  # noqa: F811
    """The first while nothing streams, the second while all do."""
    rng, alive = random.Random(2), [0, 1, 2, 3]
    command = Command(checkpoints("qwen3moe"), tmp_path / "state", len(alive), "--hang", HANG_S)
    try:
        command.said("ready on", 0.0, START_S)
        command.find_servers()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            expected = list(pool.map(lambda prompt: command.stream(prompt, NEW), PROMPTS))
            assert [len(tokens) for tokens in expected] == [NEW] * len(PROMPTS)
            for busy in (False, True):
                rank = alive.pop(rng.randrange(len(alive)))
                kind = rng.choice(["server", "Engine", "Worker"])
                print(f"rank {rank} loses its {kind}")
                streams = [pool.submit(command.stream, prompt, NEW) for prompt in PROMPTS] if busy else []
                time.sleep(0.5)
                began_s = time.monotonic()
                os.kill(command.processes(rank)[kind], signal.SIGKILL)
                command.said(f"{len(alive)} of 4 ranks serve on, after", began_s, SERVED_S)
                assert [stream.result() for stream in streams] == expected[: len(streams)], "whole, and without a trace"
                assert list(pool.map(lambda prompt: command.stream(prompt, NEW), PROMPTS)) == expected
                assert not left(command.servers[rank])
    finally:
        assert command.end() == 0, "processes left over"
