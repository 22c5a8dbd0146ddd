"""Command lines of the evaluations: options from a dataclass, a page and its numbers in a folder, refusals of one sentence."""

import json
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from aurora.cli.options import documented
from aurora.errors import AuroraError, BadInput, need
from aurora.io.files import make_folder, write_text

Options = TypeVar("Options")


def arguments(paper: str, about: str, options: type | None = None) -> ArgumentParser:
    """Returns a parser of the options that every evaluation has, and of one for each field of `options`, a dataclass."""
    parser = ArgumentParser(f"python -m bench.papers.{paper}", description=about)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the page, its numbers and the figures")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="draw no figures (matplotlib)")
    recorded = os.environ.get("AURORA_DATA")
    parser.add_argument(
        "--recorded", type=Path, default=recorded and Path(recorded), help="folder of recorded data; default: AURORA_DATA"
    )
    for field in fields(options) if options else ():
        many = isinstance(field.default, tuple)
        kind = type(field.default[0] if many else field.default)
        more: dict[str, Any] = {"nargs": "+"} if many else {}
        text = f"{documented(options)[field.name]}; default: {field.default}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=text, **more)
    return parser


def chosen(kind: type[Options], given: Namespace) -> Options:
    """Returns an instance of `kind`, a dataclass, with the parsed options of the names of its fields."""
    values = {field.name: getattr(given, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def check(given: Namespace) -> None:
    """Raises BadInput or MissingDependency, before any work, if data, folder or matplotlib are not there."""
    if given.recorded is not None and not given.recorded.is_dir():
        raise BadInput(f"--recorded: expected a folder of recorded data, found {str(given.recorded)!r}")
    if given.plots:
        need("matplotlib", extra="dev")
    make_folder(given.output)


def svgs(pictures: Sequence[Path]) -> list[str]:
    """Returns the names of the SVG pictures, which a page shows."""
    return [picture.name for picture in pictures if picture.suffix == ".svg"]


def write(paper: str, folder: Path, numbers: Mapping[str, Any], page: str, pictures: Sequence[Path]) -> None:
    """Writes a paper's page and its numbers, and prints where they are."""
    write_text(folder / f"{paper}.json", json.dumps(numbers, indent=1) + "\n")
    write_text(folder / f"{paper}.md", page)
    print(f"wrote {folder / f'{paper}.md'}, {paper}.json" + (f" and {len(pictures)} pictures" if pictures else ""))


def refuse(error: AuroraError) -> None:
    """Prints an error in one line, options in place of the parameters that it names, and ends with exit code 2."""
    named = re.sub(r"`(\w+)`", lambda name: f"--{name[1].replace('_', '-')}", str(error))
    print(named.replace("\n", " "), file=sys.stderr)
    sys.exit(2)
