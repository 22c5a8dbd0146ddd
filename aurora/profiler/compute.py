"""Time gate, expert and aggregation against tokens, in the conditions that a rank will find."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.models.loading import MoeModel, hold_experts, load_model
from aurora.ranks.group import device_of, joined
from aurora.ranks.launcher import Seat, launch
from aurora.types import PHASES, Curve

REPEATS = 7

Times = dict[str, list[float]]


def measure_curves(path: str, *, tokens: int, length: int, share: int) -> tuple[str, dict[str, Curve]]:
    """The device's kind and a Curve for each phase, up to `tokens` tokens, in sequences of at most `length`.

    `share` processes measure at the same time, as that many ranks on this machine will compute at the same time; points are
    medians over repeats and processes.
    """
    sizes = [1 << power for power in range((max(1, tokens) - 1).bit_length() + 1)]
    results = launch(_measure_rank, share, path, sizes, length)
    curves = {}
    for phase in PHASES:
        medians = [statistics.median(times[phase][i] for _, times in results) for i in range(len(sizes))]
        curves[phase] = Curve(np.array(sizes, dtype=np.float64), np.maximum.accumulate(medians))
    return results[0][0], curves


def _measure_rank(seat: Seat, path: str, sizes: list[int], length: int) -> tuple[str, Times]:
    device = device_of(seat)
    model = load_model(path, device)
    with joined(seat), torch.inference_mode():
        times = {
            "gate": [_gate_s(model, size, length) for size in sizes],
            "expert": _expert_s(model, sizes),
            "aggregate": _aggregate_s(model, sizes),
        }
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu", times


def _gate_s(model: MoeModel, tokens: int, length: int) -> float:
    """Seconds between two MoE layers: a forward pass without its experts, shared out over the layers."""
    width = min(tokens, length)
    ids = torch.randint(3, model.model.config.vocab_size, (-(-tokens // width), width))
    ids = ids.to(next(model.model.parameters()).device)
    inside: list[float] = []
    with _timed_experts(model, inside):

        def forward() -> float:
            inside.clear()
            return _seconds(lambda: model.model(input_ids=ids, logits_to_keep=1)) - sum(inside)

        return _median(forward) / len(model.layers)


@contextmanager
def _timed_experts(model: MoeModel, seconds: list[float]) -> Iterator[None]:
    began = [0.0]

    def before(*_: Any) -> None:
        began[0] = _now()

    def after(*_: Any) -> None:
        seconds.append(_now() - began[0])

    handles = []
    for layer in model.layers:
        handles.append(layer.experts.register_forward_pre_hook(before))
        handles.append(layer.experts.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _expert_s(model: MoeModel, sizes: list[int]) -> list[float]:
    experts = copy.deepcopy(model.layers[0].experts)
    hold_experts(experts, [0])
    weight = next(experts.parameters())
    times = []
    for size in sizes:
        rows = torch.randn(size, model.hidden, dtype=weight.dtype, device=weight.device)
        index = torch.zeros(size, 1, dtype=torch.long, device=weight.device)
        ones = torch.ones(size, 1, dtype=weight.dtype, device=weight.device)
        times.append(_median(partial(_seconds, partial(experts, rows, index, ones))))
    return times


def _aggregate_s(model: MoeModel, sizes: list[int]) -> list[float]:
    weight = next(model.layers[0].experts.parameters())
    times = []
    for size in sizes:
        rows = torch.randn(size * model.top_k, model.hidden, dtype=weight.dtype, device=weight.device)
        token = torch.randperm(len(rows), device=weight.device) // model.top_k
        shares = torch.rand(len(rows), 1, dtype=weight.dtype, device=weight.device)

        def aggregate(rows: Any = rows, token: Any = token, shares: Any = shares, size: int = size) -> None:
            rows.new_zeros(size, rows.shape[1]).index_add_(0, token, rows * shares)

        times.append(_median(partial(_seconds, aggregate)))
    return times


def _median(measure: Callable[[], float]) -> float:
    dist.barrier()
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


def _seconds(job: Callable[[], object]) -> float:
    began = _now()
    job()
    return _now() - began


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
