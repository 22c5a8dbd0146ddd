"""Elastic training on a recorded spot trace: `python bench/elastic.py [--quick] [PART ...]`.

Writes bench/results/elastic-DATE.md, or elastic-PART-DATE.md of a part. AURORA_DATA names the folder of recorded data. Ranks
are processes on gloo that are killed (-9); the model is the shipped Mixtral.

- `changes`: all changes of ten nodes of the trace within one run: losses beside those of uninterrupted runs, steps lost,
  members that were taken for dead, and pauses with their parts.
- `steady`: what a step takes with and without `elastic`, in turns.
- `recovery`: how often training goes on from replicas after k ranks are lost at once, beside the exact probability.
- `baselines`: samples a second on the trace, beside checkpoint-restart, fixed-size groups and whole replicas.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
from baselines import compared
from machine import machine
from scipy.stats import chi2
from spot import Played, SpotRun, steps_of
from tables import Table, write

from aurora.elastic.steps import Pause
from aurora.io import shipped
from aurora.training.data import read_samples
from aurora.training.migration import next_placement
from aurora.training.run import train
from aurora.training.trainer import Trainer, alike_ranks
from aurora.types import Placement, TrainOptions
from aurora.types.arrays import FloatArray
from bench.papers.lazarus.membership_traces import MembershipEvent, changes, limited, load_failures, shifted
from bench.papers.lazarus.model_survival import model_survival

MODEL = shipped("models/mixtral-topics")
LAYERS, EXPERTS = 4, 8
TEXT = Path(__file__).parents[1] / "README.md"
TRACE, TRACE_FROM_S, NODES = "spot_bamboo/g4dn-trace.csv", 600.0, 10
OPTIONS = TrainOptions(
    ranks=NODES, batch=20, length=16, elastic=True, transport="gloo", checkpoint_every=50, min_replicas=3, timeout_s=200.0
)
SAMPLES_NT = read_samples(MODEL, [TEXT], OPTIONS.length)
DOUBTED = 0.01  # a chi-square of lower probability says that frequencies are not those that were computed


def trace_of(nodes: int) -> list[MembershipEvent]:
    """Returns the recorded trace for a cluster of at most so many nodes, from when it has filled."""
    if (folder := os.environ.get("AURORA_DATA")) is None:
        raise SystemExit("AURORA_DATA names no folder of recorded data")
    return limited(shifted(changes(load_failures(Path(folder) / TRACE)), TRACE_FROM_S), nodes)


def played(options: TrainOptions, planned: Sequence[tuple[int, MembershipEvent]], **further) -> Played:
    """Plays a trace in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="aurora-elastic-") as folder:
        return SpotRun(MODEL, SAMPLES_NT, options, Path(folder), planned, **further).play()


def trained(options: TrainOptions) -> FloatArray:
    """Returns (steps,) the losses of a run on threads in which no rank is lost."""
    fixed = replace(options, elastic=False, transport="memory", checkpoint_every=None)
    with tempfile.TemporaryDirectory(prefix="aurora-elastic-") as folder:
        return np.array([step.loss for step in train(MODEL, [TEXT], fixed, output=Path(folder)).steps])


def apart(one: FloatArray, other: FloatArray) -> float:
    return float(np.abs(one - other).max())


def _changes(quick: bool) -> list[str]:
    """Losses, lost steps, false deaths and pauses."""
    trace = trace_of(NODES)
    table = Table(
        f"{NODES} ranks on a spot trace",
        "dtype | steps | changes | killed | joined | epochs with steps | steps done twice | taken for dead | loss apart",
        "The trace is compressed: each change comes at its step, and not before all have done a step after the last one. Loss "
        "apart: the largest difference of a step's loss from that of an uninterrupted run of the same global batches.",
    )
    lines, pauses = [], []
    forms = (("float64", 20, 5), ("float32", 40, 8)) if quick else (("float64", 50, 8), ("float32", 500, 69))
    for dtype, steps, count in forms:
        options = replace(OPTIONS, steps=steps, dtype=dtype)
        done = played(options, steps_of(trace[:count], steps))
        found = np.array([done.losses[step] for step in range(steps)])
        ranks = (NODES,) if dtype == "float64" else (NODES, 2, 5) if quick else (NODES, 2, 3, 5, 7)
        uninterrupted = [trained(replace(options, ranks=each, min_replicas=min(each, 3))) for each in ranks]
        far = apart(found, uninterrupted[0])
        counts = done.events, done.killed, done.joined, len(done.epochs), done.redone, len(done.false_deaths)
        table.add(dtype, steps, *counts, f"{far:.1e}")
        if dtype == "float64":
            lines += ["", f"float64: {'within' if far < 1e-9 else 'beyond'} 1e-9."]
        else:
            most = max(apart(one, other) for one, other in combinations(uninterrupted, 2))
            lines += ["", f"float32: uninterrupted runs on {', '.join(map(str, ranks))} ranks are {most:.1e} apart at most."]
        pauses += done.pauses.values()
        lines += done.false_deaths + done.remarks
    return [*table.lines, *lines, "", *_pauses(pauses)]


