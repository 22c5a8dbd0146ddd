"""The evaluation as one Markdown page, and the same table as JSON."""

from collections.abc import Sequence
from typing import Any

from aurora.reproduce.aurora.figures import Run
from aurora.reproduce.aurora.headlines import CONFIDENCE, ENDS, Measured
from aurora.reproduce.aurora.jobs import PRICINGS
from aurora.reproduce.aurora.traffic import TRAFFIC
from aurora.reproduce.page import page, table
from aurora.reproduce.ranges import Range

SETUP = """\
8 GPUs on one big switch: equal (100 Gbps), or 100/80/50/40 Gbps, two of each, compute speed in proportion to bandwidth. Two
models of 8 experts on two data sets, top-1, tokens of 1536 bytes each way, compute times from a ViT-B layer's arithmetic at
100 TFLOPS. The paper's traffic, compute times and token sizes are not public; ours were fixed before any result was seen.
Row and column of a traffic matrix move as one, as in the paper (the shard that sits with an expert moves with it); in the
rows "only experts move" the requests' shards stay, as in serving.

- **generated**: both models hold 8192 tokens a source. Popularity by Zipf, exponents from 0.4 to 1.2, shuffled for every model,
  data set and layer; every source's own mix by a Dirichlet (concentration 40) around it.
- **same-images**: the same with equal images, so that B/16 holds four times as many tokens as B/32 (196 and 49 patches); by
  formulas only.
- **recorded**: routing recorded from OLMoE-1B-7B (64 experts folded to 8, eight neighbours each) and Mixtral-8x7B, layers 0, 7
  and 15, sources dealt over the domains of a data set (prose: book, c4, wikipedia; technical: arxiv, github); token sizes and
  compute times as above.

Ways. **Aurora**: the paper's own method for the scenario. **ours**: the exact assignment of one model, local search for
two, by the objective that prices them; **optimum**: branch and bound. **Lina on half**: a model has
4 GPUs, one of each kind, and packs its most popular expert with its least popular; on mixed GPUs its pairs sit at random, or by
load. **Lina on all in turn**: a model has all 8 GPUs, each pair on two of them with its tokens halved, and the two models take
turns; its time is both turns'. The paper does not say which it means. **in random order**: Lina's tokens are not ordered but
sent as RCS sends them; every other all-to-all outside Fig. 11a takes its ports' time, which the best order reaches. Random
ways are means of 16 draws, in the simulator of one."""


def as_markdown(found: Sequence[Measured], runs: Sequence[Run], pictures: Sequence[str]) -> str:
    """Returns the Markdown page: set-up, the table of headlines, why some are not met, other readings, the figures."""
    seeds = found[0].seeds
    traffics = [name for name in TRAFFIC if any(one.traffic == name for one in found)]
    half = f", ± half of the {CONFIDENCE:.0%} confidence interval (Student's t over seeds)" if seeds > 1 else ""
    missed: dict[str, list[str]] = {}
    for one in found:
        if one.headline.why and one.met != "yes":
            missed.setdefault(" ".join(one.headline.why.split()), []).append(one.headline.name)
    lines = [
        SETUP,
        "",
        "Cells: lowest to highest over a figure's cases (models, data sets, layers), and their mean; each of them the mean",
        f"over {seeds} draws of the traffic{half}. ours / paper: {traffics[0]} traffic.",
        f"met: {', '.join(traffics)}, in this order; nearly: by the confidence interval.",
        "",
        "## Headlines",
        "",
        *_table([one for one in found if one.headline.why], traffics),
        "## Where ours differs, and why",
        "",
        *(f"- **{'; '.join(dict.fromkeys(names))}.** {why}" for why, names in missed.items()),
        *([] if missed else ["Every headline is met."]),
        "",
        *_exclusive_share(runs),
        "## Beside the headlines",
        "",
        *_table([one for one in found if not one.headline.why], traffics),
    ]
    source = "The paper: arXiv:2410.17043, §8. `aurora reproduce aurora` writes this page."
    return page("Aurora's evaluation, ours beside", source, lines, pictures)


def _table(found: Sequence[Measured], traffics: Sequence[str]) -> list[str]:
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


def _exclusive_share(runs: Sequence[Run]) -> list[str]:
    """How many exclusive cases are below 20 % of utilisation, as the paper says of most."""
    lines = []
    for run in runs:
        if "exclusive" in run.ways and run.pricing == "printed":
            share = float((run.utilisation("exclusive") < 0.2).mean())
            lines.append(f"Exclusive utilisation is below 20 % in {share:.0%} of cases ({run.study}, {run.traffic}).")
    return [*lines, ""] if lines else []
