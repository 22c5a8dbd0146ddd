"""vLLM with and without the plugin: time of a prefill and of a decode step, on hosts whose ports are held to a rate.

    .venv-vllm/bin/python bench/vllm.py [--ranks 4] [--mbit 400] [--repetitions 5] [--tokens 192]
    .venv-vllm/bin/python bench/vllm.py --hooks

Needs what `make test-vllm` installs; root, for the hosts (bench/network/net.py); without it ranks meet over loopback, whose
rate nobody holds. One expert-parallel rank a host, data parallel, a random Qwen3-MoE whose network takes about as long as its
compute. `stock` is vLLM's allgather and reduce-scatter with the same repairs of its CPU back end. Every configuration is a set
of processes of its own; within one, a prefill and NEW decode steps are timed by turns, and the slowest rank counts. Medians and
ranges over repetitions, after one to warm up. Results: bench/results/vllm-DATE.md.

`--hooks` instead: CPU time inside the plugin's hooks (hook_stopwatch.py) over the time of a step, on two ranks with the
watchdog on: of tiny models of 4 and 16 layers, without a record, with one, and with half and double of `SAMPLED`. Recording is
what RECORDS take beyond the same model without a record; its share is that of a decode step of DECODE_S. The others
name stuck ranks. A step counts as the CPU time of its process, which is less than its time on the wall. Threads and the
stopwatch's own time are shown apart. Results: bench/results/vllm-hooks-DATE.md.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "network"), str(HERE.parent)]
from machine import machine  # noqa: E402
from net import network, refusal  # noqa: E402

import tests.integrations  # noqa: E402, F401  # what vLLM lacks on CPUs
from aurora.io import save  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.profiler.merge_records import load_records  # noqa: E402
from aurora.types import Cluster, Gpu, PlanOptions  # noqa: E402

NEW = 8
STEPS, WARM = 64, 17  # of --hooks: tokens of an answer, rounds before those that are measured: records are sampled by then
RECORDS = ("execute_model", "sample_tokens", "forward_modular", "capture")  # hooks that record, among others
DECODE_S = 0.01  # of a step on a GPU, of which recording may take half a percent
LIMIT_S = 1200
ENGINE = HERE.parent / "tests" / "integrations" / "engine.py"
ENVIRON = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def model(folder: Path, hidden: int, experts: int, layers: int = 4, top_k: int = 2, width: int = 64) -> None:
    """A random checkpoint with more bytes between ranks than work on them."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=256,
        intermediate_size=96, moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in made.parameters():
            if tensor.ndim > 1:
                tensor.normal_(0, 0.15)
    made.save_pretrained(folder)


@contextmanager
def hosts(ranks: int, mbit: float) -> Iterator[list[str] | None]:
    """Namespaces, or None where there is only loopback."""
    why = refusal()
    if why is not None or ranks == 1:
        yield None
        return
    with network([mbit * 1e6] * ranks, 16 << 20) as names:
        yield names


