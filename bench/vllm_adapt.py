"""Experts that follow traffic through EPLB in vLLM: aurora's policy and vLLM's own, beside plans, on hosts of a rate.

    .venv-vllm/bin/python bench/vllm_adapt.py [--moves NAME] [--switches 1] [--rounds 3] [--quick]

Needs what `make test-vllm` installs, and root (bench/network/net.py); elsewhere it says why it is skipped. Four hosts, DP4, a
random Qwen3-MoE whose words are of two kinds, for which it chooses other experts; it answers with words of the kind that it is
asked with. Experts' compute is a stand-in that waits TOKEN_S a row, as in bench/interleave.py, so long that a pass waits more
than two cores compute for four ranks; all else is real. In each round
a rank gets SEQUENCES prompts and generates NEW_TOKENS for each, which is about one window of EPLB. After some rounds traffic
switches from the first kind to the second, then back, and so on. Ways: the plan of either kind, kept; aurora's controller, from
the plan of the first kind on; and vLLM's own policy. Experts move through EPLB, while serving waits or in the background:
sections of their own, each of which has the plans beside it. All ways answer the same requests in the same rounds.

Throughput counts from the end of the first round after a switch to the end of the last round before the next, and is compared
with the plan of the kind that is asked for. A gap is the time between two passes of a rank that each bring a token; it counts
as one of moves if a placement was about to change. Results: bench/results/vllm-adapt-DATE.md.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "network"), str(HERE.parent)]
from net import PAYLOAD, network  # noqa: E402
from protocol import DEEP, Results, options  # noqa: E402
from serving import waiting_profile  # noqa: E402
from vllm import answers, model, run  # bench/vllm.py  # noqa: E402

import tests.integrations  # noqa: E402, F401  # what vLLM lacks on CPUs
from aurora.io import save  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.types import Cluster, Gpu, PlanOptions  # noqa: E402

RANKS, LAYERS, HIDDEN, EXPERTS, TOP_K, SLOTS = 4, 4, 256, 16, 2, 5  # SLOTS: of a rank
WORDS = 256  # half of them are of one kind
KIND, QUIET = 0.1, 0.03  # how much words of a kind are alike, and what layers add to them
SEQUENCES, PROMPT, NEW_TOKENS, PLANNED = 8, 8, 32, 64
TOKEN_S, MBIT = 2e-3, 200
FIRST, SECOND, OURS, VLLM = "plan of the first kind", "plan of the second kind", "aurora's controller", "vLLM's policy"
MOVES = {"waiting": {"use_async": False}, "background": {"use_async": True}}  # EPLB's options
NOTED = f"""
import functools, inspect, time
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
from vllm.v1.engine.llm_engine import LLMEngine

apply, parameters = Experts.apply, inspect.signature(Experts.apply)
@functools.wraps(apply)
def apply_and_wait(*args, **named):
    until_s = time.perf_counter() + {TOKEN_S} * parameters.bind(*args, **named).arguments["topk_ids"].numel()
    apply(*args, **named)
    time.sleep(max(0.0, until_s - time.perf_counter()))
Experts.apply = apply_and_wait

step, LLMEngine.passes = LLMEngine.step, []
def step_noted(self):
    outputs = step(self)
    rounds = {{int(output.request_id.split("-")[0]) for output in outputs}}
    if rounds:
        LLMEngine.passes.append((max(rounds), time.perf_counter()))
    return outputs
LLMEngine.step = step_noted

LLMEngine.changes = []
def noted(step, maps, under_way):
    last = []
    @functools.wraps(step)
    def step_noted(self, *args, **named):
        began_s, more = time.perf_counter(), under_way(self)
        step(self, *args, **named)
        now = [each.copy() for each in maps(self)]
        slots = sum(int((each != old).sum()) for each, old in zip(now, last))
        last[:] = now
        LLMEngine.changes.append((began_s, time.perf_counter(), more or under_way(self), slots))
    return step_noted

EplbState.step = noted(
    EplbState.step,
    lambda state: [each.physical_to_logical_map.numpy() for each in state.model_states.values()],
    lambda state: any(each.rebalanced for each in state.model_states.values()),
)
"""
WRITTEN = """
import json, os
from vllm.v1.engine.llm_engine import LLMEngine
with open(os.environ["NOTES"] + os.environ["RANK"], "w") as file:
    json.dump({"passes": LLMEngine.passes, "changes": LLMEngine.changes}, file)
