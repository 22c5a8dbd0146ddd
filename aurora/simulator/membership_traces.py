"""Membership traces: when nodes leave and join. Functions check a recorded trace, cut or limit it, or generate one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput


@dataclass(frozen=True)
class MembershipEvent:
    """A membership change.

    Attributes:
        time_s: when it happens, in seconds from the trace's start.
        removed: the names of the nodes that leave.
        added: the names of the nodes that join.
    """

    time_s: float
    removed: tuple[str, ...]
    added: tuple[str, ...]


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


def every(seconds: float, nodes: int, seed: int, down_to: int) -> list[MembershipEvent]:
    """Generates single failures at a fixed interval.

    Args:
        seconds: time before the first failure, and between failures.
        nodes: nodes that are present at time zero.
        seed: chooses which nodes fail.
        down_to: how many nodes never fail.
    """
    names = [f"node{number}" for number in range(nodes)]
    failing = np.random.default_rng(seed).permutation(nodes)[: nodes - down_to].tolist()
    return [
        MembershipEvent(0.0, (), tuple(names)),
        *(MembershipEvent((n + 1) * seconds, (names[f],), ()) for n, f in enumerate(failing)),
    ]


def spot(nodes: int, end_s: float, seed: int) -> list[MembershipEvent]:
    """Generates failures and joins like those of spot instances.

    One to three nodes fail 5 to 15 minutes after the last change, and one to three new nodes join 1 to 4 minutes later.

    Args:
        nodes: nodes that are present at time zero.
        end_s: seconds before which the last change begins.
        seed: of the random times and nodes.
    """
    rng = np.random.default_rng(seed)
    names = [f"node{number}" for number in range(nodes)]
    present, found, now_s, fresh = list(names), [MembershipEvent(0.0, (), tuple(names))], 0.0, nodes
    while now_s < end_s:
        now_s += rng.uniform(300, 900)
        gone = tuple(rng.permutation(present)[: rng.integers(1, 4)].tolist())
        new = tuple(f"node{fresh + n}" for n in range(rng.integers(1, 4)))
        fresh += len(new)
        present = [node for node in present if node not in gone] + list(new)
        found += [MembershipEvent(now_s, gone, ()), MembershipEvent(now_s + rng.uniform(60, 240), (), new)]
        now_s = found[-1].time_s
    return found


def hourly(nodes: int, rate: float, hours: int, seed: int) -> list[MembershipEvent]:
    """Generates independent failures by the hour.

    In each hour every node fails with probability `rate`, at a random time. For each missing node, a new one joins in the next
    hour with probability one half.

    Args:
        nodes: nodes that are present at time zero.
        rate: probability of a failure, per node and hour.
        hours: length of the trace.
        seed: of the random times and nodes.
    """
    rng = np.random.default_rng(seed)
    present = [f"node{number}" for number in range(nodes)]
    found, fresh = [MembershipEvent(0.0, (), tuple(present))], nodes
    for hour in range(hours):
        events = []
        for node in [node for node in present if rng.random() < rate]:
            events.append((float(hour * 3600 + rng.uniform(0, 3600)), node, ""))
        for _ in range(int(rng.binomial(nodes - len(present), 0.5))):
            events.append((float(hour * 3600 + rng.uniform(0, 3600)), "", f"node{fresh}"))
            fresh += 1
        for time_s, gone, new in sorted(events):
            present = [node for node in present if node != gone] + ([new] if new else [])
            found.append(MembershipEvent(time_s, (gone,) if gone else (), (new,) if new else ()))
    return found
