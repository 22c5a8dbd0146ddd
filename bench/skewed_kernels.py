"""Fused MoE kernels with skewed tokens, predicted from balanced ones: rows for bench/fidelity.py.

Recorded are latencies of tokens whose counts by expert were drawn by a power law, the mean of five draws. The draws themselves
are not recorded; they are drawn again here as the recording's authors draw them, from another generator.
"""

from collections.abc import Iterator

import numpy as np
from kernel_curves import curves_on_ranks
from silicon_database import ENGINES, systems, tables

from aurora.algorithms.workload.curve_fit import BalancedPoints
from aurora.errors import BadInput
from aurora.types import Curve
from aurora.types.arrays import FloatArray, IntArray

KEY = ("hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size", "kernel_source")
DRAWS, EVERY = 5, 8  # draws of each recording; one recording in so many is predicted, for time
WAYS = ("as balanced", "sum of experts alone", "experts and overhead")
Model = tuple[int, int, int, int, int, str]


def drawn_counts(rng: np.random.Generator, tokens: int, top_k: int, experts: int, ranks: int, exponent: float) -> IntArray:
    """(R, E/R) tokens by rank and expert; no expert has more than there are tokens, and the fewest get what that leaves over.

    Source: `_generate_power_law_distribution` in collector/helper.py of ai-dynamo/aiconfigurator (Apache-2.0).
    """
    least, most = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    power = 1 - exponent
    part_E = ((most**power - least**power) * rng.random(experts) + least**power) ** (1 / power)
    count_E = np.minimum(np.rint(part_E / part_E.sum() * tokens * top_k).astype(np.int64), tokens)
    missing = tokens * top_k - int(count_E.sum())
    if missing < 0:
        count_E[np.argsort(-count_E, kind="stable")[:-missing]] -= 1
        missing = 0
    by_rank = [missing // ranks + (rank < missing % ranks) for rank in range(ranks)]
    return np.stack([filled(own_E, more) for own_E, more in zip(count_E.reshape(ranks, -1), by_rank, strict=True)])


def filled(count_E: IntArray, more: int) -> IntArray:
    """The counts with so many more tokens, each given to an expert that has the fewest."""
    if not more:
        return count_E
    low, high = int(count_E.min()), int(count_E.min()) + more
    while low < high:  # the highest level that all can be raised to
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(level - count_E, 0).sum() <= more else (low, level - 1)
    raised_E = np.maximum(count_E, low)
    raised_E[np.flatnonzero(raised_E == low)[: more - int((raised_E - count_E).sum())]] += 1
    return raised_E


class Kernel:
    """Predictions of one model's kernel on one system: see WAYS."""

    def __init__(self, model: Model, points: BalancedPoints, fewer_ranks: BalancedPoints | None) -> None:
        self.model, self.points = model, points
        self.whole = Curve(*np.array(sorted(zip(points.rows_X.tolist(), points.seconds_X.tolist(), strict=True))).T)
        self.expert, self.overhead = curves_on_ranks(points, fewer_ranks)

    def seconds(self, rng: np.random.Generator, tokens: int, exponent: float) -> tuple[float, float, float]:
        """Seconds of the most loaded rank, by each of WAYS."""
        _, _, top_k, experts, ranks, _ = self.model
        rows, alone, both = tokens * top_k, [], []
        for _ in range(DRAWS):
            rank_RE = drawn_counts(rng, tokens, top_k, experts, ranks, exponent)
            own_E = rank_RE[rank_RE.sum(axis=1).argmax()]
            alone.append(float(self.whole(own_E * experts).sum()) / self.points.held)
            both.append(float(self.expert(own_E).sum() + self.overhead(rows)))
        return float(self.whole(rows)), float(np.mean(alone)), float(np.mean(both))


def skewed_kernels() -> Iterator[tuple[str, str, FloatArray]]:
    """What is predicted, system with engine, and errors; by one expert-parallel rank and several, tokens in bfloat16."""
    for system in systems():
        for engine in ENGINES:
            try:
                columns = next(tables(system, "moe", engine, "moe_perf", moe_dtype="bfloat16", moe_tp_size=1))
            except BadInput:
                continue
            for what, errors in _errors(columns).items():
                yield what, f"{system}, {engine}", np.array(errors)


def _errors(columns: dict[str, list]) -> dict[str, list[float]]:
    """Errors by what is predicted."""
    models: list[Model] = list(zip(*(columns[name] for name in KEY), strict=True))
    points: dict[Model, dict[int, float]] = {}
    skewed = []
    for model, tokens, law, latency in zip(
        models, columns["num_tokens"], columns["distribution"], columns["latency"], strict=True
    ):
        if law == "balanced":
            points.setdefault(model, {})[tokens] = latency
        elif law.startswith("power_law_"):
            skewed.append((model, tokens, float(law.removeprefix("power_law_")), latency))
    measured = {model: balanced(model, found) for model, found in points.items() if len(found) > 1}
    kernels = {model: Kernel(model, found, fewest_ranks(model, measured)) for model, found in measured.items()}
    rng, errors = np.random.default_rng(0), {}
    for model, tokens, exponent, latency in skewed[::EVERY]:
        if model not in kernels:
            continue
        ranks = "one rank" if model[4] == 1 else "several ranks"
        for way, predicted in zip(WAYS, kernels[model].seconds(rng, tokens, exponent), strict=True):
            errors.setdefault(f"skewed experts on {ranks}: {way}", []).append(abs(predicted / latency - 1))
    return errors


def balanced(model: Model, latency: dict[int, float]) -> BalancedPoints:
    """Balanced measurements of a model, in milliseconds by tokens."""
    _, _, top_k, experts, ranks, _ = model
    at_X, took_X = np.array(list(latency.items()), dtype=np.float64).T
    return BalancedPoints(at_X * top_k, took_X, experts, experts // ranks)


def fewest_ranks(model: Model, measured: dict[Model, BalancedPoints]) -> BalancedPoints | None:
    """The same kernel on the fewest ranks; None if on no fewer."""
    *sizes, ranks, kernel = model
    fewer = [each for each in measured if [*each[:4]] == sizes and each[5] == kernel and each[4] < ranks]
    return measured[min(fewer, key=lambda each: each[4])] if fewer else None
