"""aurora demo: a script of the other commands, which it prints as it goes: two models one after the other, then together."""

import io
import json
import os
import pydoc_data.topics
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from shlex import join
from typing import Any, NamedTuple

from aurora.cli.inputs import check_folder
from aurora.cli.options import verb
from aurora.cli.output import need_models, show, terminal
from aurora.io import load_cluster, write_text
from aurora.io.files import make_folder
from aurora.reports.formatting import percent, seconds
from aurora.reports.tables import Columns, Table, text
from aurora.types.arrays import gap

MODELS = ("mixtral-topics", "qwen3moe-stdlib")
PROMPT_TOKENS, PROMPTS, NEW_TOKENS = 128, 32, 4
PROFILED = 3  # times as many prompts are profiled as are served
CLUSTER = "demo-4"
HELD_OUT = 0.1  # the models were trained on all but the last tenth of their texts
REPEATS = 3
NAIVE = ["--place", "contiguous", "--assign", "contiguous", "--order", "all-at-once"]


class Way(NamedTuple):
    """Way of serving both models: a name, the plan's file, and more options of aurora run."""

    name: str
    plan: str
    more: tuple[str, ...] = ()


WAYS = (
    Way("one after the other, experts in sequence, all transfers at once", "naive", ("--interleave", "off")),
    Way("one after the other, by the plan", "plan", ("--interleave", "off")),
    Way("together, by the plan", "plan"),
)


@verb()
def demo(*, output: Path = Path("demo"), as_json: bool = False) -> None:
    """Serve two shipped models on four ranks of this machine, one after the other and together, by the commands that it prints.

    Args:
        output: folder for profiles, plans, traces and the report.
    """
    check_folder(output)
    need_models()
    make_folder(output)
    ranks = load_cluster(CLUSTER)
    if not as_json:
        terminal().print(
            f"Two MoE models, {len(ranks)} ranks as processes of this machine ({os.cpu_count()} cores), ports held to "
            f"{ranks.gpus[0].out_Bps / 1e6:g} MB/s each way; float32 on the CPU. Each way is measured {REPEATS} times.\n"
        )
        terminal().print(f"$ cd {output}")
    with chdir(output):
        ways = _serve(as_json, len(ranks))
    report = output / "report.html"
    show(as_json, {"output": output, "ways": ways}, _table(ways), _headline(ways), f"wrote {report}")


def _serve(silent: bool, ranks: int) -> list[dict[str, Any]]:
    """Profiles, plans and serves both models in each way, REPEATS times in turn, reports, and returns the ways' medians."""
    write_texts()
    for name in MODELS:
        given: list[object] = ["--sources", ranks, "--share", ranks, "--limit", PROFILED * PROMPTS]
        given += ["--max-new-tokens", NEW_TOKENS, "-o", f"{name}.npz"]
        _run(silent, "profile", name, "--text", f"{name}.txt", *given)
    profiles = [word for name in MODELS for word in ("--profile", f"{name}.npz")]
    for plan, more in {"plan": [], "naive": NAIVE}.items():
        _run(silent, "plan", "--cluster", CLUSTER, *profiles, *more, "-o", f"{plan}.json")
    served = [word for name in MODELS for word in ("--model", name, "--prompts", f"{name}.prompts.jsonl")]
    served += ["--max-new-tokens", str(NEW_TOKENS), "--transport", "shaped", "--compare"]
    runs: list[list[dict[str, Any]]] = [[] for _ in WAYS]
    for repeat in range(REPEATS):
        for number, way in enumerate(WAYS):
            trace = f"{way.plan}-{'in-turn' if way.more else 'together'}-{repeat}.npz"
            checked = ["--verify"] * (repeat == 0)
            runs[number].append(_run(silent, "run", f"{way.plan}.json", *served, *way.more, *checked, "--trace", trace))
    middle = [sorted(each, key=lambda run: run["comparison"]["measured_s"])[REPEATS // 2] for each in runs]
    best = min(middle[:-1], key=lambda run: run["comparison"]["measured_s"])
    _run(silent, "report", "plan.json", best["trace"], middle[-1]["trace"], "-o", "report.html")
    return [_measured(way, each, best["comparison"]["measured_s"]) for way, each in zip(WAYS, middle, strict=True)]


def write_texts() -> None:
    """Writes texts that each of MODELS was not trained on: one half to profile, and prompts of the other."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = (
        "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)),
        "\n".join(file.read_text(encoding="utf-8") for file in files),
    )
    for name, whole in zip(MODELS, texts, strict=True):
        held_out = whole[-int(len(whole) * HELD_OUT) :].encode("ascii", "ignore").decode()
        half = len(held_out) // 2
        write_text(Path(f"{name}.txt"), held_out[:half])
        starts = range(half, half + PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)
        lines = [json.dumps({"prompt": held_out[start : start + PROMPT_TOKENS]}) + "\n" for start in starts]
        write_text(Path(f"{name}.prompts.jsonl"), "".join(lines))


def _run(silent: bool, *words: object) -> dict[str, Any]:
    """Prints a command, runs it in this process, and returns the object that it prints with --json."""
    from aurora.cli.main import run_words

    said = [str(word) for word in words]
    if not silent:
        terminal().print(f"$ aurora {join(said)}", soft_wrap=True)
    with redirect_stdout(io.StringIO()) as printed:
        run_words([*said, "--json"])
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result


def _measured(way: Way, run: dict[str, Any], best_s: float) -> dict[str, Any]:
    """Returns the numbers of a way's median run, compared with the best way of serving one after the other."""
    predicted_s, measured_s = run["comparison"]["predicted_s"], run["comparison"]["measured_s"]
    times = {"predicted_s": predicted_s, "measured_s": measured_s, "error": gap(predicted_s, measured_s)}
    return {"way": way.name, **times, "speedup": best_s / measured_s}


def _table(ways: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the ways: predicted and measured seconds, and how much faster than the best of the first ones."""
    columns: Columns = {"way": text, "predicted": seconds, "measured": seconds, "error": percent, "speed-up": "{:.2f}x".format}
    caption = (
        f"medians of {REPEATS} runs; speed-up over the faster of serving one after the other; answers are those of the "
        "unmodified models"
    )
    return Table(columns, [tuple(way.values()) for way in ways], "the same prompts", caption)


def _headline(ways: Sequence[dict[str, Any]]) -> str:
    """Returns a sentence on what sharing the GPUs brings over the best of the other ways, or that it loses."""
    gain, best = ways[-1]["speedup"], max(ways[:-1], key=lambda way: way["speedup"])["way"]
    if gain < 1:
        return f"On this machine sharing the GPUs loses: {gain:.2f}x of the speed of {best}."
    return f"Sharing the GPUs is {gain:.2f}x as fast as {best}, the best of the other ways."
