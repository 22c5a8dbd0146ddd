"""Dispatch layout of a hierarchical all-to-all: one row per (token, server), which a gateway forwards inside its server.

Axes as in `aurora.runtime.dispatch_layout`; N servers, C chunks, M ranks of this rank's server.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from aurora.planner.alltoall.hierarchical import HierarchicalRows, step_rows
from aurora.runtime.dispatch_layout import ExchangeStep, ExpertMap, RowPerRank
from aurora.runtime.token_permutation import MessageFormat, gather_rows, needed_by_chunk, permutation_by_rank, weighted_sum


class _StepSizes(NamedTuple):
    """What this rank sends and receives in one exchange of a dispatch; in the combine's the same goes back.

    It forwards a pool of rows to the ranks of its server: own rows for this server, then those that other servers' ranks have
    sent it in the step before.
    """

    own: slice  # of `rows`, which begin the pool
    inside_out: list[int]  # rows of the pool for each rank; those for this rank itself stay here
    inside_in: list[int]  # rows from each rank's pool
    between_out: list[slice]  # of `rows`, for each rank of other servers
    between_in: list[int]  # rows from each rank of other servers, which end the next step's pool


class RowPerServer(RowPerRank):
    """Layout of one row per (token, server), however many of the token's experts the server holds. Rows are sorted by server.

    A rank sends its rows for another server to its gateway there, which forwards each to the ranks that hold experts of it,
    and adds up what they answer. For its own server a rank is its own gateway. Exchanges are those of `Hierarchy`. Sums are
    taken in at least float32 and rounded once a hop, in the sequence of ranks, so that they do not depend on time.

    Args:
        expert_map: the layer's map, with a hierarchy.
        hidden, index, weights, mask, tokens_SE: as in `RowPerExpert`.

    Attributes:
        counts: (N + C * R,) int64, this rank's part of HierarchicalRows: sent_GN and needed_GCG.
        rows, rank_NK, sizes_SRR: as in `RowPerRank`.
    """

    def __init__(
        self,
        expert_map: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None,
        tokens_SE: torch.Tensor | None = None,
    ) -> None:
        self._map, self._hierarchy = expert_map, expert_map.hierarchy
        self.format = MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        physical_NK = expert_map.physical_experts(index, mask, tokens_SE)
        self.rank_NK, server_R = expert_map.rank_P[physical_NK], expert_map.server_R
        sent_N, _, token_X, self._row_NK = permutation_by_rank(server_R[self.rank_NK], self._hierarchy.servers)
        needed_CR = needed_by_chunk(self.rank_NK, server_R[:-1], sent_N, token_X, self._hierarchy.chunks)
        self.counts = torch.cat([sent_N, needed_CR.flatten()])
        self.rows = self.format.pack(hidden, weights, physical_NK, token_X)

    def gathered(self, counts_RX: torch.Tensor) -> None:
        """Takes the `counts` of every rank."""
        hierarchy, counts = self._hierarchy, counts_RX.numpy()
        sent_GN, needed_GX = np.split(counts, [hierarchy.servers], axis=1)
        rows = HierarchicalRows(sent_GN, needed_GX.reshape(len(counts), hierarchy.chunks, len(counts)))
        self.sizes_SRR = step_rows(rows, hierarchy)
        self._steps = self._own_steps(rows)
        self._arrived_S = [sum(step.inside_in) for step in self._steps]

    def flat_counts(self, counts_RX: torch.Tensor) -> torch.Tensor:
        """Returns (R, R) int64: from the `counts` of every rank, those of `RowPerRank` for the same tokens."""
        ranks, servers = len(counts_RX), self._hierarchy.servers
        return counts_RX[:, servers:].reshape(ranks, -1, ranks).sum(dim=1)

    def _own_steps(self, rows: HierarchicalRows) -> list[_StepSizes]:
        """This rank's part of each exchange."""
        hierarchy, rank, ranks = self._hierarchy, self._map.rank, self._map.ranks
        server_G, gateway_GN = hierarchy.server_G, hierarchy.gateway_GN
        server, inside_G = server_G[rank], server_G == server_G[rank]
        from_G = ~inside_G & (gateway_GN[:, server] == rank)  # ranks of other servers whose gateway this is
        sent_N = rows.sent_GN[rank]
        starts_NC = hierarchy.chunk_starts(sent_N) + (np.cumsum(sent_N) - sent_N)[:, None]
        starts_NC = np.append(starts_NC, starts_NC[:, -1:], axis=1)  # the last step has no chunk
        kept_S = np.zeros(hierarchy.steps, dtype=np.int64)
        kept_S[:-1] += rows.needed_GCG[rank, :, rank]
        kept_S[1:] += rows.needed_GCG[from_G, :, rank].sum(axis=0)
        steps = []
        for number, sizes_GG in enumerate(self.sizes_SRR):
            out_G, in_G = np.where(inside_G, sizes_GG[rank], 0), np.where(inside_G, sizes_GG[:, rank], 0)
            out_G[rank] = in_G[rank] = kept_S[number]
            between_out = [slice(0)] * ranks
            for other, (begin, end) in enumerate(starts_NC[:, number : number + 2].tolist()):
                if other != server:
                    between_out[gateway_GN[rank, other]] = slice(begin, end)
            between_in = np.where(inside_G, 0, sizes_GG[:, rank]).tolist()
            own = slice(*starts_NC[server, number : number + 2].tolist())
            steps.append(_StepSizes(own, out_G.tolist(), in_G.tolist(), between_out, between_in))
        return steps

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the rows (X, row_bytes) that arrive for this rank's experts, by step and then by sender."""
        expert_map, rows = self._map, self.rows
        arrived = rows.new_empty(sum(self._arrived_S), rows.shape[1])
        forwarded = rows[:0]
        self._pool_rows_S = []
        for step, into in zip(self._steps, arrived.split_with_sizes(self._arrived_S), strict=True):
            pool = torch.cat([rows[step.own], forwarded])
            member_XK = expert_map.member_R[expert_map.rank_P[self.format.parts(pool)[2].long()]]
            _, _, pool_X, row_XM = permutation_by_rank(member_XK, len(expert_map.members), sum(step.inside_out))
            inside = pool.new_empty(len(pool_X), pool.shape[1])
            gather_rows(pool.view(torch.int64), pool_X, inside.view(torch.int64))
            forwarded = rows.new_empty(sum(step.between_in), rows.shape[1])
            sends = _either(inside.split_with_sizes(step.inside_out), [rows[part] for part in step.between_out])
            recvs = _either(into.split_with_sizes(step.inside_in), forwarded.split_with_sizes(step.between_in))
            recvs[expert_map.rank].copy_(sends[expert_map.rank])
            exchange(sends, recvs)
            self._pool_rows_S.append(row_XM)
        return arrived

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the sums (X, H) for this rank's rows, from each rank's answers to the rows that arrived there."""
        rank, width = self._map.rank, answers.shape[1]
        sums = answers.new_empty(len(self.rows), width)
        partial = answers[:0]  # for the rows that were forwarded
        steps = list(zip(self._steps, self._pool_rows_S, answers.split_with_sizes(self._arrived_S), strict=True))
        for step, row_XM, out in reversed(steps):
            inside = answers.new_empty(sum(step.inside_out), width)
            sends = _either(out.split_with_sizes(step.inside_in), partial.split_with_sizes(step.between_in))
            recvs = _either(inside.split_with_sizes(step.inside_out), [sums[part] for part in step.between_out])
            recvs[rank].copy_(sends[rank])
            exchange(*([each.view(torch.uint8) for each in tensors] for tensors in (sends, recvs)))
            pool_sums, own = weighted_sum(inside, row_XM), step.own.stop - step.own.start
            sums[step.own], partial = pool_sums[:own], pool_sums[own:]
        return sums


def _either(inside: Sequence[torch.Tensor], between: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each rank the one of two tensors that is not empty: ranks are of this rank's server, or of another."""
    return [other if len(other) else own for own, other in zip(inside, between, strict=True)]
