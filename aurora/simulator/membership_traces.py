"""Traces of membership: which nodes leave and join when, read, cut, capped, or drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput


@dataclass(frozen=True)
class MembershipEvent:
    """Nodes that were there no more, or joined, from time_s on."""

    time_s: float
    removed: tuple[str, ...]
    added: tuple[str, ...]


def changes(rows: Sequence[tuple[float, str, str]]) -> list[MembershipEvent]:
    """A trace's (time_s, "add" or "remove", node) by time, what happens at once together. BadInput for nodes that cannot."""
    there: set[str] = set()
    found: dict[float, tuple[list[str], list[str]]] = {}
    for time_s, event, node in sorted(rows, key=lambda row: row[0]):
        if event not in ("add", "remove") or (event == "add") == (node in there):
            state = "is there already" if node in there else "is not there"
            what = f"{event!r} of {node!r}, which {state}"
            raise BadInput(f"failures, {time_s:g} s: expected add or remove as can be, found {what}")
        if any(node in names for names in found.get(time_s, ())):
            raise BadInput(f"failures, {time_s:g} s: expected one event of {node!r} at a time, found two")
        found.setdefault(time_s, ([], []))[event == "add"].append(node)
        there ^= {node}
    return [MembershipEvent(time_s, tuple(removed), tuple(added)) for time_s, (removed, added) in found.items()]


def shifted(trace: Sequence[MembershipEvent], start_s: float | None = None) -> list[MembershipEvent]:
    """The trace from start_s on, its first change by default, as time zero; what happened before happens then."""
    first_s = trace[0].time_s if trace and start_s is None else start_s or 0.0
    there: list[str] = []
    for change in trace:
        if change.time_s <= first_s:
            there = [node for node in there if node not in change.removed] + list(change.added)
    later = [
        MembershipEvent(change.time_s - first_s, change.removed, change.added) for change in trace if change.time_s > first_s
    ]
    return [MembershipEvent(0.0, (), tuple(there)), *later]


def limited(trace: Sequence[MembershipEvent], most: int) -> list[MembershipEvent]:
    """The same trace for a cluster that takes at most so many nodes: who comes when it is full is never there."""
    there: set[str] = set()
    found = []
    for change in trace:
        removed = tuple(node for node in change.removed if node in there)
        there -= set(removed)
        added = change.added[: most - len(there)]
        there |= set(added)
        if removed or added:
            found.append(MembershipEvent(change.time_s, removed, added))
    return found


def every(seconds: float, nodes: int, seed: int, down_to: int) -> list[MembershipEvent]:
    """All nodes there from the start; a random one fails every so many seconds, until down_to are left."""
    names = [f"node{number}" for number in range(nodes)]
    failing = np.random.default_rng(seed).permutation(nodes)[: nodes - down_to].tolist()
    return [
        MembershipEvent(0.0, (), tuple(names)),
        *(MembershipEvent((n + 1) * seconds, (names[f],), ()) for n, f in enumerate(failing)),
    ]


def spot(nodes: int, end_s: float, seed: int) -> list[MembershipEvent]:
    """Nodes fail and join like a spot market's: one to three go every 5 to 15 minutes, as many join between."""
    rng = np.random.default_rng(seed)
    names = [f"node{number}" for number in range(nodes)]
    there, found, now_s, fresh = list(names), [MembershipEvent(0.0, (), tuple(names))], 0.0, nodes
    while now_s < end_s:
        now_s += rng.uniform(300, 900)
        gone = tuple(rng.permutation(there)[: rng.integers(1, 4)].tolist())
        new = tuple(f"node{fresh + n}" for n in range(rng.integers(1, 4)))
        fresh += len(new)
        there = [node for node in there if node not in gone] + list(new)
        found += [MembershipEvent(now_s, gone, ()), MembershipEvent(now_s + rng.uniform(60, 240), (), new)]
        now_s = found[-1].time_s
    return found


def hourly(nodes: int, rate: float, hours: int, seed: int) -> list[MembershipEvent]:
    """Every node fails with probability `rate` in an hour, at any time; one that failed comes back, new, in the next hour with
    probability one half."""
    rng = np.random.default_rng(seed)
    there = [f"node{number}" for number in range(nodes)]
    found, fresh = [MembershipEvent(0.0, (), tuple(there))], nodes
    for hour in range(hours):
        events = []
        for node in [node for node in there if rng.random() < rate]:
            events.append((float(hour * 3600 + rng.uniform(0, 3600)), node, ""))
        for _ in range(int(rng.binomial(nodes - len(there), 0.5))):
            events.append((float(hour * 3600 + rng.uniform(0, 3600)), "", f"node{fresh}"))
            fresh += 1
        for time_s, gone, new in sorted(events):
            there = [node for node in there if node != gone] + ([new] if new else [])
            found.append(MembershipEvent(time_s, (gone,) if gone else (), (new,) if new else ()))
    return found
