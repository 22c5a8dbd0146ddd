"""The all-to-all as vLLM sees it: rows that a rank needs, with weights and experts; and sums that come back."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from aurora_vllm import layer_alltoall as module
from aurora_vllm.layer_alltoall import LayerAllToAll
from aurora_vllm.served_plan import check_fit, experts_in, read_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.models.loading import load_model
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.make_plan import make_plan
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.runtime.distributed.memory import Memory, MemoryTransport
from aurora.types import Cluster, Gpu, Network, PlanOptions, SyntheticOptions

EXPERTS, WIDTH, TOP_K = 6, 8, 2


@pytest.mark.parametrize("small_bytes", [0, 8192])
@given(
    where=st.lists(st.integers(0, 2), min_size=EXPERTS, max_size=EXPERTS),
    tokens=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    planned=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_ranks_together_compute_what_one_would(small_bytes, where, tokens, planned, seed):
    """Expert e multiplies by e + 1: exact in float32, whatever the order of sums. Ranks may hold no expert and have no token.

    Every rank knows what each computes; the last row of a rank is padding, which does not count.
    """
    rng = np.random.default_rng(seed)
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
            4, MemoryTransport(memory, rank), slots_G, orders, None, lambda *phase: reported.append(phase), torch.device("cpu")
        )
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
    between = {phase: bytes_GG for phase, _, _, bytes_GG in reported}
    assert (between["combine"].T > 0).tolist() == (between["dispatch"] > 0).tolist()


def test_a_checkpoint_is_known_by_its_routers(qwen):
    experts = experts_in(qwen)
    model = load_model(qwen)
    assert experts == model.experts
    checkpoint = read_checkpoint(qwen, experts)
    assert checkpoint.fingerprint == model.fingerprint()
    assert checkpoint.layers == tuple(range(len(model.layers)))
    assert read_checkpoint(qwen, experts + 1) is None


def test_a_plan_fits_its_own_model_and_ranks(qwen, mixtral):
    checkpoint, experts = read_checkpoint(qwen, experts_in(qwen)), experts_in(qwen)
    shape = {"num_local_experts": experts, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}
    shape |= {"num_hidden_layers": len(checkpoint.layers), "moe_intermediate_size": 64, "vocab_size": 64}
    profile = synthetic_profile("uniform", shape, SyntheticOptions(sources=2))
    cluster = Cluster("c", tuple(Gpu(f"g{i}", "x", i, 1e9, 1e9, 10**12) for i in range(2)))
    plan = make_plan(cluster, [profile], PlanOptions())
    check_fit(plan, checkpoint, experts, 2)
    with pytest.raises(BadInput, match="the plan is for 2 ranks, vLLM runs 4 expert-parallel ranks"):
        check_fit(plan, checkpoint, experts, 4)
    other = read_checkpoint(mixtral, experts_in(mixtral))
    with pytest.raises(BadInput, match="MoE layers of"):
        check_fit(plan, other, experts_in(mixtral) + 1, 2)
