"""Lazarus' evaluation as one Markdown page and as JSON."""

from collections.abc import Sequence
from typing import Any

from bench.machine import processor
from bench.papers.lazarus.evaluation import LazarusEvaluation, LazarusFigure
from bench.papers.page import show_pictures, table, template
from bench.papers.ranges import Range

SETUP, *_SECTIONS = template(__file__).split("\n## ")
SECTIONS = {text.split(":")[0].removeprefix("Fig. "): text for text in _SECTIONS}  # by figure: its title and why ours differs


def as_markdown(made: LazarusEvaluation, pictures: Sequence[str]) -> str:
    """Returns the page: set-up, then for each figure why ours differs and a table."""
    trace = "Recorded (Bamboo's g4dn, MIT licence), from its tenth minute on" if made.recorded else "Generated"
    page = SETUP.format(trace=trace)
    for name, text in SECTIONS.items():
        if rows := [one for one in made.found if one.figure == name]:
            own = [each for each in pictures if each.startswith((f"lazarus-{name}.", f"lazarus-{name}-"))]
            page += f"\n## {text.replace('{machine}', processor())}\n{_table(rows)}{show_pictures(own)}"
    return page


def _table(rows: Sequence[LazarusFigure]) -> str:
    """A row per case and a column per system or method."""
    cases, ways = (list(dict.fromkeys(getattr(one, key) for one in rows)) for key in ("case", "way"))
    cells = {(one.case, one.way): _range(one.ours) + ("" if one.paper is None else f" [{one.paper:g}]") for one in rows}
    return table(["", *ways], ([case, *(cells.get((case, way), "-") for way in ways)] for case in cases))


def as_json(made: LazarusEvaluation) -> dict[str, Any]:
    """Returns the page's numbers for JSON; a range has the keys lowest, mean and highest."""
    rows = [
        {"figure": one.figure, "case": one.case, "way": one.way, "paper": one.paper, "ours": vars(one.ours)}
        for one in made.found
    ]
    return {"schema": 1, "paper": "arXiv:2407.04656", "recorded_trace": made.recorded, "figures": rows}


def _range(found: Range) -> str:
    if found.mean is None:
        return "-"
    mean = f"{found.mean:.0f}" if found.mean >= 1000 else f"{found.mean:.3g}"
    if found.lowest is None or found.highest is None or f"{found.lowest:.3g}" == f"{found.highest:.3g}":
        return mean
    return f"{mean} ({found.lowest:.3g} to {found.highest:.3g})"
