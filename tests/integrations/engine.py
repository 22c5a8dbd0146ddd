"""One process of a real vLLM on the CPU, alone or one of torchrun's: `python engine.py JOB.json` writes answers beside the job.

It imports nothing of the tests, so that it runs in the environment that has vLLM.
"""

import atexit
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_ROUNDS = 200  # of one kind of prompts


def main(path: Path) -> None:
    job: dict[str, Any] = json.loads(path.read_text())
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ |= job.get("environ", {}) | job.get(f"environ_{rank}", {})
    from vllm import LLM, SamplingParams, TokensPrompt

    for statement in (job.get("before"), job.get(f"before_{rank}")):
        if statement:
            exec(statement, {})
    dp = job.get("dp", 1)
    spread = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": ranks // dp} if ranks > 1 else {}
    spread |= {"data_parallel_size": dp} if dp > 1 else {}
    llm = LLM(
        model=job["model"],
        enable_expert_parallel=ranks > 1,
        enforce_eager=job.get("eager", True),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=job.get("max_model_len", 256),
        max_num_seqs=job.get("max_num_seqs", 8),
        max_num_batched_tokens=job.get("max_num_batched_tokens", 256),
        enable_prefix_caching=False,
        additional_config=job.get("additional_config", {}),
        **spread,
        **job.get("llm", {}),
    )
    replica, busy = rank * dp // ranks, [r for r in range(dp) if r not in job.get("idle", [])]
    params = {"temperature": 0.0, "max_tokens": job["new_tokens"], "ignore_eos": True, "logprobs": 1}
    answers: dict[int, Any] = {}
    times, passes_s = [], []
    for number, asked in enumerate(rounds(job, rank)):
        chosen = list(asked)[busy.index(replica) :: len(busy)] if replica in busy else []
        if number and job.get("dies") == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if "between" in job:
            exec(job["between"], {"llm": llm, "number": number, "rank": rank})
            llm.llm_engine.has_unfinished_requests()  # of no replica: all wait for each other
        sampled = job.get("sampling", {}).get(str(number))  # else greedy
        began = time.perf_counter()
        for index in chosen:
            own = SamplingParams(**params | ({} if sampled is None else {**sampled, "seed": index}))
            llm.llm_engine.add_request(f"{number}-{index}", TokensPrompt(prompt_token_ids=job["prompts"][index]), own)
        done, first_s = {}, 0.0
        ends_s: list[float] = []  # of passes that brought tokens
        while llm.llm_engine.has_unfinished_requests():  # of any replica: the others keep it company
            outputs = llm.llm_engine.step()
            ends_s += [time.perf_counter() - began] if outputs else []
            first_s = first_s or (ends_s[-1] if outputs else 0.0)
            done |= {output.request_id: output for output in outputs if output.finished}
        times.append({"prefill": first_s, "decode": time.perf_counter() - began - first_s})
        passes_s.append(ends_s)
        for index in chosen:
            answer = done[f"{number}-{index}"].outputs[0]
            logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            answers[index] = {"tokens": list(answer.token_ids), "logprobs": logprobs}
    exec(job.get("after", ""), {})
    said = [llm.collective_rpc("aurora", args=tuple(args)) for args in job.get("commands", [])]
    path.with_name(f"answers-{rank}.json").write_text(
        json.dumps({"answers": answers, "times": times, "passes_s": passes_s, "said": said})
    )


def rounds(job: dict[str, Any], rank: int) -> Iterator[Sequence[int]]:
    """Yields the prompts of each round. With `until`, a list of them comes again until that code finds, on rank 0, that it is over."""
    asked = job.get("rounds", [range(len(job["prompts"]))] * job.get("repeat", 1))
    if "until" not in job:
        yield from asked
        return
    import torch

    for kind, prompts in enumerate(asked):
        over = torch.zeros(1)
        for _ in range(MOST_ROUNDS):
            yield prompts
            scope = {"job": job, "kind": kind, "rank": rank, "over": False}
            exec(job["until"], scope)
            torch.distributed.broadcast(over.fill_(scope["over"]), 0)
            if over:
                break
        print(f"engine.py: no more prompts of kind {kind}", flush=True)


def slowest(load_LE: Sequence[Sequence[float]], held_LG: Sequence[Sequence[Sequence[int]]]) -> float:
    """Returns the load of the rank that has most, summed over layers; an expert's replicas take even parts of its load."""
    total = 0.0
    for load_E, held_G in zip(load_LE, held_LG, strict=True):
        replicas = Counter(expert for held in held_G for expert in held)
        total += max(sum(load_E[expert] / replicas[expert] for expert in held) for held in held_G)
    return total


def perform(path: Path, environ: dict[str, str], log: Path) -> None:
    """Performs a job in a process that is forked from one that has imported vLLM, as a process of its own would."""
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ |= environ
    gc.freeze()  # what was imported before is no garbage, and vLLM looks for garbage often
    import torch._dynamo

    torch._dynamo.config.disable = json.loads(path.read_text()).get("eager", True)  # else each rank compiles the sampler
    try:
        main(path)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without


def inspect_model(architecture: str) -> None:
    """Makes vLLM keep what it asks about a model's class; else each rank asks a process that has to import vLLM."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    registry.ModelRegistry.models[architecture].inspect_model_cls()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
