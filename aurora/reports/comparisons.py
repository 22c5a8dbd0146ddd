"""Tables of comparisons: ways of using GPUs over a grid of settings, ways to follow changing traffic, simulated plans."""

from collections.abc import Iterator, Sequence

from rich.table import Column, Table

from aurora.advisor.recommend import CONFIDENCE, Recommendation, SimulatedPlans
from aurora.advisor.served_ways import WITH_REPLICAS, WITHOUT_REPLICAS, WaysOfServing
from aurora.advisor.sharing import BY_EXCHANGE, BY_LAYER, HALVES, IN_SEQUENCE, MICRO_BATCHES, THREE_MODELS, TIME_SLICED
from aurora.advisor.sweep import GridCell, Point
from aurora.reports.formatting import DASH, Columns, percent, right, seconds, size, table_of, text
from aurora.simulator.changing_traffic import WHOLE, FollowedTraffic
from aurora.types.arrays import gap

LETTERS = {
    IN_SEQUENCE: "-",
    HALVES: "h",
    TIME_SLICED: "t",
    MICRO_BATCHES: "m",
    BY_EXCHANGE: "x",
    BY_LAYER: "L",
    THREE_MODELS: "3",
}
LEGEND = "; ".join(f"{letter} {way}" for way, letter in LETTERS.items())


def map_tables(cells: Sequence[GridCell]) -> Iterator[Table]:
    """Yields one table per skew (bandwidths by batch sizes), with the letter and gain of the best way of sharing GPUs."""
    for skew in _values(cells, "skew"):
        group = [cell for cell in cells if cell.skew == skew]
        title = {0.0: "experts equally popular", 1.0: "skew as in the profiles"}.get(skew, f"skew {skew:g}")
        table = Table("bandwidth", *right(*(str(batch) for batch in _values(group, "batch"))), title=title)
        for bandwidth in _values(group, "bandwidth"):
            won = (cell.compared.winner for cell in group if cell.bandwidth == bandwidth)
            table.add_row(f"x {bandwidth:g}", *(f"{LETTERS[winner.way]} {winner.gain:.2f}" for winner in won))
        yield table


def ways_table(cells: Sequence[GridCell]) -> Table:
    """Returns a table of all cells of a grid and all ways of sharing GPUs."""
    columns: Columns = {
        **dict.fromkeys(("skew", "bandwidth", "batch"), "{:g}".format),
        "way": text,
        "gain": "{:.3f}".format,
        "tokens/s": "{:,.0f}".format,
        "TPOT p50 / p99, by model": text,
        "utilisation": percent,
        "": text,
    }
    rows = []
    for cell in cells:
        for way in cell.compared.outcomes:
            tpot = ", ".join(f"{seconds(median_s)} / {seconds(slow_s)}" for median_s, slow_s in way.tpot_s_M)
            figures = (way.way, way.gain, way.tokens_per_s, tpot, way.utilisation, way.how)
            rows.append((cell.skew, cell.bandwidth, cell.batch, *figures))
    return table_of(columns, rows, title="all ways")


def left_out_lines(cells: Sequence[GridCell]) -> list[str]:
    """Returns one line per way of sharing GPUs that is impossible in some cell, with the reason."""
    reasons = dict.fromkeys(reason for cell in cells for reason in cell.compared.left_out.items())
    return [f"left out: {way} ({why})" for way, why in reasons]


def _values(cells: Sequence[GridCell], name: str) -> list[float]:
    """The values of a setting, as they come."""
    return list(dict.fromkeys(getattr(cell, name) for cell in cells))


def speedups_table(points: Sequence[Point], keys: Sequence[str]) -> Table:
    """Returns a table of speed-ups over a grid of settings, and of what pays.

    Args:
        points: the points of the grid.
        keys: the settings that differ, fields of Setting.
    """
    columns: Columns = {
        **dict.fromkeys(keys, "{:g}".format),
        **dict.fromkeys(points[0].speedups, "{:.3f}".format),
        "pays": text,
    }
    rows = [(*(getattr(point.setting, key) for key in keys), *point.speedups.values(), point.pays) for point in points]
    return table_of(columns, rows)


