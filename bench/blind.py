"""Public comparisons of ways of serving beside predictions: `python bench/blind.py` writes a dated table to bench/results.

Settings are in blind.toml. They and the predictions were committed before the published figures were written down; no
constant was changed for those (58797cc2, made in between for other reasons, moved both ratios of DeepSeek-R1-NVFP4 by 5 %,
and no verdict). "seen before" says what of an answer had come in sight by then, as search results show texts as they are:
nothing, the figure of one side, the winner, or the ratio. Texts of GPUStack, vLLM's blog and UCCL were read with figures and
words of comparison blanked out.

A ratio is the throughput per GPU of the first way over that of the second, of `ServingCase.service` in the steady state. A way
has the requests in flight that are asked for, or as many as fit its memory by `ServingCase.fit`. Experts are as uneven as those
of recorded models (`recorded_range`), least and most. The interval is the span over that and over what a source does not say,
with the error of computed steps (`computed_error`) at both ends; the prediction is its geometric middle. Requests that come all
at once and drain are taken as half of them to all in flight.

Right is a prediction with the published winner (within TIE of 1 there is none), and whose interval, or 15 % around it, has the
published ratio. Configurations are the hub's; GLM-5.2's layers that share an indexer have one each here.

What the misses share, looked at afterwards: a burst of ShareGPT lasts as long as its longest answers, so that its throughput
is 0.2 to 0.6 of the steady state's, and FP8 gains less in it (three ratios). Latent attention over prompts is priced with
absorbed weights, 3.4 times the arithmetic of prompts of DeepSeek-V3 and R1 in engines; indexers of GLM-5.2, of which 21 of 78
layers have one, take half of its steps of prompts here. Of GLM-5.2 on H200 memory decides: TP 8 holds 24 requests here; with
SGLang's fraction of memory set to 0.85, DP attention is measured at 2.12 of TP 8, not 1.08. Eleven ratios of whole experts
over cut ones are off by 7 % in the median and 13 % at most, and so near to 1 that the winner is missed in five.
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
from aurora.advisor.serving_case import BATCHED_TOKENS, ServingCase
from aurora.advisor.step_constants import computed_error
from aurora.io.clusters import load_gpus
from aurora.planner.choice import TIE
from aurora.types import RequestLoad

NEAR = 1.15  # factor within which a published ratio is taken as predicted
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def per_gpu(comparison: Mapping[str, Any], side: Mapping[str, Any], flight: int, bound: int) -> float:
    """Returns all tokens per second and GPU of a way with so many requests in flight, at least (0) or most (1) imbalance."""
    layout, batched, redundant = Layout(**side["layout"]), side.get("batched_tokens", 0), side.get("redundant", 0)
    way = ServingWay(comparison["engine"], layout, side["exchange"], redundant=redundant, batched_tokens=batched)
    quantised = {"quantization_config": DATA["quantizations"][side["quantization"]]} if "quantization" in side else {}
    config, kind = DATA["models"][side["model"]] | quantised, load_gpus()[comparison["gpus"]]
    load = RequestLoad(comparison["isl"], comparison["osl"], max(1, flight // layout.gpus))
    asked = ServingCase(config, kind, load, comparison.get("nic_Bps"), 8)

    def at(concurrency: int) -> ServingCase:
        return replace(asked, load=replace(load, concurrency=concurrency))

    case = at(max(1, most(lambda concurrency: not at(concurrency).fit(way).why, load.concurrency)))
    prefill, decode = (
        recorded_range(layout.expert, tokens).ratios["eplb" if redundant else "linear"][bound] if layout.expert > 1 else 1.0
        for tokens in case.step_tokens(layout, batched or BATCHED_TOKENS)
    )
    return case.service(way, (prefill, decode)).tokens_per_s / layout.gpus * (1 + load.isl / load.osl)


def predicted(comparison: Mapping[str, Any]) -> tuple[float, float, float, str]:
    """Returns the ratio of both ways' throughput per GPU, the ends of its interval, and tokens per second and GPU of both."""
    ways, error = list(product(comparison["flight"], (0, 1))), computed_error(load_gpus()[comparison["gpus"]])
    rates = [[per_gpu(comparison, comparison[side], *way) for way in ways] for side in ("first", "second")]
    found = [first / second for first, second in zip(*rates, strict=True)]
    shown = " and ".join(f"{sqrt(min(rate) * max(rate)):,.0f}" for rate in rates)
    return sqrt(min(found) * max(found)), min(found) / error, max(found) * error, shown


def judged(ratio: float, low: float, high: float, published: float) -> tuple[bool, bool]:
    """Returns whether a prediction has the published winner, and whether it has the published ratio."""
    near = low <= published <= high or 1 / NEAR <= published / ratio <= NEAR
    return 1 / TIE < published < TIE or (ratio > 1) == (published > 1), near


def main() -> None:
    columns = "comparison | GPUs | engine | source | seen before | predicted | published | right | tokens/s and GPU | measured"
    table, verdicts = Table("Predicted and published", columns), []
    for case in DATA["comparisons"]:
        (ratio, low, high, rates), published, verdict = predicted(case), case.get("published"), "-"
        if published is not None:
            winner, near = judged(ratio, low, high, published)
            verdicts.append((case["seen"] in ("no", "one side"), winner and near, winner, near))
            verdict = "yes" if winner and near else "no: ratio" if winner else "no: winner" if near else "no: both"
        named = (case[key] for key in ("name", "gpus", "engine", "source", "seen"))
        said = f"{ratio:.2f} [{low:.2f}-{high:.2f}]", published or "-", verdict, rates, case.get("measured", "-")
        table.add(*named, *said)
    for about, kept in (("All", verdicts), ("Neither winner nor ratio seen before", [each for each in verdicts if each[0]])):
        _, right, winner, near = (sum(column) for column in zip(*kept, strict=True))
        table.lines += ["", f"{about}: {right} of {len(kept)} right; the winner {winner}, the ratio {near}."]
    write("blind", [__doc__.strip()], table.lines)


if __name__ == "__main__":
    main()
