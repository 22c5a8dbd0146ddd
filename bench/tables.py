"""Tables of results: printed row by row as they come, and written to bench/results/NAME-DATE.md."""

import datetime
from collections.abc import Sequence
from pathlib import Path


class Table:
    """A Markdown table under a heading; columns are separated by " | ", like the cells of a row."""

    def __init__(self, title: str, columns: str, about: str = "") -> None:
        head = [f"| {columns} |", "|" + "---|" * (columns.count(" | ") + 1)]
        self.lines = [f"## {title}", "", *([about, ""] if about else []), *head]

    def add(self, *cells: object) -> None:
        """Adds a row and prints it."""
        self.lines.append(f"| {' | '.join(map(str, cells))} |")
        print(self.lines[-1], flush=True)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write(name: str, *sections: Sequence[str], out: Path | None = None) -> None:
    """Writes sections, an empty line between them; `out`: a file instead of the day's."""
    out = out or Path(__file__).parent / "results" / f"{name}-{today()}.md"
    out.write_text("\n\n".join("\n".join(lines) for lines in sections) + "\n")
    print(f"wrote {out}")
