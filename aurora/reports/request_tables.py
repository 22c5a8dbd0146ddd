"""Table and lines on simulated requests: tokens per second, time to first token and per output token."""

from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from aurora.reports.formatting import DASH, percent, right, seconds, speedup
from aurora.simulator.request_simulation import RequestSimulation
from aurora.types.arrays import FloatArray

PERCENTILES = (50, 90, 99)


def percentiles(seconds_X: FloatArray) -> dict[str, float | None]:
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
