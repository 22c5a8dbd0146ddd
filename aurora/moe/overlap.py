"""Dispatch, experts and combine of a layer in stages: a group of experts computes while rows of other groups travel."""

from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np
import torch

from aurora.algorithms.alltoall.expert_groups import stage_rows
from aurora.moe.expert_map import ExpertMap
from aurora.moe.layer import LayerTransport
from aurora.moe.layouts import RowPerExpert
from aurora.types.arrays import IntArray


def overlapped(
    layout: RowPerExpert,
    expert_map: ExpertMap,
    transport: LayerTransport,
    groups: int,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    port: Executor,
) -> torch.Tensor:
    """Sends this rank's rows to their experts and back, stage by stage, while experts whose rows are there compute.

    Each rank's experts are divided into `groups` by the rows of this batch (`expert_groups`). All stages of the dispatch are
    sent, one after the other, and then those of the combine; the weights of an expert are read once.

    Args:
        layout: this rank's tokens, laid out.
        expert_map: the layer's map.
        transport: the layer's collectives.
        groups: number of groups of each rank's experts.
        compute: returns the outputs (X, H) for rows (X, H) of experts in slots (X,).
        port: executes calls in another thread, one after the other.

    Returns:
        (X, H), the outputs for this rank's own rows; `layout.aggregate` sums them by token.
    """
    rank, counts_RP = expert_map.rank, transport.gather(layout.counts).numpy()
    rank_P = np.repeat(np.arange(expert_map.ranks), np.diff(expert_map.first_R))
    sizes_KRR, group_P = stage_rows(counts_RP, rank_P, groups)
    row_X = torch.from_numpy(np.argsort(np.repeat(group_P, counts_RP[rank]), kind="stable"))
    rows, row_bytes = layout.rows[row_X], layout.rows.shape[1] * layout.rows.element_size()
    returned = torch.empty_like(rows)
    own_K, back_K = (whole.split_with_sizes(sizes_KRR[:, rank].sum(axis=1).tolist()) for whole in (rows, returned))
    arrived_K = [rows.new_empty(int(sizes_R.sum()), rows.shape[1]) for sizes_R in sizes_KRR[:, :, rank]]

    def post(phase: str, out: torch.Tensor, into: torch.Tensor, sizes_RR: IntArray) -> Future[None]:
        """Begins one stage, behind those before it; own rows are there at once."""
        sends = out.view(torch.uint8).split_with_sizes(sizes_RR[rank].tolist())
        recvs = into.view(torch.uint8).split_with_sizes(sizes_RR[:, rank].tolist())
        recvs[rank].copy_(sends[rank])

        def exchange() -> None:
            with transport.exchanging(phase, sizes_RR[None], row_bytes) as step:
                step(sends, recvs)

        return port.submit(exchange)

    stages = [post("dispatch", *stage) for stage in zip(own_K, arrived_K, sizes_KRR, strict=True)]
    try:
        for group, arrived in enumerate(arrived_K):
            stages[group].result()
            slots = np.flatnonzero(group_P[expert_map.local] == group)
            slot_X = np.repeat(np.tile(slots, len(counts_RP)), counts_RP[:, expert_map.local][:, slots].ravel())
            answers = compute(arrived, torch.from_numpy(slot_X))
            stages.append(post("combine", answers, back_K[group], sizes_KRR[group].T))
        for stage in stages[groups:]:
            stage.result()
    finally:
        for stage in stages:
            stage.cancel()
    return torch.empty_like(returned).index_copy_(0, row_X, returned)
