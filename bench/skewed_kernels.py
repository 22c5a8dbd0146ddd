"""Fused MoE kernels with skewed tokens, predicted from balanced ones: rows for bench/fidelity.py.

Recorded are latencies of tokens whose counts by expert were drawn by a power law, the mean of five draws. The draws themselves
are not recorded; they are drawn again here as the recording's authors describe them, from another generator.
"""

from collections.abc import Iterator

import numpy as np

from aurora.errors import BadInput
from aurora.io.silicon_database import systems, tables
from aurora.planner.workload.curve_fit import fit_curve
from aurora.types import Curve
from aurora.types.arrays import FloatArray, IntArray

ENGINES = ("sglang", "trtllm", "vllm")
KEY = ("hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size", "kernel_source")
DRAWS, EVERY = 5, 8  # draws of each recording; one recording in so many is predicted, for time
WEIGHT = 0.7  # of the sum of experts in the weighted mean of both; chosen on H100, H200, A100 and L40S with one rank
Model = tuple[int, int, int, int, int, str]


def drawn_counts(rng: np.random.Generator, tokens: int, top_k: int, experts: int, exponent: float) -> IntArray:
    """(E,) tokens by expert; what rounding leaves over goes to the largest, one each."""
    least, most = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    power = 1 - exponent
    part_E = ((most**power - least**power) * rng.random(experts) + least**power) ** (1 / power)
    count_E = np.rint(part_E / part_E.sum() * tokens * top_k).astype(np.int64)
    largest_E, missing = np.argsort(-count_E, kind="stable"), tokens * top_k - int(count_E.sum())
    for turn in range(abs(missing)):
        count_E[largest_E[turn % experts]] += np.sign(missing)
    return np.maximum(count_E, 0)


def predictions(
    rng: np.random.Generator, model: Model, tokens: int, exponent: float, curve: Curve
) -> tuple[float, float, float]:
    """Seconds of the most loaded rank: as balanced, the sum of its experts by the balanced curve, and their weighted mean."""
    _, _, top_k, experts, ranks, _ = model
    balanced = float(curve(tokens * top_k / experts)) * (experts // ranks)
    sums = []
    for _ in range(DRAWS):
        rank_RE = drawn_counts(rng, tokens, top_k, experts, exponent).reshape(ranks, -1)
        sums.append(float(curve(rank_RE[rank_RE.sum(axis=1).argmax()]).sum()))
    summed = float(np.mean(sums))
    return balanced, summed, balanced ** (1 - WEIGHT) * summed**WEIGHT


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
    points: dict[Model, list[tuple[int, float]]] = {}
    skewed = []
    for model, tokens, law, latency in zip(
        models, columns["num_tokens"], columns["distribution"], columns["latency"], strict=True
    ):
        if law == "balanced":
            points.setdefault(model, []).append((tokens, latency))
        elif law.startswith("power_law_"):
            skewed.append((model, tokens, float(law.removeprefix("power_law_")), latency))
    rng, curves, found = np.random.default_rng(0), {}, {}
    for model, tokens, exponent, latency in skewed[::EVERY]:
        if len(points.get(model, ())) < 2:
            continue
        if model not in curves:
            at_X, took_X = np.array(points[model]).T
            curves[model] = fit_curve(at_X * model[2] / model[3], took_X / (model[3] // model[4])).curve
        ranks = "one rank" if model[4] == 1 else "several ranks"
        ways = zip(
            ("as balanced", "sum of experts", "mean of both"),
            predictions(rng, model, tokens, exponent, curves[model]),
            strict=True,
        )
        for way, predicted in ways:
            found.setdefault(f"skewed experts on {ranks}: {way}", []).append(abs(predicted / latency - 1))
    return found
