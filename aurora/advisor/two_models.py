"""Recommends a way for two models to use the same GPUs: each on half of them, or one after the other on all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import ServingWay
from aurora.advisor.recommend import engine_default, has_nvlink, orders_of, per_server_of
from aurora.advisor.sharing import SHARING
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.step_traffic import drawn_windows
from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL
from aurora.errors import BadInput, InfeasiblePlan, check_one_of
from aurora.io import save
from aurora.io.files import make_folder, write_text
from aurora.planner.scenarios.colocated import lacking_memory
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Profile
from aurora.types.arrays import evenly_spaced

IN_SEQUENCE, HALVES = "one after the other", "halves of the GPUs"
WORTH = 1.05  # a gain that is worth doing something for
STEPS = 2  # simulated of each model
PLANNED_TOKENS = 256  # of a rank in a step of the traffic that is planned for, at least
TRANSFERS = 40_000  # simulated at most in one way; with more, some layers of each model stand for all


@dataclass(frozen=True)
class TwoModels:
    """Comparison of ways in which an engine serves two models on the same GPUs, by simulated steps of their MoE layers.

    Attributes:
        engine: the engine, one of SERVING_ENGINES.
        cluster: the GPUs.
        profiles: the traffic of each model.
        drawn: whether some of the traffic was drawn rather than recorded; then nothing is recommended.
        batch: tokens of each rank in a step of each model.
        gains: by way, seconds of the same requests one model after the other, each on all GPUs by the default / seconds
            in this way.
        refusal: the reason why halves are not possible; empty if they are.
        swapped: whether the first model is better on the second half, on GPUs of several kinds.
    """

    engine: str
    cluster: Cluster
    profiles: tuple[Profile, ...]
    drawn: bool
    batch: int
    gains: Mapping[str, float]
    refusal: str = ""
    swapped: bool = False

    @property
    def way(self) -> str | None:
        """HALVES, if they are recommended; None if they bring too little, or if traffic was drawn."""
        return None if self.drawn or self.gains.get(HALVES, 0.0) < WORTH else HALVES

    def save(self, folder: Path, models: Sequence[str]) -> str | None:
        """Writes the files of both halves to a folder, and returns the commands that use them.

        Args:
            folder: the folder, which is created.
            models: names or paths of both models, as the engine loads them.

        Returns:
            The commands. None if halves are not recommended; then nothing is written.
        """
        if self.way is None:
            return None
        use, half = SERVING_ENGINES[self.engine], _default(self.engine, self.cluster, len(self.cluster) // 2)
        way = replace(half, layout=replace(half.layout, copies=2))
        first, second = models[::-1] if self.swapped else models
        lines = [use.command(way, model, folder / use.file).splitlines() for model in (first, second)]
        make_folder(folder)
        save(self.cluster, folder / "cluster.toml")
        for number, profile in enumerate(self.profiles):
            save(profile, folder / f"{number}.npz")
        for name, text in use.files(way, folder / use.file).items():
            write_text(folder / name, text)
        return "\n".join([*lines[0][: len(lines[0]) // 2], *lines[1][len(lines[1]) // 2 :]])


def _default(engine: str, cluster: Cluster, gpus: int) -> ServingWay:
    """The engine's default on so many GPUs of a cluster."""
    return SERVING_ENGINES[engine].default(gpus, per_server_of(cluster), nvlink=has_nvlink(cluster))


def recommend_for_two(
    cluster: Cluster, engine: str, profiles: Sequence[Profile], progress: Progress = no_progress
) -> TwoModels:
    """Recommends a way for two models to use the same GPUs: each on half, or one after the other on all.

    Both are served with the engine's default placement and exchange.

    Args:
        cluster: the GPUs.
        engine: one of SERVING_ENGINES.
        profiles: the traffic of each model, of any number of source ranks, with curves of the GPUs' kinds.
        progress: called with (name of the work, amount done, amount in all).

    Raises:
        BadInput: if the engine is unknown, or there are not two profiles.
        InfeasiblePlan: if the GPUs' memory does not hold a model.
    """
    check_one_of("engine", engine, SERVING_ENGINES)
    if len(profiles) != 2:
        raise BadInput(f"`profile`: expected one, or two of two models, found {len(profiles)}")
    dealt = tuple(profile.at_sources(len(cluster)) for profile in profiles)
    drawn = any(profile.provenance.get("tool") == SYNTHETIC_TOOL for profile in dealt)
    tokens = dealt[0].tokens_TLSE.sum() / dealt[0].top_k / dealt[0].layers / dealt[0].windows / len(cluster)
    batch = max(1, round(float(tokens)))
    orders = orders_of(_default(engine, cluster, len(cluster)))
    seconds, refusal, swapped = _simulated(cluster, dealt, batch, orders, progress)
    gains = {way: seconds[IN_SEQUENCE] / took_s for way, took_s in seconds.items()}
    return TwoModels(engine, cluster, dealt, drawn, batch, gains, refusal, swapped)


