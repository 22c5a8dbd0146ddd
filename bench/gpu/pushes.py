"""Ordered push between virtual ranks in one device's memory: each rank a stream, eager and as a CUDA graph.

Usage: python -m bench.gpu.pushes. Dispatch and combine of top 8, one row a token and rank; sums are compared to the bit.
torch's way moves the same rows by a copy for each pair, with sizes that the host knows. Launches are those of a rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.moe.permutation import MessageFormat
from aurora.types import Network, Order
from bench.gpu.device import Cuda, chosen, report

WIDTH, TOP_K = 7168, 8
WAYS = ("unordered", "ordered")  # each has a layer's table
POLLS, FEW_POLLS, SPARE = 1 << 20, 32, 4  # multiprocessors without programs that wait: all of these must be on the GPU at once


class VirtualRanks:
    """Ranks on one device, with tokens of their own; those without rows keep all of theirs.

    Args:
        device: the device.
        ranks, tokens, width, top_k: sizes.
        empty: whether all choices are of the token's own rank.
    """

    def __init__(self, device: Cuda, ranks: int, tokens: int, width: int, top_k: int, empty: bool = False) -> None:
        self.device, self.ranks = device, ranks
        rng = np.random.default_rng(ranks)
        weight_R = 1 / (1.0 + np.arange(ranks))  # the first rank is the hottest
        drawn = [rng.choice(ranks, (tokens, top_k), p=weight_R / weight_R.sum()) for _ in range(ranks)]
        self.rank_RNK = torch.from_numpy(np.stack([np.full_like(each, r) if empty else each for r, each in enumerate(drawn)]))
        goes_RNR = torch.stack([(self.rank_RNK == peer).any(-1) for peer in range(ranks)], -1)
        bytes_GG = np.maximum(goes_RNR.sum(1).numpy() * 2 * width, 1)
        np.fill_diagonal(bytes_GG, 0)
        self.order = ORDER["openshop"](bytes_GG, Network.equal(ranks), rng=rng)
        self.stages = 1 + ranks
        self.hidden_RNH = torch.from_numpy(rng.integers(-3, 4, (ranks, tokens, width))).bfloat16()  # sums are exact
        factor_R = torch.arange(1, ranks + 1)
        self.wanted_RNH = (self.hidden_RNH.float() * (goes_RNR * factor_R).sum(-1, keepdim=True)).bfloat16().to(device.name)
        self.token_RX = [[goes_RNR[r, :, peer].nonzero()[:, 0].to(device.name) for peer in range(ranks)] for r in range(ranks)]
        self.rank_RNK, self.hidden_RNH = self.rank_RNK.to(device.name), self.hidden_RNH.to(device.name)
        self.out_RNH = torch.zeros_like(self.hidden_RNH).share_memory_()  # type: ignore[no-untyped-call]
        self.packing = MessageFormat(width, 0, torch.bfloat16)
        self.inbox_RR = torch.zeros(2, ranks, ranks, tokens, width, dtype=torch.bfloat16, device=device.name)

    def trips(self, polls: int) -> list[list[Callable[[], object]]]:
        """Makes buffers. Returns, for each of WAYS, what performs each rank's dispatch and combine."""
        from aurora.runtime.transports.push import LANES, OrderedPush

        tokens, row_bytes = self.hidden_RNH.shape[1], self.packing.row_bytes
        lanes = 2 if self.device.dry else min(LANES, (self.device.processors - SPARE) // self.ranks)
        sizes: dict[str, Any] = {"layers": len(WAYS), "stages": self.stages, "lanes": lanes}
        self.pushes = [OrderedPush(make, self.ranks, tokens, row_bytes, **sizes) for make in self.device.memories(self.ranks)]
        for push in self.pushes:
            push.set_order(0, Order.all_at_once(self.ranks))
            push.set_order(1, self.order)
            push.peers = push.peers._replace(polls=polls)
            for shared in push.peers:
                if isinstance(shared, torch.Tensor):
                    shared.share_memory_()  # type: ignore[no-untyped-call]
        return [[partial(self._trip, push, layer) for push in self.pushes] for layer in range(len(WAYS))]

    def _trip(self, push: Any, layer: int) -> None:
        rank = push.rank
        dispatched = push.dispatch(layer, self.hidden_RNH[rank], self.rank_RNK[rank], self.packing, None)
        rows, *_ = self.packing.parts(dispatched.rows)
        self.out_RNH[rank].copy_(push.combine(layer, dispatched, rows * (rank + 1)))

    def by_torch(self) -> None:
        """Performs all ranks' dispatches and combines by torch, one after the other."""
        there, back = self.inbox_RR
        for rank, token_X in enumerate(self.token_RX):
            for peer, tokens in enumerate(token_X):
                torch.index_select(self.hidden_RNH[rank], 0, tokens, out=there[peer, rank, : len(tokens)])
        for rank, token_X in enumerate(self.token_RX):
            self.out_RNH[rank].zero_()
            for peer, tokens in enumerate(token_X):
                rows = torch.mul(there[peer, rank, : len(tokens)], peer + 1, out=back[rank, peer, : len(tokens)])
                self.out_RNH[rank].index_add_(0, tokens, rows)

    def check(self, way: str) -> None:
        """Compares the sums with what all choices give, and looks for lost peers."""
        self.device.synchronize()
        for push in self.pushes:
            push.check_peers()
        assert torch.equal(self.out_RNH, self.wanted_RNH), f"{way}: other sums than torch's"
        self.out_RNH.zero_()


def microseconds(
    device: Cuda,
    ranks: int,
    tokens: int,
    width: int,
    top_k: int,
    empty: bool,
    found: dict[str, float],
    said: Callable[[], object],
) -> None:
    """Adds those of all ranks' dispatch and combine, by way and by whether a graph is replayed; calls `said` after each."""
    group = VirtualRanks(device, ranks, tokens, width, top_k, empty)
    for trips in group.trips(FEW_POLLS):  # compiles, loads and allocates, which may wait for kernels that wait for others
        device.side_by_side(trips)
    launches = device.launches(trips[0])
    found |= {"launches": launches, "torch": 1e3 * device.milliseconds(group.by_torch)}
    for way, trips in zip(WAYS, group.trips(POLLS), strict=True):
        together = partial(device.side_by_side, trips)
        together()
        group.check(way)
        found[way] = 1e3 * device.milliseconds(together)
        said()  # before a graph is captured, which may fail
        with device.no_syncs():
            together()
        replay = device.capture(together)
        group.out_RNH.zero_()
        replay()
        group.check(f"{way}, replayed")
        found[f"{way}_replayed"] = 1e3 * device.milliseconds(replay)
        said()


def main() -> None:
    """Prints a line for each number of ranks and tokens."""
    device = chosen()
    table: dict[str, dict[str, float]] = {}
    for ranks in (2,) if device.dry else (4, 8):
        for tokens in (0, 5) if device.dry else (0, 128, 1024):
            width, top_k = (24, 2) if device.dry else (WIDTH, TOP_K)
            found = table[f"{ranks} ranks, {tokens} tokens"] = {}
            microseconds(device, ranks, max(tokens, 8), width, top_k, tokens == 0, found, partial(report, us=table))
            print(f"{ranks} ranks, {tokens} tokens: " + ", ".join(f"{way} {us:.1f}" for way, us in found.items()), flush=True)
    last = table[f"{ranks} ranks, {tokens} tokens"]
    report(
        launches=last["launches"],
        unordered_over_torch=last["unordered_replayed"] / last["torch"],
        ordered_over_unordered=last["ordered_replayed"] / last["unordered_replayed"],
        us=table,
    )


if __name__ == "__main__":
    main()
