"""Table and lines on simulated requests: tokens per second, time to first token and per output token."""

from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from aurora.reports.formatting import DASH, percent, right, seconds
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
    """Returns a table of simulations of the same requests.

    Args:
        found: by the name of what they were served by.
    """
    served = next(iter(found.values())).served
    requests = served.requests
    inputs, outputs = (int(tokens_Q.sum()) for tokens_Q in (requests.input_tokens_Q, requests.output_tokens_Q))
    columns = [f"{what} p{percentile}" for what in ("TTFT", "TPOT") for percentile in PERCENTILES]
    table = Table(
        "",
        *right("tokens/s", *columns, "steps"),
        title=f"{len(requests)} requests in {seconds(float(requests.arrival_s_Q[-1]))}: {inputs} tokens in, {outputs} out",
        caption="tokens/s: generated, from the first arrival to the last token; TTFT: time to first token; TPOT: time per "
        "output token after it; percentiles of requests",
    )
    for name, each in found.items():
        times = [*percentiles(each.served.ttft_s_Q).values(), *percentiles(each.served.tpot_s_Q).values()]
        cells = [DASH if value is None else seconds(value) for value in times]
        table.add_row(name, f"{each.served.tokens_per_s:,.0f}", *cells, str(each.served.steps))
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
