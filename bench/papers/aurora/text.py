"""The evaluation as one Markdown page, and the same table as JSON."""

from collections.abc import Sequence
from typing import Any

from bench.papers.aurora.figures import Run
from bench.papers.aurora.headlines import CONFIDENCE, ENDS, Measured
from bench.papers.aurora.jobs import PRICINGS
from bench.papers.aurora.traffic import TRAFFIC
from bench.papers.page import show_pictures, table, template
from bench.papers.ranges import Range


def as_markdown(found: Sequence[Measured], runs: Sequence[Run], pictures: Sequence[str]) -> str:
    """Returns the Markdown page: set-up, the table of headlines, why some are not met, other readings, the figures."""
    seeds = found[0].seeds
    traffics = [name for name in TRAFFIC if any(one.traffic == name for one in found)]
    half = f", ± half of the {CONFIDENCE:.0%} confidence interval (Student's t over seeds)" if seeds > 1 else ""
    missed: dict[str, list[str]] = {}
    for one in found:
        if one.headline.why and one.met != "yes":
            missed.setdefault(" ".join(one.headline.why.split()), []).append(one.headline.name)
    differing = [f"- **{'; '.join(dict.fromkeys(names))}.** {why}" for why, names in missed.items()]
    filled = template(__file__).format(
        seeds=seeds,
        half=half,
        first=traffics[0],
        traffics=", ".join(traffics),
        headlines=_table([one for one in found if one.headline.why], traffics),
        missed="\n".join(differing or ["Every headline is met."]),
        exclusive=_exclusive_share(runs),
        beside=_table([one for one in found if not one.headline.why], traffics),
        pictures=show_pictures(pictures),
    )
    return filled.rstrip() + "\n"


def _table(found: Sequence[Measured], traffics: Sequence[str]) -> str:
    rows = []
    for cells in _rows(found):
        first, by_traffic = cells[0], {one.traffic: one for one in cells}
        rows.append(
            [
                first.headline.name,
                first.headline.figure,
                PRICINGS[first.pricing].name,
                _range(first.headline.paper, Range()),
                *(_range(by_traffic[t].found, by_traffic[t].half) if t in by_traffic else "-" for t in traffics),
                _ratio(first.headline.paper, first.found),
                ", ".join(by_traffic[t].met if t in by_traffic else "-" for t in traffics),
            ]
        )
    return table(["", "fig.", "priced by", "paper", *traffics, "ours / paper", "met"], rows)


def as_json(found: Sequence[Measured]) -> dict[str, Any]:
    """Returns the headlines' numbers for JSON; a range has the keys lowest, mean and highest."""
    rows = [
        {
            "headline": cells[0].headline.name,
            "figure": cells[0].headline.figure,
            "pricing": cells[0].pricing,
            "paper": vars(cells[0].headline.paper),
            "traffic": {
                one.traffic: {"found": vars(one.found), "half_interval": vars(one.half), "met": one.met} for one in cells
            },
        }
        for cells in _rows(found)
    ]
    return {"schema": 1, "paper": "arXiv:2410.17043", "seeds": found[0].seeds, "confidence": CONFIDENCE, "headlines": rows}


def _rows(found: Sequence[Measured]) -> list[list[Measured]]:
    """Rows of the table: one per headline and pricing, with one cell per traffic, in the order in which they come."""
    rows: dict[tuple[str, str], list[Measured]] = {}
    for one in found:
        rows.setdefault((one.headline.name, one.pricing), []).append(one)
    return list(rows.values())


def _range(found: Range, half: Range) -> str:
    def end(name: str) -> str:
        value, width = getattr(found, name), getattr(half, name)
        return f"{value:.3g}" if width is None else f"{value:.3f} ± {width:.3f}"

    parts = []
    if found.lowest is not None and found.highest is not None:
        parts.append(f"{end('lowest')} to {end('highest')}")
    elif found.highest is not None:
        parts.append(f"up to {end('highest')}")
    if found.mean is not None:
        parts.append(f"mean {end('mean')}")
    return ", ".join(parts) or "-"


def _ratio(paper: Range, found: Range) -> str:
    ratios = [f"{getattr(found, end) / getattr(paper, end):.2f}" for end in ENDS if getattr(paper, end) is not None]
    return " to ".join(ratios) or "-"


def _exclusive_share(runs: Sequence[Run]) -> str:
    """How many exclusive cases are below 20 % of utilisation, as the paper says of most."""
    lines = []
    for run in runs:
        if "exclusive" in run.ways and run.pricing == "printed":
            share = float((run.utilisation("exclusive") < 0.2).mean())
            lines.append(f"Exclusive utilisation is below 20 % in {share:.0%} of cases ({run.study}, {run.traffic}).\n")
    return "".join([*lines, "\n"]) if lines else ""
