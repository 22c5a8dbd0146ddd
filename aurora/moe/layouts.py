"""Dispatch layouts of a MoE layer: one row per (token, expert) pair, per (token, rank), or per (token, server).

A layout holds one batch of a layer. The caller gathers the `counts` of all ranks and passes them to `gathered`. Then it calls
`dispatch`, `compute`, `combine` and `aggregate`, once each. To `dispatch` and `combine` it passes a function that performs an
exchange between all ranks (`ExchangeStep`); a flat layout calls it once, `RowPerServer` several times.

Axes: N tokens, K choices of a token, E experts, P physical experts (every replica is one), R and G ranks, S ranks that hold
tokens or, of sizes, steps (exchanges of one all-to-all), X rows, Q (row, expert) pairs of arrived rows, H hidden width. Of
`RowPerServer`: N servers, C pieces, M ranks of this rank's server.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import (
    MessageFormat,
    gather_rows,
    needed_by_piece,
    permutation_by_expert,
    permutation_by_rank,
    weighted_sum,
)
from aurora.moe.permutation_cpu import sum_by_rank
from aurora.moe.transport import ExchangeStep
from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.planner.alltoall.hierarchical import HopRows


class DispatchLayout(ABC):
    """One batch of a layer, laid out as the rows in which its tokens travel.

    Args:
        expert_map: the layer's map.
        hidden: (N, H) hidden states of this rank's tokens.
        index, weights: (N, K) the experts that every token chose, and their weights.
        mask, tokens_SE: as in `ExpertMap.physical_experts`.

    Attributes:
        rows: (X, row elements) the rows to send.
        counts: int64, number of this rank's rows for each destination, which subclasses define.
        sizes_SRR: (S, R, R) int64, number of rows from each rank (row) to each rank (column) in each exchange of the dispatch;
            set by `gathered`. The combine has the exchanges in reverse, each with the transposed sizes.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    sizes_SRR: IntArray
    _row_NK: torch.Tensor  # the rows of each token, -1 for none

    def __init__(
        self,
        expert_map: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None,
        tokens_SE: torch.Tensor | None = None,
    ) -> None:
        self._map = expert_map
        self._lay_out(hidden, weights, expert_map.physical_experts(index, mask, tokens_SE))

    @abstractmethod
    def _lay_out(self, hidden: torch.Tensor, weights: torch.Tensor, physical_NK: torch.Tensor) -> None:
        """Sets `rows` and `counts`, from the physical experts (N, K) that serve the tokens' choices."""

    @abstractmethod
    def gathered(self, counts: torch.Tensor) -> None:
        """Sets `sizes_SRR` from the `counts` of every rank, (R, *counts.shape)."""

    @abstractmethod
    def compute(self, rows: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns the answers (X, H) of this rank's `experts` to the `rows` that arrived."""

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `rows`. Returns the rows (X, row elements) that arrive for this rank's experts, sorted by sender."""
        return exchange_rows(exchange, self.rows, self.sizes_SRR[0], self._map.rank)

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `answers` (X, H), one for each row that arrived here. Returns (X, H), the answers to this rank's own `rows`."""
        return exchange_rows(exchange, answers, self.sizes_SRR[0].T, self._map.rank)

    def aggregate(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H): for each token the sum of its rows in `answers`, which `combine` returned."""
        return weighted_sum(answers, self._row_NK)


class RowPerExpert(DispatchLayout):
    """Layout of one row per (token, expert) pair: the token's hidden state. Rows are sorted by physical expert.

    The token's own rank applies the weights, to the answers that come back. `counts` is (P,), the rows for each physical
    expert; rows arrive sorted by sender and then by slot.
    """

    def _lay_out(self, hidden: torch.Tensor, weights: torch.Tensor, physical_NK: torch.Tensor) -> None:
        self._weights = weights
        self.counts, token_X, self._row_NK = permutation_by_expert(physical_NK, self._map.num_physical)
        self.rows = hidden.new_empty(len(token_X), hidden.shape[1])
        gather_rows(hidden, token_X, self.rows)

    def gathered(self, counts: torch.Tensor) -> None:
        counts_RP, local = counts.numpy(), self._map.local
        self.sizes_SRR = sum_by_rank(counts_RP, self._map.first_R)[None]
        self._slots_X = np.repeat(self._map.arrival_slots, counts_RP[:, local].ravel())

    def compute(self, rows: torch.Tensor, experts: Any) -> torch.Tensor:
        return apply_experts(experts, rows, torch.from_numpy(self._slots_X).to(rows.device))

    def aggregate(self, answers: torch.Tensor) -> torch.Tensor:
        return weighted_sum(answers, self._row_NK, self._weights)


class RowPerRank(DispatchLayout):
    """Layout of one row per (token, rank), however many of the token's experts the rank holds. Rows are sorted by rank.

    The receiving rank answers with the weighted sum over these experts. This sends fewer bytes than `RowPerExpert`, but adds up
    in another sequence, so the results may differ in the last bits. A row also carries the token's weights and physical experts
    (`MessageFormat`). `counts` is (R,), the rows for each rank.

    Attributes:
        rank_NK: (N, K) int64, the rank that computes every choice; R where the token needs no experts.
    """

    def _lay_out(self, hidden: torch.Tensor, weights: torch.Tensor, physical_NK: torch.Tensor) -> None:
        self.format = MessageFormat(hidden.shape[1], physical_NK.shape[1], hidden.dtype)
        self.rank_NK = self._map.rank_P[physical_NK]
        token_X = self._sort()
        self.rows = self.format.pack(hidden, weights, physical_NK, token_X)

    def _sort(self) -> torch.Tensor:
        """Sets `counts`, and returns (X,) the token of each row."""
        self.counts, _, token_X, self._row_NK = permutation_by_rank(self.rank_NK, self._map.ranks)
        return token_X

    def gathered(self, counts: torch.Tensor) -> None:
        self.sizes_SRR = counts.numpy()[None]

    def received(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Unpacks rows that arrived: hidden states (X, H), weights (X, K) and slots (X, K), -1 for another rank's expert."""
        hidden_X, weights_XK, physical_XK = self.format.parts(rows)
        return hidden_X, weights_XK, self._map.local_slots(physical_XK)

    def compute(self, rows: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns (X, H): for each row that arrived, the weighted sum of the outputs of its experts on this rank."""
        hidden_X, weights_XK, slots_XK = self.received(rows)
        here_XK = slots_XK >= 0
        slots_Q = slots_XK[here_XK]
        hidden_Q = hidden_X.new_empty(len(slots_Q), hidden_X.shape[1])
        gather_rows(hidden_X, here_XK.nonzero()[:, 0], hidden_Q)
        answer_XK = torch.full(slots_XK.shape, -1, device=rows.device)
        answer_XK[here_XK] = torch.arange(len(slots_Q), device=rows.device)
        return weighted_sum(apply_experts(experts, hidden_Q, slots_Q), answer_XK, weights_XK)


def exchange_rows(exchange: ExchangeStep, rows: torch.Tensor, sizes_RR: IntArray, rank: int) -> torch.Tensor:
    """Performs one exchange of rows. Returns the rows that arrive, sorted by sender.

    Args:
        exchange: performs it between all ranks.
        rows: this rank's rows, sorted by receiver.
        sizes_RR: (R, R) number of rows from each rank (row) to each rank (column).
        rank: this rank.
    """
    out_sizes, in_sizes = sizes_RR[rank].tolist(), sizes_RR[:, rank].tolist()
    arrived = rows.new_empty(sum(in_sizes), rows.shape[1])
    sends, recvs = (
        tensor.view(torch.uint8).split_with_sizes(sizes) for tensor, sizes in ((rows, out_sizes), (arrived, in_sizes))
    )
    recvs[rank].copy_(sends[rank])
    exchange(sends, recvs)
    return arrived


def apply_experts(experts: Any, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns (X, H), in the dtype of `rows`: for row x of `rows` (X, H) the unweighted output of the expert in slot slots[x].

    `experts` is called as transformers' experts modules are.
    """
    if len(rows) == 0:
        return rows
    answers: torch.Tensor = experts(rows, slots[:, None], rows.new_ones(len(rows), 1))
    return answers.view(rows.shape).to(rows.dtype)  # which the other ranks expect


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

    A rank sends its rows for another server to its gateway there, a rank of that server. If all-to-alls are levelled, it may
    hand rows to a peer on its own server instead, which sends them to the peer's gateway. A gateway forwards each row to the
    ranks of its server that hold the token's experts, and adds up their answers. For rows to its own server a rank is its own
    gateway. `Hierarchy` defines the exchanges. Sums are taken in at least float32, in the sequence of ranks, and rounded at the
    gateway; so they depend neither on timing nor on the rank that carries a row.

    The expert map must have a hierarchy. `counts` is (N + C * R,): this rank's rows for each server, then the rows that each
    rank needs of each piece (`sent_GN` and `needed_GCG` of HierarchicalRows).
    """

    def _sort(self) -> torch.Tensor:
        self._hierarchy, server_R = self._map.hierarchy, self._map.server_R
        sent_N, _, token_X, self._row_NK = permutation_by_rank(server_R[self.rank_NK], self._hierarchy.servers)
        needed_CR = needed_by_piece(self.rank_NK, server_R[:-1], sent_N, token_X, self._hierarchy.pieces)
        self.counts = torch.cat([sent_N, needed_CR.flatten()])
        return token_X

    def gathered(self, counts: torch.Tensor) -> None:
        from aurora.planner.alltoall.hierarchical import HierarchicalRows, hop_rows  # which flat layouts need not

        hierarchy = self._hierarchy
        sent_GN, needed_GX = np.split(counts.numpy(), [hierarchy.servers], axis=1)
        rows = HierarchicalRows(sent_GN, needed_GX.reshape(len(counts), hierarchy.pieces, len(counts)))
        hops = hop_rows(rows, hierarchy)
        self.sizes_SRR = hops.total_SGG
        self._steps = self._own_steps(sent_GN, hops)
        self._arrived_S = [sum(step.inside_in) for step in self._steps]

    def flat_counts(self, counts_RX: torch.Tensor) -> torch.Tensor:
        """Converts the `counts` of every rank to those that `RowPerRank` would have for the same tokens: (R, R) int64."""
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
            _, _, pool_X, row_XM = permutation_by_rank(member_XK, len(expert_map.members), sum(step.inside_out))
            inside = pool.new_empty(len(pool_X), pool.shape[1])
            gather_rows(pool.view(torch.int64), pool_X, inside.view(torch.int64))
            sends = _outward(step, inside, rows, relays, relayed)
            forwarded = rows.new_empty(sum(step.between_in), rows.shape[1])
            relays, relayed = step.relays, _blocks(rows, step.relays)
            _perform(exchange, sends, _inward(step, into, forwarded, relayed), expert_map.rank)
            self._pool_rows_S.append(row_XM)
        return arrived

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `answers` (X, H), one for each row that arrived. Returns (X, H), the summed answers to this rank's `rows`."""
        width, before_S = answers.shape[1], [list[_Relay](), *(step.relays for step in self._steps[:-1])]
        sums = answers.new_empty(len(self.rows), width)
        partial, relayed = answers[:0], list[torch.Tensor]()  # for the rows that were forwarded, and those that were relayed
        steps = list(zip(self._steps, self._pool_rows_S, answers.split_with_sizes(self._arrived_S), before_S, strict=True))
        for step, row_XM, out, relays in reversed(steps):
            inside = answers.new_empty(sum(step.inside_out), width)
            sends = _inward(step, out, partial, relayed)
            relayed = _blocks(answers, relays)
            _perform(exchange, sends, _outward(step, inside, sums, relays, relayed), self._map.rank)
            pool_sums, own = weighted_sum(inside, row_XM), step.own.stop - step.own.start
            sums[step.own], partial = pool_sums[:own], pool_sums[own:]
        return sums


def _outward(
    step: _StepSizes, inside: torch.Tensor, rows: torch.Tensor, relays: Sequence[_Relay], relayed: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """For each rank, what goes to it in a dispatch: of the pool, of `rows`, and what peers handed over in the step before."""
    pool_R = inside.split_with_sizes(step.inside_out)
    tensors_R = [[part, *(rows[each] for each in own)] for part, own in zip(pool_R, step.carried_out, strict=True)]
    for relay, block in zip(relays, relayed, strict=True):
        tensors_R[relay.gateway].append(block)
    return tensors_R


def _inward(
    step: _StepSizes, arrived: torch.Tensor, forwarded: torch.Tensor, relayed: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """For each rank, what comes from it in a dispatch: for this rank, for its server, and to be relayed."""
    tensors_R = [
        list(each)
        for each in zip(arrived.split_with_sizes(step.inside_in), forwarded.split_with_sizes(step.between_in), strict=True)
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
    there_R, here_R = ([_bytes(each) for each in tensors_R] for tensors_R in (sends_R, recvs_R))
    sends = [each[0] if len(each) == 1 else torch.cat(each) for each in there_R]
    recvs = [each[0] if len(each) == 1 else each[0].new_empty(sum(map(len, each)), each[0].shape[1]) for each in here_R]
    recvs[rank].copy_(sends[rank])
    exchange(sends, recvs)
    for whole, each in zip(recvs, here_R, strict=True):
        if len(each) > 1:
            for part, found in zip(each, whole.split_with_sizes([*map(len, each)]), strict=True):
                part.copy_(found)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of those that are not empty, as bytes; of the first if all are."""
    return [each.view(torch.uint8) for each in tensors if len(each)] or [tensors[0].view(torch.uint8)]
