"""Ranks of a real vLLM on the CPU that are lost by `kill -9`: the others serve on, and every answer is that of one rank.

`make test-vllm` runs it.
"""

import importlib.util
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integrations.survivors import Command, left
from tests.integrations.test_vllm import PROMPTS, alone, checkpoints, pytestmark  # noqa: F401

NEW = 60
START_S, SERVED_S = 600, 60


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or importlib.util.find_spec("vllm_router") is None, reason="needs vllm-router")
def test_two_of_four_ranks_are_lost_one_after_the_other(tmp_path, checkpoints, alone):  # noqa: F811
    """Rank 0, by its server, while nothing streams, and then rank 3, by its worker, while all do."""
    command = Command(checkpoints("qwen3moe"), tmp_path / "state", 4)
    try:
        command.said("ready on", 0.0, START_S)
        command.find_servers()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            expected = list(pool.map(lambda prompt: command.stream(prompt, NEW), PROMPTS))
            for index, tokens in enumerate(expected):
                assert tokens[:8] == alone("qwen3moe")[str(index)]["tokens"]
            for rank, kind, busy in ((0, "server", False), (3, "Worker", True)):
                streams = [pool.submit(command.stream, prompt, NEW) for prompt in PROMPTS] if busy else []
                time.sleep(0.5)
                began_s = time.monotonic()
                os.kill(command.processes(rank)[kind], signal.SIGKILL)
                command.said("serve on, after", began_s, SERVED_S)
                assert [stream.result() for stream in streams] == expected[: len(streams)], "whole, and as of one rank"
                assert list(pool.map(lambda prompt: command.stream(prompt, NEW), PROMPTS)) == expected
                assert not left(command.servers[rank])
    finally:
        assert command.end() == 0, "processes left over"