def _pauses(pauses: Sequence[Pause]) -> list[str]:
    """A table of pauses and their parts."""
    table = Table(
        "Pauses",
        "seconds | p50 | p95 | most",
        f"{len(pauses)} changes, of each the longest pause of a member.",
    )
    parts = [each.name for each in fields(Pause) if each.name.endswith("_s") and each.name != "at_s"]
    named = {"pause": [each.seconds for each in pauses]}
    named |= {f"of the pause: {part.removesuffix('_s')}": [getattr(each, part) for each in pauses] for part in parts}
    for name, values in named.items():
        table.add(name, *(f"{np.percentile(values, at):.3f}" for at in (50, 95, 100)))
    return table.lines


def _steady(quick: bool) -> list[str]:
    """Step times with and without `elastic`, in turns."""
    columns = "ranks | rounds | steps | without elastic | with | ratio"
    table = Table("Steady state", columns, "Medians of a step in milliseconds.")
    for ranks, rounds, steps in ((4, 3, 20),) if quick else ((4, 7, 60), (NODES, 7, 60)):
        step_s: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for elastic in (False, True) if number % 2 else (True, False):
                options = replace(OPTIONS, ranks=ranks, steps=steps, elastic=elastic, checkpoint_every=None)
                with tempfile.TemporaryDirectory(prefix="aurora-elastic-") as folder:
                    steps_done = train(MODEL, [TEXT], options, output=Path(folder)).steps
                step_s[elastic] += [each.seconds for each in steps_done[5:]]
        fixed_s, elastic_s = (float(np.median(step_s[each])) for each in (False, True))
        table.add(ranks, rounds, steps, f"{fixed_s * 1e3:.1f}", f"{elastic_s * 1e3:.1f}", f"{elastic_s / fixed_s:.3f}")
    return table.lines


def _recovery(quick: bool) -> list[str]:
    """How often nothing is lost when k ranks are lost at once."""
    options = replace(OPTIONS, min_replicas=2, checkpoint_every=None)
    table = Table(
        "Recovery from ranks that are lost at once",
        "ranks lost | failures | expected to lose nothing | lost nothing",
        f"{NODES} ranks, placements by aurora with at least 2 replicas in 4 layers; the expected number is the sum of exact "
        "probabilities, by all sets of lost ranks.",
    )
    drawn, real = _drawn(60 if quick else 180), _killed(options, 4 if quick else 20)
    statistic = freedom = 0.0
    for lost in sorted({lost for lost, _, _ in drawn + real}):
        chance, kept = np.array([(chance, kept) for each, chance, kept in drawn + real if each == lost]).T
        table.add(lost, len(kept), f"{chance.sum():.1f}", int(kept.sum()))
        if (spread := float((chance * (1 - chance)).sum())) > 0:
            statistic, freedom = statistic + float(kept.sum() - chance.sum()) ** 2 / spread, freedom + 1
        else:
            assert kept.sum() == chance.sum()
    chance = float(chi2.sf(statistic, freedom))
    fits = "not doubted" if chance > DOUBTED else "doubted"
    return [
        *table.lines, "",
        f"Chi-square {statistic:.2f} with {freedom:.0f} degrees of freedom, probability {chance:.2f}: {fits}. {len(real)} of "
        f"the {len(drawn + real)} failures are processes killed (-9) during training, which then goes on from replicas, or "
        "from the start if an expert is lost; the others are decided by the planner's recovery on drawn loads and ranks.",
    ]  # fmt: skip


