"""aurora demo: profile, plan, simulate, run and report on the shipped models."""

import json
import os
import pydoc_data.topics
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from rich.table import Column, Table

import aurora
from aurora.cli.inputs import check_folder
from aurora.cli.output import progress_bars, show, terminal
from aurora.errors import AuroraError, BadInput, need
from aurora.io import load_cluster, save, shipped, write_text
from aurora.io.files import make_folder
from aurora.reports.formatting import percent, right, seconds, speedup
from aurora.types import PlanOptions, Profile, ProfileOptions, RunOptions
from aurora.types.arrays import gap
from aurora.types.options import LONGEST_S, OptionField

MODELS = ("mixtral-topics", "qwen3moe-stdlib")
PROMPT_TOKENS, PROMPTS, NEW_TOKENS, BATCH = 128, 32, 4, 8
PLANNED = 3  # times as many prompts are planned for as are served; as many again are those that a prediction is made of
CLUSTER = shipped("clusters/demo-4.toml")
HELD_OUT = 0.1  # the models were trained on all but the last tenth of their texts


class Way(NamedTuple):
    """Way of serving both models.

    Args:
        slug: name in file names.
        name: name in tables.
        together: True: both models share the GPUs at the same time; False: they run one after the other.
        options: options of its plan.
    """

    slug: str
    name: str
    together: bool
    options: PlanOptions


@dataclass
class DemoOutcome:
    """Result of one way of serving.

    Attributes:
        predicted_s, measured_s: seconds, summed over its runs.
        differences: number of answers that differ from those of the unmodified models.
    """

    predicted_s: float = 0.0
    measured_s: float = 0.0
    differences: int = 0

    @property
    def error(self) -> float:
        """predicted_s / measured_s - 1."""
        return gap(self.predicted_s, self.measured_s)


WAYS = (
    Way("random", "in turn, random order", False, PlanOptions("contiguous", "contiguous", "contiguous", "random")),
    Way("at-once", "in turn, all at once", False, PlanOptions("contiguous", "contiguous", "contiguous", "all-at-once")),
    Way("aurora", "together, planned", True, PlanOptions()),
)


def demo(
    *,
    output: Path = Path("demo"),
    timeout: Annotated[float, OptionField(above=0, most=LONGEST_S)] = 120.0,
    as_json: bool = False,
) -> None:
    """Serve two models on four ranks: one after the other with a naive placement and order, then sharing the GPUs by a plan.

    Args:
        output: folder for profiles, plans, traces and the report.
        timeout: end a run if a rank waits this many seconds for a peer.
    """
    check_folder(output)
    need("torch", "transformers")
    need("jinja2", extra="report")
    from aurora.cli.report import report_files
    from aurora.reports.inputs import Baseline

    cluster = load_cluster(CLUSTER)
    if not as_json:
        terminal().print(
            f"Two MoE models ({', '.join(MODELS)}), {len(cluster)} ranks as processes of this machine ({os.cpu_count()} "
            f"cores), ports held to {cluster.gpus[0].out_Bps / 1e6:g} MB/s each way over the shaped transport; fp32 on the CPU."
        )
    with progress_bars() as progress:
        outcomes = serve_all(output, timeout, progress)
    slug, first = WAYS[-1].slug, outcomes[0]
    traces = [output / f"{slug}.{kind}.npz" for kind in ("predicted", "measured")]
    baseline = Baseline(WAYS[0].name, {"predicted": first.predicted_s, "measured": first.measured_s})
    report_files(output / f"{slug}.plan.json", traces, [], output / "report.html", "html", baseline)
    ways = [
        {"way": way.name, **asdict(outcome), "error": outcome.error, "speedup": gap(first.measured_s, outcome.measured_s) + 1}
        for way, outcome in zip(WAYS, outcomes, strict=True)
    ]
    holds = f"{output}/ holds profiles, plans, traces (predicted and measured) and report.html"
    show(as_json, {"output": output, "ways": ways}, outcome_table(outcomes), holds)
    if sum(outcome.differences for outcome in outcomes):
        raise AuroraError(f"demo: outputs differ from the plain models', see {output}")


def serve_all(output: Path, timeout: float, progress: Callable[[str, int, int], None]) -> list[DemoOutcome]:
    """Profile both models, serve them in each of WAYS, and return one DemoOutcome per way; all files are in `output`."""
    make_folder(output)
    shutil.copy(CLUSTER, output / "cluster.toml")
    ranks = len(load_cluster(CLUSTER))
    profiles = shipped_profiles(output, ranks, progress, (PLANNED + 1) * PROMPTS)
    outcomes = []
    for number, way in enumerate(WAYS):
        progress("serving", number, len(WAYS))
        outcomes.append(DemoOutcome())
        for models in [(0, 1)] if way.together else [(0,), (1,)]:
            _serve(output, way, models, profiles, timeout, outcomes[-1])
    progress("serving", len(WAYS), len(WAYS))
    return outcomes


