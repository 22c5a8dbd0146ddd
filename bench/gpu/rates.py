"""Bytes a second of the push kernel: on one GPU over those of a copy, or between GPUs.

Usage: python -m bench.gpu.rates [--ranks N]. Alone, a GPU writes each token's row into buffers of 8 ranks in its own memory,
by several numbers of lanes and warps, and once more with a fence for each peer, by which a fence is timed. It fails below LEAST
of a device-to-device copy, or if a byte differs. With --ranks each GPU writes to all others, all at once and in rounds.
"""

import argparse
import itertools
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from aurora.types import Order
from aurora.types.schedule import rotated_pairs
from bench.gpu.device import Cuda, chosen, report

RANKS, TOKENS, FEW, WIDTH = 8, 4096, 8, 7168
LEAST = 0.7  # of a copy
LANES: tuple[int, ...] = (16, 24, 48, 96, 132)
TILES: tuple[int, ...] = (1 << 14, 1 << 13, 1 << 12)  # bytes: 32, 16 and 8 warps


def made_push(make: Any, ranks: int, tokens: int, row_bytes: int, lanes: int) -> Any:
    """Returns an OrderedPush with the orders "all at once" and "rounds"; exchanges only send."""
    from aurora.runtime.transports.push import OrderedPush

    push = OrderedPush(make, ranks, tokens, row_bytes, layers=2, lanes=lanes, stages=ranks, lock_step=True)
    push.set_order(0, Order.all_at_once(ranks))
    push.set_order(1, Order("rounds", rotated_pairs(ranks)))
    return push


def to_all(device: Cuda, ranks: int, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns hidden states (N, H), and (N, R) ranks: each token goes to every rank."""
    hidden = torch.randn(tokens, width, device=device.name).bfloat16()
    return hidden, torch.arange(ranks, device=device.name).repeat(tokens, 1)


def alone(device: Cuda) -> bool:
    """Measures one GPU, and reports. Returns whether it passes."""
    from aurora.moe import push_triton
    from aurora.moe.permutation import MessageFormat
    from aurora.moe.push_layout_triton import lay_out
    from bench.local_layer import local_memory

    ranks, tokens, width, lanes_tried, tiles = RANKS, TOKENS, WIDTH, LANES, TILES
    if device.dry:
        ranks, tokens, width, lanes_tried, tiles = 2, 9, 40, (1, 2), (512, 256)
    packing = MessageFormat(width, 0, torch.bfloat16)
    push = made_push(local_memory(ranks, device.name)[0], ranks, tokens, packing.row_bytes, max(lanes_tried))
    hidden, rank_NK = to_all(device, ranks, tokens, width)
    rows = push_triton.Rows(hidden, ranks, None, 0, packing.row_bytes)
    size = ranks * hidden.nbytes
    copied, into = hidden.repeat(ranks, 1), torch.empty(ranks * tokens, width, dtype=hidden.dtype, device=device.name)
    copy_GBps = size / device.milliseconds(lambda: into.copy_(copied)) / 1e6

    def call(layer: int, count: int) -> partial[None]:
        row_of_RX, count_RT, _ = lay_out(rank_NK[:count], ranks, tokens)
        to = row_of_RX, count_RT, 0, push._half_at[0]
        return partial(push_triton.push, push.peers, push.table_L2[layer, 0], rows, *to, waits=False)

    send, GBps = call(0, tokens), {}
    for lanes, tile in itertools.product(lanes_tried, tiles):
        with patch.object(push_triton, "lanes_of", lambda _, lanes=lanes: lanes), patch.object(push_triton, "TILE_BYTES", tile):
            GBps[f"{lanes} lanes, {tile // 512} warps"] = size / device.milliseconds(send, 10) / 1e6
            report(copy_GBps=copy_GBps, GBps=GBps)
    push.memory.keeps.zero_()
    send()
    push_GBps = size / device.milliseconds(send) / 1e6
    block = slice(push._half_at[0], push._half_at[0] + tokens * packing.row_bytes)  # rank 0's rows in each rank's buffer
    equal = all(torch.equal(packing.parts(part[block].view(tokens, -1))[0], hidden) for part in push.memory.keeps)
    few, each_us = call(1, min(FEW, tokens)), []
    for fenced in (1 << 40, 0):  # one fence at the end, or one for each peer
        with patch.object(push_triton, "FENCED_BYTES", fenced):
            each_us.append(1e3 * device.milliseconds(few))
    fence_us = (each_us[1] - each_us[0]) / (ranks - 1)
    report(
        push_over_copy=push_GBps / copy_GBps, push_GBps=push_GBps, copy_GBps=copy_GBps, equal=equal, fence_us=fence_us,
        few_rows_us=each_us[0], GBps=GBps,
    )  # fmt: skip
    return equal and (device.dry or push_GBps >= LEAST * copy_GBps)


def of_rank(rank_info: Any) -> dict[str, float]:
    """One rank's part of a measurement between GPUs. Returns what its port sends to others, in GB/s, by order."""
    from aurora.moe.permutation import MessageFormat
    from aurora.runtime.transports.gloo import GlooTransport
    from aurora.runtime.transports.process_groups import default_process_group, new_process_group
    from aurora.runtime.transports.push import LANES as ALL_LANES
    from aurora.runtime.transports.symmetric_memory import memory_of_peers

    device = chosen(rank_info.local_rank)
    tokens, width = (5, 40) if device.dry else (TOKENS, WIDTH)
    ranks, packing = rank_info.ranks, MessageFormat(width, 0, torch.bfloat16)
    with default_process_group(rank_info):
        transport, group = GlooTransport(), None if device.dry else new_process_group("nccl", rank_info.timeout_s)
        make = memory_of_peers(transport.gather, rank_info.rank, ranks, device.name, group)
        if isinstance(make, str):
            sys.exit(make)
        push = made_push(make, ranks, tokens, packing.row_bytes, 1 if device.dry else ALL_LANES)
        push._lock_step, found = False, {}
        hidden, rank_NK = to_all(device, ranks, tokens, width)
        for layer, name in enumerate(("all_at_once", "rounds")):
            took_ms = device.milliseconds(lambda layer=layer: push.dispatch(layer, hidden, rank_NK, packing, None), 20)  # type: ignore[misc]
            push.check_peers()
            found[name] = (ranks - 1) * hidden.nbytes / took_ms / 1e6
        return found


def main() -> None:
    """Measures, and ends with 1 if what was measured does not pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    if given.ranks == 1:
        sys.exit(not alone(chosen()))
    from aurora.runtime.distributed.launcher import launch
    from bench.gpu import rates  # by the name that processes import

    found_R = launch(rates.of_rank, given.ranks)
    report(**{f"{name}_GBps": min(found[name] for found in found_R) for name in found_R[0]})


if __name__ == "__main__":
    main()
