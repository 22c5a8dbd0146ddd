"""Ways of sharing GPUs as measured, beside their simulation: `python bench/measured_ways.py` writes a dated table.

Each cell runs the shipped models as processes of this machine, ports held to the cluster's rates: cells of
`aurora sweep --ways`, in random sequence, in prefill and in decode, for about --time-limit seconds.
"""

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tables import Table, write

from aurora.advisor.sharing import (
    BY_EXCHANGE,
    BY_LAYER,
    IN_SEQUENCE,
    MICRO,
    MICRO_BATCHES,
    THREE_MODELS,
    TIME_SLICED,
    ServedSteps,
    one_after_the_other,
    served_steps,
    winners,
)
from aurora.advisor.sweep import GridCell, compare_over_grid
from aurora.algorithms.workload.step_traffic import drawn_windows
from aurora.cli.demo import MODELS, shipped_profiles
from aurora.errors import BadInput
from aurora.io import load_cluster, shipped
from aurora.models.loading import load_tokenizer
from aurora.planner.plan import make_plan
from aurora.planner.simulated_choice import with_micro_batches, with_time_slice
from aurora.runtime.run import run
from aurora.types import Cluster, Plan, Profile, RunOptions
from aurora.types.profile import STAGES

TOGETHER = {TIME_SLICED: "step", BY_EXCHANGE: "exchange", BY_LAYER: "layer"}  # time slices of ways of two models at once
TRANSPORT = "shaped"
MOST_TOKENS = 512  # of a prompt
OF = (0, 1, 0)  # which of MODELS each model is
REQUESTS = 2  # of a rank in a step, if it has two tokens or more


@dataclass(frozen=True)
class MeasuredCell:
    """A cell of the grid that was run on processes, beside its simulation.

    Attributes:
        skew, bandwidth, batch: as in `GridCell`.
        stage: "prefill": each step is of new prompts; "decode": each step is a token of each of as many requests.
        seconds: by way, of all steps.
        gains: by way, over one after the other.
        predicted: by way, the simulated gain.
        tpot_s_M: by way, for each model (p50, p99) of the seconds between two of its steps.
        winner: the simplest way within 2 % of the fastest, as measured.
        right: whether the way that the simulator names is among those that are as fast as the fastest.
        loss: by how much longer the way that the simulator names takes than the fastest, for the same work.
    """

    skew: float
    bandwidth: float
    batch: int
    stage: str
    seconds: Mapping[str, float]
    gains: Mapping[str, float]
    predicted: Mapping[str, float]
    tpot_s_M: Mapping[str, tuple[tuple[float, float], ...]]
    winner: str
    right: bool
    loss: float


def measure_cells(
    cluster: Cluster,
    profiles: Sequence[Profile],
    cells: Sequence[GridCell],
    folder: Path,
    steps: int,
    limit_s: float,
) -> list[MeasuredCell]:
    """Runs cells with the profiles' own skew, in prefill and decode, in random sequence until no time is left.

    The first is run in any case.

    Args:
        cluster: the machines, without a fabric; each GPU is a process, its port held to its rate.
        profiles: of MODELS.
        cells: the grid, with cells of skew 1.
        folder: where the texts of the models are.
        steps: steps of each model.
        limit_s: no cell begins after so many seconds.
    """
    own = [cell for cell in cells if cell.skew == 1.0]
    paths = [shipped(f"models/{name}") for name in MODELS]
    texts = [load_tokenizer(path).encode((folder / f"{path.name}.txt").read_text()) for path in paths]
    began_s, found = time.perf_counter(), list[MeasuredCell]()
    settings = list(itertools.product(own, STAGES))
    for number in np.random.default_rng(0).permutation(len(settings)).tolist():
        if found and time.perf_counter() - began_s > limit_s:
            break
        cell, stage = settings[number]
        found.append(_measured(cluster, profiles, cell, stage, paths, texts, steps))
    return sorted(found, key=lambda cell: (cell.stage, cell.bandwidth, cell.batch))


