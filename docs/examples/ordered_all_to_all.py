"""Exchanges tensors of unequal sizes between two processes in a planned order: torch's all_to_all_single, ordered."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import aurora

ROWS_RR = [[1, 3], [2, 4]]  # rows from each rank to each rank


def rank_main(rank: int, folder: str) -> None:
    """Sends rows to both ranks, in the order that `openshop` makes for these sizes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sends, receives = ROWS_RR[rank], [row[rank] for row in ROWS_RR]
    mine = torch.full((sum(sends), 4), float(rank))
    received = torch.empty(sum(receives), 4)
    aurora.all_to_all(received, mine, receives, sends, order="openshop")
    print(f"rank {rank} received rows of ranks {received[:, 0].int().tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(folder,), nprocs=2)
