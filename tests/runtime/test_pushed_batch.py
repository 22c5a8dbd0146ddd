"""A layer's batch over ordered push: ranks in lock step in Triton's interpreter, and a step on a GPU that is not there."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aurora.moe.permutation import MessageFormat
from aurora.types import TRACE_PHASES
from bench.launches import fake_step

pytest.importorskip("triton", reason="the kernels' interpreter needs triton")

HIDDEN, INNER, EXPERTS, TOP_K = 24, 16, 6, 3


def experts_module(dtype=torch.float32):
    """Mixtral's experts, in a module that computes them one by one."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    experts = MixtralExperts(MixtralConfig(**sizes)).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    return experts.eval()


def lock_step():
    """Ranks with different numbers of tokens, replicas, and a rank of one expert; called in a process of its own."""
    from aurora.models.loading import hold_experts
    from aurora.moe import push_layout_triton, push_triton
    from aurora.moe.expert_map import ExpertMap
    from bench.local_layer import LocalLayer

    push_layout_triton.SCANNED, push_triton.TILE_BYTES, push_triton.SUM_ELEMENTS = 16, 64, 16  # so that there are several
    torch.manual_seed(0)
    full, slots_G = experts_module(), ((0, 1, 2), (3,), (4, 5, 0))
    experts_R = [copy.deepcopy(full) for _ in slots_G]
    for experts, slots in zip(experts_R, slots_G, strict=True):
        hold_experts(experts, slots)
    maps = [ExpertMap(slots_G, rank) for rank in range(len(slots_G))]
    maps[1].share_until_EM[0] = torch.tensor([0.5, 1.0])  # of rank 1's tokens of expert 0
    layer = LocalLayer(maps, experts_R, 7, torch.zeros(1, HIDDEN), TOP_K, lanes=2)
    for counts in ((6, 0, 7), (1, 2, 0)):
        tokens_R = []
        for tokens in counts:
            index = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
            tokens_R.append((torch.randn(tokens, HIDDEN), index, torch.rand(tokens, TOP_K)))
        layer.step(tokens_R)
        for push in layer.pushes:
            push.check_peers()
            push.batch_tokens = max(counts)
        found_R = layer.step(tokens_R)
        for (hidden, index, weights), found in zip(tokens_R, found_R, strict=True):
            if len(hidden):
                torch.testing.assert_close(found, full(hidden, index, weights), rtol=1e-5, atol=1e-5)
    print("compared")


def in_parts():
    """A DistributedExperts of one rank, whose batch takes three parts, the last of which is padding; in a process of its own."""
    from aurora.runtime.distributed.launcher import RankInfo
    from aurora.runtime.distributed_experts import DistributedExperts
    from aurora.runtime.transports.ordered import Memory
    from aurora.runtime.transports.push import OrderedPush
    from aurora.types import Placement
    from bench.local_layer import local_memory
    from tests.runtime.test_distributed_experts import context_on, ops_for

    torch.manual_seed(2)
    full, placement = experts_module(), Placement(((tuple(range(EXPERTS)),),))
    context, recorder = context_on(RankInfo(0, 1, "", 0, 9.0, 0, 1, launched=True), Memory(1, 9.0))
    row_bytes = MessageFormat(HIDDEN, TOP_K, torch.float32).row_bytes
    context.push = OrderedPush(local_memory(1)[0], 1, 8, row_bytes, 3, lanes=2, experts=EXPERTS)
    layer = DistributedExperts(copy.deepcopy(full))
    layer.set_placement(placement, ops_for(1), 0, context)
    hidden, index, weights = torch.randn(8, HIDDEN), torch.rand(8, EXPERTS).topk(TOP_K).indices, torch.rand(8, TOP_K)
    context.own_tokens = 8
    assert context.any_active(True)
    context.next_step(torch.arange(8) < 6)
    context.start_compute()
    found = layer(hidden, index, weights)
    context.finish_exchanges()
    expected = full(hidden, index, weights)
    expected[6:] = 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    phases = recorder.trace().phase_X
    assert (phases == TRACE_PHASES.index("expert")).sum() == 3
    print("compared")


@pytest.mark.parametrize("function", ["lock_step", "in_parts"])
def test_ranks_answer_as_all_experts_would(function):
    code = f"import torch; from {__name__} import {function}\nwith torch.inference_mode(): {function}()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=root, timeout=550)
    assert ended.stdout.endswith("compared\n"), ended.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_answer_as_single_ones(dtype):
    """By torch's grouped product on a CPU; rows behind the last expert's are anything."""
    from aurora.runtime.pushed_batch import compute_experts, grouped_products, is_grouped

    torch.manual_seed(1)
    experts, rows = experts_module(dtype), torch.randn(12, HIDDEN).to(dtype)
    rows[9:] = float("nan")
    ends_E = torch.tensor([2, 2, 5, 6, 9, 9], dtype=torch.int32)
    with torch.inference_mode():
        assert is_grouped(experts)
        found, expected = grouped_products(experts, rows, ends_E), compute_experts(experts, rows, ends_E)
    assert expected.shape == (9, HIDDEN)
    torch.testing.assert_close(found[:9], expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((8, 9), torch.bfloat16), ((12, 0), torch.bfloat16), ((9, 0), torch.float32)]
)
def test_gpus_without_a_grouped_kernel_take_the_path_of_transformers(capability, dtype, monkeypatch):
    """There torch's grouped product would read the ends of experts on the host."""
    from aurora.runtime.pushed_batch import has_grouped_kernel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert not has_grouped_kernel(SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert has_grouped_kernel(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda:0"))


def test_a_step_on_a_gpu_takes_eight_launches_and_no_synchronisation():
    counted = fake_step(8, tokens=128, experts=64)
    assert counted.synchronisations == []
    assert counted.launches == [
        "_lay_out", "_push", "_arrange", "aten._grouped_mm", "_silu_gate", "aten._grouped_mm", "_push", "_weighted_sum",
    ]  # fmt: skip
    assert counted.before == ["aten.index"]  # the physical experts


def test_a_replicated_layer_with_padding_waits_for_nothing():
    counted = fake_step(8, tokens=128, experts=64, replicas=8, masked=True)
    assert (counted.synchronisations, len(counted.launches)) == ([], 8)
