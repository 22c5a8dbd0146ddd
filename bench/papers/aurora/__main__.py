"""Aurora (arXiv:2410.17043 §8): every headline in one table, figures as SVG and PNG.

python -m bench.papers.aurora --figure all -o DIR
"""

from collections.abc import Sequence

from aurora.cli.output import progress_bars
from aurora.errors import AuroraError
from bench.papers.aurora.drawing import draw
from bench.papers.aurora.evaluation import ReproduceOptions, reproduce
from bench.papers.aurora.figures import FIGURES
from bench.papers.aurora.headlines import measured
from bench.papers.aurora.text import as_json, as_markdown
from bench.papers.command import arguments, check, chosen, refuse, svgs, write


def main(line: Sequence[str] | None = None) -> None:
    """Runs the evaluation and writes its page."""
    given = arguments("aurora", __doc__.splitlines()[0], ReproduceOptions).parse_args(line)
    try:
        options = chosen(ReproduceOptions, given)
        check(given)
        with progress_bars() as progress:
            runs = reproduce(options, given.recorded, progress)
        figures = list(FIGURES) if options.figure == "all" else [options.figure]
        pictures = draw(runs, figures, given.output) if given.plots else []
        headlines = [row for row in measured(runs) if row.headline.figure in figures]
        write("aurora", given.output, as_json(headlines), as_markdown(headlines, runs, svgs(pictures)), pictures)
    except AuroraError as error:
        refuse(error)


if __name__ == "__main__":
    main()
