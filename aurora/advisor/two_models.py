"""Recommends a way for two models to use the same GPUs: each on half of them, both on all of them, or one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import ServingWay
from aurora.advisor.recommend import engine_default, has_nvlink, orders_of, per_server_of
from aurora.advisor.sharing import SHARING
from aurora.algorithms.gpu_slots import USABLE
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.step_traffic import drawn_windows
from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL
from aurora.errors import BadInput, InfeasiblePlan, check_one_of
from aurora.io import save
from aurora.io.files import make_folder, write_text
from aurora.planner.choice import TIE
from aurora.planner.plan import make_plan, price
from aurora.planner.scenarios.colocated import lacking_memory, share_bytes
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Plan, PlanOptions, Profile
from aurora.types.arrays import evenly_spaced

IN_SEQUENCE, HALVES = "one after the other", "halves of the GPUs"
TIME_SLICED, BY_EXCHANGE = "time-sliced", "by exchange"  # both models on all GPUs, in turns of a step or of an exchange
TURNS = {TIME_SLICED: "step", BY_EXCHANGE: "exchange"}  # and their time slices
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
        left_out: the ways that are not possible, each with the reason.
        swapped: whether the first model is better on the second half, on GPUs of several kinds.
        plans: the plan of each model, if it is recommended that they share all GPUs; empty otherwise.
    """

    engine: str
    cluster: Cluster
    profiles: tuple[Profile, ...]
    drawn: bool
    batch: int
    gains: Mapping[str, float]
    left_out: Mapping[str, str]
    swapped: bool = False
    plans: tuple[Plan, ...] = ()

    @property
    def best(self) -> str:
        """The simplest way within TIE of the fastest, of the ways that engines support."""
        ways = [way for way in (IN_SEQUENCE, HALVES, BY_EXCHANGE) if way in self.gains]
        fastest = max(self.gains[way] for way in ways)
        return next(way for way in ways if self.gains[way] * TIE >= fastest)

    @property
    def way(self) -> str | None:
        """The recommended way; None if one model after the other is best, or if traffic was drawn."""
        return None if self.drawn or self.gains[self.best] < WORTH else self.best

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
            first, second = models[::-1] if self.swapped else models
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
    ways = (*halves, *(TURNS if takes_turns(engine, cluster) else ()))
    tokens = dealt[0].tokens_TLSE.sum() / dealt[0].top_k / dealt[0].layers / dealt[0].windows / len(cluster)
    batch = max(1, round(float(tokens)))
    orders = orders_of(_default(engine, cluster, len(cluster)))
    seconds, left_out, swapped = _simulated(cluster, dealt, batch, ways, orders, progress)
    gains = {way: seconds[IN_SEQUENCE] / took_s for way, took_s in seconds.items()}
    two = TwoModels(engine, cluster, dealt, drawn, batch, gains, left_out, swapped)
    if two.way != BY_EXCHANGE:
        return two
    joint = make_plan(cluster, dealt).models
    plans = (price(cluster, *pair, PlanOptions()) for pair in zip(dealt, (model.placement for model in joint), strict=True))
    return replace(two, plans=tuple(plans))


def _simulated(
    cluster: Cluster, profiles: Sequence[Profile], batch: int, ways: Sequence[str], orders: str, progress: Progress
) -> tuple[dict[str, float], dict[str, str], bool]:
    """Simulates the same requests one model after the other, and in each of `ways`.

    Args:
        cluster, profiles: as in `recommend_for_two`, with one source rank per GPU.
        batch: tokens of each rank in a step.
        ways: names of further ways.
        orders: of the engine's all-to-alls, one of SIMULATED_ORDERS.
        progress: called with (name of the work, ways done, ways in all).

    Returns:
        (seconds by way, reason by way that is not possible, whether halves are faster with the first model on the second).

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
        half = len(cluster) // 2
        parts = [cluster.at_ranks(range(first, first + half)) for first in (0, half)]
        ways = [parts] if cluster.equal else [parts, parts[::-1]]
        both = [max(alone_s(part, model) for model, part in enumerate(each)) for each in ways]
        return min(both), both.index(min(both)) == 1

    def turns_s(time_slice: str) -> float:
        """Returns the seconds of both models on all GPUs, by a plan of both."""
        if (short := lacking_memory(cluster, profiles)) is not None:
            raise InfeasiblePlan(short)
        joint = make_plan(cluster, planned_M)
        return simulate_plan(replace(joint, options=replace(joint.options, time_slice=time_slice)), requests_M).seconds

    progress(SHARING, 0, len(ways) + 1)
    seconds, left_out, swapped = {IN_SEQUENCE: sum(alone_s(cluster, model) for model in range(2))}, {}, False
    for number, way in enumerate(ways, 1):
        progress(SHARING, number, len(ways) + 1)
        try:
            if way == HALVES:
                seconds[way], swapped = halves_s()
            else:
                seconds[way] = turns_s(TURNS[way])
        except InfeasiblePlan as error:
            left_out[way] = str(error)
        except BadInput as error:  # of a fabric that cannot be taken apart
            if way != HALVES:
                raise
            left_out[way] = str(error)
    progress(SHARING, len(ways) + 1, len(ways) + 1)
    return seconds, left_out, swapped


def _some_layers(cluster: Cluster, profiles: Sequence[Profile]) -> list[Profile]:
    """Returns the profiles, of large models some evenly spaced layers, so that a way simulates about TRANSFERS transfers."""
    transfers = 2 * STEPS * sum(profile.layers for profile in profiles) * len(cluster) * max(1, len(cluster) - 1)
    if (part := TRANSFERS / transfers) >= 1:
        return list(profiles)
    return [profile.at_layers(evenly_spaced(profile.layers, max(1, int(part * profile.layers)))) for profile in profiles]


def _drawn_steps(profile: Profile, batch: int, seed: tuple[int, ...]) -> Profile:
    """Returns STEPS steps of `batch` tokens on each rank, drawn from a profile's traffic."""
    return drawn_windows(profile, np.full((STEPS, profile.sources), batch), np.random.default_rng([0, *seed, batch]))