"""


def model_of_two_kinds(folder: Path) -> None:
    """A random checkpoint that answers with words of the kind that it is asked with, and chooses experts by the words."""
    import torch
    import transformers

    model(folder, HIDDEN, EXPERTS, LAYERS, TOP_K)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kind = torch.randn(HIDDEN) * KIND
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                tensor *= QUIET
        for words in (made.get_input_embeddings().weight, made.get_output_embeddings().weight):
            words[: WORDS // 2] += kind
            words[WORDS // 2 :] -= kind
    made.save_pretrained(folder)


def prompts_of(kind: int, count: int) -> list[list[int]]:
    """So many prompts of words of a kind, 0 or 1."""
    rng = np.random.default_rng(kind)
    return rng.integers(kind * WORDS // 2, (kind + 1) * WORDS // 2, (count, PROMPT)).tolist()


@dataclass(frozen=True)
class Served:
    """What one way's ranks noted: the ends of passes that brought tokens, by round, and what moved beside each."""

    passes_R: list[list[tuple[int, float]]]  # of a rank: the round, and the end by time.perf_counter
    changes: list[tuple[float, float, bool, int]]  # of rank 0: begin, end, whether more is to come, slots that changed
    tokens: dict[str, list[int]]  # by prompt

    @classmethod
    def read(cls, notes: Path, folder: Path) -> "Served":
        found_R = [json.loads(notes.with_name(f"{notes.name}{rank}").read_text()) for rank in range(RANKS)]
        return cls([found["passes"] for found in found_R], found_R[0]["changes"], answers(folder, RANKS))

    def end_s(self, number: int) -> float:
        """When the last rank had ended a round."""
        return max(end_s for passes in self.passes_R for its, end_s in passes if its == number)

    @property
    def began_s(self) -> float:
        """When the first pass that brought tokens ended."""
        return min(passes[0][1] for passes in self.passes_R)

    @cached_property
    def moves(self) -> list[tuple[float, float, int]]:
        """Begin and end of each change of the placement, and its slots."""
        found, slots, first_s = [], 0, None
        for began_s, ended_s, more, changed in self.changes:
            if more or changed:
                first_s = began_s if first_s is None else first_s
                slots += changed
            if not more and first_s is not None:
                found += [(first_s, ended_s, slots)] if slots else []
                slots, first_s = 0, None
        return found

    @cached_property
    def gaps_s(self) -> tuple[list[float], list[float]]:
        """Seconds between passes of a round that bring tokens: those without moves, and those with them."""
        found: tuple[list[float], list[float]] = [], []
        for passes in self.passes_R:
            for (its, began_s), (other, ended_s) in pairwise(passes):
                if its == other:
                    moving = any(first_s <= ended_s and began_s <= last_s for first_s, last_s, _ in self.moves)
                    found[moving].append(ended_s - began_s)
        return found


