"""Compute timing: measures seconds of gate, expert and aggregation by tokens, in as many processes at once as in a run."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from aurora.algorithms.workload.curve_fit import BalancedPoints, fit_curve, grouped_curves
from aurora.algorithms.workload.timing_doubts import SPREAD
from aurora.models.loading import MoeModel, hold_experts
from aurora.models.own_weights import load_without_experts
from aurora.profiler.devices import clocks_and_power
from aurora.runtime.distributed.launcher import RankInfo, launch
from aurora.runtime.phase_recorder import HostTimer, StreamTimer, Timer
from aurora.runtime.transports.process_groups import default_process_group, device_of
from aurora.types import OVERHEAD, PHASES, ComputeCurves

WARM_UP, REPEATS = 2, 7
CACHE_BYTES = 256 << 20  # larger than any GPU's last-level cache
HELD = 8  # experts at most that are timed as one group
WAIT_S = 5e-3  # about as long as a rank waits for an exchange

Model = tuple[str, str, int, int, int]  # the first fields of ComputeCurves
Times = dict[str, list[float]]


class _Stopwatch:
    """Times work on the device's own clock: CUDA events, or the host's clock on a CPU.

    Attributes:
        spreads: of each median, the distance of the repeats' quartiles / the median.
    """

    def __init__(self, device: str) -> None:
        on_gpu = device != "cpu"
        self._flush = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device) if on_gpu else None
        self._timer: Timer = StreamTimer(0.0) if on_gpu else HostTimer(0.0)
        self.spreads: list[float] = []

    def cool(self) -> None:
        """Brings caches and core into the state that they have when a phase starts in a run.

        On a GPU, the weights of other experts have been through the caches. On a CPU, other ranks have used the core while this
        rank waited.
        """
        if self._flush is not None:
            self._flush.zero_()
        else:
            time.sleep(WAIT_S)

    def mark(self) -> Any:
        """Marks the present moment on the device's clock. Returns the mark, to be given to `seconds`."""
        return self._timer.mark()

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks; waits until the device has reached the second."""
        self._timer.seconds(end)
        return self._timer.elapsed_s(begin, end)

    def median(self, measure: Callable[[], float]) -> float:
        """Returns the median result of REPEATS calls of `measure`, after WARM_UP calls. All processes begin together."""
        dist.barrier()
        for _ in range(WARM_UP):
            measure()
        first, median, third = statistics.quantiles((measure() for _ in range(REPEATS)), method="inclusive")
        self.spreads.append((third - first) / median)
        return median

    def seconds_of(self, job: Callable[[], object]) -> float:
        """Returns the seconds that a call of `job` takes."""
        self.cool()
        begin = self.mark()
        job()
        return self.seconds(begin, self.mark())


def measure_curves(path: str | Path, *, max_tokens: int, sequence_tokens: int, processes: int = 1) -> ComputeCurves:
    """Measures how long a model's gate, expert and aggregation take on this machine, by number of tokens.

    Each power of two up to `max_tokens` is timed in several processes at once; a curve is fitted to the medians. Experts are
    timed in a group of up to HELD experts: first with one active, then with more, then all with more tokens. This separates
    the seconds of a call (OVERHEAD), of an active expert and of its tokens.

    Args:
        path: the folder of a transformers MoE model.
        max_tokens: largest number of tokens to time.
        sequence_tokens: largest number of tokens of a sequence while the gate phase, which includes attention, is timed.
        processes: number of processes that measure at the same time; as many as ranks will compute on this machine.

    Returns:
        ComputeCurves of this machine's kind of device, seconds by tokens, with provenance.

    Raises:
        BadInput: if there is no MoE model at `path`.
        RankFailed: if a process dies.

    Example:
        >>> from aurora.io import shipped
        >>> curves = measure_curves(shipped("models/mixtral-topics"), max_tokens=64, sequence_tokens=32)
        >>> sorted(curves.kinds["cpu"])  # doctest: +SKIP
        ['aggregate', 'expert', 'gate']
    """
    sizes = [1 << power for power in range((max(1, max_tokens) - 1).bit_length() + 1)]
    results = launch(_measure_rank, processes, str(path), sizes, sequence_tokens)
    about: Model
    about, kind, shape, experts = results[0][:4]
    medians = {
        phase: [statistics.median(seconds) for seconds in zip(*(times[phase] for *_, times, _ in results), strict=True)]
        for phase in PHASES
    }
    rows = _group_rows(sizes, experts)
    points = BalancedPoints(np.array(rows, dtype=np.float64), np.array(medians["expert"]), experts, experts)
    expert, overhead = grouped_curves(points)
    curves, errors_X = {OVERHEAD: overhead, "expert": expert}, {}
    errors_X["expert"] = np.abs((overhead(rows) + points.busy_X * expert(rows / points.busy_X)) / points.seconds_X - 1)
    for phase in ("gate", "aggregate"):
        curves[phase] = fit_curve(sizes, medians[phase])
        errors_X[phase] = np.abs(curves[phase](sizes) / medians[phase] - 1)
    errors = ", ".join(f"{phase} {np.median(errors_X[phase]):.1%} / {errors_X[phase].max():.1%}" for phase in PHASES)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = f"{processes} processes at a time on {os.cpu_count()} cores, {platform.machine()}"
    said = f"{shape}; {cores}; torch {torch.__version__}; fit, median / worst: {errors}; {today}"
    spread = max(spread for *_, spread in results)
    return ComputeCurves(*about, {kind: curves}, {f"curves of {kind}": said, f"{SPREAD}{kind}": f"{spread:.0%}"})


def _group_rows(sizes: list[int], experts: int) -> list[int]:
    """Returns the rows of a group of experts: powers of two up to the largest size for each expert."""
    return [1 << power for power in range((experts * sizes[-1]).bit_length())]


def _measure_rank(
    rank_info: RankInfo, path: str, sizes: list[int], sequence_tokens: int
) -> tuple[Model, str, str, int, Times, float]:
    """One process: the model, the kind of device, the shape in words, experts of a group, seconds by phase and size, spread.

    It holds the dense weights and one group of experts, by which all layers compute.
    """
    device = device_of(rank_info)
    model = load_without_experts(path, device)
    about = (model.name, model.fingerprint(), model.top_k, model.row_bytes, model.expert_bytes)
    experts = min(HELD, model.experts)
    watch = _Stopwatch(device)
    group = _ExpertGroup(model.layers[0].experts, experts, watch)
    for layer in model.layers:
        setattr(layer.block, layer.name, group)
    with default_process_group(rank_info), torch.inference_mode():
        times = {
            "gate": [_gate_s(model, watch, group, size, sequence_tokens) for size in sizes],
            "expert": _group_s(model, watch, group, _group_rows(sizes, experts)),
            "aggregate": _aggregate_s(model, watch, sizes),
        }
    dtype = str(next(group.parameters()).dtype).removeprefix("torch.")
    kind, shape = "cpu", f"{dtype}, hidden size {model.hidden}, experts of {model.expert_bytes} bytes"
    if device != "cpu":
        gpu = torch.cuda.get_device_properties(device)
        kind, shape = gpu.name, "; ".join(filter(None, (shape, clocks_and_power(str(gpu.uuid)))))
    return about, kind, shape, experts, times, statistics.median(watch.spreads)


class _ExpertGroup(nn.Module):
    """Experts module with the first `num_experts` experts of a layer, which compute for all of its experts.

    Args:
        experts: the layer's module, whose other experts are dropped, or read none from the model's files.
        held: experts of the group.
        watch: marks the beginning and the end of each call.

    Attributes:
        calls: the two marks of each call.
    """

    def __init__(self, experts: Any, count: int, watch: _Stopwatch) -> None:
        super().__init__()
        reader = getattr(experts, "reader", None)
        hold_experts(experts, range(count) if reader is None else [*reader.read(range(count)).values()])
        self.experts, self.num_experts, self._watch = experts, count, watch
        self.calls: list[tuple[Any, Any]] = []

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns the outputs (N, H) of tokens (N, H) by the group's experts, choices (N, K) taken modulo their number."""
        begin = self._watch.mark()
        out: torch.Tensor = self.experts(hidden_states, top_k_index % self.num_experts, top_k_weights)
        self.calls.append((begin, self._watch.mark()))
        return out


