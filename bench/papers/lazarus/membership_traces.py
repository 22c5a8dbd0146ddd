"""Membership traces: when nodes leave and join; read (.csv, as Bamboo recorded them), checked, cut and limited."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aurora.errors import BadInput
from aurora.io.files import read_text

COLUMNS = ["time_ms", "event", "node"]


@dataclass(frozen=True)
class MembershipEvent:
    """A membership change."""

    time_s: float  # when it happens, in seconds from the trace's start
    removed: tuple[str, ...]  # the names of the nodes that leave
    added: tuple[str, ...]  # the names of the nodes that join


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
    if not rows:
        raise BadInput(f"{path}: expected events, found none")
    for number, row in enumerate(rows, 2):
        if len(row) != 3 or not (row[0].isascii() and row[0].isdigit()):
            raise BadInput(f"{path}, line {number}: expected milliseconds, an event and a node, found {','.join(row)!r}")
    return [(int(time_ms) / 1e3, event, node) for time_ms, event, node in rows]


def changes(rows: Sequence[tuple[float, str, str]]) -> list[MembershipEvent]:
    """Returns the membership changes of a recorded trace by rising time; events at one time become one change.

    Args:
        rows: (time_s, event, node) in any sequence; an event is "add" or "remove".

    Raises:
        BadInput: if an event is unknown, adds a present node or removes an absent one, or a node has two events at one time.
    """
    present: set[str] = set()
    found: dict[float, tuple[list[str], list[str]]] = {}
    for time_s, event, node in sorted(rows, key=lambda row: row[0]):
        if event not in ("add", "remove") or (event == "add") == (node in present):
            found_event = f"{event!r} of {node!r}, which is {'present' if node in present else 'absent'}"
            raise BadInput(
                f"failures, {time_s:g} s: expected `add` of an absent node or `remove` of a present one, found {found_event}"
            )
        if any(node in names for names in found.get(time_s, ())):
            raise BadInput(f"failures, {time_s:g} s: expected one event of {node!r} at a time, found two")
        found.setdefault(time_s, ([], []))[event == "add"].append(node)
        present ^= {node}
    return [MembershipEvent(time_s, tuple(removed), tuple(added)) for time_s, (removed, added) in found.items()]


def shifted(trace: Sequence[MembershipEvent], start_s: float | None = None) -> list[MembershipEvent]:
    """Returns the trace from `start_s` on, which becomes time zero; the nodes present by then join at time zero.

    Args:
        trace: changes by rising time.
        start_s: seconds of the trace; None: its first change.
    """
    first_s = trace[0].time_s if trace and start_s is None else start_s or 0.0
    present: list[str] = []
    for change in trace:
        if change.time_s <= first_s:
            present = [node for node in present if node not in change.removed] + list(change.added)
    later = [
        MembershipEvent(change.time_s - first_s, change.removed, change.added) for change in trace if change.time_s > first_s
    ]
    return [MembershipEvent(0.0, (), tuple(present)), *later]


def limited(trace: Sequence[MembershipEvent], most: int) -> list[MembershipEvent]:
    """Returns the trace for a cluster of at most `most` nodes; nodes that join while it is full are left out for good.

    Args:
        trace: changes by rising time.
        most: how many nodes the cluster holds at most.
    """
    present: set[str] = set()
    found = []
    for change in trace:
        removed = tuple(node for node in change.removed if node in present)
        present -= set(removed)
        added = change.added[: most - len(present)]
        present |= set(added)
        if removed or added:
            found.append(MembershipEvent(change.time_s, removed, added))
    return found
