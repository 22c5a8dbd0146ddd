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
from itertools import product
from pathlib import Path

import numpy as np
from machine import machine
from scipy.optimize import least_squares
from skewed_kernels import drawn_counts

from aurora.algorithms.workload.curve_fit import fit_curve

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
    curve = fit_curve(tokens_X[kept_X], seconds_X[kept_X])
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
        knots = f"{np.median([len(fit.tokens_X) for fit in fits]):.0f} of {len(group[0][0])}"
        residual_X = np.concatenate([np.abs(fit(at) / took - 1) for fit, (at, took) in zip(fits, group, strict=True)])
        cells = [
            spread(residual_X),
            knots,
            *(spread(np.concatenate([way(*points) for points in group])) for way in ways.values()),
        ]
        lines.append(f"| {gpu} | {model} | {len(group)} | {' | '.join(cells)} |")
    pooled = [spread(np.concatenate([way(*points) for points in series.values()])) for way in ways.values()]
    return [*lines, f"| all | | {len(series)} | | | {' | '.join(pooled)} |"]


FORMS = {  # of seconds in (a, b, c), active experts and rows of a rank
    "a + b active + c rows": lambda abc, active_X, rows_X: abc[0] + abc[1] * active_X + abc[2] * rows_X,
    "a + max(b active, c rows)": lambda abc, active_X, rows_X: abc[0] + np.maximum(abc[1] * active_X, abc[2] * rows_X),
}
RANGES = {"all": (0, np.inf), "at most 4": (0, 4), "4 to 64": (4, 64), "above 64": (64, np.inf)}


def forms(series: Series) -> list[str]:
    """One row for each of FORMS, fitted to relative errors of a rank's kernels with balanced and power-law rows together."""
    kernels: dict[tuple[str, ...], list[np.ndarray]] = defaultdict(list)
    rng = np.random.default_rng(0)
    for (gpu, shape, *sizes, law), (tokens_X, seconds_X) in series.items():
        top_k, experts, ranks = map(int, sizes)
        for tokens, took_s in zip(tokens_X.astype(int).tolist(), seconds_X.tolist(), strict=True):
            rows, held = tokens * top_k, experts // ranks
            counts = [np.array([max(1.0, rows / max(1, min(rows, experts)))] * min(max(1, rows // ranks), held))]
            if law != "balanced":
                drawn = (drawn_counts(rng, tokens, top_k, experts, ranks, float(law.rpartition("_")[2])) for _ in range(3))
                counts = [rank_RE[rank_RE.sum(axis=1).argmax()] for rank_RE in drawn]
            found = [((own_E > 0).sum(), own_E.sum()) for own_E in counts]
            kernels[gpu, shape, *sizes].append(np.array([*np.mean(found, axis=0), took_s]))
    columns = " | ".join(f"{name} rows an active expert" for name in RANGES)
    lines = [f"| form | {columns} |", "|" + "---|" * (1 + len(RANGES))]
    for name, form in FORMS.items():
        fitted = []
        for points in kernels.values():
            active_X, rows_X, took_X = np.array(points).T

            def residual_X(log_abc, form=form, active_X=active_X, rows_X=rows_X, took_X=took_X):
                return np.log(form(np.exp(log_abc), active_X, rows_X) / took_X)

            least_s = [2e-5, took_X.min() / 2], [(took_X / active_X).min(), took_X.max() / active_X.max() / 4]
            starts = [np.log([a, b, took_X.max() / rows_X.max()]) for a, b in product(*least_s)]
            fits = (least_squares(residual_X, start, loss="soft_l1", f_scale=0.1) for start in starts)
            log_abc = min(fits, key=lambda fit: fit.cost).x
            fitted.append((rows_X / active_X, np.abs(np.expm1(residual_X(log_abc)))))
        each_X, error_X = (np.concatenate(column) for column in zip(*fitted, strict=True))
        cells = (spread(error_X[(each_X > low) & (each_X <= high)]) for low, high in RANGES.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


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
        "## The form of a rank's kernel over active experts and rows, fused MoE layers with balanced and power-law tokens",
        "\n".join(forms(fused)),
        "## Dense feed-forward blocks, bf16 (microsoft/vidur, measured medians; all degrees of tensor parallelism)",
        "\n".join(table(dense, 1, ways)),
        f"Took {time.perf_counter() - began:.0f} s.",
    ]
    out = ROOT / "bench" / "results" / f"curves-{today}.md"
    out.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
