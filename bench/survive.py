"""Failure-resilient placements and replica selection: `python bench/survive.py` writes bench/results/survive-DATE.md.

All small cases against every placement there is; large placements and a rank's replica selection, medians on one core.
"""

import datetime
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from machine import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from aurora.algorithms.check.plans import check_resilient
from aurora.algorithms.replicas.failure_resilient import SURVIVE, aim_of, place_for_failures
from aurora.moe.expert_map import LocalFirst
from aurora.types import FailureDomains
from tests.algorithms.replicas.brute_force import cases

REPEATS = 5


def kept(held_EN: np.ndarray) -> np.ndarray:
    """By number of nodes alive, from how many sets of them every expert is held."""
    nodes = held_EN.shape[1]
    mask_E = ((held_EN > 0) << np.arange(nodes)).sum(axis=1)
    found = np.zeros(nodes - 1, dtype=np.int64)
    for alive in range(1, (1 << nodes) - 1):
        found[alive.bit_count() - 1] += bool((mask_E & alive).all())
    return found


def small_cases() -> list[str]:
    below, broken, seen = dict.fromkeys(SURVIVE, 0), dict.fromkeys(SURVIVE, 0), 0
    for nodes, slots, counts, best_K in cases():
        failure_domains, count_E, min_replicas = FailureDomains.equal(nodes, slots), np.array(counts), counts[0]
        seen += nodes - 1
        for name, make in SURVIVE.items():
            held_EN = make(count_E, failure_domains, aim_of(min_replicas, failure_domains), np.random.default_rng(0))
            below[name] += int((kept(held_EN) < best_K).sum())
            broken[name] += bool(((held_EN > 0).sum(axis=1) < min(min_replicas, nodes)).any())
    lines = [f"| {name} | {seen - below[name]} of {seen} | {broken[name]} |" for name in SURVIVE]
    return [
        "| method | as good as the best of all placements | placements that break `min_replicas` |",
        "|---|---|---|",
        *lines,
    ]


def large_cases() -> list[str]:
    lines = ["| nodes, slots, experts, min replicas | method | placed in | survives 1, f, 2f failures | at most |"]
    lines.append("|---|---|---|---|---|")
    load_E = (1.0 + np.arange(256)) ** -0.8
    for nodes, slots, min_replicas in ((64, 8, 2), (64, 32, 2), (64, 32, 3), (128, 32, 3)):
        failure_domains = FailureDomains.equal(nodes, slots)
        for name in SURVIVE:
            made = [
                place_for_failures(load_E, failure_domains, name, min_replicas)
                for _ in range(REPEATS if name == "aurora" else 1)
            ]
            check_resilient(made[0], failure_domains, guaranteed=name == "aurora")
            took = statistics.median(one.seconds for one in made)
            found, at = made[0].survival_L[0], [0, min_replicas - 1, 2 * min_replicas - 1]
            p, most = (", ".join(f"{value:.5f}" for value in row[at]) for row in (found.p_K, found.bound_K))
            lines.append(f"| {nodes}, {slots}, 256, {min_replicas} | {name} | {took * 1e3:.0f} ms | {p} | {most} |")
    return lines


def replica_selections() -> list[str]:
    lines = ["| ranks, experts, replicas, tokens | median | 95th percentile |", "|---|---|---|"]
    torch.set_num_threads(1)
    load_E, rng = (1.0 + np.arange(256)) ** -0.8, np.random.default_rng(0)
    for slots in (8, 16, 32):
        held_G = place_for_failures(load_E, FailureDomains.equal(64, slots), min_replicas=2).slots_LN[0]
        selections = [LocalFirst(held_G, rank) for rank in range(64)]
        tokens_SE = torch.from_numpy(rng.multinomial(8192, load_E / load_E.sum(), 64))
        took = []
        for number in range(500):
            began = time.perf_counter()
            selections[number % 64](tokens_SE)
            took.append((time.perf_counter() - began) * 1e6)
        lines.append(
            f"| 64, 256, {sum(len(set(held)) for held in held_G)}, 8192 a rank | {np.median(took):.0f} us | "
            f"{np.percentile(took, 95):.0f} us |"
        )
    return lines


def main() -> None:
    parts = (
        ("All small cases", small_cases),
        ("Large placements", large_cases),
        ("A rank's replica selection", replica_selections),
    )
    lines = ["# Failure-resilient placements", "", machine(), ""]
    for title, part in parts:
        lines += [f"## {title}", "", *part(), ""]
    path = Path(__file__).parent / "results" / f"survive-{datetime.date.today()}.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    print(path)


if __name__ == "__main__":
    main()
