"""What counting where tokens go costs, how many tokens are enough, and drift: `python bench/profiling.py` writes
bench/results/profile-DATE.md, section by section."""

import datetime
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine
from transformers import AutoModelForCausalLM, OlmoeConfig

from aurora.errors import BadInput
from aurora.io import shipped
from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel, find_moe_layers, load_model
from aurora.models.prompts import Corpus
from aurora.planner.evaluate import drift
from aurora.profiler.import_routing import import_profile
from aurora.profiler.profile_model import profile_model, route_round
from aurora.runtime.distributed.launcher import start_fork_server
from aurora.types import ProfileOptions

ROOT = Path(__file__).parents[1]
RECORDS = Path(os.environ.get("AURORA_DATA", ROOT / "../shared/data"))
REPEATS = 21
WIDE = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 259, "pad_token_id": 0}  # fmt: skip
OLMOE = {"num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 1024}


def main() -> None:
    start_fork_server()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"# Profiling, {date}",
        "",
        f"`python bench/profiling.py` on {machine()}; torch {torch.__version__}, float32.",
        "",
    ]
    for section in (_memory, _overhead, _drift, _enough):
        lines += section()
        (ROOT / "bench" / "results" / f"profile-{date}.md").write_text("\n".join(lines).rstrip() + "\n")


def _overhead() -> list[str]:
    """Forward passes as they are, counted, and with every choice kept, in turn."""
    torch.manual_seed(0)
    wide = AutoModelForCausalLM.from_config(OlmoeConfig(**WIDE)).float().eval()
    models = [load_model(shipped(f"models/{name}")) for name in ("mixtral-topics", "qwen3moe-stdlib")]
    models.append(MoeModel("OLMoE, 4 layers of width 512", wide, None, find_moe_layers(wide), 8))
    lines = [
        "## What counting costs",
        "",
        f"One batch of 8 prompts, the ways in turn; medians of {REPEATS} turns, each beside its own plain passes.",
        "`counted`: experts counted by layer, as always;",
        "`kept`: and every token's choices, as with `--tokens`.",
        "The last column is how far the plain passes themselves are apart, between their quartiles.",
        "",
        "| model | passes | plain, ms | counted | kept | plain, spread |",
        "|---|---|---|---|---|---|",
    ]
    for model in models:
        for what, length, tokens in (("prefill of 128 tokens", 128, 1), ("16 of one token each", 1, 16)):
            prompts = [torch.randint(3, 259, (length,)).tolist() for _ in range(8)]
            ways: list[Callable[[], object]] = [
                lambda: _plain(model, prompts, tokens),  # noqa: B023
                lambda: route_round(model, [prompts], tokens, keep=False),  # noqa: B023
                lambda: route_round(model, [prompts], tokens, keep=True),  # noqa: B023
            ]
            took = _in_turn(ways)
            plain = statistics.median(took[0])
            low, _, high = statistics.quantiles(took[0], n=4)
            over = [statistics.median(other / own for other, own in zip(way, took[0], strict=True)) - 1 for way in took[1:]]
            cells = " | ".join(f"{each:+.1%}" for each in over)
            lines.append(f"| {model.name} | {what} | {plain * 1e3:.1f} | {cells} | {(high - low) / plain:.1%} |")
            print(lines[-1], flush=True)
    return [*lines, ""]


def _plain(model: MoeModel, prompts: list[list[int]], tokens: int) -> None:
    together = GreedyBatch(model.model, prompts, [tokens] * len(prompts), eos=None, pad=0)
    for _ in range(tokens):
        together.step()


def _in_turn(ways: list[Callable[[], object]]) -> list[list[float]]:
    took: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(REPEATS):
        for way, seconds in zip(ways, took, strict=True):
            began = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - began)
    return took


def _memory() -> list[str]:
    tokenizer = load_model(shipped("models/mixtral-topics")).tokenizer
    line = "the quick brown fox jumps over the lazy dog, and the dog does not mind\n"
    most = []
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in (2, 8):
            file = Path(folder) / "t.txt"
            file.write_text(line * (megabytes * 10**6 // len(line)))
            prompts = sum(1 for _ in Corpus(tokenizer, 259, [file], 128))
            most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    return [
        "## Memory",
        "",
        f"Reading text of 2 MB, then of 8 MB ({prompts} prompts), this process took at most {most[0]} and {most[1]} MiB.",
        "",
    ]


def _enough() -> list[str]:
    lines = [
        "## How many tokens are enough",
        "",
        "`aurora profile MODEL FILES --precision P --sources 4 --prompt-tokens 64 --batch 2`, the shipped models on this",
        "repository's own text.",
        "",
    ]
    texts = {
        "mixtral-topics": ["LICENSE", "README.md", "CHANGELOG.md"],
        "qwen3moe-stdlib": sorted(ROOT.glob("aurora/planner/*/*.py")),
    }
    for name, files in texts.items():
        for precision in (0.02, 0.01, 0.005):
            options = ProfileOptions(prompt_tokens=64, batch=2, precision=precision)
            made = profile_model(shipped(f"models/{name}"), [ROOT / file for file in files], options)
            lines.append(f"- {name}, {precision:.1%}: {made.provenance['precision']}")
            print(lines[-1], flush=True)
    return [*lines, ""]


def _drift() -> list[str]:
    lines = [
        "## Drift",
        "",
        "Recorded counts of OLMoE-1B-7B (three of its layers, 208,896 tokens a domain) dealt to 8 sources. The loss is of",
        "balanced groups, one a source rank.",
        "",
        "| planned for | then | total variation | by chance | overlap of the 8 hottest | loss | |",
        "|---|---|---|---|---|---|---|",
    ]
    file = RECORDS / "olmoe_mixtral_domains" / "counts_dev.csv"
    try:
        made = {
            domain: import_profile(
                [file], "csv", OLMOE, 8, wheres=[{"model": "olmoe-1b-7b-0924", "selection": "topk", "domain": domain}]
            )
            for domain in ("arxiv", "book", "c4", "github", "wikipedia")
        }
    except BadInput as error:
        return [*lines[:2], f"Not measured: {error}", ""]
    for before, after in (("c4", "c4"), ("c4", "wikipedia"), ("c4", "book"), ("c4", "github"), ("arxiv", "github")):
        found = drift(made[before], made[after])
        lines.append(
            f"| {before} | {after} | {found.variation_L.mean():.3f} | {found.noise:.4f} | {found.overlap_L.mean():.2f} | "
            f"{found.slowdown:.1%} | {'plan again' if found.replan else 'keep'} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
