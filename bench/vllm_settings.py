"""Does the simulator name the fastest of three ways in vLLM? Prefills and decode steps, measured and predicted.

    .venv-vllm/bin/python bench/vllm_settings.py [--quick] [--rates MBIT...] [--keep FOLDER]

Needs what `make test-vllm` installs, and root (bench/network/net.py); elsewhere it says why it is skipped. Four hosts, DP4, a
random Qwen3-MoE; ports are held to one rate after the other while vLLM serves. A setting is a rate, a routing, a phase, and the
tokens of a rank in it. Routing: prompts of FEW words, which few experts serve, or of all words. Ways: `stock`, vLLM's
allgather and reduce-scatter; `online`, an order for each batch on vLLM's placement; `plan`, a plan for that routing. Each way
is one start of vLLM, `plan` one for each routing. Answers are drawn evenly of the same words, so that a decode step is routed
as prompts are.

Steps are so large that four engines on two cores do not spend most of them in Python, which takes 40 to 60 ms of a step here
and differs by a fifth between two starts of the same engine. Nothing is fitted to what is predicted. Compute is from the
plugin's records of a run apart of `online` (CALIBRATED tokens, other prompts, one rate), and so is what the simulator leaves
out (vllm_predictions.py: Predictions), from the same passes once more, not recorded. Routing is profiled on other prompts
than are served, and than plans are made for. Links are measured at each rate as `aurora measure links` does, and for `stock`
gloo's own all-to-all, by which it gathers and scatters. The named way is right if it is within TIE of the fastest measured
one, or the fastest measured one within TIE of it as predicted. Results: bench/results/vllm-settings-DATE.md.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "network"), str(HERE), str(HERE.parent)]  # network first: its hosts.py
from hosts import TORCH, ExchangeJob, all_ready, measure_after_links  # noqa: E402
from net import PAYLOAD, network, rate_commands  # noqa: E402
from protocol import DEEP, Results, options  # noqa: E402
from vllm import model, run  # bench/vllm.py  # noqa: E402
from vllm_predictions import (  # noqa: E402
    PROMPT,
    RANKS,
    ROUTINGS,
    WAYS,
    Measured,
    Predictions,
    Rounds,
    Setting,
    made_plan,
    routed,
    save_rounds,
)

from aurora.algorithms.network.measured_links import fit_link  # noqa: E402
from aurora.io import save  # noqa: E402
from aurora.profiler.link_timing import cluster_of  # noqa: E402
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.types import Cluster, Gpu  # noqa: E402

sys.path.insert(0, str(HERE / "network"))  # bench/vllm.py has put another hosts.py before the one that launched ranks import
HIDDEN, EXPERTS, LAYERS, TOP_K = 512, 16, 4, 2
RATES_MBIT, PREFILLS, DECODES = (60, 100, 150, 200), (64, 128, 256), (16, 32, 64)  # tokens of a rank
GATHERED_BYTES = tuple(1 << power for power in range(9, 21))  # that a rank sends each other one
REPETITIONS, STEPS = 4, 6  # of a setting; decode steps of a round
ALL, QUICK = (RATES_MBIT, tuple(ROUTINGS), PREFILLS, DECODES), ((200,), ("skewed",), (64, 256), (32,))
CALIBRATED_MBIT, CALIBRATED = 200, {"prefill": (32, 96, 192), "decode": (8, 48)}
TIE = 1.02
BETWEEN = """
import json, os, subprocess
note = json.loads(os.environ["ROUNDS"])[number]
if rank == 0:
    for command in note["commands"]:
        subprocess.run(command.split(), check=True)
for words in note["records"]:
    llm.collective_rpc("aurora", args=tuple(words))
