"""Choices are counted from a static buffer, also where passes are replayed and nothing may wait; phases are then not timed."""

import functools

import numpy as np
import pytest
import torch
from aurora_vllm import traffic_recorder, worker_integration
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import (
    FEW_ROWS,
    ChoiceCounter,
    EngineFacts,
    KeptCounter,
    PhaseClock,
    span,
)
from aurora_vllm.worker_integration import WorkerIntegration
from torch.utils._python_dispatch import TorchDispatchMode

from aurora.io.plugin_records import TIMED, load_record

LAYERS, EXPERTS, TOP_K, ROWS, DECODER_LAYERS = 2, 4, 2, 8, {0: 1, 1: 2}
FACTS = EngineFacts("tiny", "f", "vllm", "gpu", 0, 1, TOP_K, LAYERS, EXPERTS, 256, 256, 1000, 5000)


class Graph(TorchDispatchMode):
    """Emulates a CUDA graph: while it is entered, operations are captured; `replay` performs them on the same tensors again."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            for kept, new in zip(*(each if isinstance(each, tuple) else (each,) for each in (out, again)), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class Gpu:
    """Emulates what the clock asks of CUDA: events of a stream, of which none may be made or waited for during a capture."""

    def __init__(self):
        self.capturing, self.now_s = False, 0.0

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu, enable_timing):
        assert enable_timing
        self._gpu = gpu

    def record(self):
        assert not self._gpu.capturing
        self.at_s = self._gpu.now_s

    def synchronize(self):
        assert not self._gpu.capturing

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def gpu(monkeypatch):
    emulated = Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: emulated.capturing)
    monkeypatch.setattr(torch.cuda, "Event", functools.partial(Event, emulated))
    return emulated


class Model:
    """Routers of two MoE layers, the second and third decoder layer, which write their choices as vLLM's capturer does."""

    def __init__(self, integration, gpu):
        self.chosen_NLK = torch.zeros(ROWS, 3, TOP_K, dtype=torch.int32)
        self.logits_LNE = torch.zeros(LAYERS, ROWS, EXPERTS)
        self.integration, self.gpu = integration, gpu

    def __call__(self, rows):
        for layer, decoder_layer in DECODER_LAYERS.items():
            top_NK = self.logits_LNE[layer, :rows].topk(TOP_K).indices
            self.chosen_NLK[:rows, decoder_layer] = top_NK.to(torch.int32)
            with self.integration.moe_layer(layer, top_NK, False):
                self.gpu.now_s += 0.5


def test_replayed_passes_are_counted_and_captures_wait_for_nothing(gpu, tmp_path):
    """A capture in warm-up, replays of it with other tokens and padding, and one pass without a graph, which alone is timed."""
    integration = WorkerIntegration(Settings(order="stock", record=tmp_path, record_every_s=1e6), 0, 1, None, None)
    model = Model(integration, gpu)
    counter = ChoiceCounter(model.chosen_NLK, DECODER_LAYERS, LAYERS, EXPERTS)
    integration.begin_serving(FACTS, "tiny", DECODER_LAYERS, counter)
    integration._clock = PhaseClock(on_gpu=True)
    graph = Graph()
    gpu.capturing = True
    with integration.forward_pass(0), graph:
        model(ROWS)
    gpu.capturing = False
    generator, expected_LE = torch.Generator().manual_seed(0), np.zeros((LAYERS, EXPERTS), dtype=np.int64)
    for real in (3, 8, 1, 5):
        model.logits_LNE.copy_(torch.rand(model.logits_LNE.shape, generator=generator))
        with integration.forward_pass(real):
            if real == 5:
                model(5)
            else:
                graph.replay()
        for layer in range(LAYERS):
            top_NK = model.logits_LNE[layer, :real].topk(TOP_K).indices
            expected_LE[layer] += np.bincount(top_NK.numpy().ravel(), minlength=EXPERTS)
    record = integration.records._recorders[tmp_path.resolve()].record()
    np.testing.assert_array_equal(record.tokens_TLE.sum(axis=0), expected_LE)
    assert record.passes_L.tolist() == [1, 1]
    assert record.seconds_LP.sum() == 1.0
    integration.records._ended.set()


