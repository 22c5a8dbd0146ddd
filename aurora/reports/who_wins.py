"""Who wins where: ways of using GPUs over a grid, as a map, tables and a picture. This module computes no numbers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Column, Table

from aurora.advisor.colocation_grid import GridCell
from aurora.advisor.ways import APART, BY_EXCHANGE, BY_LAYER, IN_SEQUENCE, MICRO_BATCHES, THREE_MODELS, TIME_SLICED, WAYS
from aurora.reports.formatting import DASH, percent, right, seconds, speedup
from aurora.reports.pictures import canvas, save_picture

LETTERS = {
    IN_SEQUENCE: "-",
    TIME_SLICED: "t",
    MICRO_BATCHES: "m",
    BY_EXCHANGE: "x",
    BY_LAYER: "L",
    THREE_MODELS: "3",
    APART: "a",
}
LEGEND = "; ".join(f"{letter} {way}" for way, letter in LETTERS.items())


def skew_title(skew: float) -> str:
    """Returns what a skew means, in words."""
    return {0.0: "experts equally popular", 1.0: "skew as in the profiles"}.get(skew, f"skew {skew:g}")


def map_tables(cells: Sequence[GridCell]) -> Iterator[Table]:
    """Yields a map for each skew: bandwidths by batches, in each cell the winner's letter and gain."""
    for skew in _values(cells, "skew"):
        own = [cell for cell in cells if cell.skew == skew]
        table = Table("bandwidth", *right(*(str(batch) for batch in _values(own, "batch"))), title=skew_title(skew))
        for bandwidth in _values(own, "bandwidth"):
            won = (cell.compared.winner for cell in own if cell.bandwidth == bandwidth)
            table.add_row(f"x {bandwidth:g}", *(f"{LETTERS[one.way]} {one.gain:.2f}" for one in won))
        yield table


def summary_table(cells: Sequence[GridCell]) -> Table:
    """Returns a table of the ways: in how many cells each wins or ties, and the least, median and most of what it brings."""
    from statistics import median

    from aurora.advisor.ways import winners

    table = Table(
        Column("way", min_width=max(map(len, " ".join(WAYS).split()))),
        *right("wins", "or as fast", "least\ngain", "median", "most"),
        Column("utilisation, median", justify="right", min_width=len("utilisation,")),
        title="over all cells",
    )
    for way in WAYS:
        found = [outcome for cell in cells for outcome in cell.compared.outcomes if outcome.way == way]
        if not found:
            table.add_row(way, *["0"] * 2, *[DASH] * 4)
            continue
        gains = [outcome.gain for outcome in found]
        wins = sum(cell.compared.winner.way == way for cell in cells)
        ties = sum(way in winners(cell.compared.gains) for cell in cells)
        of_gains = (speedup(gain, 1.0) for gain in (min(gains), median(gains), max(gains)))
        table.add_row(way, str(wins), str(ties), *of_gains, percent(median(outcome.utilisation for outcome in found)))
    return table


def left_out_lines(cells: Sequence[GridCell]) -> list[str]:
    """Returns a line for each way that cannot be had in some cell, with the reason."""
    reasons = dict.fromkeys(reason for cell in cells for reason in cell.compared.left_out.items())
    return [f"left out: {way} ({why})" for way, why in reasons]


def markdown(cells: Sequence[GridCell], heading: Sequence[str], pictures: Sequence[str]) -> str:
    """Returns a Markdown page: a map for each skew, and a table of all cells and ways.

    Args:
        cells: the grid.
        heading: lines under the title.
        pictures: file names of the pictures.
    """
    lines = ["# Who wins where", "", *heading]
    for skew in _values(cells, "skew"):
        own = [cell for cell in cells if cell.skew == skew]
        batches = _values(own, "batch")
        lines += ["", f"## {skew_title(skew).capitalize()}", "", f"| bandwidth | {' | '.join(map(str, batches))} |"]
        lines.append("|---|" + "---|" * len(batches))
        for bandwidth in _values(own, "bandwidth"):
            won = (cell.compared.winner for cell in own if cell.bandwidth == bandwidth)
            lines.append(f"| x {bandwidth:g} | {' | '.join(f'{one.way} {one.gain:.2f}' for one in won)} |")
    lines += ["", *(f"![{name}]({name})" for name in pictures), "", "## All ways", ""]
    lines += [line for said in left_out_lines(cells) for line in (said, "")]
    heads = ("skew", "bandwidth", "batch", "way", "gain", "tokens/s", "TPOT p50 / p99, by model", "utilisation", "")
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for cell in cells:
        for one in cell.compared.outcomes:
            tpot = ", ".join(f"{seconds(median_s)} / {seconds(slow_s)}" for median_s, slow_s in one.tpot_s_M)
            where = (f"{cell.skew:g}", f"{cell.bandwidth:g}", str(cell.batch))
            brings = (f"{one.gain:.3f}", f"{one.tokens_per_s:,.0f}", tpot, percent(one.utilisation), one.how)
            lines.append(f"| {' | '.join((*where, one.way, *brings))} |")
    return "\n".join(lines) + "\n"


def draw_who_wins(cells: Sequence[GridCell], folder: Path) -> list[Path]:
    """Draws who-wins.svg and who-wins.png: for each skew a map of bandwidths and batches, a colour for each way that wins.

    Args:
        cells: the grid.
        folder: folder to write to.
    """
    skews, batches, bandwidths = (_values(cells, name) for name in ("skew", "batch", "bandwidth"))
    drawn = canvas(max(4.0, 0.75 * len(batches) + 1.5) * len(skews), max(2.6, 0.6 * len(bandwidths) + 1.8))
    colours = dict(zip(WAYS, ("#d9d9d9", "#bcbddc", "#fdae6b", "#9ecae1", "#3182bd", "#31a354", "#e377c2"), strict=True))
    for number, skew in enumerate(skews):
        plot = drawn.add_subplot(1, len(skews), number + 1)
        for cell in (cell for cell in cells if cell.skew == skew):
            won, at = cell.compared.winner, (batches.index(cell.batch), bandwidths.index(cell.bandwidth))
            plot.bar(at[0], 1, 1, at[1] - 0.5, color=colours[won.way], edgecolor="white")
            plot.text(*at, f"{won.gain:.2f}", ha="center", va="center", fontsize="small")
        plot.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        plot.set_yticks(range(len(bandwidths)), [f"x {bandwidth:g}" for bandwidth in bandwidths])
        plot.set_xlabel("tokens of a rank in a step")
        plot.set_ylabel("bandwidth")
        plot.set_title(skew_title(skew), fontsize="medium")
    here = [way for way in WAYS if any(cell.compared.winner.way == way for cell in cells)]
    from matplotlib.patches import Patch

    drawn.legend(handles=[Patch(color=colours[way], label=way) for way in here], loc="outside lower center", ncols=4)
    return save_picture(drawn, folder, "who-wins")


def _values(cells: Sequence[GridCell], name: str) -> list[float]:
    """The values of a setting, as they come."""
    return list(dict.fromkeys(getattr(cell, name) for cell in cells))
