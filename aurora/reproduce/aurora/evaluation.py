"""Aurora's evaluation (arXiv:2410.17043 §8) in its own set-up: every figure and headline, ours beside."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from aurora.errors import BadInput
from aurora.reproduce.aurora.figures import FIGURES, Run, run_of
from aurora.reproduce.aurora.jobs import PRICINGS
from aurora.reproduce.aurora.studies import STUDIES
from aurora.reproduce.aurora.traffic import COUNTS, TRAFFIC, Workload
from aurora.reproduce.recorded_data import is_recorded
from aurora.types import ReproduceOptions

NOT_SIMULATED = ("same-images",)  # a variation on the generated traffic; simulating takes most of the time


def reproduce(options: ReproduceOptions, folder: Path | None, progress: Callable[[str, int, int], None]) -> list[Run]:
    """Runs the studies behind the chosen figures; the same at every call.

    Args:
        options: which figures and traffic, and how many draws of the traffic.
        folder: recorded data, None for none; with traffic "all" the recorded traffic is left out where it is absent.
        progress: called with what is being done, how much of it is done, and how much there is in all.

    Returns:
        A run for each study, traffic and pricing.

    Raises:
        BadInput: if a figure or traffic is unknown, or recorded traffic was asked for and cannot be read.
    """
    figures = _chosen("`figure`", options.figure, FIGURES)
    traffics = _chosen("`traffic`", options.traffic, TRAFFIC)
    if options.traffic == "all" and not is_recorded(folder, COUNTS):
        traffics.remove("recorded")
    studies = list(dict.fromkeys(FIGURES[figure].study for figure in figures))
    work = [
        (traffic, study, pricing)
        for traffic in traffics
        for study in studies
        for pricing in STUDIES[study].pricings
        if pricing != "simulated" or traffic not in NOT_SIMULATED
    ]
    runs = []
    workloads = {traffic: [_workload(traffic, seed, folder) for seed in range(options.seeds)] for traffic in traffics}
    for number, (traffic, study, pricing) in enumerate(work):
        seeds = []
        for seed, workload in enumerate(workloads[traffic]):
            progress("pricing", number * options.seeds + seed, len(work) * options.seeds)
            rng = np.random.default_rng([seed, list(TRAFFIC).index(traffic), list(STUDIES).index(study)])
            seeds.append(STUDIES[study].make(workload, PRICINGS[pricing], rng))
        runs.append(run_of(study, traffic, pricing, seeds))
    progress("pricing", len(work) * options.seeds, len(work) * options.seeds)
    return runs


def _workload(traffic: str, seed: int, folder: Path | None) -> Workload:
    return TRAFFIC[traffic](np.random.default_rng([seed, list(TRAFFIC).index(traffic)]), folder)


def _chosen(option: str, name: str, known: Mapping[str, object]) -> list[str]:
    if name != "all" and name not in known:
        raise BadInput(f"{option}: expected one of all, {', '.join(known)}, found {name!r}")
    return list(known) if name == "all" else [name]
