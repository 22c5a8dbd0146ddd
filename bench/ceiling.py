"""What balancing can bring on recorded routing, and what reaches it: `python bench/ceiling.py` writes results.

With --range it writes profiles/recorded_balance.json instead, the range that advice on drawn traffic answers with.

Of DeepSeek-V2-Lite tokens were recorded in sequence. Of OLMoE's and Mixtral's tasks only counts were: their tokens are these
counts in random order, so that steps differ by chance alone.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from machine import machine
from replicas_by_layer import FEWER, balanced_by_layer, replicas_by_layer
from robust import mixed
from routed_tasks import MIXTRAL, OLMOE, ROOT, Source, Traffic, counted, deepseek
from tables import Table, write

from aurora.advisor.balancers import BALANCERS, RECORDED_RANGE, reach
from aurora.advisor.ceiling import (
    TOKENS,
    RankCurve,
    ServedTraffic,
    imbalance_split,
    linear_map,
    perfect_seconds,
    planned_map,
)
from aurora.algorithms.replicas.registry import slot_tables
from aurora.algorithms.workload.model_config import Shape
from aurora.io.files import write_text
from aurora.types import GpuSlots, Profile

SUFFICES = 0.95  # share of the ceiling from which a static map is enough
WINDOWS = 40
DECODE = RankCurve(
    0.0, 30.0, 1.0
)  # an expert's weights take as long to read as 30 tokens to compute: decode is bound by memory
AFTER = "one task after the other"
CASES = ((8, 4096, TOKENS), (16, 1024, TOKENS), (8, 256, DECODE))  # GPUs, tokens per step, time
FEW_EXPERTS = ((2, 4096, TOKENS), (2, 256, DECODE))
COUNTS = "olmoe_mixtral_domains/counts_dev.csv"
BY_TASK = "DeepSeek-V2-Lite"  # whose tasks are also judged one by one


def sources(every: int = 1) -> list[Source]:
    """The recorded sets that are at hand, with every so-many-th layer where all were recorded."""
    olmoe = {"model": "olmoe-1b-7b-0924", "selection": "topk"}
    mixtral = {"model": "mixtral-8x7b-v0.1", "selection": "topk"}
    found = [
        deepseek(list(range(0, 26, every))),
        counted("OLMoE", OLMOE, COUNTS, [0, 7, 15], olmoe),
        counted("Mixtral, web and code", MIXTRAL, COUNTS, [0, 7, 15], mixtral),
        counted(
            "Mixtral, MMLU", MIXTRAL, "mixtral_fiddler/counts_original.csv", list(range(0, 32, every)), {"variant": "original"}
        ),
    ]
    return [source for source in found if source is not None]


def profile(source: Source, traffic: Traffic, windows: int = WINDOWS) -> Profile:
    """The traffic in windows of one source."""
    parts = np.array_split(np.arange(len(traffic)), windows)
    tokens_TLSE = np.stack([traffic.at(part).loads_LE(source.experts) for part in parts])[:, :, None]
    return replace(Shape.of(source.config), layers=len(traffic.layers)).profile(tokens_TLSE, {})


def traffics(source: Source) -> Iterator[tuple[str, Traffic]]:
    """Each task of token-level recordings alone; all tasks mixed; one task after the other."""
    tasks = list(source.tasks.values())
    if source.name == BY_TASK:
        yield from source.tasks.items()
    yield "tasks mixed", mixed(tasks)
    after = Traffic(np.concatenate([task.experts_ULK for task in tasks]), np.concatenate([task.sequence_U for task in tasks]))
    yield AFTER, after


def gpu_counts(source: Source) -> tuple[int, ...]:
    return (4, 8, 16) if source.experts > 8 else (2, 4)


def percent(value: float) -> str:
    return f"{value:.1%}"


def splits(quick: bool) -> list[str]:
    """The split of the imbalance by the first half, and what a static map of it reaches on the second half."""
    about = (
        "Relative to perfect balance, 95 % intervals in brackets. Slots: 1 x are as many as there are "
        "experts, 1.25 x have replicas. "
        "Predicted: from the first half of the recording alone. Reached: the share of the ceiling that the "
        "map planned from the first "
        "half reaches on steps of the second. Said: whether the prediction is 95 % or more. Halves of `one "
        "task after the other` are "
        "different tasks."
    )
    columns = (
        "set | traffic | GPUs | slots | tokens per step | imbalance | stable | drifting | per step | of it by slots | "
        "per step, of the ceiling | static, predicted | reached | said | right"
    )
    table, told = Table("Stable, drifting, per step", columns, about), []
    for source in sources(3 if quick else 1):
        for name, traffic in traffics(source):
            halves = [profile(source, traffic.at(part)) for part in np.array_split(np.arange(len(traffic)), 2)]
            for gpus in gpu_counts(source)[:: 2 if quick else 1]:
                for tokens in (64, 512, 4096, 32768, 98304):
                    if tokens > len(traffic) / 2 / 5:
                        continue
                    for slots in (-(-source.experts // gpus), round(1.25 * source.experts / gpus)):
                        split = imbalance_split(halves[0], gpus, tokens, slots)
                        reached, per_step = static_share(*halves, gpus, slots, tokens), split.per_step.value / split.whole.value
                        said = split.stable.value / split.whole.value
                        suffices = said >= SUFFICES
                        correct = suffices == (reached >= SUFFICES)
                        parts = [
                            f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]"
                            for each in (split.stable, split.drifting, split.per_step)
                        ]
                        table.add(
                            source.name, name, gpus, f"{slots * gpus / source.experts:g} x", f"{tokens:,}",
                            f"{split.whole.value:.3f}", *parts, f"{split.by_slots:.3f}", percent(per_step),
                            percent(said), percent(reached), "suffices" if suffices else "does not",
                            "yes" if correct else "no",
                        )  # fmt: skip
                        told.append((name != AFTER, per_step, said, reached, correct))
    return [*table.lines, "", summary(told)]


def summary(told: list[tuple[bool, float, float, float, bool]]) -> str:
    """Sentences on predictions: (same traffic in both halves, per step of the ceiling, predicted, reached, right)."""
    same = [each for each in told if each[0]]
    low = [reached for _, per_step, _, reached, _ in same if per_step < 1 - SUFFICES]
    high = [reached for _, per_step, _, reached, _ in same if per_step >= 1 - SUFFICES]
    off = np.abs([predicted - reached for _, _, predicted, reached, _ in same])
    return (
        f"Same traffic in both halves, {len(same)} cases: the share is predicted within {np.median(off):.1%} in the median and "
        f"{off.max():.1%} at most, and whether it is 95 % is said right in {sum(each[4] for each in same)}. "
        "Per step is below 5 % of "
        f"the ceiling in {len(low)} cases; static reaches 95 % in {sum(each >= SUFFICES for each in low)} of them, "
        f"{min(low, default=np.nan):.1%} at least. Of the {len(high)} others it reaches 95 % in "
        f"{sum(each >= SUFFICES for each in high)}. "
        f"Other tasks in the second half, {len(told) - len(same)} cases: said right in "
        f"{sum(each[4] for each in told if not each[0])}."
    )


def static_share(before: Profile, after: Profile, gpus: int, slots: int, tokens: float) -> float:
    """The share of the ceiling that a static map for the first profile reaches on steps of the second."""
    traffic = ServedTraffic.of(after, tokens, np.random.default_rng(1))
    once = np.zeros(len(traffic.load_TLE), dtype=np.int64)
    static, linear = (
        planned_map(before.load_LE.astype(np.float64), gpus, slots),
        linear_map(before.layers, before.experts, gpus),
    )
    served, default = (traffic.seconds_D([each], once, TOKENS).sum() for each in (static, linear))
    return float((default - served) / (default - perfect_seconds(traffic.step_DLE, gpus, TOKENS).sum()))


def methods(quick: bool) -> Iterator[list[str]]:
    """What each method reaches, and replicas by layer, which no engine can have."""
    BALANCERS["replicas-by-layer"] = balanced_by_layer
    columns = (
        "method | slowest / perfect | share of the ceiling | slots per GPU | moved in a window | memory per GPU | worst window"
    )
    for source in sources(3 if quick else 1):
        for name, traffic in list(traffics(source))[-2:]:
            recorded = profile(source, traffic)
            for gpus, wanted, curve in (CASES if source.experts > 8 else FEW_EXPERTS)[: 1 if name == AFTER else 3]:
                tokens = min(wanted, len(traffic) // 10)
                slots = round(1.25 * source.experts / gpus)
                kind = "tokens alone" if curve is TOKENS else "reading an expert's weights takes as long as 30 of its tokens"
                about = f"{tokens} tokens a step, {slots} slots a GPU for {source.experts / gpus:g} experts; time: {kind}."
                table = Table(f"{source.name}, {name}, {gpus} GPUs, {tokens} tokens a step", columns, about)
                for each in reach(recorded, gpus, slots, (*BALANCERS,), tokens, curve):
                    table.add(
                        each.name, f"{each.ratio:.4f} [{each.low:.4f}, {each.high:.4f}]",
                        f"{each.share:.1%}", f"{each.slots:g}",
                        f"{each.moved_bytes / 1e6:.0f} MB", f"{each.memory_bytes / 1e6:.0f} MB", f"{each.worst:.3f}",
                    )  # fmt: skip
                yield table.lines


def fewer_replicas(quick: bool) -> list[str]:
    """EPLB with 1.25 x slots beside FEWER replicas by layer, on windows that neither was planned for."""
    about = (
        "Planned from one half of the windows, judged on the other, and the other way round: slowest over "
        "mean GPU, all layers "
        f"and windows. EPLB has 0.25 E replicas in each layer, aurora at most {FEWER:.0%} as many in all "
        "layers together. Of four "
        "ways to make candidates the one in use was chosen on the tasks of DeepSeek-V2-Lite with 12 windows; the rest saw none."
    )
    table = Table(
        "EPLB's balance with fewer replicas",
        "set | traffic | GPUs | windows | linear | EPLB | aurora | replicas, of EPLB's | reached",
        about,
    )
    reached, worst = [], 0.0
    for source in sources():  # with all layers, over which replicas are divided
        for name, traffic in list(traffics(source))[:-1]:
            for windows in (12, 24, 48)[:: 3 if quick else 1]:
                load_TLE = profile(source, traffic, windows).tokens_TLSE.sum(axis=2).astype(np.float64)
                for gpus in (8, 16) if source.experts > 8 else (2,):
                    for part in (slice(windows // 2), slice(windows // 2, None)):
                        other = slice(windows // 2, None) if part.start is None else slice(windows // 2)
                        found = fewer_case(load_TLE[part], load_TLE[other], gpus)
                        reached.append(found[2] <= found[1])
                        worst = max(worst, found[2] / found[1] - 1)
                        ratios = [f"{each:.4f}" for each in found[:3]]
                        yes = "yes" if reached[-1] else "no"
                        table.add(source.name, name, gpus, windows // 2, *ratios, percent(found[3]), yes)
    return [
        *table.lines,
        "",
        f"As even as EPLB or more even in {sum(reached)} of {len(reached)} cases, {worst:.2%} less even at most.",
    ]


def fewer_case(made_from_TLE: np.ndarray, judged_TLE: np.ndarray, gpus: int) -> tuple[float, float, float, float]:
    """Slowest over mean of linear, EPLB and replicas by layer, and the part of EPLB's replicas that the last has."""
    _, layers, experts = made_from_TLE.shape
    redundant = round(0.25 * experts)
    slots = GpuSlots.equal(gpus, (experts + redundant) // gpus)
    tables = replicas_by_layer(made_from_TLE, gpus, int(FEWER * redundant * layers))
    linear = linear_map(1, experts, gpus)
    ways = ([(linear.held_LGP[0], linear.part_LGP[0])] * layers, slot_tables(made_from_TLE.sum(axis=0), slots, "eplb"), tables)
    ratios = [sum(slowest(judged_TLE[:, at], *way[at]) for at in range(layers)) / (judged_TLE.sum() / gpus) for way in ways]
    extra = sum(int((held_GP >= 0).sum()) - experts for held_GP, _ in tables)
    return ratios[0], ratios[1], ratios[2], extra / redundant / layers


def slowest(load_TE: np.ndarray, held_GP: np.ndarray, part_GP: np.ndarray) -> float:
    """The sum over windows of the largest load of a GPU."""
    load_TG = (np.where(held_GP >= 0, load_TE[:, np.maximum(held_GP, 0)], 0.0) * part_GP).sum(axis=2)
    return float(load_TG.max(axis=1).sum())


def windows_of_other_lengths() -> list[str]:
    """The per-step part that counts of long windows predict, beside the one of the recorded tokens in sequence."""
    about = (
        "DeepSeek-V2-Lite, 8 GPUs. Predicted: steps cut from windows of 1,024 tokens, known by their counts "
        "alone. Measured: the same "
        "tokens in windows as long as a step. Shuffled: the same tokens in random order, in which tokens are exchangeable."
    )
    table = Table(
        "Chance, by tokens of a step",
        "task | tokens per step | per step, predicted | measured | shuffled | predicted / measured",
        about,
    )
    source = next(each for each in sources() if each.name == BY_TASK)
    for name, traffic in source.tasks.items():
        shuffled = traffic.at(np.random.default_rng(0).permutation(len(traffic)))
        for tokens in (32, 64, 128, 256, 512, 1024):
            found = [
                imbalance_split(profile(source, each, len(each) // length), 8, tokens).per_step.value
                for each, length in ((traffic, 1024), (traffic, tokens), (shuffled, tokens))
            ]
            table.add(name, tokens, *(f"{each:.3f}" for each in found), f"{found[0] / found[1]:.2f}")
    return table.lines


def speed() -> list[str]:
    """Processor seconds of a large model."""
    table = Table(
        "Processor seconds, 58 layers of 256 experts, 40 windows, steps of 8,192 tokens",
        "GPUs | split | all methods | the two, wall",
    )
    rng = np.random.default_rng(0)
    share_LE = rng.permuted(np.tile((1.0 + np.arange(256)) ** -0.8, (58, 1)), axis=1)
    tokens_TLSE = rng.multinomial(32768 * 8, share_LE / share_LE.sum(axis=1, keepdims=True), size=(40, 58))[:, :, None]
    config = {
        "num_local_experts": 256,
        "num_hidden_layers": 58,
        "num_experts_per_tok": 8,
        "hidden_size": 7168,
        "intermediate_size": 2048,
    }
    drawn = Shape.of(config).profile(tokens_TLSE, {})
    for gpus in (16, 32):
        wall_s, begin_s = time.perf_counter(), time.process_time()
        imbalance_split(drawn, gpus, 8192)
        middle_s = time.process_time()
        reach(drawn, gpus, 256 // gpus + 1, step_tokens=8192)
        seconds = middle_s - begin_s, time.process_time() - middle_s, time.perf_counter() - wall_s
        table.add(gpus, *(f"{each:.1f}" for each in seconds))
    return table.lines


def recorded_rows() -> list[dict[str, Any]]:
    """Splits and ratios of the recorded models whose tasks come mixed, as the shipped range has them."""
    rows = []
    shown = [name for name in BALANCERS if name != "exact"]
    for source in sources():
        traffic = mixed(list(source.tasks.values()))
        recorded = profile(source, traffic)
        for gpus in (2, 4, 8, 16, 32):
            for tokens in (128, 2048, 32768):
                if gpus > source.experts or tokens > len(traffic) / 5:
                    continue
                slots = -(-source.experts // gpus)
                split = imbalance_split(recorded, gpus, tokens)
                found = reach(recorded, gpus, min(source.experts, slots + -(-slots // 4)), shown, tokens)
                parts = {part: round(getattr(split, part).value, 4) for part in ("whole", "stable", "drifting", "per_step")}
                ratios = {each.name: round(each.ratio, 4) for each in found}
                of = {"model": source.name, "experts": source.experts, "gpus": gpus, "step_tokens": tokens}
                rows.append({**of, "parts": parts, "ratios": ratios})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--range", action="store_true", help="write the shipped range over recorded models")
    arguments = parser.parse_args()
    if arguments.range:
        text = json.dumps({"schema": 1, "recordings": recorded_rows()}, indent=None).replace('{"model"', '\n{"model"')
        write_text(ROOT / "profiles" / RECORDED_RANGE, text + "\n")
        return
    few = " With --quick: every third layer of DeepSeek-V2-Lite and MMLU where no replicas are divided, fewer cases."
    chosen = (
        " The way in which replicas are divided over layers was chosen among four after seeing held-out figures of "
        "DeepSeek-V2-Lite, 12 windows a half; the other sets played no part in it."
    )
    about = f"{machine()}. Time is in tokens unless said. Methods are those of `aurora.advisor.balancers`."
    head = [f"# Ceiling of balancing, and what reaches it\n\n{about}{few if arguments.quick else ''}{chosen}"]
    write(
        "ceiling",
        head,
        splits(arguments.quick),
        fewer_replicas(arguments.quick),
        windows_of_other_lengths(),
        speed(),
        *methods(arguments.quick),
    )


if __name__ == "__main__":
    main()
