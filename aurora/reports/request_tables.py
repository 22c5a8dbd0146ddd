"""Tables and lines on simulated and served requests: tokens per second, time to first token and per output token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from rich.table import Column, Table

from aurora.reports.formatting import DASH, distinct, percent, right, seconds, speedup
from aurora.simulator.requests import RequestSimulation
from aurora.types.arrays import FloatArray

PERCENTILES = (50, 90, 99)
MOST_NAME = 15  # characters of a model's name that are on one line in 80 columns


def percentiles(seconds_X: FloatArray | Sequence[float]) -> dict[str, float | None]:
    """Returns the percentiles of some seconds by their names; None if there are none.

    Args:
        seconds_X: (X,) float64.
    """
    values = np.percentile(seconds_X, PERCENTILES).tolist() if len(seconds_X) else [None] * len(PERCENTILES)
    return {f"p{percentile}": value for percentile, value in zip(PERCENTILES, values, strict=True)}


def requests_table(found: Mapping[str, RequestSimulation]) -> Table:
    """Returns a table of simulations of the same requests, a column for each.

    Args:
        found: by the name of what they were served by; with two of them a column says how much better the first is.
    """
    requests = next(iter(found.values())).served.requests
    inputs, outputs = (int(tokens_Q.sum()) for tokens_Q in (requests.input_tokens_Q, requests.output_tokens_Q))
    served = [each.served for each in found.values()]
    table = Table(
        "",
        *right(*found, *(["speed-up"] if len(found) == 2 else [])),
        title=f"{len(requests)} requests in {seconds(float(requests.arrival_s_Q[-1]))}: {inputs} tokens in, {outputs} out",
        caption="tokens/s: generated, from the first arrival to the last token; TTFT: time to first token; TPOT: time per "
        "output token after it; percentiles of requests",
    )

    def add(name: str, values: Sequence[float | None], cells: Sequence[str], larger_is_better: bool = False) -> None:
        factor = []
        if len(values) == 2:
            one, other = values if larger_is_better else values[::-1]
            factor = [DASH if one is None or other is None else speedup(one, other)]
        table.add_row(name, *cells, *factor)

    rates = [each.tokens_per_s for each in served]
    add("tokens/s", rates, [f"{rate:,.3g}" if rate < 100 else f"{rate:,.0f}" for rate in rates], larger_is_better=True)
    ttfts, tpots = ([percentiles(each.ttft_s_Q) for each in served], [percentiles(each.tpot_s_X) for each in served])
    for what, times in (("TTFT", ttfts), ("TPOT", tpots)):
        for name in times[0]:
            values = [each[name] for each in times]
            add(f"{what} {name}", values, [DASH if value is None else seconds(value) for value in values])
    table.add_row("steps", *(str(each.steps) for each in served), *([""] if len(found) == 2 else []))
    return table


def request_lines(found: Mapping[str, RequestSimulation]) -> Sequence[str]:
    """Returns sentences on simulations of the same requests: queues that grow, how far steps are off, what is left out.

    Args:
        found: by the name of what they were served by.
    """
    lines = []
    for name, each in found.items():
        if each.served.queue_grows:
            waiting = (each.served.waiting(*part) for part in ((0.25, 0.5), (0.75, 1.0)))
            before, after = (f"{value:.0f}" for value in waiting)
            lines.append(
                f"{name}: overloaded. The queue grows, from {before} requests without a first token in the second quarter of "
                f"the arrivals to {after} in the last: TTFT depends on how long requests go on arriving."
            )
    for name, each in found.items():
        if len(each.off_C):
            off = np.abs(each.off_C)
            lines.append(
                f"{name}: steps are interpolated between {each.points} simulated ones; of {len(off)} drawn steps the error is "
                f"{percent(float(np.median(off)))} in the median, {percent(float(off.max()))} at most."
            )
    return [*lines, *next(iter(found.values())).assumptions]


@dataclass(frozen=True)
class ServedModel:
    """What a run served of one model.

    Attributes:
        model: its name.
        requests: its requests that have tokens.
        finished: how many of them have all.
        tokens_per_s: generated while it served.
        tokens_per_s_with_start: the same, with the seconds before serving.
        ttft_s_R: by rank, seconds from the arrival of each request to its first token.
        tpot_s_R: by rank, seconds from one token of an answer to the next.
    """

    model: str
    requests: int
    finished: int
    tokens_per_s: float
    tokens_per_s_with_start: float
    ttft_s_R: Mapping[int, Sequence[float]]
    tpot_s_R: Mapping[int, Sequence[float]]

    @property
    def ttft_s(self) -> list[float]:
        """Those of all ranks."""
        return [*chain(*self.ttft_s_R.values())]

    @property
    def tpot_s(self) -> list[float]:
        """Those of all ranks."""
        return [*chain(*self.tpot_s_R.values())]


def served_table(models: Sequence[ServedModel], transport: str, start_s: float) -> Table:
    """Returns a table of a run's models: requests, tokens per second, TTFT and TPOT.

    Args:
        models: what was served.
        transport: name of the transport.
        start_s: seconds before serving.
    """
    names = distinct([each.model for each in models])
    with_start = ", ".join(f"{each.tokens_per_s_with_start:.1f}" for each in models)
    table = Table(
        Column("model", overflow="fold", min_width=min(MOST_NAME, max(map(len, names)))),
        *right("requests", "tokens\n/s", "TTFT\np50", "TTFT\np99", "TPOT\np50", "TPOT\np99"),
        title=f"served over {transport}",
        caption=f"with the {start_s:.1f} s before serving {with_start} tokens/s; TTFT: from a request's arrival to its "
        "first token; TPOT: from one token of an answer to the next; percentiles of requests and of tokens",
    )
    for name, each in zip(names, models, strict=True):
        times = [percentiles(seconds_X)[p] for seconds_X in (each.ttft_s, each.tpot_s) for p in ("p50", "p99")]
        table.add_row(
            name,
            str(each.requests) if each.finished == each.requests else f"{each.finished} of {each.requests}",
            f"{each.tokens_per_s:.1f}",
            *(DASH if value is None else seconds(value) for value in times),
        )
    return table


def rank_lines(models: Sequence[ServedModel]) -> Iterator[str]:
    """For each model that several ranks served, a line on the ranks whose TTFT and TPOT are shortest and longest.

    Args:
        models: what was served.
    """
    for name, each in zip(distinct([each.model for each in models]), models, strict=True):
        parts = []
        for what, times_R in (("TTFT", each.ttft_s_R), ("TPOT", each.tpot_s_R)):
            slow_s = sorted((value, rank) for rank, some in times_R.items() if (value := percentiles(some)["p99"]) is not None)
            if len(slow_s) > 1:
                (least_s, first), (most_s, last) = slow_s[0], slow_s[-1]
                parts.append(f"{what} p99 from {seconds(least_s)} (rank {first}) to {seconds(most_s)} (rank {last})")
        if parts:
            yield f"{name}: {', '.join(parts)}"
