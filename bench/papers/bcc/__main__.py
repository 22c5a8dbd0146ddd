"""BCC (arXiv:1710.09990): Fig. 2, 4 and 5, Tables I and II; sums collected from redundant workers despite stragglers.

python -m bench.papers.bcc --workers 50 100 -o DIR
"""

from collections.abc import Sequence

from aurora.cli.output import progress_bars
from aurora.errors import AuroraError
from bench.papers.bcc.drawing import draw
from bench.papers.bcc.evaluation import reproduce
from bench.papers.bcc.studies import BccOptions
from bench.papers.bcc.text import as_json, as_markdown
from bench.papers.command import arguments, check, chosen, refuse, svgs, write


def main(line: Sequence[str] | None = None) -> None:
    """Runs the evaluation and writes its page."""
    given = arguments("bcc", __doc__.splitlines()[0], BccOptions).parse_args(line)
    try:
        options = chosen(BccOptions, given)
        check(given)
        with progress_bars() as progress:
            results = reproduce(options, given.recorded, progress)
        pictures = draw(results, given.output) if given.plots else []
        write("bcc", given.output, as_json(results), as_markdown(results, svgs(pictures)), pictures)
    except AuroraError as error:
        refuse(error)


if __name__ == "__main__":
    main()
