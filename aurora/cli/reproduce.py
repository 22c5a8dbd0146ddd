"""aurora reproduce: a paper's evaluation in its own set-up, our figures beside the paper's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from aurora.cli.choices import names
from aurora.cli.common import check_folder, make_folder, need
from aurora.cli.subcommand import Json, Subcommand, chosen, option, show
from aurora.errors import BadInput
from aurora.types import BccOptions, ReproduceOptions

DEFAULTS = ReproduceOptions()
BCC = BccOptions()

Recorded = Annotated[Path | None, typer.Option(envvar="AURORA_DATA", help="folder of recorded data; default: none")]

app = typer.Typer(help="A paper's evaluation in its own set-up, our figures beside the paper's.", no_args_is_help=True)


@app.command("aurora", cls=Subcommand)
def aurora(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the table and the figures")],
    figure: Annotated[str, option(ReproduceOptions, "figure", more=": {figure}", choices=["figure"])] = DEFAULTS.figure,
    traffic: Annotated[str, option(ReproduceOptions, "traffic", more=": {traffic}", choices=["traffic"])] = DEFAULTS.traffic,
    seeds: Annotated[int, option(ReproduceOptions, "seeds")] = DEFAULTS.seeds,
    plots: Annotated[bool, typer.Option(help="draw the figures too (matplotlib)")] = True,
    recorded: Recorded = None,
    as_json: Json = False,
) -> None:
    """Aurora (arXiv:2410.17043 §8): every headline in one table, figures as SVG and PNG."""
    options = chosen(ReproduceOptions, context)
    for kind in ("figure", "traffic"):
        if (given := getattr(options, kind)) not in (known := ("all", *names(kind))):
            raise BadInput(f"`{kind}`: expected one of {', '.join(known)}, found {given!r}")
    _check_files(recorded, output, "aurora")
    if plots:
        need("matplotlib", extra="report")
    from aurora.cli.progress import shown
    from aurora.reproduce.aurora.drawing import draw
    from aurora.reproduce.aurora.evaluation import reproduce
    from aurora.reproduce.aurora.figures import FIGURES
    from aurora.reproduce.aurora.headlines import measured
    from aurora.reproduce.aurora.text import as_json as as_json_of
    from aurora.reproduce.aurora.text import as_markdown

    with shown() as progress:
        runs = reproduce(options, recorded, progress)
    make_folder(output)
    figures = list(FIGURES) if figure == "all" else [figure]
    pictures = draw(runs, figures, output) if plots else []
    found = [one for one in measured(runs) if one.headline.figure in figures]
    _write(as_json, "aurora", output, as_json_of(found), as_markdown(found, runs, _svgs(pictures)), pictures)


@app.command("bcc", cls=Subcommand)
def bcc(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the tables and the figures")],
    workers: Annotated[
        list[int] | None, typer.Option(help=f"number of workers, with as many batches; repeat it. Default: {BCC.workers}")
    ] = None,
    load: Annotated[int, option(BccOptions, "load")] = BCC.load,
    iterations: Annotated[int, option(BccOptions, "iterations")] = BCC.iterations,
    points: Annotated[int, option(BccOptions, "points")] = BCC.points,
    process_iterations: Annotated[int, option(BccOptions, "process_iterations")] = BCC.process_iterations,
    stretch: Annotated[float, option(BccOptions, "stretch")] = BCC.stretch,
    draws: Annotated[int, option(BccOptions, "draws")] = BCC.draws,
    seed: Annotated[int, option(BccOptions, "seed")] = BCC.seed,
    plots: Annotated[bool, typer.Option(help="draw the figures too (matplotlib)")] = True,
    recorded: Recorded = None,
    as_json: Json = False,
) -> None:
    """BCC (arXiv:1710.09990): Fig. 2, 4 and 5, Tables I and II; sums collected from redundant workers despite stragglers."""
    options = chosen(BccOptions, context, workers=tuple(workers or BCC.workers))
    _check_files(recorded, output, "bcc")
    if plots:
        need("matplotlib", extra="report")
    need(*(("torch", "transformers") if process_iterations else ()))
    from aurora.cli.progress import shown
    from aurora.reproduce.bcc.drawing import draw
    from aurora.reproduce.bcc.evaluation import reproduce
    from aurora.reproduce.bcc.text import as_json as as_json_of
    from aurora.reproduce.bcc.text import as_markdown
    from aurora.runtime.distributed.coded_aggregation import CodedAggregator

    with shown() as progress:
        found = reproduce(options, recorded, progress, CodedAggregator)
    make_folder(output)
    pictures = draw(found, output) if plots else []
    _write(as_json, "bcc", output, as_json_of(found), as_markdown(found, _svgs(pictures)), pictures)


@app.command("lazarus", cls=Subcommand)
def lazarus(
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the page and the figures")],
    real: Annotated[
        bool, typer.Option("--real", help="train the shipped Mixtral on 8 processes too, and kill some of them (minutes)")
    ] = False,
    plots: Annotated[bool, typer.Option(help="draw the figures too (matplotlib)")] = True,
    recorded: Recorded = None,
    as_json: Json = False,
) -> None:
    """Lazarus (arXiv:2407.04656 §6): recovery probabilities, throughput under failures, bytes moved."""
    _check_files(recorded, output, "lazarus")
    if plots:
        need("matplotlib", extra="report")
    need(*(("torch", "transformers") if real else ()))
    from aurora.cli.progress import shown
    from aurora.reproduce.lazarus.drawing import draw
    from aurora.reproduce.lazarus.evaluation import reproduce, spot_trace, time_in_steps
    from aurora.reproduce.lazarus.text import as_json as as_json_of
    from aurora.reproduce.lazarus.text import as_markdown

    with shown() as progress:
        made = reproduce(recorded, progress)
        if real:
            from aurora.reproduce.lazarus.real_training import RealRuns, train_for_real

            found = train_for_real(RealRuns(), spot_trace(recorded)[1], time_in_steps(made), progress)
            made = replace(made, found=[*made.found, *found])
    make_folder(output)
    pictures = draw(made, output) if plots else []
    _write(as_json, "lazarus", output, as_json_of(made), as_markdown(made, _svgs(pictures)), pictures)


def _check_files(recorded: Path | None, output: Path, paper: str) -> None:
    """Raises BadInput unless the recorded data is a folder and the page can be written."""
    if recorded is not None and not recorded.is_dir():
        raise BadInput(f"--recorded: expected a folder of recorded data, found {str(recorded)!r}")
    check_folder(output, f"{paper}.json", f"{paper}.md")


def _svgs(pictures: Sequence[Path]) -> list[str]:
    """Returns the names of the SVG pictures, which a page shows."""
    return [picture.name for picture in pictures if picture.suffix == ".svg"]


def _write(as_json: bool, paper: str, folder: Path, found: Mapping[str, Any], page: str, pictures: Sequence[Path]) -> None:
    """Write a paper's page and its numbers; print where they are, or the numbers as JSON."""
    from aurora.io import write_text

    write_text(folder / f"{paper}.json", json.dumps(found, indent=1) + "\n")
    write_text(folder / f"{paper}.md", page)
    wrote = f"wrote {folder / f'{paper}.md'}, {paper}.json" + (f" and {len(pictures)} pictures" if pictures else "")
    show(as_json, {"output": folder, "pictures": [picture.name for picture in pictures], "found": dict(found)}, wrote)
