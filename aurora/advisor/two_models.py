"""Recommends a way for two models to use the same GPUs: each on half of them, both on all of them, or one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import ServingWay
from aurora.advisor.recommend import engine_default, has_nvlink, orders_of, per_server_of
from aurora.advisor.sharing import (
    BY_EXCHANGE,
    HALVES,
    IN_SEQUENCE,
    SECOND_HALF,
    TIME_SLICED,
    WORTH,
    ServedAlone,
    WayOutcome,
    WaysCompared,
    compare_ways,
    winners,
)
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.placement.gpu_slots import USABLE
from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL
from aurora.errors import BadInput, check_one_of
from aurora.io import save
from aurora.io.files import make_folder, write_text
from aurora.planner.plan import make_plan, price
from aurora.planner.scenarios.colocated import share_bytes
from aurora.types import Cluster, Plan, PlanOptions, Profile

STEPS = 2  # simulated of each model


@dataclass(frozen=True)
class TwoModels:
    """Comparison of ways in which an engine serves two models on the same GPUs, by simulated steps of their MoE layers.

    Attributes:
        engine: the engine, one of SERVING_ENGINES.
        cluster: the GPUs.
        profiles: the traffic of each model.
        drawn: whether some of the traffic was drawn rather than recorded; then nothing is recommended.
        compared: the comparison; the reference of gains is the engine's default, one model after the other, each on all GPUs.
        plans: the plan of each model, if it is recommended that they share all GPUs; empty otherwise.
    """

    engine: str
    cluster: Cluster
    profiles: tuple[Profile, ...]
    drawn: bool
    compared: WaysCompared
    plans: tuple[Plan, ...] = ()

    @property
    def best(self) -> WayOutcome:
        """The simplest way within TIE of the fastest, of the ways that engines support."""
        gains = self.compared.gains
        best = winners({way: gains[way] for way in (IN_SEQUENCE, HALVES, BY_EXCHANGE) if way in gains})[0]
        return next(outcome for outcome in self.compared.outcomes if outcome.way == best)

    @property
    def way(self) -> str | None:
        """The recommended way; None if one model after the other is best, or if traffic was drawn."""
        return None if self.drawn or self.best.gain < WORTH else self.best.way

    def save(self, folder: Path, models: Sequence[str]) -> str | None:
        """Writes the files of the recommended way to a folder, and returns the commands that use them.

        Args:
            folder: the folder, which is created.
            models: names or paths of both models, as the engine loads them.

        Returns:
            The commands. None if no way is recommended; then nothing is written.
        """
        if self.way is None:
            return None
        use, texts = SERVING_ENGINES[self.engine], {}
        files = [folder / f"plan{number}.json" for number in range(len(models))]
        if self.way == HALVES:
            half = _default(self.engine, self.cluster, len(self.cluster) // 2)
            way = replace(half, layout=replace(half.layout, copies=2))
            first, second = models[::-1] if self.best.how == SECOND_HALF else models
            lines = [use.command(way, model, folder / use.file).splitlines() for model in (first, second)]
            said, texts = [*lines[0][: len(lines[0]) // 2], *lines[1][len(lines[1]) // 2 :]], use.files(way, folder / use.file)
        else:
            assert use.share is not None
            way = _default(self.engine, self.cluster, len(self.cluster))
            said = use.share(way, models, files, memory_shares(self.cluster, self.profiles))
        make_folder(folder)
        save(self.cluster, folder / "cluster.toml")
        for number, profile in enumerate(self.profiles):
            save(profile, folder / f"{number}.npz")
        for number, (plan, file) in enumerate(zip(self.plans, files, strict=False)):
            save(replace(plan, models=(replace(plan.models[0], profile_path=f"{number}.npz"),)), file)
        for name, text in texts.items():
            write_text(folder / name, text)
        return "\n".join(said)


def takes_turns(engine: str, cluster: Cluster) -> bool:
    """Returns whether an engine supports several server processes that take turns on the cluster's GPUs, all in one machine."""
    return SERVING_ENGINES[engine].share is not None and len({gpu.node for gpu in cluster.gpus}) == 1 < len(cluster)


def memory_shares(cluster: Cluster, profiles: Sequence[Profile]) -> list[float]:
    """Returns the part of a GPU's memory for each model's server: its weights, and an equal part of the remaining memory."""
    have = USABLE * min(gpu.memory_bytes for gpu in cluster.gpus)
    need_M = [share_bytes(profile, len(cluster)) for profile in profiles]
    rest = (have - sum(need_M)) / len(profiles)
    return [USABLE * (need + rest) / have for need in need_M]


def _default(engine: str, cluster: Cluster, gpus: int) -> ServingWay:
    """The engine's default on so many GPUs of a cluster."""
    return SERVING_ENGINES[engine].default(gpus, per_server_of(cluster), nvlink=has_nvlink(cluster))


def recommend_for_two(
    cluster: Cluster, engine: str, profiles: Sequence[Profile], progress: Progress = no_progress
) -> TwoModels:
    """Recommends a way for two models to use the same GPUs: each on half, or both on all, at once or one after the other.

    Models that do not share GPUs are served with the engine's default placement and exchange. Models that share are served with
    a plan of both and its orders, if the engine supports servers that take turns.

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
    size, server = sorted((max(1, len(cluster) // 2), per_server_of(cluster)))
    halves = (HALVES,) if server % size == 0 else ()  # which engines serve on: parts of servers, or whole ones
    ways = (*halves, *((TIME_SLICED, BY_EXCHANGE) if takes_turns(engine, cluster) else ()))
    alone = ServedAlone(engine_default, orders_of(_default(engine, cluster, len(cluster))), weighted=False)
    tokens = dealt[0].tokens_TLSE.sum() / dealt[0].top_k / dealt[0].layers / dealt[0].windows / len(cluster)
    batch = max(1, round(float(tokens)))
    compared = compare_ways(cluster, dealt, batch, steps=STEPS, ways=ways, progress=progress, alone=alone)
    two = TwoModels(engine, cluster, dealt, drawn, compared)
    if two.way != BY_EXCHANGE:
        return two
    joint = make_plan(cluster, dealt).models
    plans = (price(cluster, *pair, PlanOptions()) for pair in zip(dealt, (model.placement for model in joint), strict=True))
    return replace(two, plans=tuple(plans))
