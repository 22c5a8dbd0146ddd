"""Cells of the comparison run for real: the shipped models as processes of this machine, ports held to the cluster's rates."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aurora.advisor.colocation_grid import GridCell
from aurora.advisor.served_steps import served_steps
from aurora.advisor.ways import BY_EXCHANGE, BY_LAYER, IN_SEQUENCE, winners
from aurora.cli.demo import MODELS
from aurora.errors import BadInput
from aurora.io import shipped
from aurora.models.loading import load_tokenizer
from aurora.planner.make_plan import make_plan
from aurora.runtime.run import run
from aurora.types import Cluster, Profile, RunOptions

MEASURED = {  # by way, how its models interleave, and their time slice
    IN_SEQUENCE: ("off", "exchange"),
    BY_EXCHANGE: ("on", "exchange"),
    BY_LAYER: ("on", "layer"),
}
REQUESTS = 2  # of a rank in a step, if it has two tokens or more


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that was run.

    Attributes:
        skew, bandwidth, batch: as in `GridCell`.
        seconds: by way, of all steps.
        gains: by way, over one after the other.
        predicted: by way, the simulated gain.
        tpot_s_M: by way, for each model (p50, p99) of the seconds between two of its steps.
        winner: the simplest way within 2 % of the fastest, as measured.
        right: whether the way that the simulator names is among those that are as fast as the fastest.
        loss: by how much longer the way that the simulator names takes than the fastest.
    """

    skew: float
    bandwidth: float
    batch: int
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
    progress: Callable[[str, int, int], None],
) -> list[MeasuredCell]:
    """Runs cells with the profiles' own skew, in random sequence, until no time is left; the first in any case.

    Args:
        cluster: the machines; each GPU is a process, its port held to its rate.
        profiles: of MODELS.
        cells: the grid.
        folder: where the texts of the models are.
        steps: steps of each model.
        limit_s: no cell begins after so many seconds.
        progress: called with (what is being done, cells done, cells in all).

    Raises:
        BadInput: if no cell has the profiles' own skew, or the cluster has a fabric, whose links are not held to their rates.
    """
    own = [cell for cell in cells if cell.skew == 1.0]
    if not own:
        raise BadInput("`skew`: expected 1 among them with `measure`, as the models route as they do")
    if cluster.fabric is not None:
        raise BadInput("`measure`: holds ports to their rates, but not the links of a fabric")
    paths = [shipped(f"models/{name}") for name in MODELS]
    texts = [load_tokenizer(path).encode((folder / f"{path.name}.txt").read_text()) for path in paths]
    began_s, found = time.perf_counter(), list[MeasuredCell]()
    for done, number in enumerate(np.random.default_rng(0).permutation(len(own)).tolist()):
        progress("measuring", done, len(own))
        if found and time.perf_counter() - began_s > limit_s:
            break
        found.append(_measured(cluster, profiles, own[number], paths, texts, steps))
    return sorted(found, key=lambda cell: (cell.bandwidth, cell.batch))


def _measured(
    cluster: Cluster,
    profiles: Sequence[Profile],
    cell: GridCell,
    paths: Sequence[Path],
    texts: Sequence[list[int]],
    steps: int,
) -> MeasuredCell:
    """One cell, each way once."""
    plan = make_plan(cluster.scaled(cell.bandwidth), profiles)
    of_step = min(REQUESTS, cell.batch)
    length, number = cell.batch // of_step, len(cluster) * of_step * steps
    prompts_M = [[[ids[(i * length + at) % len(ids)] for at in range(length)] for i in range(number)] for ids in texts]
    served = {}
    for way, (interleave, time_slice) in MEASURED.items():
        options = RunOptions(1, of_step, "shaped", interleave=interleave)
        result = run(replace(plan, options=replace(plan.options, time_slice=time_slice)), paths, prompts_M, options)
        if result is None:
            raise BadInput("bench colocate: starts its own ranks; run it without torchrun's environment variables")
        served[way] = served_steps(result.trace)
    seconds = {way: each.seconds for way, each in served.items()}
    gains = {way: seconds[IN_SEQUENCE] / each for way, each in seconds.items()}
    predicted = {way: gain for way, gain in cell.compared.gains.items() if way in gains}
    named, fastest = winners(predicted)[0], winners(gains)
    loss = seconds[named] / min(seconds.values()) - 1
    tpot_s_M = {way: each.tpot_s_M for way, each in served.items()}
    return MeasuredCell(
        cell.skew, cell.bandwidth, cell.batch, seconds, gains, predicted, tpot_s_M, fastest[0], named in fastest, loss
    )
