"""Runs by put and signal on CPUs, over gloo, against runs by messages: two models that share the ranks."""

import numpy as np
import pytest

import aurora
from aurora.errors import BadInput
from aurora.io import shipped
from aurora.runtime.transports.put import put_transport
from aurora.types import RunOptions

MODELS = [shipped("models/mixtral-topics"), shipped("models/qwen3moe-stdlib")]
PROMPTS = [[76, 107, 104, 35, *range(40, 60)], [5, 9], [80, 11, 30]]


def test_put_and_signal_serves_as_messages_do():
    traffic = [
        aurora.synthetic_profile("zipf:1", model / "config.json", aurora.SyntheticOptions(sources=2)) for model in MODELS
    ]
    gpus = tuple(aurora.Gpu(f"gpu-{rank}", "cpu", 0, 1e9, 1e9, 10**9) for rank in range(2))
    plan = aurora.plan(aurora.Cluster("mine", gpus), traffic)

    def served(transport):
        options = RunOptions(max_new_tokens=2, transport=transport, keep_logits=True, timeout_s=200)
        return aurora.run(plan, MODELS, [PROMPTS] * 2, options)

    by_put, by_gloo = served("put"), served("gloo")
    assert (by_put.transport, by_gloo.transport) == ("put", "gloo")
    for put, gloo in zip(by_put.answers_M, by_gloo.answers_M, strict=True):
        assert put.tokens == gloo.tokens
        assert put.logits.keys() == gloo.logits.keys() == {0, 1, 2}
        assert all(np.array_equal(put.logits[prompt], gloo.logits[prompt]) for prompt in gloo.logits)


def test_an_older_nccl_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    with pytest.raises(BadInput, match=r"`transport` put: expected NCCL 2\.29 or newer, found 2\.28\.9"):
        put_transport("cuda:0", 60.0, None)
