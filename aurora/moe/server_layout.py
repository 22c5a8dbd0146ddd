"""Dispatch layout of hierarchical all-to-alls: one row per (token, server).

Axes are those of `aurora.moe.layouts`, and N servers, C pieces, M ranks of this rank's server; S steps are the exchanges of one
all-to-all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from aurora.moe.layouts import RowPerRank
from aurora.moe.permutation import gather_rows, needed_by_piece, permutation_by_rank, weighted_sum
from aurora.moe.transport import ExchangeStep
from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.algorithms.alltoall.hierarchical import HopRows


class _Relay(NamedTuple):
    """Rows that this rank carries for a peer of its server."""

    source: int  # the peer
    gateway: int  # the rank of another server that they go to in the next step
    rows: int


class _StepSizes(NamedTuple):
    """Rows that this rank sends and receives in one exchange of a dispatch; in the combine's the same go back.

    It forwards a pool of rows to the ranks of its server: own rows for this server, then those that other servers' ranks have
    sent it in the step before. What peers have handed it in the step before goes to its own gateways.
    """

    own: slice  # of `rows`, which begin the pool
    inside_out: list[int]  # rows of the pool for each rank; those for this rank itself stay here
    inside_in: list[int]  # rows from each rank's pool
    carried_out: list[list[slice]]  # of `rows`, for each rank, which is their gateway or hands them to its own
    between_in: list[int]  # rows from each rank of other servers, which end the next step's pool
    relays: list[_Relay]  # rows that peers hand over, by peer and then by server


class RowPerServer(RowPerRank):
    """Layout of one row per (token, server), however many of the token's experts the server holds. Rows are sorted by server.

    A rank sends its rows for another server to its gateway, a rank of that server. If all-to-alls are levelled, it may instead
    hand rows to a peer on its own server, which sends them to the peer's gateway. A gateway forwards each row to the ranks of
    its server that hold the token's experts, and sums their outputs. For rows to its own server a rank is its own gateway.
    `Hierarchy` defines the exchanges. Sums are computed in at least float32, in the sequence of ranks, and rounded at the
    gateway; so they depend neither on timing nor on the rank whose NIC carries a row.

    The expert map must have a hierarchy. `counts` is (N + C * R,): this rank's rows for each server, then the rows that each
    rank needs of each piece (`sent_GN` and `needed_GCG` of HierarchicalRows).
    """

    def __init__(self, *tokens: Any) -> None:
        super().__init__(*tokens)
        self._tokens = tokens

    def flat(self) -> RowPerRank:
        return RowPerRank(*self._tokens)

    def _sort(self) -> torch.Tensor:
        self._hierarchy, server_R = self._map.hierarchy, self._map.server_R
        sent_N, token_X, self._row_NK = permutation_by_rank(server_R[self.rank_NK], self._hierarchy.servers)
        needed_CR = needed_by_piece(self.rank_NK, server_R[:-1], sent_N, token_X, self._hierarchy.pieces)
        self.counts = torch.cat([sent_N, needed_CR.flatten()])
        return token_X

    def gathered(self, counts: torch.Tensor) -> None:
        from aurora.algorithms.alltoall.hierarchical import HierarchicalRows, hop_rows  # which flat layouts need not

        hierarchy = self._hierarchy
        del self._tokens  # `flat` is not asked for any more
        sent_GN, needed_GX = np.split(counts.numpy(), [hierarchy.servers], axis=1)
        rows = HierarchicalRows(sent_GN, needed_GX.reshape(len(counts), hierarchy.pieces, len(counts)))
        hops = hop_rows(rows, hierarchy)
        self.sizes_SRR = hops.total_SGG
        self._steps = self._own_steps(sent_GN, hops)
        self._arrived_S = [sum(step.inside_in) for step in self._steps]

    def flat_counts(self, counts_RX: torch.Tensor) -> torch.Tensor:
        """Converts the `counts` of all ranks to (R, R) int64, the counts of `flat()`."""
        ranks, servers = len(counts_RX), self._hierarchy.servers
        return counts_RX[:, servers:].reshape(ranks, -1, ranks).sum(dim=1)

    def _own_steps(self, sent_GN: IntArray, hops: "HopRows") -> list[_StepSizes]:
        """This rank's part of each exchange."""
        hierarchy, rank = self._hierarchy, self._map.rank
        server, sent_N = int(hierarchy.server_G[rank]), sent_GN[rank]
        starts_NC = hierarchy.piece_starts(sent_N) + (sent_N.cumsum() - sent_N)[:, None]
        own_C = starts_NC[server, :: hierarchy.parts].tolist()
        own_C += own_C[-1:] * (hierarchy.steps - hierarchy.chunks)  # the last steps have no chunk
        carried_out, relays = self._carried(starts_NC, hops.carrier_GNC[rank]), self._relays(sent_GN, hops.carrier_GNC)
        between_SG = np.where(hierarchy.server_G == server, 0, hops.carried_SGG[:, :, rank])
        return [
            _StepSizes(
                slice(*own_C[step : step + 2]),
                hops.forwarded_SGG[step, rank].tolist(),
                hops.forwarded_SGG[step, :, rank].tolist(),
                carried_out[step],
                between_SG[step].tolist(),
                relays[step],
            )
            for step in range(hierarchy.steps)
        ]

    def _carried(self, starts_NC: IntArray, carrier_NC: IntArray) -> list[list[list[slice]]]:
        """By step and rank, which of `rows` go to gateways and carriers; starts_NC says where pieces begin."""
        hierarchy, rank = self._hierarchy, self._map.rank
        to_NC = np.where(carrier_NC == rank, hierarchy.gateway_GN[rank][:, None], carrier_NC)
        first_NC, last_NC = np.ones((2, *to_NC.shape), dtype=np.bool_)  # of pieces of a chunk that go to the same rank
        first_NC[:, 1:] = last_NC[:, :-1] = to_NC[:, 1:] != to_NC[:, :-1]
        first_NC[:, :: hierarchy.parts] = last_NC[:, hierarchy.parts - 1 :: hierarchy.parts] = True
        first_NC[hierarchy.server_G[rank]] = last_NC[hierarchy.server_G[rank]] = False
        carried: list[list[list[slice]]] = [[[] for _ in range(hierarchy.ranks)] for _ in range(hierarchy.steps)]
        chunk_X, to_X = np.nonzero(first_NC)[1] // hierarchy.parts, to_NC[first_NC]
        columns = chunk_X, to_X, starts_NC[:, :-1][first_NC], starts_NC[:, 1:][last_NC]
        for chunk, to, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            if start < stop:
                carried[chunk][to].append(slice(start, stop))
        return carried

    def _relays(self, sent_GN: IntArray, carrier_GNC: IntArray) -> list[list[_Relay]]:
        """By step, the rows that peers hand to this rank."""
        hierarchy, rank = self._hierarchy, self._map.rank
        relays: list[list[_Relay]] = [[] for _ in range(hierarchy.steps)]
        peers = np.array([peer for peer in self._map.members if peer != rank], dtype=np.int64)
        handed_MNC = carrier_GNC[peers] == rank
        if handed_MNC.any():
            rows_MNC = np.where(handed_MNC, np.diff(hierarchy.piece_starts(sent_GN[peers])), 0)
            rows_MNS = rows_MNC.reshape(*rows_MNC.shape[:2], hierarchy.chunks, hierarchy.parts).sum(axis=-1)
            peer_X, server_X, chunk_X = np.nonzero(rows_MNS)
            columns = chunk_X, peers[peer_X], hierarchy.gateway_GN[rank, server_X], rows_MNS[peer_X, server_X, chunk_X]
            for chunk, *relay in zip(*(column.tolist() for column in columns), strict=True):
                relays[chunk].append(_Relay(*relay))
        return relays

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `rows`. Returns the rows (X, row_bytes) that arrive for this rank's experts, sorted by step, then by sender."""
        expert_map, rows = self._map, self.rows
        arrived = rows.new_empty(sum(self._arrived_S), rows.shape[1])
        forwarded, relays, relayed = rows[:0], list[_Relay](), list[torch.Tensor]()
        self._pool_rows_S = []
        for step, into in zip(self._steps, arrived.split_with_sizes(self._arrived_S), strict=True):
            pool = torch.cat([rows[step.own], forwarded])
            member_XK = expert_map.member_R[expert_map.rank_P[self.format.parts(pool)[2].long()]]
            _, pool_X, row_XM = permutation_by_rank(member_XK, len(expert_map.members), sum(step.inside_out))
            inside = pool.new_empty(len(pool_X), pool.shape[1])
            gather_rows(pool.view(torch.int64), pool_X, inside.view(torch.int64))
            sends = _outward(step, inside, rows, relays, relayed)
            forwarded = rows.new_empty(sum(step.between_in), rows.shape[1])
            relays, relayed = step.relays, _blocks(rows, step.relays)
            _perform(exchange, sends, _inward(step, into, forwarded, relayed), expert_map.rank)
            self._pool_rows_S.append(row_XM)
        return arrived

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `answers` (X, H), the outputs for arrived rows. Returns (X, H), the summed outputs for this rank's `rows`."""
        width, before_S = answers.shape[1], [list[_Relay](), *(step.relays for step in self._steps[:-1])]
        sums = answers.new_empty(len(self.rows), width)
        partial, relayed = answers[:0], list[torch.Tensor]()  # for the rows that were forwarded, and those that were relayed
        steps = list(zip(self._steps, self._pool_rows_S, answers.split_with_sizes(self._arrived_S), before_S, strict=True))
        for step, row_XM, out, relays in reversed(steps):
            inside = answers.new_empty(sum(step.inside_out), width)
            sends = _inward(step, out, partial, relayed)
            relayed = _blocks(answers, relays)
            _perform(exchange, sends, _outward(step, inside, sums, relays, relayed), self._map.rank)
            pool_sums, rows = weighted_sum(inside, row_XM), step.own.stop - step.own.start
            sums[step.own], partial = pool_sums[:rows], pool_sums[rows:]
        return sums


