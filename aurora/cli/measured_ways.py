"""Cells of the comparison run for real: the shipped models as processes of this machine, ports held to the cluster's rates."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

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
from aurora.advisor.sweep import GridCell, MeasuredCell
from aurora.cli.demo import MODELS
from aurora.errors import BadInput
from aurora.io import shipped
from aurora.models.loading import load_tokenizer
from aurora.planner.plan import make_plan
from aurora.planner.simulated_choice import with_micro_batches, with_time_slice
from aurora.planner.workload.step_traffic import steps_profile
from aurora.runtime.run import run
from aurora.types import Cluster, Plan, Profile, RunOptions
from aurora.types.profile import STAGES

TOGETHER = {TIME_SLICED: "step", BY_EXCHANGE: "exchange", BY_LAYER: "layer"}  # time slices of ways of two models at once
TRANSPORT = "shaped"
MOST_TOKENS = 512  # of a prompt
OF = (0, 1, 0)  # which of MODELS each model is
REQUESTS = 2  # of a rank in a step, if it has two tokens or more


def measure_cells(
    cluster: Cluster,
    profiles: Sequence[Profile],
    cells: Sequence[GridCell],
    folder: Path,
    steps: int,
    limit_s: float,
    progress: Callable[[str, int, int], None],
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
        progress: called with (what is being done, cells done, cells in all).
    """
    own = [cell for cell in cells if cell.skew == 1.0]
    paths = [shipped(f"models/{name}") for name in MODELS]
    texts = [load_tokenizer(path).encode((folder / f"{path.name}.txt").read_text()) for path in paths]
    began_s, found = time.perf_counter(), list[MeasuredCell]()
    settings = list(itertools.product(own, STAGES))
    for done, number in enumerate(np.random.default_rng(0).permutation(len(settings)).tolist()):
        progress("measuring", done, len(settings))
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
            raise BadInput("sweep --ways: starts its own ranks; run it without torchrun's environment variables")
        return served_steps(result.trace, [0] * plan.options.micro_batches if plan.options.micro_batches > 1 else None)

    given = [profiles[of] for of in OF]
    plan_M = [make_plan(ports, [profile]) for profile in given]
    two, three = make_plan(ports, given[:2]), make_plan(ports, given)
    drawn_M = [steps_profile(each, np.full(len(cluster), cell.batch), steps, np.random.default_rng(0)) for each in given]
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
