"""Lazarus (arXiv:2407.04656 §6): recovery probabilities, throughput under failures, bytes moved.

python -m bench.papers.lazarus -o DIR [--real]
"""

from collections.abc import Sequence
from dataclasses import replace

from aurora.cli.output import progress_bars
from aurora.errors import AuroraError
from bench.papers.command import arguments, check, refuse, svgs, write
from bench.papers.lazarus import evaluation
from bench.papers.lazarus.drawing import draw
from bench.papers.lazarus.text import as_json, as_markdown


def main(line: Sequence[str] | None = None) -> None:
    """Runs the evaluation and writes its page."""
    parser = arguments("lazarus", __doc__.splitlines()[0])
    real = "train the shipped Mixtral on 8 processes too, and kill some of them (minutes)"
    parser.add_argument("--real", action="store_true", help=real)
    given = parser.parse_args(line)
    try:
        check(given)
        with progress_bars() as progress:
            results = evaluation.reproduce(given.recorded, progress)
            if given.real:
                from bench.papers.lazarus.real_training import RealRuns, train_for_real

                trace = evaluation.spot_trace(given.recorded)[1]
                trained = train_for_real(RealRuns(), trace, evaluation.time_in_steps(results), progress)
                results = replace(results, found=[*results.found, *trained])
        pictures = draw(results, given.output) if given.plots else []
        write("lazarus", given.output, as_json(results), as_markdown(results, svgs(pictures)), pictures)
    except AuroraError as error:
        refuse(error)


if __name__ == "__main__":
    main()