"""


def answer_evenly(folder: Path) -> None:
    """Makes a model draw all words alike."""
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(1e-3)
    made.save_pretrained(folder)


def rounds_of(setting: Setting, repetitions: int) -> Iterator[tuple[Setting, list[list[int]], dict[str, object]]]:
    """The setting, prompts of all ranks and what is sampled, of each round that times it."""
    rng = np.random.default_rng([setting.tokens, len(setting.routing), len(setting.phase)])
    words = ROUTINGS[setting.routing]
    for _ in range(repetitions):
        decode = setting.phase == "decode"
        shape = (RANKS * setting.tokens, PROMPT) if decode else (RANKS, setting.tokens)
        sampling: dict[str, object] = {"max_tokens": 1 + STEPS if decode else 1, "temperature": 1.0}
        yield setting, rng.integers(words, size=shape).tolist(), sampling | {"allowed_token_ids": list(range(words))}


def served(
    folder: Path, name: str, settings: Sequence[Setting], aurora: dict[str, object], names: Sequence[str], repetitions: int
) -> Rounds:
    """The rounds of all settings in one start of vLLM. If it records, they come twice: not recorded the second time."""
    rounds = [made for setting in settings for made in rounds_of(setting, repetitions)]
    recorded = len(rounds) if "record" in aurora else 0
    rounds = [rounds[-1], *rounds, *rounds[:recorded]]  # one to warm up
    prompts, indices, notes, sampling = [], [], [], {}
    last_mbit, last_record = 0, ""
    for number, (setting, own, sampled) in enumerate(rounds):
        indices.append(list(range(len(prompts), len(prompts) + len(own))))
        prompts += own
        sampling[str(number)] = sampled
        records, record = [], f"{aurora['record']}/{setting.phase}-{setting.tokens}" if 0 < number <= recorded else ""
        if record != last_record:
            records = [["stop", last_record]] * bool(last_record) + [["start", record] if record else ["stop"]]
            last_record = record
        commands = rate_commands(RANKS, setting.mbit * 1e6, DEEP) if setting.mbit != last_mbit else []
        notes.append({"commands": commands, "records": records})
        last_mbit = setting.mbit
    job = {
        "model": str(folder / "model"), "prompts": prompts, "rounds": indices, "sampling": sampling, "between": BETWEEN,
        "environ": {"ROUNDS": json.dumps(notes)}, "additional_config": {"aurora": aurora}, "max_num_seqs": 64,
        "max_model_len": 512, "max_num_batched_tokens": 512,
    }  # fmt: skip
    run(folder / name, names, RANKS, job)
    ends_R = [json.loads((folder / name / f"answers-{rank}.json").read_text())["passes_s"] for rank in range(RANKS)]
    return [(setting, np.max(own_R, axis=0).tolist()) for (setting, *_), *own_R in zip(rounds, *ends_R, strict=True)][1:]


def measure(folder: Path, quick: bool, rates: Sequence[int] = ()) -> None:
    """Measures what the folder lacks, and leaves it there with records, plans and the model."""
    usual, routings, prefills, decodes = QUICK if quick else ALL
    rates = rates or usual
    repetitions = 3 if quick else REPETITIONS
    sizes = [("prefill", tokens) for tokens in prefills] + [("decode", tokens) for tokens in decodes]
    settings = [Setting(mbit, routing, *size) for mbit in rates for routing in routings for size in sizes]
    apart = [Setting(CALIBRATED_MBIT, "skewed", phase, tokens) for phase, some in CALIBRATED.items() for tokens in some]
    if not (folder / "model").exists():
        model(folder / "model", HIDDEN, EXPERTS, LAYERS, TOP_K)
        answer_evenly(folder / "model")
    starts: list[tuple[str, list[Setting], dict[str, object]]] = [
        ("apart", apart, {"order": "online", "record": str(folder / "records")}),
        ("stock", settings, {}),
        ("online", settings, {"order": "online"}),
    ]
    for routing in routings:
        own = [setting for setting in settings if setting.routing == routing]
        starts.append((f"plan-{routing}", own, {"order": "plan", "plan": str(folder / f"plan-{routing}.json")}))
    for name, some, config in starts:
        if not (folder / f"rounds-{name}.json").exists():
            with network([min(rates) * 1e6] * RANKS, DEEP) as names:
                rounds = served(folder, name, some, config, names, repetitions)
            if name == "apart":
                save_rounds(rounds[len(rounds) // 2 :], folder / "rounds-bare.json")
                rounds = rounds[: len(rounds) // 2]
            save_rounds(rounds, folder / f"rounds-{name}.json")
            print(f"served: {name}", flush=True)
        if name == "apart":
            for routing in routings:
                if not (folder / f"plan-{routing}.json").exists():
                    profile = routed(folder, routing)
                    save(made_plan(profile), folder / f"plan-{routing}.json")
    for mbit in sorted({*rates, CALIBRATED_MBIT}):
        if not (folder / f"cluster-{mbit}.toml").exists():
            for name, found in zip(("cluster", "gathers"), links(mbit), strict=True):
                save(found, folder / f"{name}-{mbit}.toml")
            print(f"links at {mbit} Mbit/s", flush=True)


def links(mbit: int) -> tuple[Cluster, Cluster]:
    """The hosts as measured, and with the start-up and the rate of gloo's own all-to-all in place of theirs."""
    rates_Bps = np.full(RANKS, mbit / 8 * 1e6 * PAYLOAD)
    jobs = [ExchangeJob("", TORCH, size * (1 - np.eye(RANKS, dtype=np.int64))) for size in GATHERED_BYTES]
    with network([mbit * 1e6] * RANKS, DEEP) as names, tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "meeting")
        found = launch(measure_after_links, RANKS, names, place, jobs, rates_Bps, REPETITIONS)
    cluster = cluster_of(found[0][1], [Gpu(f"host{rank}-0", "cpu", rank, 1.0, 1.0, 10**10) for rank in range(RANKS)])
    seconds = [float(np.median(each)) for each in all_ready([spans for spans, _ in found])]
    fit = fit_link((RANKS - 1) * np.array(GATHERED_BYTES), seconds)
    port = {"out_Bps": fit.rate_Bps, "in_Bps": fit.rate_Bps, "startup_s": fit.startup_s}
    return cluster, replace(cluster, gpus=tuple(replace(gpu, **port) for gpu in cluster.gpus))


