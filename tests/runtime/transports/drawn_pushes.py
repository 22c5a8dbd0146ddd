"""Drawn exchanges by ordered push between processes, in Triton's interpreter, against what each rank computes from all ranks' inputs."""

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.moe.permutation import MessageFormat
from aurora.types import Network, Order

TOKENS, TOP_K, WIDTH, LANES, STAGES = 9, 4, 150, 2, 64
POLL_S = 2e-4  # of a look at a flag
STORE_S = 0.01  # before a store of a process that is slow


class Drawn(NamedTuple):
    """One exchange, the same on all ranks."""

    hidden: list  # (N, H) of each rank
    rank: list  # (N, K) of each rank, R for no rank
    weights: list
    packing: MessageFormat
    order: Order
    physical: list  # (N, K) int32, anything that travels along


def drawn(seed, ranks, dtype=None):
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    kind = dtype or kinds[rng.integers(len(kinds))]
    top_k, width = int(rng.integers(1, TOP_K + 1)), int(rng.integers(1, WIDTH + 1))
    tokens_R = [int(rng.integers(0, TOKENS + 1)) for _ in range(ranks)]
    skew_R = rng.dirichlet(np.full(ranks + 1, rng.choice([0.3, 3.0])))
    rank_R = [torch.from_numpy(rng.choice(ranks + 1, (tokens, top_k), p=skew_R)) for tokens in tokens_R]
    hidden_R = [torch.randn(tokens, width, generator=torch_rng).to(kind) for tokens in tokens_R]
    weights_R = [torch.rand(tokens, top_k, generator=torch_rng) for tokens in tokens_R]
    if kind != torch.float32:  # the interpreter rounds to bfloat16 otherwise than GPUs and torch: nothing is rounded
        weights_R = [(weights * 4).ceil() / 4 for weights in weights_R]
    physical_R = [torch.from_numpy(rng.integers(0, 1000, (tokens, top_k)).astype(np.int32)) for tokens in tokens_R]
    method = str(rng.choice(["openshop", "random", "all-at-once", "birkhoff"]))
    bytes_GG = np.array([[int((rank == peer).sum()) for peer in range(ranks)] for rank in rank_R])
    np.fill_diagonal(bytes_GG, 0)
    order = ORDER[method](bytes_GG, Network.equal(ranks), rng=rng)
    packing = MessageFormat(width, top_k, kind)
    return Drawn(hidden_R, rank_R, weights_R, packing, order, physical_R)


def keys(spec, source, rank):
    """The (token, choice) of each row that a source sends to a rank, in sequence."""
    rank_NK, found = spec.rank[source], []
    for n, k in (rank_NK == rank).nonzero().tolist():
        if not (rank_NK[n, :k] == rank).any():
            found.append((n, k))
    return found


def answer(spec, rows, source, rank):
    """The experts' answers: anything that depends on the row, its source and its rank; sums of narrow ones are exact."""
    if spec.packing.dtype == torch.float32:
        return rows * (1 + rank) + source
    return (rows.float().abs().floor() + 3 * rank + source).remainder(4).to(spec.packing.dtype)


def differing(push, spec, layer=0, pause_s=0.0):
    """Performs a dispatch and a combine; returns how many rows arrived, and how many bytes differ from what should have."""
    rank, packing = push.rank, spec.packing
    push.set_order(layer, spec.order)
    sent = spec.hidden[rank], spec.rank[rank], packing, packing.tail(spec.weights[rank], spec.physical[rank])
    dispatched = push.dispatch(layer, *sent)
    time.sleep(pause_s)
    wrong = total = 0
    slots = push.slots
    answers = torch.full((push.ranks * slots, packing.width), float("nan")).to(packing.dtype)
    for source in range(push.ranks):
        own = keys(spec, source, rank)
        wrong += int(dispatched.count_R[source]) != len(own)
        rows = dispatched.rows[source * slots : source * slots + len(own)]
        token_X = torch.tensor([n for n, _ in own], dtype=torch.long)
        hidden = spec.hidden[source]
        expected = torch.zeros(len(own), packing.row_bytes, dtype=torch.uint8)
        into, weights, physical = packing.parts(expected)
        into.view(torch.uint8).copy_(hidden[token_X].view(torch.uint8))
        weights.copy_(spec.weights[source][token_X])
        physical.copy_(spec.physical[source][token_X])
        for found, wanted in zip(parts(packing, rows), parts(packing, expected), strict=True):
            wrong += int((found != wanted).sum())
        answers[source * slots : source * slots + len(own)] = answer(spec, hidden[token_X], source, rank)
        total += len(own)
    sums = push.combine(layer, dispatched, answers)
    expected = torch.zeros(len(spec.hidden[rank]), packing.width)
    for n, k in sorted(key for peer in range(push.ranks) for key in keys(spec, rank, peer)):
        expected[n] += answer(spec, spec.hidden[rank][n], rank, int(spec.rank[rank][n, k])).float()
    wrong += int((sums.view(torch.uint8) != expected.to(packing.dtype).view(torch.uint8)).sum())
    return total, wrong


def parts(packing, rows):
    hidden, *others = packing.parts(rows)
    return hidden.view(torch.uint8), *others


