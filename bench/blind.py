"""Public comparisons of ways of serving beside predictions: `python bench/blind.py` writes a dated table to bench/results.

Settings are in blind.toml. They and the predictions were committed before the published figures were written down; no
constant was changed for those (58797cc2, made in between for other reasons, moved both ratios of DeepSeek-R1-NVFP4 by 5 %,
and no verdict). "seen before" says what of an answer had come in sight by then, as search results show texts as they are:
nothing, the figure of one side, the winner, or the ratio. Texts of GPUStack, vLLM's blog and UCCL were read with figures and
words of comparison blanked out.

The first set has served to find what was missing in computed steps (below) and how wide intervals must be (`RATIO_ERRORS`), and
is blind no longer. The second was predicted after that, and is judged by the intervals that were committed with its inputs
(`predicted` in blind.toml). Its set-ups were read with all figures of results and words of comparison blanked out; "winner" is
what a page's own recommendation, a sorted table or a title gave away. Eight of its comparisons are of dense models.

A ratio is the throughput per GPU of the first way over that of the second, of `ServingCase.service` in the steady state. A way
has the requests in flight that are asked for, or as many as fit its memory by `ServingCase.fit`. Experts are as uneven as those
of recorded models (`recorded_range`), least and most. The interval is the span over that and over what a source does not say,
with the error of ratios of such ways (`ratio_error`) at both ends; the prediction is its geometric middle. Requests that come
all at once and drain are taken as half of them to all in flight.

Right is a prediction whose interval has the published ratio; where only a winner is published, one with this winner. Stricter,
as counted before: the winner is the published one (within TIE of 1 there is none), and the interval, or 15 % around the
prediction, has the ratio. Configurations are the hub's; GLM-5.2's layers that share an indexer have one each here.

What the misses of the first set led to: experts of fp8 run in Triton's fused kernels but behind some exchanges, which are
little faster than those of half precision on Hopper, and read less of the bandwidth; kernels quantise inputs; FlashMLA pads the
heads of a rank to 64; SGLang reserves more memory with data-parallel attention. What is left: a burst lasts as long as its
longest answers, and has 0.2 to 0.6 of the steady state's throughput.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

from tables import Table, write

from aurora.advisor.balancers import recorded_range
from aurora.advisor.engines.engine import Layout, ServingWay
from aurora.advisor.gpu_memory import most
from aurora.advisor.ratio_errors import differences, ratio_error
from aurora.advisor.serving_case import BATCHED_TOKENS, ServingCase
from aurora.io.clusters import load_gpus
from aurora.planner.choice import TIE
from aurora.types import RequestLoad

NEAR = 1.15  # factor within which a published ratio is taken as predicted
COUNTED = (  # comparisons that are counted together: name, set, only those unseen, only models with experts
    ("First set, which was used to calibrate", 1, False, False), ("Second set", 2, False, False),
    ("Second set, nothing seen", 2, True, False), ("Second set, models with experts", 2, False, True),
)  # fmt: skip
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def way_of(comparison: Mapping[str, Any], side: Mapping[str, Any]) -> ServingWay:
    """Returns a side of a comparison as a way of serving."""
    settings = {name: side.get(name, 0) for name in ("redundant", "batched_tokens")}
    return ServingWay(comparison["engine"], Layout(**side["layout"]), side["exchange"], **settings)


def error_of(comparison: Mapping[str, Any]) -> float:
    """Returns the factor of error of a comparison's ratio."""
    sides = comparison["first"], comparison["second"]
    found = differences(*(way_of(comparison, side) for side in sides)) - {"steps"}
    found |= {"format"} if len({side.get("quantization") for side in sides}) > 1 else set()
    return ratio_error(load_gpus()[comparison["gpus"]], found)


def per_gpu(comparison: Mapping[str, Any], side: Mapping[str, Any], flight: int, bound: int) -> float:
    """Returns all tokens per second and GPU of a way with so many requests in flight, at least (0) or most (1) imbalance."""
    way, layout = way_of(comparison, side), Layout(**side["layout"])
    quantised = {"quantization_config": DATA["quantizations"][side["quantization"]]} if "quantization" in side else {}
    config, kind = DATA["models"][side["model"]] | quantised, load_gpus()[comparison["gpus"]]
    load = RequestLoad(comparison["isl"], comparison["osl"], max(1, flight // layout.gpus))
    asked = ServingCase(config, kind, load, comparison.get("nic_Bps"), 8)

    def at(concurrency: int) -> ServingCase:
        return replace(asked, load=replace(load, concurrency=concurrency))

    case = at(max(1, most(lambda concurrency: not at(concurrency).fit(way).why, load.concurrency)))
    prefill, decode = (
        recorded_range(layout.expert, tokens).ratios["eplb" if way.redundant else "linear"][bound] if layout.expert > 1 else 1.0
        for tokens in case.step_tokens(layout, way.batched_tokens or BATCHED_TOKENS)
    )
    return case.service(way, (prefill, decode)).tokens_per_s / layout.gpus * (1 + load.isl / load.osl)


def predicted(comparison: Mapping[str, Any]) -> tuple[float, float, float, str]:
    """Returns the ratio of both ways' throughput per GPU, the ends of its interval, and tokens per second and GPU of both."""
    ways, error = list(product(comparison["flight"], (0, 1))), error_of(comparison)
    rates = [[per_gpu(comparison, comparison[side], *way) for way in ways] for side in ("first", "second")]
    found = [first / second for first, second in zip(*rates, strict=True)]
    shown = " and ".join(f"{sqrt(min(rate) * max(rate)):,.0f}" for rate in rates)
    return sqrt(min(found) * max(found)), min(found) / error, max(found) * error, shown


def judged(ratio: float, low: float, high: float, published: float | str) -> tuple[bool, bool]:
    """Returns whether a prediction is right, and whether it is by the stricter rule."""
    if isinstance(published, str):
        return ((ratio > 1) == (published == "first"),) * 2
    near = low <= published <= high or 1 / NEAR <= published / ratio <= NEAR
    return low <= published <= high, near and (1 / TIE < published < TIE or (ratio > 1) == (published > 1))


def main() -> None:
    heads = "comparison | GPUs | engine | source | seen before | predicted | published | right | tokens/s and GPU | measured"
    table, verdicts = Table("Predicted and published", heads), []
    for case in DATA["comparisons"]:
        (ratio, low, high, rates), published, verdict = predicted(case), case.get("published"), "-"
        if published is not None:
            ends = case.get("predicted", (low, high))
            right, strictly = judged(sqrt(ends[0] * ends[1]), *ends, published)
            experts = "num_experts_per_tok" in DATA["models"][case["first"]["model"]]
            verdicts.append((case.get("set", 1), case["seen"] in ("no", "one side"), experts, right, strictly))
            verdict = "yes" if right and strictly else "yes, not by the stricter rule" if right else "no"
        said = f"{ratio:.2f} [{low:.2f}-{high:.2f}]", published or "-", verdict, rates, case.get("measured", "-")
        table.add(*(case[key] for key in ("name", "gpus", "engine", "source", "seen")), *said)
    for about, number, blind, experts in COUNTED:
        kept = [each[3:] for each in verdicts if each[0] == number and each[1] >= blind and each[2] >= experts]
        right, strictly = (sum(column) for column in zip(*kept, strict=True))
        table.lines += ["", f"{about}: {right} of {len(kept)} right; by the stricter rule {strictly}."]
    write("blind", [__doc__.strip()], table.lines)


if __name__ == "__main__":
    main()
