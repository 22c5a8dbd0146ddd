"""Two models on the same GPUs: each on a half of them, both on all in turns, or one after the other; and the commands."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.recommend import has_nvlink, per_server_of
from aurora.advisor.sharing import BY_EXCHANGE, BY_LAYER, HALVES, IN_SEQUENCE, WORTH, WaysCompared, compare_sharing
from aurora.errors import BadInput, check_one_of
from aurora.io import save
from aurora.io.files import make_folder, write_text
from aurora.planner.layers_in_threads import Progress, untold
from aurora.planner.workload.synthetic import SYNTHETIC_TOOL
from aurora.types import Cluster, Profile


@dataclass(frozen=True)
class TwoModels:
    """Ways in which two models may use the same GPUs, by simulated steps of their MoE layers.

    Attributes:
        engine: the engine, one of SERVING_ENGINES.
        cluster: the GPUs.
        profiles: the traffic of each.
        drawn: whether some of it was drawn, so that nothing is recommended.
        compared: the ways; gains are over one model after the other, each on all GPUs.
    """

    engine: str
    cluster: Cluster
    profiles: tuple[Profile, ...]
    drawn: bool
    compared: WaysCompared

    @property
    def way(self) -> str | None:
        """The way to take; None for one model after the other, or if traffic was drawn."""
        found = self.compared.winner
        return None if self.drawn or found.gain < WORTH else found.way

    def save(self, folder: Path, models: Sequence[str]) -> str | None:
        """Writes what the commands name to a folder, which is made, and returns the commands; None where there is no way."""
        if self.way is None:
            return None
        paths = [folder / f"{number}.npz" for number in range(len(models))]
        texts = {}
        if self.way == HALVES:
            use, half = SERVING_ENGINES[self.engine], len(self.cluster) // 2
            one = use.default(half, per_server_of(self.cluster), nvlink=has_nvlink(self.cluster))
            way = replace(one, layout=replace(one.layout, copies=2))
            lines = [use.command(way, model, folder / use.file).splitlines() for model in models]
            said, texts = [*lines[0][: len(lines[0]) // 2], *lines[1][len(lines[1]) // 2 :]], use.files(way, folder / use.file)
        else:
            given, plan = " ".join(f"--profile {path}" for path in paths), folder / "plan.json"
            said = [f"aurora plan --cluster {folder / 'cluster.toml'} {given} --time-slice {self.way.split()[-1]} -o {plan}"]
            said += [f"aurora run {plan} {' '.join(f'--model {shlex.quote(model)}' for model in models)} --prompts PROMPTS"]
        make_folder(folder)
        save(self.cluster, folder / "cluster.toml")
        for path, profile in zip(paths, self.profiles, strict=True):
            save(profile, path)
        for name, text in texts.items():
            write_text(folder / name, text)
        return "\n".join(said)


def recommend_for_two(cluster: Cluster, engine: str, profiles: Sequence[Profile], progress: Progress = untold) -> TwoModels:
    """Recommends how two models use the same GPUs: each a half of them, or both all, at once or one after the other.

    Args:
        cluster: the GPUs.
        engine: one of SERVING_ENGINES.
        profiles: the traffic of each, of any number of source ranks, with curves of the GPUs' kinds.
        progress: called with (what is being done, how much of it is done, how much there is in all).

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
    compared = compare_sharing(cluster, dealt, progress, (IN_SEQUENCE, *halves, BY_EXCHANGE, BY_LAYER))
    return TwoModels(engine, cluster, dealt, drawn, compared)
