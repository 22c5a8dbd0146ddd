"""aurora demo: profile, plan, simulate, run and report on the shipped models."""

import json
import os
import pydoc_data.topics
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from aurora.cli.inputs import check_folder, make_folder, need
from aurora.cli.options import Json
from aurora.cli.output import show, terminal
from aurora.errors import AuroraError, BadInput
from aurora.io import load_cluster, save, shipped, write_text
from aurora.types import Cluster, Plan, PlanOptions, Profile, ProfileOptions, RunOptions
from aurora.types.arrays import gap
from aurora.types.option_checks import LONGEST_S

MODELS = ("mixtral-topics", "qwen3moe-stdlib")
PROMPT_TOKENS, PROMPTS, NEW_TOKENS, BATCH = 128, 32, 4, 8
PLANNED = 3  # times as many prompts are planned for as are served; as many again are those that a prediction is made of
CLUSTER = shipped("clusters/demo-4.toml")
HELD_OUT = 0.1  # the models were trained on all but the last tenth of their texts


@dataclass(frozen=True)
class Way:
    """A way of serving both models.

    Attributes:
        slug: name in file names.
        name: name in tables.
        together: whether both models share the GPUs at the same time, or run one after the other.
        options: the options of its plan.
    """

    slug: str
    name: str
    together: bool
    options: PlanOptions


@dataclass
class DemoOutcome:
    """Result of a way of serving.

    Attributes:
        predicted_s, measured_s: seconds, summed over its runs.
        differences: answers that differ from those of the unchanged models.
    """

    predicted_s: float = 0.0
    measured_s: float = 0.0
    differences: int = 0

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return gap(self.predicted_s, self.measured_s)


NAIVE = PlanOptions("contiguous", "contiguous", "contiguous")
WAYS = (
    Way("random", "in turn, random order", False, replace(NAIVE, order="random")),
    Way("at-once", "in turn, all at once", False, replace(NAIVE, order="all-at-once")),
    Way("aurora", "together, planned", True, PlanOptions()),
)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for profiles, plans, traces and the report")] = Path(
        "demo"
    ),
    timeout: Annotated[float, typer.Option(help="seconds that a rank waits for a peer before a run is ended")] = 120.0,
    as_json: Json = False,
) -> None:
    """Serve two models on four ranks: one after the other with a naive placement and order, then sharing the GPUs by a plan."""
    if not 0 < timeout <= LONGEST_S:
        raise BadInput(f"`timeout`: expected more than zero and at most {LONGEST_S:g} seconds, found {timeout}")
    check_folder(output)
    need("torch", "transformers")
    need("jinja2", extra="report")
    from aurora.cli.progress import shown
    from aurora.cli.report import report_files
    from aurora.reports.inputs import Baseline

    cluster = load_cluster(CLUSTER)
    if not as_json:
        terminal().print(
            f"Two MoE models ({', '.join(MODELS)}), {len(cluster)} ranks as processes of this machine ({os.cpu_count()} "
            f"cores), ports held to {cluster.gpus[0].out_Bps / 1e6:g} MB/s each way over the shaped transport; fp32 on the CPU."
        )
    with shown() as progress:
        outcomes = serve_all(output, timeout, progress)
    traces = [output / f"{WAYS[-1].slug}.{kind}.npz" for kind in ("predicted", "measured")]
    first = outcomes[0]
    baseline = Baseline(WAYS[0].name, {"predicted": first.predicted_s, "measured": first.measured_s})
    report_files(output / f"{WAYS[-1].slug}.plan.json", traces, [], output / "report.html", "html", baseline)
    ways = [
        {"way": way.name, **asdict(outcome), "error": outcome.error, "speedup": gap(first.measured_s, outcome.measured_s) + 1}
        for way, outcome in zip(WAYS, outcomes, strict=True)
    ]
    holds = f"{output}/ holds profiles, plans, traces (predicted and measured), report.txt and report.html"
    show(as_json, {"output": output, "ways": ways}, outcome_table(outcomes), holds)
    if sum(outcome.differences for outcome in outcomes):
        raise AuroraError(f"demo: outputs differ from the plain models', see {output}")


def serve_all(output: Path, timeout: float, progress: Callable[[str, int, int], None]) -> list[DemoOutcome]:
    """Profile both models and serve in each of WAYS, leaving all files in the folder `output`; one DemoOutcome per way."""
    from aurora.reports.formatting import as_text
    from aurora.reports.plan_tables import plan_table, profile_table

    make_folder(output)
    cluster = load_cluster(CLUSTER)
    shutil.copy(CLUSTER, output / "cluster.toml")
    profiles = shipped_profiles(output, len(cluster), progress, (PLANNED + 1) * PROMPTS)
    planned = [each.first_windows(each.windows - NEW_TOKENS) for each in profiles]
    unseen = [each.at_windows(range(each.windows - NEW_TOKENS, each.windows)) for each in profiles]
    plans, outcomes = [], []
    for number, way in enumerate(WAYS):
        progress("serving", number, len(WAYS))
        plan, outcome = _serve(output, way, cluster, planned, unseen, timeout)
        plans.append(plan)
        outcomes.append(outcome)
    progress("serving", len(WAYS), len(WAYS))
    heading = f"aurora demo, {len(cluster)} ranks on {os.cpu_count()} cores"
    report = as_text([heading, *map(profile_table, profiles), plan_table(plans[-1]), outcome_table(outcomes)])
    write_text(output / "report.txt", report)
    return outcomes


