"""aurora reproduce: a paper's evaluation in its own set-up, ours beside."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import make_folder, need, terminal
from aurora.types import BccOptions, ReproduceOptions

DEFAULTS = ReproduceOptions()
BCC = BccOptions()

Recorded = Annotated[Path | None, typer.Option(envvar="AURORA_DATA", help="folder of recorded data; default: none")]

app = typer.Typer(help="A paper's evaluation in its own set-up, ours beside.", no_args_is_help=True)


@app.command("aurora")
def aurora(
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the table and the figures")],
    figure: Annotated[str, typer.Option(help="11a, 11b, 11c, 11d, 12a, 12b, 13, 14a, 14b, or all of them")] = DEFAULTS.figure,
    traffic: Annotated[
        str, typer.Option(help="generated, same-images, recorded; all: recorded only where it is found")
    ] = DEFAULTS.traffic,
    seeds: Annotated[int, typer.Option(help="draws of the traffic")] = DEFAULTS.seeds,
    plots: Annotated[bool, typer.Option(help="draw the figures too (matplotlib)")] = True,
    recorded: Recorded = None,
) -> None:
    """Aurora (arXiv:2410.17043 §8): every headline in one table, figures as SVG and PNG."""
    if plots:
        need("matplotlib", extra="report")
    from aurora.cli.progress import shown
    from aurora.io import write_text
    from aurora.reproduce.aurora.drawing import draw
    from aurora.reproduce.aurora.evaluation import reproduce
    from aurora.reproduce.aurora.figures import FIGURES
    from aurora.reproduce.aurora.headlines import measured
    from aurora.reproduce.aurora.text import as_json, as_markdown

    make_folder(output)
    options = ReproduceOptions(figure, traffic, seeds)
    with shown() as progress:
        runs = reproduce(options, recorded, progress)
    names = list(FIGURES) if figure == "all" else [figure]
    pictures = draw(runs, names, output) if plots else []
    found = [one for one in measured(runs) if one.headline.figure in names]
    write_text(output / "aurora.json", json.dumps(as_json(found), indent=1) + "\n")
    write_text(
        output / "aurora.md", as_markdown(found, runs, [picture.name for picture in pictures if picture.suffix == ".svg"])
    )
    terminal().print(f"wrote {output / 'aurora.md'}, aurora.json" + (f" and {len(pictures)} pictures" if pictures else ""))


@app.command("bcc")
def bcc(
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the tables and the figures")],
    workers: Annotated[
        list[int] | None, typer.Option(help=f"how many, each time with as many batches; repeat. Default: {BCC.workers}")
    ] = None,
    load: Annotated[int, typer.Option(help="batches that a worker with copies holds")] = BCC.load,
    iterations: Annotated[int, typer.Option(help="of the gradient descent")] = BCC.iterations,
    points: Annotated[int, typer.Option(help="of a batch, where processes descend; the paper has 100")] = BCC.points,
    process_iterations: Annotated[
        int, typer.Option(help="the same by real processes; 0: by the simulated clock alone")
    ] = BCC.process_iterations,
    stretch: Annotated[float, typer.Option(help="how many times as long their delays are")] = BCC.stretch,
    draws: Annotated[int, typer.Option(help="of random placements on the mixed cluster")] = BCC.draws,
    seed: Annotated[int, typer.Option(help="random seed")] = BCC.seed,
    plots: Annotated[bool, typer.Option(help="draw the figures too (matplotlib)")] = True,
    recorded: Recorded = None,
) -> None:
    """BCC (arXiv:1710.09990): Fig. 2, 4 and 5, Tables I and II; sums collected in spite of stragglers."""
    if plots:
        need("matplotlib", extra="report")
    need(*(("torch", "transformers") if process_iterations else ()))
    from aurora.cli.progress import shown
    from aurora.io import write_text
    from aurora.reproduce.bcc.drawing import draw
    from aurora.reproduce.bcc.evaluation import reproduce
    from aurora.reproduce.bcc.text import as_json, as_markdown
    from aurora.runtime.distributed.coded_aggregation import CodedAggregator

    make_folder(output)
    options = BccOptions(
        tuple(workers or BCC.workers), load, iterations, process_iterations, stretch, points, draws=draws, seed=seed
    )
    with shown() as progress:
        found = reproduce(options, recorded, progress, CodedAggregator)
    pictures = draw(found, output) if plots else []
    write_text(output / "bcc.json", json.dumps(as_json(found), indent=1) + "\n")
    write_text(output / "bcc.md", as_markdown(found, [picture.name for picture in pictures if picture.suffix == ".svg"]))
    terminal().print(f"wrote {output / 'bcc.md'}, bcc.json" + (f" and {len(pictures)} pictures" if pictures else ""))


@app.command("lazarus")
def lazarus(
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the page and the figures")],
    plots: Annotated[bool, typer.Option(help="draw the figures too (matplotlib)")] = True,
    recorded: Recorded = None,
) -> None:
    """Lazarus (arXiv:2407.04656 §6): recovery probabilities, throughput under failures, what moves."""
    if plots:
        need("matplotlib", extra="report")
    from aurora.cli.progress import shown
    from aurora.io import write_text
    from aurora.reproduce.lazarus.drawing import draw
    from aurora.reproduce.lazarus.evaluation import reproduce
    from aurora.reproduce.lazarus.text import as_json, as_markdown

    make_folder(output)
    with shown() as progress:
        made = reproduce(recorded, progress)
    pictures = draw(made, output) if plots else []
    write_text(output / "lazarus.json", json.dumps(as_json(made), indent=1) + "\n")
    write_text(output / "lazarus.md", as_markdown(made, [picture.name for picture in pictures if picture.suffix == ".svg"]))
    terminal().print(f"wrote {output / 'lazarus.md'}, lazarus.json" + (f" and {len(pictures)} pictures" if pictures else ""))
