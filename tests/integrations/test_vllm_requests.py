"""Ranks of requests, and steps with prompts, in a real vLLM on the CPU: answers are those of one rank."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integrations.test_vllm import (  # noqa: F401
    LIMIT_S,
    Server,
    alone,
    checkpoints,
    expected,
    nothing_goes_on,
    pytestmark,
)


def prompt_tokens(server):
    """The prompt tokens that each rank has computed, on vLLM's own page."""
    counts = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d)".*\} (\S+)$', server.ask("/metrics"), re.MULTILINE)
    return [int(float(count)) for _, count in sorted(counts)]


def send(server, prompts, **header):
    """Sends prompts at once; returns the tokens that each rank has computed for them."""
    before = prompt_tokens(server)
    server.ask("/v1/completions", {"model": server.checkpoint, "prompt": prompts, "max_tokens": 2, "detokenize": False}, header)
    until = time.monotonic() + LIMIT_S
    while sum(found := [now - then for now, then in zip(prompt_tokens(server), before, strict=True)]) < sum(map(len, prompts)):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_requests_go_by_tokens_and_are_answered_as_by_one_rank(tmp_path, checkpoints, alone):  # noqa: F811
    with Server(tmp_path, checkpoints("qwen3moe"), {"requests": "cadence"}) as server:
        server.wait_until_ready()
        assert send(server, [[5] * tokens for tokens in (200, 12, 200, 12)]) == [212, 212]
        assert send(server, [[6] * 50] * 3, **{"X-data-parallel-rank": "1"}) == [0, 150]
        with ThreadPoolExecutor(12) as pool:
            for _ in range(4):
                assert list(pool.map(server.complete, range(96))) == expected(alone("qwen3moe"), 96)
        metrics = server.ask("/metrics")
    busiest, mean = (
        float(re.search(rf"aurora_{name}_rank_tokens_total\{{.* (\S+)", metrics)[1]) for name in ("busiest", "mean")
    )
    assert 1 <= busiest / mean <= 2
