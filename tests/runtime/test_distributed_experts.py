"""Distributed experts on ranks that are threads: dtypes of hidden states and weights, and ranks without tokens."""

import numpy as np
import pytest
import torch
from torch import nn

from aurora.algorithms.alltoall.registry import ORDER
from aurora.models.decoding import greedy_decode
from aurora.models.loading import load_model
from aurora.runtime.distributed.launcher import launch_threads
from aurora.runtime.distributed_experts import DistributedExperts
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.model_worker import ModelWorker, Request
from aurora.runtime.phase_recorder import PhaseRecorder
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import (
    TRACE_PHASES,
    Barrier,
    Compute,
    Exchange,
    Hierarchy,
    Network,
    Placement,
    Program,
    RunOptions,
    TraceRecorder,
)
from tests.models.architectures import build

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class QuantisedExperts(nn.Module):
    """Experts with float8 weights that compute in the dtype of their tokens, or in float32 where torch cannot."""

    def __init__(self, experts):
        super().__init__()
        self.num_experts, self.act_fn = experts.num_experts, experts.act_fn
        for name, parameter in experts.named_parameters():
            setattr(self, name, nn.Parameter(parameter.detach().to(torch.float8_e4m3fn), requires_grad=False))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = hidden_states.to(torch.float32 if hidden_states.dtype in FLOAT8 else hidden_states.dtype)
        out = torch.zeros(rows.shape, dtype=torch.float32)
        for expert in range(self.num_experts):
            token, nth = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = (rows[token] @ self.gate_up_proj[expert].to(rows.dtype).T).chunk(2, dim=-1)
            answer = (self.act_fn(gate) * up) @ self.down_proj[expert].to(rows.dtype).T
            out.index_add_(0, token, answer.float() * top_k_weights[token, nth, None].float())
        return out.to(hidden_states.dtype)


def context_on(rank_info, memory):
    recorder = TraceRecorder("measured", ("m",), rank_info.ranks)
    phases = PhaseRecorder(recorder, rank_info.rank, 0, 0.0)
    return LayerContext(0, MemoryTransport(memory, rank_info.rank), *thread_port_arbiters(1), phases), recorder


WAYS = [(False, None), (True, None), (True, Hierarchy(np.array([0, 1, 0]), 2)), (True, Hierarchy(np.arange(3)))]


def ops_for(ranks, hierarchy=None):
    every = np.ones((ranks, ranks), dtype=np.int64) - np.eye(ranks, dtype=np.int64)
    order = ORDER["openshop"](every, Network.equal(ranks), rng=np.random.default_rng(0))
    return (Compute("gate"), Barrier("counts"), Exchange("dispatch", order, hierarchy=hierarchy), Compute("expert"),
            Exchange("combine", order.reversed, hierarchy=hierarchy), Compute("aggregate"))  # fmt: skip


def quantised(folder):
    """A bfloat16 model whose experts have float8 weights."""
    model = load_model(folder, dtype=torch.bfloat16)
    for layer in model.layers:
        setattr(layer.block, layer.name, QuantisedExperts(layer.experts))
    return model


PROMPT = [5, 40, 7, 99, 31]


def serve(rank_info, memory, models, deduplicate, hierarchy):
    """Rank 0 answers the prompt; the other ranks have no requests. Returns answers and transfers."""
    model = models[rank_info.rank]
    worker = ModelWorker(model, RunOptions(max_new_tokens=3, deduplicate=deduplicate, keep_logits=True))
    slots_G = ((0, 3), (1,), (2, 4))
    ops = ops_for(rank_info.ranks, hierarchy)
    layers = len(model.layers)
    program = Program(rank_info.ranks, ("m",), (Placement((slots_G,) * layers),), ((ops,) * layers,), (False,))
    context, recorder = context_on(rank_info, memory)
    worker.set_program(program, context)
    if rank_info.rank == 0:
        worker.waiting.append(Request(0, PROMPT))
    worker.serve()
    return worker.answers, recorder.trace()


@pytest.mark.parametrize(("deduplicate", "hierarchy"), WAYS)
def test_idle_ranks_expect_rows_of_the_hidden_states_dtype(tmp_path, deduplicate, hierarchy):
    folder = build("mixtral", tmp_path / "mixtral")
    model = quantised(folder)
    assert (model.hidden_dtype, model.row_bytes) == (torch.bfloat16, 2 * model.hidden)
    assert model.identity.row_bytes == model.row_bytes
    with torch.inference_mode():
        _, logits = greedy_decode(model.model, PROMPT, 3, 1)
    served = launch_threads(
        serve, 3, Memory(3, 300.0), [quantised(folder) for _ in range(3)], deduplicate, hierarchy, timeout_s=60
    )
    first_V = torch.from_numpy(served[0][0].logits[0][0])
    torch.testing.assert_close(first_V, logits[0].double(), rtol=0.1, atol=0.1)
    for _, trace in served[1:]:
        travelled_X = trace.bytes_X[trace.sent_X]
        assert len(travelled_X)
        assert not (travelled_X % model.row_bytes).any()


def layer_outputs(rank_info, memory, given, deduplicate, hierarchy):
    """One layer of experts that double their rows; returns this rank's outputs and the bytes that it sent to each peer."""
    hidden, index, weights = given[rank_info.rank]
    slots_G = ((0, 1), (2, 3), (4, 5))

    class Doubled(nn.Module):
        num_experts = 6

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 1), requires_grad=False)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states.float() * 2.0  # wider than the rows that came

    layer, (context, recorder) = DistributedExperts(Doubled()), context_on(rank_info, memory)
    layer.set_placement(Placement((slots_G,)), ops_for(3, hierarchy), 0, context, deduplicate)
    context.next_step(None)
    context.start_compute()
    return layer(hidden, index, weights), recorder.trace()


@pytest.mark.parametrize(("deduplicate", "hierarchy"), WAYS)
@pytest.mark.parametrize("dtype", [*FLOAT8, torch.bfloat16, torch.float16, torch.float32])
def test_hidden_states_of_every_dtype_travel(dtype, deduplicate, hierarchy):
    """Sums are taken in float32 and rounded to the hidden states' dtype; a rank without tokens takes part."""
    generator, width, top_k = torch.Generator().manual_seed(3), 32, 3
    given = []
    for tokens in (7, 0, 4):
        hidden = torch.randint(-4, 5, (tokens, width), generator=generator).float().to(dtype)
        index = torch.rand(tokens, 6, generator=generator).topk(top_k).indices
        given.append((hidden, index, torch.tensor([0.5, 0.25, 0.25]).expand(tokens, top_k)))
    served = launch_threads(layer_outputs, 3, Memory(3, 300.0), given, deduplicate, hierarchy)
    back_bytes = 0
    for (hidden, *_), (out, trace) in zip(given, served, strict=True):
        assert out.dtype == dtype
        assert torch.equal(out.float(), hidden.float() * 2)  # all values and sums are exact in every dtype
        back_X = trace.bytes_X[trace.sent_X & (trace.phase_X == TRACE_PHASES.index("combine"))]
        assert not (back_X % (width * dtype.itemsize)).any()
        back_bytes += back_X.sum()
    if hierarchy is None:  # a row for each choice, or for each rank that has some of a token's
        homes = [(source, row) for source, (_, index, _) in enumerate(given) for row in (index // 2).tolist()]
        rows = [home for source, row in homes for home in (set(row) if deduplicate else row) if home != source]
        assert back_bytes == len(rows) * width * dtype.itemsize
