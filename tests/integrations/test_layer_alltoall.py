"""The all-to-all as vLLM sees it: rows that a rank needs, with weights and experts; and sums that come back."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from aurora_vllm import layer_alltoall as module
from aurora_vllm.layer_alltoall import LayerAllToAll
from aurora_vllm.served_plan import check_fit, read_checkpoint
from aurora_vllm.traffic_recorder import PhaseClock
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.workload.model_structure import expert_count
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.io import load_model_config
from aurora.models.loading import load_model
from aurora.planner.plan import make_plan
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Cluster, Gpu, Hierarchy, Network, PlanOptions, SyntheticOptions

EXPERTS, WIDTH, TOP_K = 6, 8, 2


@pytest.mark.parametrize("small_bytes", [0, 8192])
@given(
    where=st.lists(st.integers(0, 2), min_size=EXPERTS, max_size=EXPERTS),
    tokens=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    planned=st.booleans(),
    servers=st.sampled_from([None, (0, 0, 0), (0, 1, 2), (0, 1, 0), (1, 0, 0)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=50)
def test_ranks_together_compute_what_one_would(small_bytes, where, tokens, planned, servers, seed):
    """Expert e multiplies by e + 1: exact in float32, whatever the order of sums. Ranks may hold no expert and have no token.

    Every rank knows what each computes; the last row of a rank is padding, which does not count.
    """
    rng = np.random.default_rng(seed)
    hierarchy = None if servers is None else Hierarchy(np.array(servers), int(rng.integers(1, 4)), (None, 1)[seed % 2])
    slots_G = tuple(tuple(int(e) for e in np.flatnonzero(np.array(where) == rank)) for rank in range(3))
    ones = Network.equal(3)
    order = ORDER["birkhoff"](rng.integers(1, 9, (3, 3)) * (1 - np.eye(3, dtype=np.int64)), ones, rng=rng)
    memory, reported = Memory(3, 10.0), []
    batches = [
        (
            torch.tensor(rng.integers(-4, 5, (n, WIDTH)), dtype=torch.float32),
            torch.tensor(rng.integers(1, 5, (n, TOP_K)), dtype=torch.float32) / 4,
            torch.tensor(np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(n)]).reshape(n, TOP_K), dtype=torch.int32),
        )
        for n in tokens
    ]

    chosen = [expert for _, _, index in batches for expert in index[:-1].flatten().tolist()]
    computed_G = [sum(where[expert] == rank for expert in chosen) for rank in range(3)]

    def serve(rank):
        orders = (order, order.reversed) if planned else None
        layer = LayerAllToAll(
            4, MemoryTransport(memory, rank), slots_G, orders, hierarchy, None,
            lambda *phase: reported.append(phase), PhaseClock(False), torch.device("cpu"),
        )  # fmt: skip
        rows, weights, index, batch = layer.dispatch(*batches[rank], slice(0, max(0, tokens[rank] - 1)))
        here = torch.isin(index, torch.tensor(slots_G[rank], dtype=torch.int32))
        assert (weights[~here] == 0).all()
        assert here.any(dim=1).all()  # no row came for nothing
        assert index.dtype == torch.int32
        assert batch.tokens_G.tolist() == computed_G
        return layer.combine(rows * (weights * (index + 1)).sum(dim=1, keepdim=True), batch)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(module, "SMALL_BYTES", small_bytes)
        found = list(pool.map(serve, range(3)))
    for (hidden, weights, index), out in zip(batches, found, strict=True):
        torch.testing.assert_close(out, hidden * (weights * (index + 1)).sum(dim=1, keepdim=True), rtol=0, atol=0)
    assert sorted(phase for phase, *_ in reported) == ["combine"] * 3 + ["dispatch"] * 3
    assert all(0 <= took.seconds < 60 and took.reached for _, _, took, _ in reported)
    between = {phase: bytes_GG for phase, _, _, bytes_GG in reported}
    assert (between["combine"].T > 0).tolist() == (between["dispatch"] > 0).tolist()


class Counted(MemoryTransport):
    """Notes the rows of each exchange."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = []

    def exchange(self, order, sends, recvs, observe):
        self.sent.append([len(rows) for rows in sends])
        super().exchange(order, sends, recvs, observe)


@pytest.mark.parametrize(("tokens", "chunks"), [(2, 3), (60, 1), (60, 3)])
def test_a_token_crosses_to_a_server_once_in_as_many_exchanges_as_there_are_steps(tokens, chunks):
    """Two servers of two ranks, every token needs all ranks; a batch of few bytes goes straight to the ranks, in one exchange."""
    memory, hierarchy = Memory(4, 10.0), Hierarchy(np.array([0, 1, 0, 1]), chunks)

    def serve(rank):
        transport = Counted(memory, rank)
        layer = LayerAllToAll(
            0, transport, ((0,), (1,), (2,), (3,)), None, hierarchy, None,
            lambda *_: None, PhaseClock(False), torch.device("cpu"),
        )  # fmt: skip
        hidden, index = torch.ones(tokens, 64), torch.arange(4, dtype=torch.int32).repeat(tokens, 1)
        rows, _, _, batch = layer.dispatch(hidden, torch.ones(tokens, 4), index, slice(0, tokens))
        assert len(rows) == 4 * tokens
        assert batch.tokens_G.tolist() == [4 * tokens] * 4
        torch.testing.assert_close(layer.combine(rows, batch), 4 * hidden, rtol=0, atol=0)
        return transport.sent

    with ThreadPoolExecutor(4) as pool:
        sent_RXR = np.array(list(pool.map(serve, range(4))))
    exchanges = 1 if tokens == 2 else hierarchy.steps
    assert sent_RXR.shape == (4, 2 * exchanges, 4)
    apart_RR = hierarchy.server_G[:, None] != hierarchy.server_G
    across = sent_RXR.sum(axis=1)[apart_RR].sum()
    assert across == 2 * 4 * tokens * (2 if exchanges == 1 else 1)  # there and back, to both ranks of the other server or to it


def test_a_checkpoint_is_known_by_its_routers(qwen):
    experts = expert_count(load_model_config(qwen))
    model = load_model(qwen)
    assert experts == model.experts
    checkpoint = read_checkpoint(qwen, experts)
    assert checkpoint.fingerprint == model.fingerprint()
    assert checkpoint.layers == tuple(range(len(model.layers)))
    assert read_checkpoint(qwen, experts + 1) is None


def test_a_plan_fits_its_own_model_and_ranks(qwen, mixtral):
    checkpoint, experts = read_checkpoint(qwen, expert_count(load_model_config(qwen))), expert_count(load_model_config(qwen))
    shape = {"num_local_experts": experts, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}
    shape |= {"num_hidden_layers": len(checkpoint.layers), "moe_intermediate_size": 64, "vocab_size": 64}
    profile = draw_profile("uniform", shape, SyntheticOptions(sources=2))
    cluster = Cluster("c", tuple(Gpu(f"g{i}", "x", i, 1e9, 1e9, 10**12) for i in range(2)))
    plan = make_plan(cluster, [profile], PlanOptions())
    check_fit(plan, checkpoint, experts, 2)
    with pytest.raises(BadInput, match="the plan is for 2 ranks, vLLM runs 4 expert-parallel ranks"):
        check_fit(plan, checkpoint, experts, 4)
    other = read_checkpoint(mixtral, expert_count(load_model_config(mixtral)))
    with pytest.raises(BadInput, match="MoE layers of"):
        check_fit(plan, other, expert_count(load_model_config(mixtral)) + 1, 2)