def _gate_s(model: MoeModel, watch: _Stopwatch, group: _ExpertGroup, tokens: int, sequence_tokens: int) -> float:
    """Seconds between two MoE layers: a forward pass without its experts, divided by the number of layers."""
    width = min(tokens, sequence_tokens)
    ids = torch.randint(3, model.vocabulary, (-(-tokens // width), width))
    ids = ids.to(next(model.model.parameters()).device)

    def forward() -> float:
        group.calls.clear()
        whole = watch.seconds_of(lambda: model.model(input_ids=ids, logits_to_keep=1))
        return max(whole - sum(watch.seconds(*marks) for marks in group.calls), 1e-9)

    return watch.median(forward) / len(model.layers)


def _group_s(model: MoeModel, watch: _Stopwatch, group: _ExpertGroup, sizes: list[int]) -> list[float]:
    """Seconds of a group of experts for each number of rows, which are dealt to them in turn."""
    weight = next(group.parameters())
    times = []
    for size in sizes:
        rows = torch.randn(size, model.hidden, dtype=model.hidden_dtype, device=weight.device)
        index = (torch.arange(size, device=weight.device) % group.num_experts)[:, None]
        ones = torch.ones(size, 1, dtype=model.hidden_dtype, device=weight.device)
        times.append(watch.median(partial(watch.seconds_of, partial(group.experts, rows, index, ones))))
    return times


def _aggregate_s(model: MoeModel, watch: _Stopwatch, sizes: list[int]) -> list[float]:
    """Seconds to sum the experts' outputs for each number of tokens."""
    weight = next(model.layers[0].experts.parameters())
    times = []
    for size in sizes:
        rows = torch.randn(size * model.top_k, model.hidden, dtype=model.hidden_dtype, device=weight.device)
        token = torch.randperm(len(rows), device=weight.device) // model.top_k
        shares = torch.rand(len(rows), 1, dtype=model.hidden_dtype, device=weight.device)

        def aggregate(rows: Any = rows, token: Any = token, shares: Any = shares, size: int = size) -> None:
            rows.new_zeros(size, rows.shape[1]).index_add_(0, token, rows * shares)

        times.append(watch.median(partial(watch.seconds_of, aggregate)))
    return times
