"""Aurora's evaluation (arXiv:2410.17043 §8) in its own set-up: every figure and headline, ours beside."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aurora.errors import BadInput
from aurora.io import load_cluster
from aurora.types.options import check_options, option
from bench.papers.aurora.figures import FIGURES, Run
from bench.papers.aurora.jobs import PRICINGS
from bench.papers.aurora.studies import STUDIES, StudySetting
from bench.papers.aurora.traffic import COUNTS, TRAFFIC
from bench.papers.recorded_data import is_recorded

NOT_SIMULATED = ("same-images",)  # a variation on the generated traffic; simulating takes most of the time


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of the evaluation.

    Args:
        figure: name of a figure, or "all".
        traffic: name of a traffic, or "all".
        seeds: random draws of the traffic.
    """

    figure: str = "all"
    traffic: str = "all"
    seeds: int = option(6, above=0, most=1000)

    def __post_init__(self) -> None:
        check_options(self)


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
