"""Membership traces (.csv with the columns time_ms, event and node): when nodes joined and left. Source: Bamboo's traces."""

from pathlib import Path

from aurora.errors import BadInput
from aurora.io.files import read_text

COLUMNS = ["time_ms", "event", "node"]


def load_failures(path: str | Path) -> list[tuple[float, str, str]]:
    """Read a membership trace.

    Args:
        path: the CSV file.

    Returns:
        (time_s, event, node) of each row; events are "add" and "remove".

    Raises:
        BadInput: if the file cannot be read or a row has other columns.
    """
    header, *rows = [line.strip().split(",") for line in read_text(Path(path)).splitlines() if line.strip()] or [[]]
    if header != COLUMNS:
        raise BadInput(f"{path}: expected the columns {','.join(COLUMNS)}, found {','.join(header) or 'nothing'}")
    for number, row in enumerate(rows, 2):
        if len(row) != 3 or not row[0].isdecimal():
            raise BadInput(f"{path}, line {number}: expected milliseconds, an event and a node, found {','.join(row)!r}")
    return [(int(time_ms) / 1e3, event, node) for time_ms, event, node in rows]