@pytest.mark.parametrize(
    ("kept", "few"), [(False, 64), (True, 64), (True, 3)], ids=["on-the-device", "kept", "kept-of-prompts"]
)
def test_long_records_are_sampled_and_lose_no_count(kept, few, gpu, tmp_path, monkeypatch):
    """From some windows on, one pass of three is timed and read out; a record that begins then is dense again."""
    for module in (traffic_recorder, worker_integration):
        monkeypatch.setattr(module, "SAMPLED", 3)
    monkeypatch.setattr(traffic_recorder, "MAX_WINDOWS", 4)
    monkeypatch.setattr(traffic_recorder, "PENDING_LIMIT", 1)
    monkeypatch.setattr(traffic_recorder, "FEW_ROWS", few)
    integration = WorkerIntegration(Settings(order="stock", record=tmp_path, record_every_s=1e6), 0, 1, None, None)
    model, passes = Model(integration, gpu), 31
    buffer = ChoiceCounter(model.chosen_NLK, DECODER_LAYERS, LAYERS, EXPERTS)
    counter = KeptCounter(DECODER_LAYERS, LAYERS, EXPERTS) if kept else buffer
    integration.begin_serving(FACTS, "tiny", DECODER_LAYERS, counter)
    generator, expected_NLE = torch.Generator().manual_seed(0), []
    for number in range(passes):
        if number == passes - 2:
            integration.records.command("start", "late")
        model.logits_LNE.copy_(torch.rand(model.logits_LNE.shape, generator=generator))
        with integration.forward_pass(5):
            model(5)
            for decoder_layer in DECODER_LAYERS.values() if kept else ():
                counter.keeper(decoder_layer)(model.chosen_NLK[:5, decoder_layer].clone())
        expected_NLE.append(buffer.count(slice(0, 5)).read())
        if number in (20, passes - 1):
            integration.records.command("write")
            record = load_record(tmp_path / "rank-0.npz")
            np.testing.assert_array_equal(record.tokens_TLE.sum(axis=0), np.sum(expected_NLE, axis=0))
            assert 8 <= record.passes_L[0] < number - 5
    integration.records.command("stop", "late")
    late = load_record(tmp_path / "late/rank-0.npz")
    np.testing.assert_array_equal(late.tokens_TLE, expected_NLE[-2:])
    assert late.passes_L.tolist() == [2, 2]
    integration.records._ended.set()


def test_no_mark_while_a_graph_is_captured(gpu):
    clock = PhaseClock(on_gpu=True)
    began = clock.mark()
    gpu.now_s = 2.0
    assert span(began, clock.mark()).seconds == 2.0
    gpu.capturing = True
    assert clock.mark() is None
    assert span(began, clock.mark()) is None


def test_choices_of_no_expert_of_the_model_are_left_out():
    chosen_NLK = torch.tensor([[[9, 9], [0, 3]], [[9, 9], [-1, 4]], [[9, 9], [3, 3]]])
    counter = ChoiceCounter(chosen_NLK, {2: 1}, 3, 4)
    assert counter.count(slice(0, 3)).read().tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 3]]
    assert counter.count(slice(1, 2)).read().sum() == 0


@pytest.mark.parametrize("rows", [5, FEW_ROWS + 1], ids=["counted-later", "counted-at-once"])
def test_choices_that_are_kept_are_counted_as_those_in_a_buffer(rows):
    """Later passes change nothing of what was counted, the dense layer 0 is none of them, and padding is left out."""
    generator = torch.Generator().manual_seed(1)
    chosen_NLK = torch.zeros(rows, 3, TOP_K, dtype=torch.int32)
    kept, buffer = KeptCounter(DECODER_LAYERS, LAYERS, EXPERTS), ChoiceCounter(chosen_NLK, DECODER_LAYERS, LAYERS, EXPERTS)
    keepers, found, expected = {layer: kept.keeper(layer) for layer in DECODER_LAYERS.values()}, [], []
    for _ in range(3):
        for layer, keep in keepers.items():
            chosen_NLK[:, layer] = torch.randint(EXPERTS, (rows, TOP_K), generator=generator)
            keep(chosen_NLK[:, layer].clone())
        found.append(kept.count(slice(0, rows - 1)))
        expected.append(buffer.count(slice(0, rows - 1)).read())
        np.testing.assert_array_equal(kept.count(slice(1, 2)).read(), buffer.count(slice(1, 2)).read())
    np.testing.assert_array_equal([each.read() for each in found], expected)


def test_layers_of_vllms_own_all_to_all_are_timed(gpu, tmp_path):
    """As those in `moe_layer`: the experts of each layer, and what is between two layers; an unrecorded pass is not."""
    integration = WorkerIntegration(Settings(order="stock", record=tmp_path, record_every_s=1e6), 0, 1, None, None)
    integration.begin_serving(
        FACTS,
        "tiny",
        DECODER_LAYERS,
        ChoiceCounter(torch.zeros(ROWS, 3, TOP_K, dtype=torch.int32), DECODER_LAYERS, LAYERS, EXPERTS),
    )
    integration._clock = PhaseClock(on_gpu=True)
    assert integration.stock
    for real in (0, 4, 4):
        with integration.forward_pass(real):
            for layer in DECODER_LAYERS:
                gpu.now_s += 0.25
                began = integration.enter_layer(layer)
                gpu.now_s += 1.0
                integration.leave_layer(layer, torch.zeros(4, TOP_K), True, began)
    record = integration.records._recorders[tmp_path.resolve()].record()
    assert record.passes_L.tolist() == [2, 2]
    assert record.seconds_LP[:, [TIMED.index("gate"), TIMED.index("expert")]].tolist() == [[0.0, 2.0], [0.5, 2.0]]
    integration.records._ended.set()


@pytest.mark.parametrize("combined", [False, True], ids=["not-combined", "combined"])
def test_a_dispatch_that_is_not_combined_is_an_error_at_the_layers_end(combined):
    integration = WorkerIntegration(Settings(order="online"), 0, 1, None, None)
    with (
        pytest.raises(RuntimeError, match="MoE layer 1 were dispatched by aurora and not combined by it")
        if not combined
        else (integration.moe_layer(0, torch.zeros(1, 1), False))
    ):
        with integration.moe_layer(1, torch.zeros(1, 1), False):
            integration._in_flight.batch = None if combined else object()
        assert combined
