"""ADRS' evaluator of expert placements, rebuilt: `python bench/adrs_eplb.py` writes bench/results/adrs-eplb-DATE.md.

ADRS (UC Berkeley, arXiv:2510.06189; repository UCB-ADRS/ADRS-Leaderboard, problems/eplb) scores placements of 58 layers
of 256 experts in 8 groups on 288 slots of 32 GPUs on 4 servers. A placement is made for the loads of 100 steps and
scored on those of the next 100: the mean load of a GPU over the largest, each summed over layers. The score is 90 times
that, plus 5 * min(2 ms / time of a call, 2), less 20 points a second if a call takes more than 10 ms. Its trace
(Hugging Face, abmfy/eplb-openevolve, 224 MB) is not among what can be had here: loads are drawn in its shape.
"""

import statistics
import time
from itertools import pairwise

import numpy as np
from machine import machine
from tables import Table, today, write

import aurora
from aurora.types import GpuSlots, Placement

LAYERS, EXPERTS, GPUS, PER_GPU, GROUPS, SERVERS = 58, 256, 32, 9, 8, 4
WINDOWS = 13
SLOTS, GROUPED = GpuSlots.equal(GPUS, PER_GPU), GpuSlots.equal(GPUS, PER_GPU, SERVERS, GROUPS)


def windows(skew: float, drift: float) -> np.ndarray:
    """Loads (W, L, E) of windows in sequence: Zipf, with factors of experts that go their ways and come back."""
    rng = np.random.default_rng(0)
    base_LE = rng.permuted(np.tile((1.0 + np.arange(EXPERTS)) ** -skew, (LAYERS, 1)), axis=1)
    log_LE, drawn = drift * rng.standard_normal(base_LE.shape), []
    for _ in range(WINDOWS):
        log_LE = 0.9 * log_LE + np.sqrt(1 - 0.9**2) * drift * rng.standard_normal(base_LE.shape)
        part_LE = base_LE * np.exp(log_LE)
        drawn.append(np.array([rng.multinomial(10**6, part_E / part_E.sum()) for part_E in part_LE]))
    return np.array(drawn)


def snake(weight_XN: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack and place in it of each item: by weight, forth and back over the packs; all rows at once."""
    at_N = np.arange(weight_XN.shape[1])
    turn_N, pack_N = at_N // packs, at_N % packs
    pack_N = np.where(turn_N % 2, packs - 1 - pack_N, pack_N)
    place_XN = np.empty(weight_XN.shape, dtype=np.int64)
    np.put_along_axis(place_XN, np.argsort(-weight_XN, axis=1), pack_N * (len(at_N) // packs) + turn_N, axis=1)
    return place_XN


def evolved(load_LE: np.ndarray) -> np.ndarray:
    """Slots (L, G, P) by the idea of ADRS' published program: DeepSeek's three steps, packed by a snake, all layers at once."""
    size = EXPERTS // GROUPS
    place_LN = snake(load_LE.reshape(LAYERS, GROUPS, size).sum(axis=2), SERVERS)
    group_LN = np.argsort(place_LN, axis=1)  # groups by server
    expert_XE = (group_LN[:, :, None] * size + np.arange(size)).reshape(LAYERS * SERVERS, -1)
    load_XE = np.take_along_axis(load_LE, expert_XE.reshape(LAYERS, -1), axis=1).reshape(expert_XE.shape).astype(np.float64)
    rows, own, slots = len(load_XE), load_XE.shape[1], GPUS * PER_GPU // SERVERS
    count_XE, held_XP = np.ones(load_XE.shape), np.tile(np.arange(slots), (rows, 1))
    for slot in range(own, slots):
        held_XP[:, slot] = best_X = np.argmax(load_XE / count_XE, axis=1)
        count_XE[np.arange(rows), best_X] += 1
    place_XP = snake(np.take_along_axis(load_XE / count_XE, held_XP, axis=1), GPUS // SERVERS)
    by_place_XP = np.take_along_axis(held_XP, np.argsort(place_XP, axis=1), axis=1)
    return np.take_along_axis(expert_XE, by_place_XP, axis=1).reshape(LAYERS, GPUS, PER_GPU)


def parts(made: Placement | np.ndarray) -> np.ndarray:
    """(L, G, E) the part of each expert's load that each GPU takes; slots (L, G, P) share evenly, those of one GPU too."""
    if isinstance(made, Placement):
        return np.array([made.split_EG(layer).T for layer in range(LAYERS)])
    held_LGE = np.zeros((LAYERS, GPUS, EXPERTS))
    np.add.at(held_LGE, (np.arange(LAYERS)[:, None, None], np.arange(GPUS)[:, None], made), 1.0)
    return held_LGE / held_LGE.sum(axis=1, keepdims=True)


def balance(part_LGE: np.ndarray, load_LE: np.ndarray) -> float:
    """Mean load of a GPU over the largest, each summed over layers."""
    load_LG = (part_LGE @ load_LE[:, :, None])[:, :, 0]
    return float(load_LG.mean(axis=1).sum() / load_LG.max(axis=1).sum())


def main() -> None:
    table = Table(
        f"ADRS' evaluator of expert placements, {today()} ({machine()})",
        "loads | method | balance on the next window | ms a call, least / median | score at the least | moves a layer",
        "Methods in turn on 12 windows. `evolved`: the idea of the published program in NumPy; the original is PyTorch. "
        "`eplb`: DeepSeek's algorithm, compiled, with groups on servers as ADRS calls it, and without groups. Moves: from the "
        "method's placement before.",
    )
    for skew, drift in ((0.8, 0.1), (0.8, 0.3), (1.2, 0.3)):
        drawn = windows(skew, drift)
        in_force = aurora.place(drawn[0], SLOTS).placement
        methods = {
            "eplb (DeepSeek)": lambda now, _: aurora.place(now, GROUPED, "eplb").placement,
            "eplb, no groups": lambda now, _: aurora.place(now, SLOTS, "eplb").placement,
            "evolved (ADRS)": lambda now, _: evolved(now),
            "aurora.place": lambda now, _: aurora.place(now, SLOTS).placement,
            "aurora.rebalance": lambda now, held: aurora.rebalance(now, held).held_LGP,
        }
        held, took, found, moves = dict.fromkeys(methods, in_force), {}, {}, {}
        for now_LE, next_LE in pairwise(drawn):
            for name, method in methods.items():
                began = time.perf_counter()
                after = method(now_LE, held[name])
                took.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
                part_LGE = parts(after)
                found.setdefault(name, []).append(balance(part_LGE, next_LE))
                moves.setdefault(name, []).append(((part_LGE > 0) & (parts(held[name]) == 0)).sum() / LAYERS)
                held[name] = after
        for name in methods:
            least, ratio = min(took[name]), statistics.mean(found[name])
            score = 90 * ratio + 5 * min(2 / least, 2) - (min(0.02 * least, 20) if least > 10 else 0)
            ms = f"{least:.1f} / {statistics.median(took[name]):.1f}"
            table.add(
                f"Zipf {skew}, drift {drift}",
                name,
                f"{ratio:.4f}",
                ms,
                f"{score:.1f}",
                f"{statistics.mean(moves[name][1:]):.1f}",
            )
    write("adrs-eplb", table.lines)


if __name__ == "__main__":
    main()