def table(found: Measured) -> list[str]:
    """A row for each setting, and how often the simulator named the fastest way."""
    ways = [f"{way}: measured, ms | predicted, ms | error" for way in WAYS]
    lines = [f"| Mbit/s | routing | phase | tokens of a rank | {' | '.join(ways)} | fastest | named | right |"]
    lines.append("|---" * (7 + 3 * len(WAYS)) + "|")
    predicted_s = Predictions(found)
    errors: dict[tuple[str, str], list[float]] = {}
    rights, strict = [], []
    for setting, ways_found in groupby(sorted(found.seconds), key=lambda key: key[0]):
        took = {way: float(np.median(found.seconds[setting, way])) for _, way in ways_found}
        said = {way: predicted_s(setting, way) for way in took}
        best, named = min(took, key=lambda way: took[way]), min(said, key=lambda way: said[way])
        strict.append(best == named)
        rights.append(took[named] <= TIE * took[best] or said[best] <= TIE * said[named])
        cells = []
        for way in WAYS:
            errors.setdefault((way, setting.phase), []).append(said[way] / took[way] - 1)
            cells += [f"{took[way] * 1e3:.1f}", f"{said[way] * 1e3:.1f}", f"{said[way] / took[way] - 1:+.0%}"]
        row = [*setting, *cells, best, named, "yes" if rights[-1] else "no"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    every = np.abs([error for some in errors.values() for error in some])
    right = f"The named way is right in {sum(rights)} of {len(rights)} settings ({np.mean(rights):.0%})"
    off = f"Errors: median {np.median(every):.1%}, 90th percentile {np.quantile(every, 0.9):.1%}."
    lines += ["", f"{right}; it is the fastest, without ties, in {sum(strict)}. {off}", ""]
    lines += ["| way | phase | median error | 90th percentile | mean with its sign |", "|---|---|---|---|---|"]
    for (way, phase), some in sorted(errors.items()):
        off = np.abs(some)
        lines.append(f"| {way} | {phase} | {np.median(off):.1%} | {np.quantile(off, 0.9):.1%} | {np.mean(some):+.1%} |")
    return [*lines, "", *predicted_s.lines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three settings at one rate")
    parser.add_argument("--rates", type=int, nargs="+", default=(), metavar="MBIT", help="of ports, in this sequence")
    parser.add_argument("--keep", type=Path, help="a folder that keeps what is measured; what it has is not measured again")
    chosen = options(parser)
    results = Results("vllm-settings", "Predictions of three ways in vLLM", chosen.out)
    with nullcontext(chosen.keep) if chosen.keep else tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        folder.mkdir(exist_ok=True)
        measure(folder, chosen.quick, chosen.rates)
        lines = table(Measured.read(folder))
    about = (
        f"Ports of {RANKS} hosts are held to a rate; hidden {HIDDEN}, {EXPERTS} experts, top-{TOP_K}, {LAYERS} layers, fp32."
    )
    at = f"ports of {', '.join(map(str, chosen.rates))} Mbit/s" if chosen.rates else "all settings"
    results.add("quick" if chosen.quick else at, *lines, "", about)


if __name__ == "__main__":
    main()