def shipped_profiles(
    folder: Path, ranks: int, progress: Callable[[str, int, int], None], prompts: int = PROMPTS
) -> list[Profile]:
    """Returns profiles of MODELS on held-out text, for `ranks` ranks; writes profiles, texts and prompts to `folder`."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = (
        "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)),
        "\n".join(file.read_text(encoding="utf-8") for file in files),
    )
    profiles = []
    for number, (name, text) in enumerate(zip(MODELS, texts, strict=True)):
        progress("profiling", number, len(MODELS))
        held_out = text[-int(len(text) * HELD_OUT) :].encode("ascii", "ignore").decode()
        half = len(held_out) // 2  # to profile; prompts are from the other half
        write_text(folder / f"{name}.txt", held_out[:half])
        starts = range(half, half + PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)
        lines = [json.dumps({"prompt": held_out[start : start + PROMPT_TOKENS]}) + "\n" for start in starts]
        write_text(folder / f"{name}.prompts.jsonl", "".join(lines))
        profiles.append(_profile(folder, name, ranks, prompts))
    progress("profiling", len(MODELS), len(MODELS))
    return profiles


def _profile(folder: Path, name: str, ranks: int, prompts: int) -> Profile:
    options = ProfileOptions(ranks, PROMPT_TOKENS, BATCH, NEW_TOKENS, limit=prompts, share=ranks)
    profile = aurora.profile(shipped(f"models/{name}"), [folder / f"{name}.txt"], options)
    save(profile, folder / f"{name}.npz")
    return profile


def _serve(
    folder: Path, way: Way, models: tuple[int, ...], profiles: Sequence[Profile], timeout: float, outcome: DemoOutcome
) -> None:
    """Plans, simulates, serves over the shaped transport, and compares with the plain models; adds to `outcome`.

    Leaves plan and traces in `folder`. What is predicted is the time of traffic that was not planned for, as that of the
    prompts that are served was not.
    """
    from aurora.models.loading import load_tokenizer
    from aurora.models.prompts import read_prompts
    from aurora.runtime.run import verify

    options = RunOptions(NEW_TOKENS, BATCH, "shaped", timeout, keep_logits=True)
    names = [MODELS[model] for model in models]
    planned = [profiles[model].first_windows(profiles[model].windows - NEW_TOKENS) for model in models]
    unseen = [profiles[model].at_windows(range(profiles[model].windows)[-NEW_TOKENS:]) for model in models]
    files = [f"{name}.planned.npz" for name in names]
    for file, traffic in zip(files, planned, strict=True):
        save(traffic, folder / file)
    plan = aurora.plan(load_cluster(CLUSTER), planned, way.options, profile_paths=files)
    slug = "-".join([way.slug, *([] if way.together else names)])
    save(plan, folder / f"{slug}.plan.json")
    predicted = aurora.simulate(plan, unseen)
    save(predicted, folder / f"{slug}.predicted.npz")
    paths = [shipped(f"models/{name}") for name in names]
    prompts = [read_prompts(load_tokenizer(path), folder / f"{path.name}.prompts.jsonl") for path in paths]
    result = aurora.run(plan, paths, prompts, options)
    if result is None:
        raise BadInput("demo: starts its own ranks; run it without torchrun's environment variables")
    save(result.trace, folder / f"{slug}.measured.npz")
    outcome.predicted_s += predicted.seconds
    outcome.measured_s += result.trace.seconds
    outcome.differences += len(verify(result, paths, prompts, options))


def outcome_table(outcomes: Sequence[DemoOutcome]) -> Table:
    """Returns a table of WAYS: predicted and measured seconds, speed-up over the first way, and differing answers."""
    table = Table(
        Column("way", no_wrap=True),
        *right("predicted", "measured", "prediction error", "speed-up", "equal"),
        title="the same prompts, three ways",
        caption="in turn: one model after the other, experts placed contiguously; together: sharing the GPUs under the plan",
    )
    for way, outcome in zip(WAYS, outcomes, strict=True):
        times = seconds(outcome.predicted_s), seconds(outcome.measured_s), percent(outcome.error)
        gain = speedup(outcomes[0].measured_s, outcome.measured_s)
        table.add_row(way.name, *times, gain, "no" if outcome.differences else "yes")
    return table
