"""Published times of exchanges beside computed ones: `python bench/exchanges.py` writes a dated table to bench/results.

Points are in exchanges.toml, each with its source. `EngineExchange.paces` are the least, the median and the most of published
over computed seconds. The computed ones count bytes by links or NICs and a start-up; what libraries lose beyond that, and what
proxies on CPUs cost, is in the paces. Half and double of a pace are half and double of the exchange's seconds, so that the last
table has what they do to a step: of DeepSeek-V3 on 16 B200, with prompts of 4,096 tokens a rank and with 128 requests a rank.
"""

import tomllib
from collections.abc import Iterator, Mapping
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


def compared(source: Mapping[str, Any]) -> Iterator[tuple[str, int, float, float]]:
    """Yields (what, tokens of a rank, published seconds, computed seconds) of each point of a source."""
    kind, sent = load_gpus()[source["gpus"]], EXCHANGES[source["exchange"]]
    sizes = replace(ServedSizes.of(V3), moe_layers=1, row_bytes=source["row_bytes"])
    per_server = source.get("per_server", 8)
    for ranks, tokens, *both_us in source["points"]:
        calls = collectives_of(sizes, Layout(data=ranks, expert=ranks), tokens, sent, 1.0, per_server, True)[1]
        for name, call, published_us in zip(("dispatch", "combine"), calls, both_us, strict=True):
            computed_s = call.seconds(StepConstants.of(kind), kind, NIC_BPS, per_server)
            if published_us:
                yield f"{name}, {ranks} ranks, {tokens} tokens", tokens, published_us * 1e-6, computed_s


def paces() -> dict[str, list[tuple[float, float, float]]]:
    """Returns {exchange: (least, median, most) of published / computed seconds, of steps of prompts and of answers}."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for source in SOURCES:
        for _, tokens, took, computed in compared(source):
            found.setdefault(source["exchange"], ([], []))[tokens < LARGE].append(took / computed)
    known = {name: (large or small, small or large) for name, (large, small) in found.items()}

    def pace(name: str, part: list[float]) -> tuple[float, float, float]:
        """Returns the least, the median and the most."""
        middle = 1.0 if name in FITTED else median(part)
        return min(*part, middle), middle, max(*part, middle)

    return {name: [pace(name, part) for part in both] for name, both in known.items()}


def main() -> None:
    points = Table("Points", "exchange | GPUs | what | published | computed | published / computed | source")
    for source in SOURCES:
        for what, _, took, computed in compared(source):
            cells = f"{took * 1e6:.0f} us", f"{computed * 1e6:.0f} us", f"{took / computed:.2f}"
            points.add(source["exchange"], source["gpus"], what, *cells, source["source"])
    found = Table(
        "Paces", "exchange | of prompts | of answers | step of prompts at half, once and double of the median | of answers"
    )
    steps, kind = (SchedulerStep(4096), SchedulerStep(decode_requests=128, kv_tokens=128 * 2000)), load_gpus()["NVIDIA B200"]

    def taken(name: str, step: SchedulerStep, pace: float) -> str:
        """Returns the milliseconds of a step with half, once and double of a pace."""
        at = [step_seconds(V3, kind, Layout(data=16, expert=16), step, exchange=name, nic_Bps=NIC_BPS, pace=pace * by)
              for by in (0.5, 1, 2)]  # fmt: skip
        return " ".join(f"{each.total * 1e3:.1f}" for each in at)

    for name, ratios in paces().items():
        shown = [taken(name, step, pace) for step, (_, pace, _) in zip(steps, ratios, strict=True)]
        found.add(name, *(" ".join(f"{ratio:.2f}" for ratio in part) for part in ratios), *(f"{each} ms" for each in shown))
    write("exchanges", ["# Published times of exchanges", "", *(__doc__ or "").splitlines()[2:]], points.lines, found.lines)


if __name__ == "__main__":
    main()
