"""Page on simulations of requests: tokens per second, distributions of TTFT and TPOT, and the queue over time."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np

from aurora.reports.charts import Chart, Frame, Section, Selector, Sheet, sheet
from aurora.reports.formatting import DASH, seconds, speedup
from aurora.reports.html import Tile, count, rendered
from aurora.reports.trace_tables import percentiles, request_lines, requests_table
from aurora.types.arrays import FloatArray
from aurora.types.requests import RequestSimulation

SHOWN = (1, 5, 10, 25, 50, 75, 90, 95, 99)  # percentiles of the chart
PARTS_OF_TIME = 40  # bars of the queue


def request_page(found: Mapping[str, RequestSimulation]) -> str:
    """Returns simulations of requests as HTML.

    Args:
        found: by the name of what they were served by, at least one; the first is compared with the last.
    """
    first = next(iter(found.values())).served
    requests = first.requests
    inputs, outputs = requests.input_tokens_Q.sum(), requests.output_tokens_Q.sum()
    arrive = seconds(float(requests.arrival_s_Q[-1]))
    lead = f"{len(requests)} requests arrive in {arrive}: {inputs:,} tokens in, {outputs:,} out."
    heads = {"title": "requests", "heading": "Requests, simulated", "lead": lead, "next": "What the figures rest on"}
    rows = [("aurora", version("aurora-moe"))]
    rows += [(f"{name}: steps", f"{each.served.steps}, between {each.points} simulated ones") for name, each in found.items()]
    provenance = [Sheet("Simulation", ("what", "found"), tuple(rows))]
    return rendered(heads, _tiles(found), request_lines(found), (_times(found), _queue(found)), provenance)


def _tiles(found: Mapping[str, RequestSimulation]) -> list[Tile]:
    """Output tokens per second and medians of TTFT and TPOT of the first, each beside the last."""
    (name, one), (other_name, other) = next(iter(found.items())), list(found.items())[-1]
    alone = len(found) == 1

    def note(value: str) -> str:
        return name if alone else f"{name}, against {value}: {other_name}"

    rates = [each.served.tokens_per_s for each in (one, other)]
    made = [Tile("Output tokens per second, predicted", count(rates[0]), note(count(rates[1])))]
    for what, of in _measures(one, other).items():
        p50, p99 = ([percentiles(seconds_X)[key] for seconds_X in of] for key in ("p50", "p99"))
        if p50[0] is not None:
            cells = [DASH if value is None else seconds(value) for value in (p50[0], p50[1], p99[0])]
            made.append(Tile(f"{what}, median", cells[0], f"{note(cells[1])}; p99 {cells[2]}"))
    if not alone:
        made.append(Tile("Speed-up", speedup(rates[0], rates[1]), f"output tokens per second of {name} over {other_name}"))
    return made


def _measures(*found: RequestSimulation) -> dict[str, list[FloatArray]]:
    """Times of each simulation by their names."""
    return {
        "Time to first token (TTFT)": [each.served.ttft_s_Q for each in found],
        "Time per output token (TPOT)": [each.served.tpot_s_X for each in found],
    }


def _times(found: Mapping[str, RequestSimulation]) -> Section:
    """The section on the distributions of TTFT and TPOT."""
    text = "A percentile is the time that so many of a hundred requests stay below. TTFT counts from a request's arrival."
    of = {what: times for what, times in _measures(*found.values()).items() if all(map(len, times))}
    frames = []
    for what, times in of.items():
        columns = {f"s{i}": np.percentile(seconds_X, SHOWN) for i, seconds_X in enumerate(times)}
        said = (f"{name}: median {seconds(float(np.median(seconds_X)))}" for name, seconds_X in zip(found, times, strict=True))
        frames.append(Frame(f"{what}. {'; '.join(said)}.", columns))
    names = [f"p{percentile}" for percentile in SHOWN]
    about = {"axis": "percentile of requests", "names": names, "series": _series(found), "unit": "s"}
    table = sheet(requests_table(found))
    choices = (Selector("time", tuple(of)),)
    chart = Chart("request-times", "bars", "TTFT and TPOT by percentile", choices, frames, about)
    return Section("times", "Times of requests", text, (chart,), (table,))


def _queue(found: Mapping[str, RequestSimulation]) -> Section:
    """The section on requests without a first token over time."""
    text = "Requests that have arrived and have no first token yet, the mean of each part of the time, over all ranks."
    served = [each.served for each in found.values()]
    arrival_s_Q = served[0].requests.arrival_s_Q
    begin, end = float(arrival_s_Q[0]), max(float(each.first_s_Q.max()) for each in served)
    edges = np.linspace(begin, end, PARTS_OF_TIME + 1)
    columns = {f"s{i}": _waiting(arrival_s_Q, each.first_s_Q, edges) for i, each in enumerate(served)}
    said = (f"{name}: at most {columns[f's{i}'].max():.3g} wait in the mean of a part" for i, name in enumerate(found))
    names = [seconds(float(at)) for at in edges[:-1]]
    about = {"axis": "from this time on", "names": names, "series": _series(found), "unit": "mean"}
    rows = tuple((at, *(f"{waiting_X[part]:.3g}" for waiting_X in columns.values())) for part, at in enumerate(names))
    table = Sheet("Waiting requests", ("from", *found), rows)
    chart = Chart("request-queue", "bars", "Queue over time", (), Frame(f"{'; '.join(said)}.", columns), about, (table,))
    return Section("queue", "Queue", text, (chart,))


def _waiting(arrival_s_Q: FloatArray, first_s_Q: FloatArray, edge_s_X: FloatArray) -> FloatArray:
    """(X - 1,) mean number of requests between arrival and first token, between two edges each."""
    # seconds that requests have waited until each edge: of each request none, a part or all
    until_X = [np.clip(edge - arrival_s_Q, 0, first_s_Q - arrival_s_Q).sum() for edge in edge_s_X]
    return np.asarray(np.diff(until_X) / np.diff(edge_s_X))


def _series(found: Mapping[str, RequestSimulation]) -> Sequence[Sequence[str]]:
    return [[name, f"s{i}"] for i, name in enumerate(found)]