def shipped_profiles(
    folder: Path, ranks: int, progress: Callable[[str, int, int], None], prompts: int = PROMPTS
) -> list[Profile]:
    """Returns profiles of MODELS on held-out text, for so many ranks; leaves profiles, texts and prompts in the folder."""
    _write_texts(folder)
    profiles = []
    for number, name in enumerate(MODELS):
        progress("profiling", number, len(MODELS))
        profiles.append(_profile(folder, name, ranks, prompts))
    progress("profiling", len(MODELS), len(MODELS))
    return profiles


def _write_texts(folder: Path) -> None:
    """Write, for each model, half of its held-out text to profile, and prompts from the other half."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = (
        "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)),
        "\n".join(file.read_text(encoding="utf-8") for file in files),
    )
    for name, text in zip(MODELS, texts, strict=True):
        held = text[-int(len(text) * HELD_OUT) :].encode("ascii", "ignore").decode()
        half = len(held) // 2
        write_text(folder / f"{name}.txt", held[:half])
        starts = range(half, half + PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)
        lines = [json.dumps({"prompt": held[start : start + PROMPT_TOKENS]}) + "\n" for start in starts]
        write_text(folder / f"{name}.prompts.jsonl", "".join(lines))


def _profile(folder: Path, name: str, ranks: int, prompts: int) -> Profile:
    from aurora.profiler.profile_model import profile_model

    options = ProfileOptions(ranks, PROMPT_TOKENS, BATCH, NEW_TOKENS, limit=prompts, share=ranks)
    profile = profile_model(shipped(f"models/{name}"), [folder / f"{name}.txt"], options)
    save(profile, folder / f"{name}.npz")
    return profile


def _serve(
    folder: Path, way: Way, cluster: Cluster, profiles: Sequence[Profile], unseen: Sequence[Profile], timeout: float
) -> tuple[Plan, DemoOutcome]:
    """Plan, simulate, serve over the shaped transport, compare with the plain models; leaves plans and traces in `folder`.

    What is predicted is the time of traffic `unseen` by the plan, as that of the prompts that are served is.
    """
    from aurora.models.loading import load_tokenizer
    from aurora.models.prompts import read_prompts
    from aurora.planner.plan import make_plan
    from aurora.planner.simulated_choice import with_time_slice
    from aurora.runtime.run import run, verify
    from aurora.simulator.interpreter import simulate_plan

    options = RunOptions(NEW_TOKENS, BATCH, "shaped", timeout, keep_logits=True)
    outcome = DemoOutcome()
    for indices in [(0, 1)] if way.together else [(0,), (1,)]:
        names = [MODELS[i] for i in indices]
        chosen = [profiles[i] for i in indices]
        plan = make_plan(cluster, chosen, way.options, [f"{name}.npz" for name in names])
        if way.together:
            plan = with_time_slice(plan, chosen)
        slug = "-".join([way.slug, *([] if way.together else names)])
        save(plan, folder / f"{slug}.plan.json")
        predicted = simulate_plan(plan, [unseen[i] for i in indices])
        save(predicted, folder / f"{slug}.predicted.npz")
        paths = [shipped(f"models/{name}") for name in names]
        prompts = [
            read_prompts(load_tokenizer(path), folder / f"{name}.prompts.jsonl")
            for path, name in zip(paths, names, strict=True)
        ]
        result = run(plan, paths, prompts, options)
        if result is None:
            raise BadInput("demo: starts its own ranks; run it without torchrun's environment variables")
        save(result.trace, folder / f"{slug}.measured.npz")
        outcome.predicted_s += predicted.seconds
        outcome.measured_s += result.trace.seconds
        outcome.differences += len(verify(result, paths, prompts, options))
    return plan, outcome


def outcome_table(outcomes: Sequence[DemoOutcome]) -> Table:
    """Returns a table of the ways: predicted and measured seconds, speed-up over the first way, whether answers are equal."""
    from aurora.reports.formatting import percent, right, seconds, speedup

    table = Table(
        Column("way", no_wrap=True),
        *right("predicted", "measured", "prediction error", "speed-up", "equal"),
        title="the same prompts, three ways",
        caption="in turn: one model after the other, experts placed contiguously; together: sharing the GPUs under the plan",
    )
    for way, outcome in zip(WAYS, outcomes, strict=True):
        table.add_row(
            way.name,
            seconds(outcome.predicted_s),
            seconds(outcome.measured_s),
            percent(outcome.error),
            speedup(outcomes[0].measured_s, outcome.measured_s),
            "no" if outcome.differences else "yes",
        )
    return table