def served(folder: Path, names: list[str], mode: str, switches: int, rounds: int) -> dict[str, Served]:
    """What each way noted; all serve the same rounds."""
    model_of_two_kinds(folder / "model")
    rate_Bps, asked = MBIT * 1e6 / 8 * PAYLOAD, RANKS * SEQUENCES
    cluster = Cluster("hosts", tuple(Gpu(f"host{rank}", "cpu", rank, rate_Bps, rate_Bps, 10**10) for rank in range(RANKS)))
    prompts_K = [prompts_of(kind, PLANNED + asked * rounds * (switches // 2 + 1)) for kind in range(2)]
    for kind, prompts in enumerate(prompts_K):
        profile = waiting_profile(folder / "model", prompts[:PLANNED], NEW_TOKENS, RANKS, TOKEN_S)
        save(make_plan(cluster, [profile], PlanOptions(slots_per_gpu=SLOTS)), folder / f"plan-{kind}.json")
    blocks = [prompts_K[block % 2][PLANNED + block // 2 * rounds * asked :][: rounds * asked] for block in range(switches + 1)]
    prompts = [prompt for block in blocks for prompt in block]
    plans = [{"plan": str(folder / f"plan-{kind}.json")} for kind in range(2)]
    ways: dict[str, dict[str, object]] = {FIRST: plans[0], SECOND: plans[1], OURS: {**plans[0], "adapt": True}, VLLM: {}}
    found = {}
    for way, settings in ways.items():
        place = folder / way.replace(" ", "-")
        job = {
            "model": str(folder / "model"), "prompts": prompts, "new_tokens": NEW_TOKENS, "max_num_batched_tokens": 512,
            "rounds": [list(range(begin, begin + asked)) for begin in range(0, len(prompts), asked)],
            "additional_config": {"aurora": {**settings, "order": "online", "required": True}}, "llm": eplb(**MOVES[mode]),
            "before": NOTED, "after": WRITTEN, "environ": {"NOTES": f"{place}-"},
        }  # fmt: skip
        began_s = time.perf_counter()
        run(place, names, RANKS, job)
        found[way] = Served.read(Path(f"{place}-"), place)
        served_s, changes = found[way].end_s(rounds * (switches + 1) - 1) - found[way].began_s, found[way].moves
        print(
            f"{way}: {len(changes)} changes of {sum(slots for *_, slots in changes)} slots; {served_s:.0f} of "
            f"{time.perf_counter() - began_s:.0f} s serving",
            flush=True,
        )
    return found


def eplb(**more: object) -> dict[str, object]:
    """vLLM's options: a window is as many passes as a round has."""
    config = {"num_redundant_experts": RANKS * SLOTS - EXPERTS, "step_interval": NEW_TOKENS, "window_size": NEW_TOKENS, **more}
    return {"enable_eplb": True, "eplb_config": config}


def table(mode: str, switches: int, rounds: int) -> list[str]:
    """The section of a way to move experts, a row for each way to place them."""
    with tempfile.TemporaryDirectory() as folder, network([MBIT * 1e6] * RANKS, DEEP) as names:
        ways = served(Path(folder), names, mode, switches, rounds)
    lines = [
        "| way | seconds from the first round after a switch to the next switch | throughput over the plan's for that traffic, "
        "median (worst) | longest gap over the median gap | the same while experts move | changes | slots that changed |",
        "|" + "---|" * 7,
    ]
    ends = range(rounds, rounds * (switches + 1), rounds)  # the first round of each block after a switch
    after_s = {way: [each.end_s(first + rounds - 1) - each.end_s(first) for first in ends] for way, each in ways.items()}
    for way, each in ways.items():
        over = [after_s[(SECOND, FIRST)[block % 2]][block] / own_s for block, own_s in enumerate(after_s[way])]
        ordinary, moving = each.gaps_s
        middle = statistics.median(ordinary)
        cells = (
            ", ".join(f"{own_s:.2f}" for own_s in after_s[way]),
            f"{statistics.median(over):.3f} ({min(over):.3f})",
            f"{max(ordinary) / middle:.2f}",
            f"{max(moving) / middle:.2f}" if moving else "",
            len(each.moves),
            sum(slots for *_, slots in each.moves),
        )
        lines.append(f"| {way} | {' | '.join(map(str, cells))} |")
    first, *others = (each.tokens for each in ways.values())
    differ = sum(any(other[prompt] != tokens for other in others) for prompt, tokens in first.items())
    return [
        *lines,
        "",
        f"Answers that differ between ways: {differ} of {len(first)}. {LAYERS} layers of {EXPERTS} experts in {RANKS * SLOTS} "
        f"slots; {switches} switches, {rounds} rounds of {RANKS * SEQUENCES} requests before each and after the last; ports of "
        f"{MBIT:g} Mbit/s; experts wait {TOKEN_S * 1e6:g} us a row.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", action="append", choices=tuple(MOVES), help="repeat for several; default all")
    parser.add_argument("--switches", type=int, default=1, help="of traffic")
    parser.add_argument("--rounds", type=int, default=3, help="before each switch, and after the last")
    parser.add_argument("--quick", action="store_true", help="one switch, of two rounds")
    chosen = options(parser)
    switches, rounds = (1, 2) if chosen.quick else (chosen.switches, chosen.rounds)
    results = Results("vllm-adapt", "Experts in vLLM follow traffic that switches", chosen.out)
    for mode in chosen.moves or MOVES:
        results.add(f"experts move: {mode}", *table(mode, switches, rounds))


if __name__ == "__main__":
    main()
