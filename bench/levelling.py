"""What levelling NICs saves hierarchical dispatches: `python bench/levelling.py` writes bench/results/levelling-DATE.md.

A rank's rows leave by its own NIC, and reach the gateway with its number in the other server. FAST (arXiv:2505.09764) first
moves rows inside a server, so that its NICs carry the same. The bound by the busiest ports, if both hops overlap
fully, falls in two ways:

- gateways by load: a row may land at any rank of a server, which moves nothing inside;
- rows moved first: these, and every NIC of a server sends the same; the rows that move load the ports inside.

Beside them is what aurora's levelling saves: the fastest of 2, 4 and 8 chunks, levelled or not, timed by the simulator's
switch in the order that "auto" takes; levelled where it is 2 % faster, as plans are. Once without start-ups, and once with 10
microseconds a message, which these small batches feel. Tokens choose 6 of 64 experts, which lie contiguously; a row has 14 kB.
NICs carry 50e9 B/s, ports inside 450e9. Recorded tokens are read from AURORA_DATA (default ../shared/data) and left out where
that folder is absent.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from machine import machine
from routed_tasks import deepseek
from tables import Table, today, write

from aurora.algorithms.alltoall.hierarchical import carriers, hierarchical_rows, level_from, step_rows
from aurora.algorithms.alltoall.schedule import hierarchical_order_s
from aurora.planner.scenarios.servers import LEVEL_GAIN
from aurora.types import Hierarchy, Network, Servers
from aurora.types.arrays import IntArray

NIC, INSIDE = 1.0, 9.0  # rates, of NIC_BPS
NIC_BPS, ROW_BYTES = 50e9, 14_336
STARTUPS_S = (0.0, 1e-5)  # of a message
CHUNKS = (2, 4, 8)
EXPERTS, TOP_K = 64, 6
MIDDLE = 13  # of DeepSeek-V2-Lite's 26 MoE layers
DRAWS, MANY_RANKS, DRAWS_OF_MANY = 5, 64, 1  # deals of the tokens; timing many ranks takes minutes
SHAPES = ((2, 4), (4, 2), (2, 8), (4, 8), (8, 8))  # servers and ranks of each


def recorded(task: str) -> tuple[IntArray, IntArray] | None:
    """(U, K) experts and (U,) sequences of a recorded task."""
    source = deepseek([MIDDLE])
    return None if source is None else (source.tasks[task].experts_ULK[:, 0].astype(np.int64), source.tasks[task].sequence_U)


def drawn() -> tuple[IntArray, IntArray]:
    """As `recorded`: popularity is Zipf 1, every sequence prefers some experts, and lengths have a log deviation of 0.7."""
    rng = np.random.default_rng(0)
    length_Q = np.exp(rng.normal(np.log(64), 0.7, 128)).astype(np.int64) + 1
    luck_UE = np.repeat(rng.gumbel(size=(128, EXPERTS)), length_Q, axis=0) - np.log1p(rng.permutation(EXPERTS))
    luck_UE += rng.gumbel(size=luck_UE.shape)
    return np.argpartition(-luck_UE, TOP_K, axis=1)[:, :TOP_K], np.repeat(np.arange(128), length_Q)


def equally(sequence_U: IntArray, ranks: int, rng: np.random.Generator) -> IntArray:
    """The rank of each token, or -1: whole sequences, each to the rank with the fewest tokens, cut to as many a rank."""
    rank_U, held_G = np.full(len(sequence_U), -1), np.zeros(ranks, dtype=np.int64)
    for sequence in rng.permutation(np.unique(sequence_U)):
        own_U = sequence_U == sequence
        rank_U[own_U] = held_G.argmin()
        held_G[held_G.argmin()] += own_U.sum()
    for rank in range(ranks):
        rank_U[np.flatnonzero(rank_U == rank)[held_G.min() :]] = -1
    return rank_U


def one_prompt(sequence_U: IntArray, ranks: int, rng: np.random.Generator) -> IntArray:
    """As `equally`: every rank has one whole sequence, as in a prefill of prompts of different lengths."""
    chosen = rng.choice(np.unique(sequence_U), ranks, replace=len(np.unique(sequence_U)) < ranks)
    rank_U = np.full(len(sequence_U), -1)
    for rank, sequence in enumerate(chosen):
        rank_U[sequence_U == sequence] = rank
    return rank_U


def prefill_beside_decode(sequence_U: IntArray, ranks: int, rng: np.random.Generator) -> IntArray:
    """As `equally`: every fourth rank has a prompt of 512 tokens, the others 32 tokens of decoding."""
    size_G = np.where(rng.permutation(ranks) % 4 == 0, 512, 32)
    start, rank_U = rng.integers(len(sequence_U)), np.full(len(sequence_U), -1)
    at_X = (start + np.arange(min(size_G.sum(), len(sequence_U)))) % len(sequence_U)
    rank_U[at_X] = np.repeat(np.arange(ranks), size_G)[: len(at_X)]
    return rank_U


DEALS: dict[str, Callable[[IntArray, int, np.random.Generator], IntArray]] = {
    "as many tokens a rank": equally,
    "one prompt a rank": one_prompt,
    "a prompt on every fourth rank, decoding on others": prefill_beside_decode,
}


def priced(rank_UK: IntArray, source_U: IntArray, hierarchy: Hierarchy) -> tuple[list[float], float]:
    """Rows / rate of a dispatch as it is, with gateways by load and with rows moved first; and the rows that move, of all."""
    server_G = hierarchy.server_G
    rows_GG = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy).sum(axis=0)
    apart_GG = server_G[:, None] != server_G
    across_GG, within_GG = np.where(apart_GG, rows_GG, 0), np.where(apart_GG, 0, rows_GG)
    sent_G, got_G = across_GG.sum(axis=1), across_GG.sum(axis=0)
    mean_sent_G, mean_got_G = ((np.bincount(server_G, each_G) / np.bincount(server_G))[server_G] for each_G in (sent_G, got_G))
    out_G, into_G = within_GG.sum(axis=1), within_GG.sum(axis=0)
    inside = max(out_G.max(), into_G.max()) / INSIDE
    excess_G, lack_G = np.maximum(sent_G - mean_sent_G, 0), np.maximum(mean_sent_G - sent_G, 0)
    moved = max((out_G + excess_G).max(), (into_G + lack_G).max()) / INSIDE
    nics = max(sent_G.max(), got_G.max()), max(sent_G.max(), mean_got_G.max()), max(mean_sent_G.max(), mean_got_G.max())
    seconds = [max(each / NIC, side) for each, side in zip(nics, (inside, inside, moved), strict=True)]
    return seconds, float(excess_G.sum() / sent_G.sum())


def built_saves(rank_UK: IntArray, source_U: IntArray, server_G: IntArray, startup_s: float) -> float:
    """What part of a dispatch's seconds levelling saves, at the best number of chunks with and without."""
    ports_Bps = np.full(len(server_G), INSIDE * NIC_BPS)
    servers = Servers.of(server_G.tolist(), NIC_BPS)
    network = Network(ports_Bps, ports_Bps, np.full(len(server_G), startup_s), servers)

    def seconds(hierarchy: Hierarchy) -> float:
        bytes_SGG = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy) * ROW_BYTES
        return hierarchical_order_s(bytes_SGG, hierarchy, network, "auto", rng=np.random.default_rng(0))[1]

    plain_s = min(seconds(Hierarchy(server_G, chunks)) for chunks in CHUNKS)
    levelled_s = min(seconds(Hierarchy(server_G, chunks, level_from(chunks, ROW_BYTES, network))) for chunks in CHUNKS)
    return 1 - levelled_s / plain_s if levelled_s < (1 - LEVEL_GAIN) * plain_s else 0.0