Outcome = tuple[int, float, bool]  # ranks lost, exact probability that nothing is lost, whether nothing was


def _drawn(count: int) -> list[Outcome]:
    """Draws failures of a placement that the planner made, and counts those after which every expert is held."""
    dice, cluster, slots, found = np.random.default_rng(0), alike_ranks(range(NODES)), -(-EXPERTS * 2 // NODES), []
    for number in range(count):
        load_LE = dice.permuted(np.tile((1.0 + np.arange(EXPERTS)) ** -dice.uniform(0.4, 1.6), (LAYERS, 1)), axis=1)
        placement = next_placement([[()] * LAYERS] * NODES, load_LE, cluster, slots, 2)
        alive_N, lost = np.ones(NODES, dtype=bool), 2 + number % 3
        alive_N[dice.permutation(NODES)[:lost]] = False
        left = np.flatnonzero(alive_N).tolist()
        held = all(len(set().union(*(held_N[node] for node in left))) == EXPERTS for held_N in placement.slots_LG)
        found.append((lost, model_survival(placement.slots_LG, lost), held))
    return found


def write_placements(file: Path, trainer: Trainer) -> None:
    """Makes a trainer write each placement that it is given."""
    place = trainer.place

    def writing(placement: Placement) -> int:
        moved = place(placement)
        if trainer._transport.rank == 0:
            temporary = file.with_suffix(".part")
            temporary.write_text(json.dumps(placement.slots_LG))
            temporary.rename(file)
        return moved

    trainer.place = writing  # type: ignore[method-assign]


def _killed(options: TrainOptions, count: int) -> list[Outcome]:
    """Kills ranks of a run, as many as `count` times, and as many join each time."""
    dice, present = np.random.default_rng(1), [f"node{number}" for number in range(NODES)]
    planned = [(0, MembershipEvent(0.0, (), tuple(present)))]
    for number in range(count):
        gone = dice.choice(present, 2 + number % 3, replace=False).tolist()
        new = [f"{name}-{number}" for name in gone]
        present = [name for name in present if name not in gone] + new
        planned.append((2, MembershipEvent(float(number + 1), tuple(gone), tuple(new))))
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="aurora-elastic-") as folder:
        file = Path(folder) / "placement.json"

        def before(change: MembershipEvent, names: list[str]) -> None:
            slots_LG = json.loads(file.read_text())
            left = [rank for rank, name in enumerate(names) if name not in change.removed]
            kept = all({expert for rank in left for expert in held_G[rank]} == set(range(EXPERTS)) for held_G in slots_LG)
            found.append((len(change.removed), model_survival(slots_LG, len(change.removed)), kept))

        run = SpotRun(
            MODEL, SAMPLES_NT, replace(options, steps=10**6), Path(folder), planned,
            adapt=partial(write_placements, file), to_the_end=False, before=before,
        )  # fmt: skip
        done = run.play()
    restarts = sum(not kept for _, _, kept in found)
    assert done.restarts == restarts, f"training began anew {done.restarts} times, replicas were lost {restarts} times"
    return found


def _baselines(quick: bool) -> list[str]:
    """Throughput beside baselines."""
    return compared(MODEL, TEXT, SAMPLES_NT, OPTIONS, trace_of(NODES), quick)


PARTS: dict[str, Callable[[bool], list[str]]] = {
    "changes": _changes, "steady": _steady, "recovery": _recovery, "baselines": _baselines
}  # fmt: skip


def main() -> None:
    """Runs the parts that are named, all without a name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="fewer steps, changes and rounds")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"expected of {', '.join(PARTS)}, found {', '.join(sorted(unknown))}")
    form = "The quick form" if chosen.quick else "The whole form"
    head = [f"# Elastic training on a spot trace\n\n{machine()}. {form}."]
    write("-".join(["elastic", *chosen.parts]), head, *(PARTS[part](chosen.quick) for part in chosen.parts or PARTS))


if __name__ == "__main__":
    from elastic import main  # members are started from a module that they can import

    main()
