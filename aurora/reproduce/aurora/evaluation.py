"""Aurora's evaluation (arXiv:2410.17043 §8) in its own set-up: every figure and headline, ours beside."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from aurora.errors import BadInput
from aurora.io import load_cluster
from aurora.reproduce.aurora.figures import FIGURES, Run
from aurora.reproduce.aurora.jobs import PRICINGS
from aurora.reproduce.aurora.studies import STUDIES, StudySetting
from aurora.reproduce.aurora.traffic import COUNTS, TRAFFIC
from aurora.reproduce.recorded_data import is_recorded
from aurora.types import ReproduceOptions

NOT_SIMULATED = ("same-images",)  # a variation on the generated traffic; simulating takes most of the time


def reproduce(options: ReproduceOptions, folder: Path | None, progress: Callable[[str, int, int], None]) -> list[Run]:
    """Runs the studies behind the chosen figures. Equal arguments give equal results.

    `folder` has the recorded data; None leaves recorded traffic out. `progress` is called with (what, runs done, runs in all).
    """
    figures = _chosen("`figure`", options.figure, FIGURES)
    traffics = _chosen("`traffic`", options.traffic, TRAFFIC)
    if options.traffic == "all" and not is_recorded(folder, COUNTS):
        traffics.remove("recorded")
    work = [
        (traffic, study, pricing)
        for traffic in traffics
        for study in dict.fromkeys(FIGURES[figure].study for figure in figures)
        for pricing in STUDIES[study].pricings
        if pricing != "simulated" or traffic not in NOT_SIMULATED
    ]
    workloads = {
        name: [TRAFFIC[name](np.random.default_rng([seed, list(TRAFFIC).index(name)]), folder) for seed in range(options.seeds)]
        for name in traffics
    }
    runs = []
    for number, (traffic, study, pricing) in enumerate(work):
        cluster, seeds = load_cluster(STUDIES[study].cluster), []
        for seed, workload in enumerate(workloads[traffic]):
            progress("pricing", number * options.seeds + seed, len(work) * options.seeds)
            rng = np.random.default_rng([seed, list(TRAFFIC).index(traffic), list(STUDIES).index(study)])
            found = STUDIES[study].make(StudySetting(workload, cluster, PRICINGS[pricing], rng))
            seeds.append({(way, case): outcome for way, case, outcome in found})
        runs.append(Run.of(study, traffic, pricing, seeds))
    progress("pricing", len(work) * options.seeds, len(work) * options.seeds)
    return runs


def _chosen(option: str, name: str, known: Mapping[str, object]) -> list[str]:
    if name != "all" and name not in known:
        raise BadInput(f"{option}: expected one of all, {', '.join(known)}, found {name!r}")
    return list(known) if name == "all" else [name]
