"""All-to-alls of the plugin by push, between processes in Triton's interpreter."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from aurora_vllm import pushed_alltoall
from aurora_vllm.pushed_alltoall import EngineLayers, bytes_of_row, pushed_layers
from aurora_vllm.settings import Settings
from aurora_vllm.worker_integration import WorkerIntegration

from aurora.moe.permutation import MessageFormat
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.transports import nvlink
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.runtime.transports.process_groups import default_process_group
from aurora.runtime.transports.symmetric_memory import SymmetricMemory, memory_of_peers
from tests.profiler.nvml import Replay
from tests.runtime.transports import drawn_pushes

SLOTS_LG = {4: ((0, 3), (1, 2)), 7: ((1,), (0, 2, 3))}  # by layer
EXPERTS, TOP_K, WIDTH, MOST = 4, 2, 24, 7


def inputs(rank, seed, tokens, dtype):
    """What a rank's router chose; values whose sums are exact in bfloat16. One choice is of no expert."""
    rng = torch.Generator().manual_seed(10 * seed + rank)
    index = torch.rand(tokens, EXPERTS, generator=rng).topk(TOP_K).indices.int()
    index[:1, 0] = -1
    hidden = torch.randint(-2, 3, (tokens, WIDTH), generator=rng).to(dtype)
    return hidden, torch.randint(1, 3, (tokens, TOP_K), generator=rng) / 2, index


def served_by_push(rank_info, buffer_bytes):
    """Batches of several sizes. Returns how many values differ, and sizes."""
    drawn_pushes.in_interpreter()
    pushed_alltoall.BUFFER_BYTES = buffer_bytes
    with default_process_group(rank_info):
        return exchanges(rank_info.rank, GlooTransport())


def exchanges(rank, transport):
    wrong, rows_seen = 0, []
    make_memory = memory_of_peers(transport.gather, rank, 2, "cpu")
    engine = EngineLayers(SLOTS_LG, MessageFormat(WIDTH, TOP_K, torch.float32), MOST, torch.device("cpu"))
    push, layers = pushed_layers(transport, make_memory, engine, None)
    addresses = [push.table_L2.data_ptr(), *(each.rank_E.data_ptr() for each in layers.values())]
    for seed, (tokens_R, dtype) in enumerate(
        [((5, 2), torch.float32), ((0, 1), torch.bfloat16), ((7, 0), torch.float32), ((3, 7), torch.float8_e4m3fn)]
    ):
        for layer, pushed in layers.items():
            hidden, weights, index = inputs(rank, seed, tokens_R[rank], dtype)
            extra = [] if dtype == torch.float32 else [2 * hidden[:, :3].float(), hidden[:, 1].to(torch.int8)]  # as scales are
            assert bytes_of_row(hidden, index, extra) <= push.row_bytes
            rows, weights_PK, index_PK, batch = pushed.dispatch(hidden, weights, index, max(tokens_R), extra)
            assert [each.dtype for each in batch.extra] == [each.dtype for each in extra]
            for each, expected in zip(batch.extra, (2 * rows[:, :3].float(), rows[:, 1].to(torch.int8)), strict=False):
                assert torch.equal(each, expected), "zero where nothing came, too"
            assert (rows.dtype, weights_PK.dtype, index_PK.dtype) == (dtype, torch.float32, torch.int32)
            here_PK = torch.isin(index_PK, torch.tensor(SLOTS_LG[layer][rank], dtype=torch.int32))
            assert (weights_PK[~here_PK] == 0).all()
            assert rows[~here_PK.any(dim=1)].float().eq(0).all(), "also where nothing came, which kernels may look at"
            assert batch.received == len(rows)
            rows_seen.append((len(rows), len(batch.rounds)))
            wide = torch.bfloat16 if dtype.itemsize == 1 else dtype  # of experts' outputs
            factor = (weights_PK * (index_PK + 1)).sum(dim=1, keepdim=True).to(wide)
            sums = pushed.combine(rows.to(wide) * factor, batch)
            expected = hidden.to(wide) * (weights * (index + 1)).sum(dim=1, keepdim=True).to(
                wide
            )  # -1 of no expert gives nothing
            wrong += int((sums != expected).sum())
    push.check_peers(waits=False)
    assert addresses == [push.table_L2.data_ptr(), *(each.rank_E.data_ptr() for each in layers.values())]
    return wrong, rows_seen


