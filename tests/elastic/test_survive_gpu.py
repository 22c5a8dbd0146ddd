"""Serving that survives lost ranks over NCCL, on emulated GPUs: what an aborted call leaves behind is no answer."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.elastic import elastic_rank
from aurora.elastic import serving as running
from aurora.elastic.elastic_rank import serve_elastic_rank
from aurora.elastic.serving import run_elastic
from aurora.errors import BadInput
from aurora.runtime.run import verify
from aurora.types import Hierarchy, RunOptions
from tests.elastic.emulated_gpu import EmulatedGpu
from tests.elastic.test_elastic_rank import NEW_TOKENS, Blows, kill
from tests.runtime.test_run import hierarchical, plan_for, prompts_for

pytestmark = pytest.mark.full

OPTIONS = RunOptions(NEW_TOKENS, 2, "nccl", 60.0, keep_logits=True, survive=True, deduplicate=True)


def serve_emulated(rank_info, *args):
    """Serves as a rank whose GPU is emulated."""
    elastic_rank.gpu_of_rank = lambda transport, *_: EmulatedGpu()
    serve_elastic_rank(rank_info, *args)


def test_answers_stay_the_same_over_nccl(monkeypatch, mixtral):
    monkeypatch.setattr(running, "transport_of_host", lambda asked, ranks: asked)
    monkeypatch.setattr(running, "serve_elastic_rank", serve_emulated)
    plan, prompts = plan_for([mixtral], 3), [prompts_for(mixtral, 9)]
    struck = Blows(monkeypatch, {15: kill(1)})
    result = run_elastic(plan, [mixtral], prompts, OPTIONS, watch=struck.watch)
    assert (result.transport, result.failure) == ("nccl", None)
    assert [rank for change in result.changes for rank in change.lost] == [1]
    on_cpu = replace(result, transport="gloo")  # the plain model
    assert verify(on_cpu, [mixtral], prompts, OPTIONS) == []


def test_what_nccl_cannot_do_is_refused(mixtral):
    plan, prompts = plan_for([mixtral], 2), [prompts_for(mixtral, 2)]
    with pytest.raises(BadInput, match=r"^`transport` nccl: expected a CUDA device for each of 2 ranks, found 0$"):
        run_elastic(plan, [mixtral], prompts, OPTIONS)
    over_servers = hierarchical(plan, Hierarchy(np.arange(2), 1))
    with pytest.raises(BadInput, match=r"^`survive`: on nccl expected a plan with flat all-to-alls, found one over servers$"):
        run_elastic(over_servers, [mixtral], prompts, OPTIONS)