def _simulated(
    cluster: Cluster, profiles: Sequence[Profile], batch: int, orders: str, progress: Progress
) -> tuple[dict[str, float], str, bool]:
    """Simulates the same requests one model after the other, and on halves.

    Args:
        cluster, profiles: as in `recommend_for_two`, with one source rank per GPU.
        batch: tokens of each rank in a step.
        orders: of the engine's all-to-alls, one of SIMULATED_ORDERS.
        progress: called with (name of the work, ways done, ways in all).

    Returns:
        (seconds by way, reason why halves are not possible, whether they are faster with the first model on the second).

    Raises:
        InfeasiblePlan: if the GPUs' memory does not hold a model.
    """
    if (short := lacking_memory(cluster, profiles[:1])) is not None:
        raise InfeasiblePlan(short)
    requests_M, planned_M = (
        [_drawn_steps(profile, tokens, (number, at_least)) for number, profile in enumerate(_some_layers(cluster, profiles))]
        for at_least, tokens in enumerate((batch, max(batch, PLANNED_TOKENS)))
    )

    def alone_s(part: Cluster, model: int) -> float:
        """Returns the seconds of one model by the engine's default on some GPUs."""
        plan = engine_default(part, planned_M[model].at_sources(len(part)))
        return simulate_plan(plan, [requests_M[model].at_sources(len(part))], orders=orders).seconds

    def halves_s() -> tuple[float, bool]:
        """Returns the seconds of both models, each on a half; and whether the first is on the second half."""
        if len(cluster) % 2:
            raise InfeasiblePlan(f"cluster {cluster.name!r}: expected an even number of GPUs to split, found {len(cluster)}")
        size, server = sorted((len(cluster) // 2, per_server_of(cluster)))
        if server % size:
            raise InfeasiblePlan("engines serve on whole servers or on equal parts of them, which halves of these GPUs are not")
        half = len(cluster) // 2
        parts = [cluster.at_ranks(range(first, first + half)) for first in (0, half)]
        ways = [parts] if cluster.equal else [parts, parts[::-1]]
        both = [max(alone_s(part, model) for model, part in enumerate(each)) for each in ways]
        return min(both), both.index(min(both)) == 1

    progress(SHARING, 0, 2)
    seconds, refusal, swapped = {IN_SEQUENCE: sum(alone_s(cluster, model) for model in range(2))}, "", False
    progress(SHARING, 1, 2)
    try:
        seconds[HALVES], swapped = halves_s()
    except (InfeasiblePlan, BadInput) as error:  # BadInput: of a fabric that cannot be taken apart
        refusal = str(error)
    progress(SHARING, 2, 2)
    return seconds, refusal, swapped


def _some_layers(cluster: Cluster, profiles: Sequence[Profile]) -> list[Profile]:
    """Returns the profiles, of large models some evenly spaced layers, so that a way simulates about TRANSFERS transfers."""
    transfers = 2 * STEPS * sum(profile.layers for profile in profiles) * len(cluster) * max(1, len(cluster) - 1)
    if (part := TRANSFERS / transfers) >= 1:
        return list(profiles)
    return [profile.at_layers(evenly_spaced(profile.layers, max(1, int(part * profile.layers)))) for profile in profiles]


def _drawn_steps(profile: Profile, batch: int, seed: tuple[int, ...]) -> Profile:
    """Returns STEPS steps of `batch` tokens on each rank, drawn from a profile's traffic."""
    return drawn_windows(profile, np.full((STEPS, profile.sources), batch), np.random.default_rng([0, *seed, batch]))
