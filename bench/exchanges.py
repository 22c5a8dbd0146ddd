"""Published times of exchanges beside computed ones: `python bench/exchanges.py` writes a dated table to bench/results.

Points are in exchanges.toml, each with its source. `EngineExchange.paces` are the least, the median and the most of published
over computed seconds. The computed ones count bytes by links or NICs and a start-up; what libraries lose beyond that, and what
proxies on CPUs cost, is in the paces. Half and double of a pace are half and double of the exchange's seconds: the second table
has what they do to a step of DeepSeek-V3 on 16 B200, of prompts with 4,096 tokens a rank and of answers with 128 requests.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from steps import V3
from tables import Table, write

from aurora.advisor.collectives import collectives_of
from aurora.advisor.engines.engine import Layout
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.served_sizes import ServedSizes
from aurora.advisor.step_constants import StepConstants
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.io.clusters import load_gpus

SOURCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["sources"]
FITTED = ("deepep-ht", "deepep-ll")  # of which recorded tables gave the constants (steps.py), so that their median is 1
NIC_BPS, LARGE = 50e9, 1024  # tokens of a rank from which a step is one of prompts
STEPS = SchedulerStep(4096), SchedulerStep(decode_requests=128, kv_tokens=128 * 2000)


def compared() -> Iterator[tuple[dict[str, Any], str, int, float, float]]:
    """Yields (source, what, tokens of a rank, published seconds, computed seconds) of each point."""
    for source in SOURCES:
        kind, per_server = load_gpus()[source["gpus"]], source.get("per_server", 8)
        sizes = replace(ServedSizes.of(V3), moe_layers=1, row_bytes=source["row_bytes"])
        for ranks, tokens, *both_us in source["points"]:
            layout, sent = Layout(data=ranks, expert=ranks), EXCHANGES[source["exchange"]]
            calls = collectives_of(sizes, layout, tokens, sent, 1.0, per_server, True)[1]
            for name, call, took_us in zip(("dispatch", "combine"), calls, both_us, strict=True):
                computed_s = call.seconds(StepConstants.of(kind), kind, NIC_BPS, per_server)
                if took_us:
                    yield source, f"{name}, {ranks} ranks, {tokens} tokens", tokens, took_us * 1e-6, computed_s


def pace(name: str, ratios: list[float]) -> tuple[float, float, float]:
    """Returns the least, the median and the most of published / computed seconds."""
    ratios = [*ratios, *[1.0] * (name in FITTED)]
    return min(ratios), 1.0 if name in FITTED else median(ratios), max(ratios)


def paces() -> dict[str, list[tuple[float, float, float]]]:
    """Returns {exchange: [pace of steps of prompts, and of answers]}; where one is not published, the other's."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for source, _, tokens, took_s, computed_s in compared():
        found.setdefault(source["exchange"], ([], []))[tokens < LARGE].append(took_s / computed_s)
    return {name: [pace(name, large or small), pace(name, small or large)] for name, (large, small) in found.items()}


if __name__ == "__main__":
    points = Table("Points", "exchange | GPUs | what | published, us | computed, us | published / computed | source")
    for source, what, _, took_s, computed_s in compared():
        cells = f"{took_s * 1e6:.0f}", f"{computed_s * 1e6:.0f}", f"{took_s / computed_s:.2f}"
        points.add(source["exchange"], source["gpus"], what, *cells, source["source"])
    found = Table(
        "Paces", "exchange | least | median | most | ms of a step at half | once | double", "Prompts first, then answers."
    )
    where = load_gpus()["NVIDIA B200"], Layout(data=16, expert=16)
    for name, both in paces().items():
        for step, taken in zip(STEPS, both, strict=True):
            at = (step_seconds(V3, *where, step, exchange=name, nic_Bps=NIC_BPS, pace=taken[1] * by) for by in (0.5, 1, 2))
            found.add(name, *(f"{ratio:.2f}" for ratio in taken), *(f"{each.total * 1e3:.1f}" for each in at))
    write("exchanges", ["# Published times of exchanges", "", *(__doc__ or "").splitlines()[2:]], points.lines, found.lines)