def _outward(
    step: _StepSizes, inside: torch.Tensor, rows: torch.Tensor, relays: Sequence[_Relay], relayed: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """For each rank, what goes to it in a dispatch: of the pool, of `rows`, and what peers handed over in the step before."""
    pool_R = inside.split_with_sizes(step.inside_out)
    tensors_R = [[part, *(rows[span] for span in spans)] for part, spans in zip(pool_R, step.carried_out, strict=True)]
    for relay, block in zip(relays, relayed, strict=True):
        tensors_R[relay.gateway].append(block)
    return tensors_R


def _inward(
    step: _StepSizes, arrived: torch.Tensor, forwarded: torch.Tensor, relayed: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """For each rank, what comes from it in a dispatch: for this rank, for its server, and to be relayed."""
    tensors_R = [
        list(pair)
        for pair in zip(arrived.split_with_sizes(step.inside_in), forwarded.split_with_sizes(step.between_in), strict=True)
    ]
    for relay, block in zip(step.relays, relayed, strict=True):
        tensors_R[relay.source].append(block)
    return tensors_R


def _blocks(like: torch.Tensor, relays: Sequence[_Relay]) -> list[torch.Tensor]:
    """Room for the rows of each relay."""
    sizes = [relay.rows for relay in relays]
    return list(like.new_empty(sum(sizes), like.shape[1]).split_with_sizes(sizes)) if sizes else []


def _perform(
    exchange: ExchangeStep, sends_R: Sequence[Sequence[torch.Tensor]], recvs_R: Sequence[Sequence[torch.Tensor]], rank: int
) -> None:
    """Performs an exchange in which several tensors for a rank travel as one."""
    there_R, here_R = ([_bytes(tensors) for tensors in tensors_R] for tensors_R in (sends_R, recvs_R))
    sends = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in there_R]
    recvs = [parts[0] if len(parts) == 1 else parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1]) for parts in here_R]
    recvs[rank].copy_(sends[rank])
    exchange(sends, recvs)
    for whole, parts in zip(recvs, here_R, strict=True):
        if len(parts) > 1:
            for part, block in zip(parts, whole.split_with_sizes([*map(len, parts)]), strict=True):
                part.copy_(block)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of those that are not empty, as bytes; of the first if all are."""
    return [tensor.view(torch.uint8) for tensor in tensors if len(tensor)] or [tensors[0].view(torch.uint8)]
