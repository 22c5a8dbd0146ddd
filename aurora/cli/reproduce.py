"""aurora reproduce: a paper's evaluation in its own set-up, ours beside."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import make_folder, need, terminal
from aurora.types import ReproduceOptions

DEFAULTS = ReproduceOptions()

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
    recorded: Annotated[Path, typer.Option(envvar="AURORA_DATA", help="folder of recorded data")] = Path("../shared/data"),
) -> None:
    """Aurora (arXiv:2410.17043 §8): every headline in one table, figures as SVG and PNG."""
    if plots:
        need("matplotlib", extra="report")
    from aurora.cli.progress import shown
    from aurora.reproduce.aurora import reproduce
    from aurora.reproduce.drawing import draw
    from aurora.reproduce.figures import FIGURES
    from aurora.reproduce.headlines import measured
    from aurora.reproduce.text import as_json, as_markdown
    from aurora.store import write_text

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