@pytest.mark.parametrize(("buffer_bytes", "most"), [(1 << 20, MOST), (2 * 2 * 3 * 160, 3)])
def test_batches_by_push_are_served_as_by_one_rank(buffer_bytes, most):
    """Two processes, several layers; with buffers for 3 tokens larger batches take rounds. Nothing is dropped."""
    pytest.importorskip("triton", reason="the kernels' interpreter needs triton")
    assert MessageFormat(WIDTH, TOP_K, torch.float32).row_bytes == 128
    for wrong, seen in launch(served_by_push, 2, buffer_bytes):
        assert wrong == 0
        needed = [max(tokens, 1) for tokens in (5, 1, 7, 7) for _ in SLOTS_LG]
        assert seen == [(2 * tokens, -(-tokens // most)) for tokens in needed]


@pytest.mark.parametrize(("machine", "linked"), [("h100-sxm-8", True), ("l40s-4", False)])
def test_only_gpus_that_nvlink_connects_are_peers(machine, linked, monkeypatch):
    nvml = Replay(machine)
    nvml._answers["nvmlDeviceGetHandleByUUID"] = {f"GPU-{n}": n for n in range(4)}
    monkeypatch.setattr(nvlink, "open_nvml", lambda: nullcontext(nvml))
    assert nvlink.linked_by_nvlink([f"GPU-{n}" for n in range(4)]) is linked
    assert not nvlink.linked_by_nvlink(["GPU-0", "GPU-of-another-machine"])


def test_gpus_of_a_machine_without_nvml_are_no_peers(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not nvlink.linked_by_nvlink(["GPU-0", "GPU-1"])


@pytest.mark.parametrize(
    ("memory", "known", "lacks"),
    [
        ("expected GPUs, found CPUs", True, "expected GPUs, found CPUs"),
        (None, False, "expected MoE layers"),
        (None, True, None),
    ],
)
def test_push_is_vllms_own_where_there_are_no_peers_or_layers(memory, known, lacks, monkeypatch):
    """That is told; `required` then ends the server, as for all that it falls short of."""
    integration, said = WorkerIntegration(Settings(order="push"), 0, 2, None, None), []
    integration.status = SimpleNamespace(report_degraded=said.append, engaged=said.append)
    integration.peers_memory = memory or (lambda _size: None)
    integration.connect(lambda: None)
    monkeypatch.setattr("aurora_vllm.worker_integration.Metrics", lambda *_: None)
    monkeypatch.setattr("aurora_vllm.pushed_alltoall.pushed_layers", lambda *_: ("push", {0: "pushed"}))
    row = MessageFormat(WIDTH, TOP_K, torch.float32)
    engine = EngineLayers({0: ((0,), (1,))}, row, 8, torch.device("cpu"))
    integration.begin_serving(None, "m", {0: 0}, None, engine if known else None)
    with integration.moe_layer(0, torch.zeros(3, TOP_K), False):
        assert integration.takes(lambda: [3, 5]) is (lacks is None)
        assert integration._in_flight.most_tokens == (0 if lacks else 5)
        if lacks is None:  # push carries what travels along, if its slots are so large
            integration._push = SimpleNamespace(row_bytes=160, check_peers=None)
            assert [integration.takes(lambda: [3, 5], size) for size in (160, 161)] == [True, False]
    assert lacks is None or (said[0].startswith(f"order push: {lacks}") and said[0].endswith("; all-to-alls are vLLM's own"))
    assert said[-1].endswith(f"all-to-alls by {'vLLM' if lacks else 'push'}, no record")


@pytest.mark.parametrize(("fails", "said"), [(None, None), (0, "no driver"), (1, "expected ordered push to bring back")])
def test_a_rank_that_cannot_push_is_a_reason_for_all(fails, said, monkeypatch):
    """It has no symmetric memory, or its kernels bring what was not sent."""
    pytest.importorskip("triton", reason="the kernels need triton")
    row, memory = MessageFormat(WIDTH, TOP_K, torch.float32), Memory(2, 30.0)
    engine = EngineLayers(SLOTS_LG, row, MOST, torch.device("cpu"))

    def dispatch(layer, hidden, weights, index, _most_tokens):
        assert index.max() < EXPERTS
        assert (index.sort(dim=1).values.diff() > 0).all(), "experts of a token are others"
        return hidden, weights, index, layer.rank_E[index.long()]

    def combine(layer, rows, rank_NK):
        wrong = layer.push.rank == fails == 1
        return rows * torch.tensor([len(set(ranks)) for ranks in rank_NK.tolist()])[:, None] + wrong

    monkeypatch.setattr(pushed_alltoall.PushedLayer, "dispatch", dispatch)
    monkeypatch.setattr(pushed_alltoall.PushedLayer, "combine", combine)

    def make(rank):
        def make_memory(size):
            if rank == fails == 0:
                raise RuntimeError("no driver")
            return SymmetricMemory(rank, 2, torch.zeros(size, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), None)

        return pushed_layers(MemoryTransport(memory, rank), make_memory, engine, None)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
    if said is None:
        assert [set(layers) for _, layers in made] == [{4, 7}] * 2
    else:
        assert made[0] == made[1]
        assert said in made[0]
