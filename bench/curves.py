"""How well a fitted curve predicts token counts that it has not seen.

`python bench/curves.py` writes bench/results/curves-DATE.md.

Recorded kernel times are read from AURORA_DATA (default ../shared/data); without it there is nothing to do. Errors are
|predicted / measured - 1| of points held back, none outside the fitted range; a row pools all series of one GPU and model.
"""

import csv
import datetime
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import machine

from aurora.planner.workload.curve_fit import fit_curve

ROOT = Path(__file__).parents[1]
RECORDED = Path(os.environ.get("AURORA_DATA", ROOT.parent / "shared" / "data"))
Series = dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]]


def read(pattern: str, tokens: str, milliseconds: str, *keys: str) -> Series:
    """Tokens and seconds by GPU (of the file's name) and `keys`, sorted."""
    rows: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for path in sorted(RECORDED.glob(pattern)):
        gpu = path.stem.removeprefix("moe_bf16_").removeprefix("mlp_")
        with path.open() as file:
            for row in csv.DictReader(file):
                rows[gpu, *(row[key] for key in keys)].append((float(row[tokens]), float(row[milliseconds]) / 1e3))
    return {key: (np.array(sorted(found))[:, 0], np.array(sorted(found))[:, 1]) for key, found in rows.items()}


def held_back(tokens_X: np.ndarray, seconds_X: np.ndarray, kept_X: np.ndarray) -> np.ndarray:
    """Errors of the points that are not kept and lie between kept ones."""
    curve = fit_curve(tokens_X[kept_X], seconds_X[kept_X]).curve
    asked_X = ~kept_X & (tokens_X > tokens_X[kept_X].min()) & (tokens_X < tokens_X[kept_X].max())
    return np.asarray(np.abs(curve(tokens_X[asked_X]) / seconds_X[asked_X] - 1))


def every_other(tokens_X: np.ndarray, seconds_X: np.ndarray) -> np.ndarray:
    return held_back(tokens_X, seconds_X, np.arange(len(tokens_X)) % 2 == 0)


def powers_of_two(tokens_X: np.ndarray, seconds_X: np.ndarray) -> np.ndarray:
    return held_back(tokens_X, seconds_X, np.log2(tokens_X) % 1 == 0)


def one_at_a_time(tokens_X: np.ndarray, seconds_X: np.ndarray) -> np.ndarray:
    points = np.arange(len(tokens_X))
    return np.concatenate([held_back(tokens_X, seconds_X, points != point) for point in points[1:-1]])


def table(series: Series, by: int, ways: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]) -> list[str]:
    """One row for each GPU and the key at `by`; cells are median / 95th percentile / worst."""
    groups: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for key, points in series.items():
        groups[key[0], key[by]].append(points)
    lines = [f"| GPU | model | series | fit: residual | knots of points | {' | '.join(ways)} |"]
    lines.append("|" + "---|" * (5 + len(ways)))
    for (gpu, model), group in sorted(groups.items()):
        fits = [fit_curve(*points) for points in group]
        knots = f"{np.median([len(fit.curve.tokens_X) for fit in fits]):.0f} of {len(group[0][0])}"
        residual_X = np.concatenate([np.abs(fit.curve(at) / took - 1) for fit, (at, took) in zip(fits, group, strict=True)])
        cells = [
            spread(residual_X),
            knots,
            *(spread(np.concatenate([way(*points) for points in group])) for way in ways.values()),
        ]
        lines.append(f"| {gpu} | {model} | {len(group)} | {' | '.join(cells)} |")
    pooled = [spread(np.concatenate([way(*points) for points in series.values()])) for way in ways.values()]
    return [*lines, f"| all | | {len(series)} | | | {' | '.join(pooled)} |"]


def spread(errors_X: np.ndarray) -> str:
    return f"{np.median(errors_X):.1%} / {np.quantile(errors_X, 0.95):.1%} / {errors_X.max():.0%}"


def main() -> None:
    if not RECORDED.is_dir():
        print(f"skipped: no recorded kernels in {RECORDED}; set AURORA_DATA")
        return
    began = time.perf_counter()
    keys = ("shape", "topk", "num_experts", "moe_ep_size", "distribution")
    fused = read("gpu_moe_aiconfigurator/moe_bf16_*.csv", "num_tokens", "latency_ms", *keys)
    dense = read("gpu_mlp_vidur/mlp_*.csv", "num_tokens", "mlp_total_ms", "model", "tp")
    alone = {key: points for key, points in fused.items() if key[-1] == "balanced"}
    ways = {"every other point": every_other, "powers of two alone": powers_of_two}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [
        f"# Compute curves on recorded kernels, {today}",
        f"`python bench/curves.py` on {machine()}: arithmetic on recordings, nothing is timed here. A cell is median / 95th "
        "percentile / worst of |predicted / measured - 1|; `powers of two alone` is what `aurora profile` measures.",
        "## Fused MoE layers, bf16 (ai-dynamo/aiconfigurator, measured; balanced tokens)",
        "\n".join(table(alone, 1, {"one at a time": one_at_a_time, **ways})),
        "## The same with power-law tokens",
        "\n".join(table({k: v for k, v in fused.items() if k not in alone}, 1, ways)),
        "## Dense feed-forward blocks, bf16 (microsoft/vidur, measured medians; all degrees of tensor parallelism)",
        "\n".join(table(dense, 1, ways)),
        f"Took {time.perf_counter() - began:.0f} s.",
    ]
    out = ROOT / "bench" / "results" / f"curves-{today}.md"
    out.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
