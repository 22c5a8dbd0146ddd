"""Generated membership traces: single failures, spot instances, independent failures by the hour."""

import numpy as np

from bench.papers.lazarus.membership_traces import MembershipEvent


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