def run(folder: Path, names: Sequence[str] | None, ranks: int, job: dict[str, object]) -> list[list[dict[str, float]]]:
    """By rank and repetition: seconds of the prefill and of all decode steps."""
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"dp": ranks, "new_tokens": NEW, "timed": True, **job}))
    processes = []
    for rank in range(ranks):
        meet = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 29741}
        environ = {**os.environ, **ENVIRON, **({k: str(v) for k, v in meet.items()} if ranks > 1 else {})}
        inside: list[str] = []
        if names is not None:
            inside = ["ip", "netns", "exec", names[rank]]
            environ |= {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": f"10.78.0.{rank + 1}"}
        elif ranks > 1:
            environ |= {"MASTER_ADDR": "127.0.0.1"}
        with (folder / f"log-{rank}").open("w") as log:
            command = [*inside, sys.executable, str(ENGINE), str(folder / "job.json")]
            processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{folder.name}: exit codes {codes}\n{(folder / 'log-0').read_text()[-2000:]}")
    return [json.loads((folder / f"answers-{rank}.json").read_text())["times"] for rank in range(ranks)]


def answers(folder: Path, ranks: int) -> dict[str, list[int]]:
    """The tokens of each prompt's answer."""
    found = [json.loads((folder / f"answers-{rank}.json").read_text())["answers"] for rank in range(ranks)]
    return {prompt: answer["tokens"] for each in found for prompt, answer in each.items()}


def slowest(times_R: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Of each repetition but the first: the seconds of the rank that took longest."""
    return [{phase: max(each[phase] for each in ranks) for phase in ranks[0]} for ranks in list(zip(*times_R, strict=True))[1:]]


def row(name: str, times: list[dict[str, float]], base: list[dict[str, float]]) -> str:
    cells = []
    for phase, steps in (("prefill", 1), ("decode", NEW - 1)):
        found, other = (np.array([seconds[phase] for seconds in each]) * 1e3 / steps for each in (times, base))
        middle = statistics.median(found)
        cells.append(f"{middle:.3g} ({found.min():.3g}-{found.max():.3g}) | {statistics.median(other) / middle:.2f} x")
    return f"| {name} | {' | '.join(cells)} |"


def hooks(folder: Path) -> Iterator[str]:
    """Yields the rows of a table: the share of the plugin's hooks in steps, by model and rank."""
    yield "| model | rank | steps | step, ms of CPU (wall) | hooks, us | record, us | share | threads | stopwatch | by hook |"
    yield "|---" * 10 + "|"
    without_s: dict[tuple[int, int], float] = {}
    watch = f"import sys; sys.path.append({str(HERE)!r}); import hook_stopwatch"
    for layers, sampled in ((4, 0), (4, 16), (4, 8), (4, 32), (16, 0), (16, 16)):
        name = f"{layers} layers, " + (f"a pass of {sampled} timed" if sampled else "no record")
        record = {"record": str(folder / f"{name} seen"), "record_every_s": 60} if sampled else {"required": True}
        model(folder / name, 64, 16, layers)
        job = {
            "model": str(folder / name), "prompts": [[1 + n] * 8 for n in range(8)], "repeat": 21, "new_tokens": STEPS,
            "before": f"{watch}; hook_stopwatch.install({sampled})",
            "between": f"import hook_stopwatch; number == {WARM} and hook_stopwatch.begin()",
            "after": f"import hook_stopwatch; hook_stopwatch.save({str(folder / name)!r})",
            "additional_config": {"aurora": record},
        }  # fmt: skip
        run(folder / f"{name} run", None, 2, job)
        for rank in range(2):
            found = json.loads(Path(f"{folder / name}-{rank}.json").read_text())
            step_s, wall_s, threads_s = (found[each] / found["steps"] for each in ("cpu_s", "wall_s", "threads_s"))
            spent_s = {each: spent - found["stopwatch_s"][each] for each, spent in found["hooks_s"].items()}
            own_s, hooks_s = sum(found["stopwatch_s"].values()), sum(spent_s.values())
            recording_s = sum(spent_s.get(each, 0.0) for each in RECORDS)
            without_s |= {} if sampled else {(layers, rank): recording_s}
            record_s = recording_s - without_s[layers, rank]
            most = sorted(spent_s, key=spent_s.__getitem__, reverse=True)
            cells = [name, rank, found["steps"], f"{step_s * 1e3:.1f} ({wall_s * 1e3:.1f})", f"{hooks_s * 1e6:.0f}"]
            cells += [f"{record_s * 1e6:.0f}", f"{record_s / DECODE_S:.2%}", f"{threads_s * 1e6:.0f}", f"{own_s * 1e6:.0f}"]
            cells.append(", ".join(f"{each} {spent_s[each] * 1e6:.0f}" for each in most))
            yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=192, help="of the prompt of each rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hooks", action="store_true", help="time inside the plugin's hooks instead")
    args = parser.parse_args()
    if args.hooks:
        with tempfile.TemporaryDirectory() as temporary:
            lines = [f"# Time in the plugin's hooks in vLLM, {datetime.date.today()}", "", f"{machine()}.", ""]
            for row_of_rank in hooks(Path(temporary)):
                lines.append(row_of_rank)
                write("vllm-hooks", [*lines, "", f"Load of the machine: {os.getloadavg()[0]:.1f}."])
        return
    rng = np.random.default_rng(0)
    prompts = [rng.choice(12, args.tokens).tolist() for _ in range(args.ranks)]  # few words: skewed
    lines = [f"# vLLM with the plugin, {datetime.date.today()}", "", f"{machine()}.", ""]
    with tempfile.TemporaryDirectory() as temporary, hosts(args.ranks, args.mbit) as names:
        folder = Path(temporary)
        model(folder / "model", args.hidden, args.experts)
        where = f"hosts of {args.mbit:g} Mbit/s" if names else "processes over loopback"
        lines.append(f"{args.ranks} {where}, DP{args.ranks}, prompts of {args.tokens} tokens, hidden {args.hidden}, fp32:")
        shared = {"model": str(folder / "model"), "prompts": prompts, "repeat": args.repetitions + 1, "max_model_len": 512}
        shared |= {"max_num_batched_tokens": 512}

        def served(name: str, settings: dict[str, object], **more: object) -> list[dict[str, float]]:
            return slowest(run(folder / name, names, args.ranks, {**shared, "additional_config": {"aurora": settings}, **more}))

        stock = served("stock", {})
        seen = str(folder / "seen")
        online = served("online", {"order": "online", "record": seen}, commands=[["write"]])
        rate = args.mbit * 1e6 / 8 if names else 1e9
        cluster = Cluster("hosts", tuple(Gpu(f"host{i}", "cpu", i, rate, rate, 10**10) for i in range(args.ranks)))
        plan = make_plan(cluster, [load_records(Path(seen))], PlanOptions())
        save(plan, folder / "plan.json")
        planned = served("planned", {"plan": str(folder / "plan.json"), "order": "plan"})
        lines += ["", "| all-to-all | prefill, ms | against stock | decode step, ms | against stock |", "|---|---|---|---|---|"]
        lines += [row("stock", stock, stock), row("online, vLLM's placement", online, stock)]
        lines += [row("plan", planned, stock)]
    write("vllm", lines)


def write(name: str, lines: Sequence[str]) -> None:
    text = "\n".join(lines) + "\n"
    (HERE / "results" / f"{name}-{datetime.date.today()}.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