def in_interpreter():
    """Makes Triton interpret the kernels of this process. Returns the module of ordered push."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    yield_when_polling()
    from aurora.moe import push_layout_triton, push_triton
    from aurora.runtime.transports import push

    push_layout_triton.SCANNED = 16  # less than what is drawn, so that there are several
    push_triton.TILE_BYTES, push_triton.SUM_ELEMENTS, push_triton.FEW_ROWS, push_triton.FENCED_BYTES = 512, 64, 4, 512
    return push


def yield_when_polling():
    """Lets a process sleep at each look at a flag, so that its peers have the core: kernels are as they are."""
    from triton.runtime.interpreter import InterpreterBuilder

    look = InterpreterBuilder.create_atomic_rmw
    if look.__name__ != "sleep_and_look":

        def sleep_and_look(*args):
            time.sleep(POLL_S)
            return look(*args)

        InterpreterBuilder.create_atomic_rmw = sleep_and_look


def private(folder, name):
    """A folder for the buffers of one group, made by whichever of its ranks comes first."""
    own = Path(folder) / name
    own.mkdir(mode=0o700, exist_ok=True, parents=True)
    return own


def ordered_push(rank_info, folder, timeout_s=0.05, **named):
    """An OrderedPush of this rank over files in a folder. A look takes POLL_S, 200 times what `timeout_s` counts with."""
    module = in_interpreter()
    from aurora.runtime.transports.symmetric_memory import shared_memory

    make = partial(shared_memory, private(folder, "all"), rank_info.rank, rank_info.ranks)
    row_bytes = MessageFormat(WIDTH, TOP_K, torch.float32).row_bytes
    sizes = {"layers": 2, "lanes": LANES, "stages": STAGES, "timeout_s": timeout_s} | named
    return module.OrderedPush(make, rank_info.ranks, TOKENS, row_bytes, **sizes)


def slow_writes():
    """Lets this process sleep before each of its masked stores: flags that come before their rows are seen."""
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store

    def sleep_and_store(*args):
        time.sleep(STORE_S)
        return store(*args)

    InterpreterBuilder.create_masked_store = sleep_and_store


def exchanges(rank_info, folder, seeds, slow=False):
    """One rank's part of drawn exchanges; returns (rows, differing bytes) of each. With `slow`, rank 0 writes slowly."""
    push, found = ordered_push(rank_info, folder, timeout_s=0.5), []
    if slow and rank_info.rank == 0:
        slow_writes()
    for number, seed in enumerate(seeds):
        found.append(differing(push, drawn(seed, rank_info.ranks), number % 2))
        push.check_peers()
    return found


def late_readers(rank_info, folder, one_half):
    """Rank 1 reads what a dispatch has brought after rank 0 has sent its combine; returns differing bytes of each exchange."""
    push = ordered_push(rank_info, folder, timeout_s=0.5)
    if one_half:
        push._half_at = push._half_at[:1] * 2
    specs = [drawn(seed, 2, torch.float32) for seed in range(40, 44)]
    return [differing(push, spec, 0, 0.5 * rank_info.rank)[1] for spec in specs]


def lose_a_flag(rank_info, folder):
    """Rank 0 of 3 takes part in one exchange and not in the next. Returns what the others say."""
    push = ordered_push(rank_info, folder, timeout_s=0.5)
    spec = drawn(1, 3)
    differing(push, spec)
    push.check_peers()
    if rank_info.rank == 0:
        return ""
    push.peers = push.peers._replace(polls=2000)
    differing(push, spec)
    push.check_peers(waits=False)  # which sees it the next time
    said = []
    for waits in (False, True):
        try:
            push.check_peers(waits)
        except Exception as error:
            said.append(str(error))
    return said[0] if said[1:] == said[:1] else "nothing"


def too_many(rank_info, folder):
    """Four tokens where rounds have three. Returns what is said, and the rounds of seven tokens where nine may come."""
    push = ordered_push(rank_info, folder, round_tokens=3)
    packing = MessageFormat(96, 2, torch.float32)
    hidden, rank_NK = torch.zeros(4, packing.width), torch.zeros(4, 2, dtype=torch.long)
    push.row_bytes = packing.row_bytes
    try:
        push.dispatch(0, hidden, rank_NK, packing, packing.tail(torch.zeros(4, 2), rank_NK))
    except Exception as error:
        return str(error), [part.indices(7) for part in push.parts(7)]
    return None


def main():
    """Performs as many drawn exchanges as are asked for, by 2, 3 and 4 processes in turn, and prints how many bytes differ."""
    from aurora.runtime.distributed.launcher import launch
    from tests.runtime.transports.drawn_pushes import exchanges  # by the name that processes import

    wanted, done, rows, wrong, seed = int(sys.argv[1]), 0, 0, 0, 10_000
    while done < wanted:
        ranks, count = 2 + seed // 100 % 3, min(50, wanted - done)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            found = launch(exchanges, ranks, folder, range(seed, seed + count), timeout_s=3000.0)
        rows += sum(each for of_rank in found for each, _ in of_rank)
        wrong += sum(each for of_rank in found for _, each in of_rank)
        done, seed = done + count, seed + 100
        print(f"{done} exchanges, {rows} rows, {wrong} differing bytes", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
