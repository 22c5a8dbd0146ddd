"""Whether the gains that `aurora recommend` states hold later: `python bench/recommend.py --recorded FOLDER` writes results.

FOLDER has token-level routing recorded from DeepSeek-V2-Lite (`dsv2lite_esft/*.npz`). A recommendation is made from the first
half of a recording. Its plan then serves blocks of the second half, and blocks of another task's recording.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine
from tables import Table, write

from aurora.advisor.datasheet_gpus import cluster_of
from aurora.advisor.recommend import BLOCKS, orders_of, recommend, simulated_s_W
from aurora.algorithms.workload.model_config import Shape
from aurora.io import load_gpus
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions, Profile

CONFIG = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "first_k_dense_replace": 1, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "hidden_size": 2048, "moe_intermediate_size": 1408,
}  # fmt: skip


def recorded(file: Path, sources: int, window_tokens: int, kinds: list[str], layers: int) -> Profile:
    """Returns the recording as windows of whole sequences' tokens, dealt to sources in turn."""
    with np.load(file) as found:
        experts_ULK = found["experts"][:, :layers]
    windows = len(experts_ULK) // window_tokens
    tokens_TLSE = np.zeros((windows, layers, sources, 64), dtype=np.int64)
    for window in range(windows):
        for source in range(sources):
            mine_ULK = experts_ULK[window * window_tokens : (window + 1) * window_tokens][source::sources]
            for layer in range(layers):
                tokens_TLSE[window, layer, source] = np.bincount(mine_ULK[:, layer].ravel(), minlength=64)
    shape = replace(Shape.of(CONFIG), layers=layers)
    known = load_gpus()
    return shape.profile(tokens_TLSE, {}, kinds=[known[kind] for kind in kinds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", type=Path, required=True, help="the folder of recorded data")
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6, help="of the recorded 26")
    parser.add_argument("--gpus", nargs="+", default=["h100:8", "l40s:8", "h20:4,a100:4"])
    parser.add_argument("--engines", nargs="+", default=["vllm", "sglang"])
    args = parser.parse_args()
    about = (
        f"`python bench/recommend.py` on {machine()}; {args.layers} layers, windows of {args.window_tokens} tokens. `in`: "
        "blocks on which the gain lies in the stated interval; `above`: blocks on which it is above the interval's lower end."
    )
    table = Table(
        "Gain of the best candidate, stated from half a recording, and on blocks of later traffic",
        "GPUs | engine | task | stated gain | interval | same task: mean | in | above | other task: mean | in | above | s",
        about,
    )
    total = {which: np.zeros(3, dtype=int) for which in ("same task", "other task")}
    files = sorted((args.recorded / "dsv2lite_esft").glob("*.npz"))
    for gpus in args.gpus:
        cluster = cluster_of(gpus, load_gpus())
        kinds = list(dict.fromkeys(gpu.kind for gpu in cluster.gpus))
        profiles = {file.stem: recorded(file, len(cluster), args.window_tokens, kinds, args.layers) for file in files}
        for engine in args.engines:
            for task, profile in profiles.items():
                half = profile.windows // 2
                began_s = time.perf_counter()
                found = recommend(cluster, engine, profile=profile.at_windows(range(half)))
                took_s = time.perf_counter() - began_s
                best = found.candidates[0]
                default = make_plan(cluster, [profile], PlanOptions("contiguous", "contiguous", order="all-at-once"))
                cells = []
                others = [each for name, each in profiles.items() if name != task]
                for which, later in (
                    ("same task", profile.at_windows(range(half, profile.windows))),
                    ("other task", others[0]),
                ):
                    parts = np.array_split(np.arange(later.windows), max(1, later.windows * BLOCKS // half))
                    blocks = [later.at_windows(part) for part in parts]
                    orders = orders_of(found.default)
                    seconds = [[simulated_s_W(plan, b, orders).mean() for plan in (default, best.plan)] for b in blocks]
                    gains = np.array([before / after for before, after in seconds])
                    inside, above = (
                        int(((gains >= best.low) & (gains <= best.high)).sum()),
                        int((gains >= best.low).sum()),
                    )
                    total[which] += np.array([inside, above, len(gains)])
                    cells += [f"{gains.mean():.3f}", f"{inside} of {len(gains)}", f"{above} of {len(gains)}"]
                table.add(
                    gpus,
                    engine,
                    task,
                    f"{best.gain:.3f}",
                    f"{best.low:.3f} to {best.high:.3f}",
                    *cells,
                    f"{took_s:.0f}",
                )
    share = [
        f"- {which}: {inside} of {blocks} blocks in the interval ({inside / blocks:.0%}), {above} above its lower end"
        for which, (inside, above, blocks) in total.items()
    ]
    write("recommend", ["# Gains that were recommended, and kept"], table.lines, ["In all:", "", *share])


if __name__ == "__main__":
    main()