def followed_table(followed: FollowedTraffic) -> Table:
    """Returns a table that compares ways to follow changing traffic with a clairvoyant one, which knows the next window."""
    counted_W = followed.counted_W
    best, left_out = float(followed.ways[-1].slowest_W[counted_W].mean()), int((~counted_W).sum())
    table = Table(
        Column("", no_wrap=True),
        *right("slowest GPU", "excess", f"worst {WHOLE}", "moved", "changes", "stalls"),
        title=f"{followed.change}: {len(counted_W)} windows",
        caption="slowest GPU: its load over the mean, all layers; "
        + (f"without the {left_out} windows that begin other traffic" if left_out else "all windows, each of other traffic")
        + "; excess: over clairvoyant, which rebalances for the window to come and is no bound; mean known does so for its "
        "mean, without its chance",
    )
    for way in followed.ways:
        slowest = float(way.slowest_W[counted_W].mean())
        times = (f"{slowest:.3f}", percent(gap(slowest, best)), f"{way.worst():.3f}")
        moved = (size(float(way.bytes_W.sum())), str(way.changes), seconds(way.stall_s))
        table.add_row(way.name, *times, *moved)
    return table


SHOWN_WAYS = 12  # of a recommendation, at most


def recommendation_table(recommendation: Recommendation) -> Table:
    """Returns a table that compares the fastest ways of serving, and methods without parameters, with the engine's default."""
    kinds = [gpu.kind for gpu in recommendation.cluster.gpus]
    title = f"{recommendation.profile.model} on " + " and ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if recommendation.simulated is not None:
        return _plans_table(recommendation.engine, recommendation.simulated, title)
    assert recommendation.served is not None
    served, heads = recommendation.served, right("tokens/s", "TTFT", "TPOT", "gain", "interval", "share")
    table = Table(Column("way", min_width=18), *heads, title=title, caption="share: of what perfect balance would save")
    with_setting = [other for other in served.others if other.way is not None][:SHOWN_WAYS]
    without = [other for other in served.others if other.way is None]
    for part in ([served.default, served.ceiling], with_setting, without):
        for way in part:
            table.add_row(
                f"{recommendation.engine}'s default" if way is served.default else way.name,
                f"{way.service.tokens_per_s:,.0f}",
                seconds(way.service.ttft_s),
                seconds(way.service.tpot_s),
                f"{way.gain:.2f}x",
                f"{way.low:.2f}-{way.high:.2f}",
                DASH if way.share is None else f"{way.share:.0%}",
            )
        table.add_section()
    return table


def balancing_costs(served: WaysOfServing) -> Table:
    """Returns a table of the cost of balancing methods, with and without replicas: memory, moved bytes, and start-up."""
    caption = "worst: the slowest GPU's experts over perfect balance, in the worst window"
    heads = right("memory\nof a GPU", "weights moved\nin a step", "works", "worst")
    table, called = Table(Column("balancing", min_width=18), *heads, caption=caption), {**WITHOUT_REPLICAS, **WITH_REPLICAS}
    layout = served.default.way and served.default.way.layout
    rows = {
        (way.method, way.memory_bytes): (size(way.memory_bytes), size(way.moved_bytes), way.starts, f"{way.worst:.2f}x")
        for way in (*served.others, served.default)
        if way.method and (way.way is None or way.way.layout == layout)
    }
    for (method, _), row in sorted(rows.items(), key=lambda entry: (entry[0][1], entry[1][3])):
        table.add_row(called.get(method, method), *row)
    return table


def _plans_table(engine: str, plans: SimulatedPlans, title: str) -> Table:
    """A table of simulated plans beside the engine's default."""
    table = Table("plan", "step", "processed\ntokens/s", "gain", f"{CONFIDENCE:.0%} interval", title=title)
    table.add_row(f"{engine}'s default", seconds(plans.default_s), f"{plans.tokens / plans.default_s:,.0f}", "1.00x", "")
    for candidate in plans.candidates:
        between = "" if candidate.low is None else f"{candidate.low:.2f}x to {candidate.high:.2f}x"
        rate = f"{plans.tokens / candidate.seconds:,.0f}"
        table.add_row(candidate.name, seconds(candidate.seconds), rate, f"{candidate.gain:.2f}x", between)
    return table