def _measured(
    cluster: Cluster,
    profiles: Sequence[Profile],
    cell: GridCell,
    stage: str,
    paths: Sequence[Path],
    texts: Sequence[list[int]],
    steps: int,
) -> MeasuredCell:
    """One cell, each way once."""
    ports, decodes = cluster.scaled(cell.bandwidth), stage == "decode"
    of_step = cell.batch if decodes else min(cell.batch, max(REQUESTS, -(-cell.batch // MOST_TOKENS)))
    length, number = cell.batch // of_step, len(cluster) * of_step * (1 if decodes else steps)
    prompts_M = [  # the third model's lie behind the first's
        [[texts[of][(at + token) % len(texts[of])] for token in range(length)] for at in range(begin, begin + size, length)]
        for of, begin, size in zip(OF, (0, 0, length * number), [length * number] * 3, strict=True)
    ]
    options = RunOptions(steps if decodes else 1, of_step, TRANSPORT)

    def serve(plan: Plan, *models: int) -> ServedSteps:
        result = run(plan, [paths[OF[model]] for model in models], [prompts_M[model] for model in models], options)
        if result is None:
            raise BadInput("starts its own ranks: run it without torchrun's environment variables")
        return served_steps(result.trace, [0] * plan.options.micro_batches if plan.options.micro_batches > 1 else None)

    given = [profiles[of] for of in OF]
    plan_M = [make_plan(ports, [profile]) for profile in given]
    two, three = make_plan(ports, given[:2]), make_plan(ports, given)
    tokens_TS = np.full((steps, len(cluster)), cell.batch)
    drawn_M = [drawn_windows(each, tokens_TS, np.random.default_rng(0)) for each in given]
    alone_M = [serve(plan, model) for model, plan in enumerate(plan_M)]
    served = {IN_SEQUENCE: one_after_the_other(alone_M[:2])}
    if of_step > 1:
        cut_M = [with_micro_batches(plan, [drawn], MICRO) for plan, drawn in zip(plan_M[:2], drawn_M, strict=False)]
        served[MICRO_BATCHES] = one_after_the_other([serve(plan, model) for model, plan in enumerate(cut_M)])
    for way, time_slice in TOGETHER.items():
        served[way] = serve(with_time_slice(two, drawn_M[:2], (time_slice,)), 0, 1)
    served[THREE_MODELS] = serve(with_time_slice(three, drawn_M), 0, 1, 2)
    seconds = {way: each.seconds for way, each in served.items()}
    gains = {way: sum(alone.seconds for alone in alone_M[: len(each.ends_M)]) / each.seconds for way, each in served.items()}
    predicted = {way: gain for way, gain in cell.compared.gains.items() if way in gains}
    named, fastest = winners(predicted)[0], winners(gains)
    loss = max(gains.values()) / gains[named] - 1
    tpot_s_M = {way: each.tpot_s_M for way, each in served.items()}
    where = cell.skew, cell.bandwidth, cell.batch, stage
    return MeasuredCell(*where, seconds, gains, predicted, tpot_s_M, fastest[0], named in fastest, loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="demo-4")
    parser.add_argument("--step-tokens", type=int, nargs="+", default=(4, 32, 128))
    parser.add_argument("--bandwidth", type=float, nargs="+", default=(1.0, 4.0))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cluster = load_cluster(given.cluster)
    with TemporaryDirectory() as folder:
        profiles = shipped_profiles(Path(folder), len(cluster), lambda what, done, total: None)
        cells = compare_over_grid(cluster, profiles, given.step_tokens, given.bandwidth, (1.0,), given.steps)
        measured = measure_cells(cluster, profiles, cells, Path(folder), given.steps, given.time_limit)
    ways = list(measured[0].gains)[1:]
    table = Table(
        "Measured (simulated) gains", f"stage | bandwidth | step tokens | {' | '.join(ways)} | fastest | named | loss"
    )
    for cell in measured:
        gains = (f"{cell.gains[way]:.2f} ({cell.predicted[way]:.2f})" if way in cell.gains else "-" for way in ways)
        right = "right" if cell.right else "wrong"
        table.add(cell.stage, f"x {cell.bandwidth:g}", cell.batch, *gains, cell.winner, right, f"{cell.loss:.1%}")
    write("measured-ways", [__doc__.strip()], table.lines, out=given.out)


if __name__ == "__main__":
    main()