def levelling_takes_s(servers_: int, members: int, chunks: int) -> float:
    """Median seconds in which a batch is levelled, with a prompt on every fourth rank."""
    hierarchy, rng = Hierarchy(np.arange(servers_ * members) // members, chunks, 1), np.random.default_rng(0)
    tokens_G = np.where(rng.permutation(hierarchy.ranks) % 4 == 0, 512, 32)
    sent_GN = rng.binomial(tokens_G[:, None], 0.6, (hierarchy.ranks, hierarchy.servers))
    carriers(sent_GN, hierarchy)
    took_s = []
    for _ in range(200):
        began_s = time.perf_counter()
        carriers(sent_GN, hierarchy)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def cases() -> Iterator[tuple[str, tuple[IntArray, IntArray]]]:
    for task in ("intent", "law"):
        if (found := recorded(task)) is not None:
            yield f"recorded, {task}", found
    yield "drawn, Zipf 1", drawn()


def levelling() -> list[str]:
    built = " | ".join(f"saved{f' at {startup_s * 1e6:.0f} µs' * (startup_s > 0)}" for startup_s in STARTUPS_S)
    bounds = "bound falls by gateways | bound falls by moved rows | rows that move"
    table = Table(
        f"Time of a dispatch saved by levelling, mean / most of {DRAWS} deals, {DRAWS_OF_MANY} of {MANY_RANKS} ranks",
        f"traffic | dealt | servers x ranks | most / mean tokens | {bounds} | {built}",
    )
    for traffic, (experts_UK, sequence_U) in cases():
        for dealt, deal in DEALS.items():
            for count, members in SHAPES:
                ranks = count * members
                if deal is not prefill_beside_decode and ranks > len(np.unique(sequence_U)):
                    continue
                hierarchy, found = Hierarchy(np.arange(ranks) // members, 1), []
                for seed in range(DRAWS if ranks < MANY_RANKS else DRAWS_OF_MANY):
                    rank_U = deal(sequence_U, ranks, np.random.default_rng(seed))
                    own_U = rank_U >= 0
                    held_G = np.bincount(rank_U[own_U], minlength=ranks)
                    rank_UK, source_U = experts_UK[own_U] * ranks // EXPERTS, rank_U[own_U]
                    (now, landed, moved), part = priced(rank_UK, source_U, hierarchy)
                    saves = [built_saves(rank_UK, source_U, hierarchy.server_G, startup_s) for startup_s in STARTUPS_S]
                    found.append((held_G.max() / held_G.mean(), part, 1 - landed / now, 1 - moved / now, *saves))
                (skew, part, *means), (_, _, *mosts) = np.mean(found, axis=0), np.max(found, axis=0)
                parts = [f"{mean:.1%} / {most:.1%}" for mean, most in zip(means, mosts, strict=True)]
                cells = (*parts[:2], f"{part:.1%}", *parts[2:])
                table.add(traffic, dealt, f"{count} x {members}", f"{skew:.2f}", *cells)
    took = ", ".join(f"{chunks} chunks {levelling_takes_s(8, 8, chunks) * 1e6:.0f} µs" for chunks in CHUNKS[:2])
    return [*table.lines, "", f"A batch of 8 x 8 ranks is levelled in (median of 200): {took}."]


if __name__ == "__main__":
    assert __doc__ is not None
    heading = [f"# Levelling NICs, {today()}", "", f"`python bench/levelling.py` on {machine()}."]
    write("levelling", heading, [__doc__.split("\n\n", 1)[1].strip()], levelling())
