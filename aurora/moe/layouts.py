"""Dispatch layouts of a MoE layer: one row per (token, expert) or (token, rank); in `server_layout` per (token, server).

A layout holds one batch of a layer. The caller allgathers the `counts` and passes them to `gathered`. Then it calls `dispatch`,
`compute`, `combine` and `aggregate`, once each. To `dispatch` and `combine` it passes a function that performs an exchange
between all ranks (`ExchangeStep`); a flat layout calls it once, `RowPerServer` several times.

Axes: N tokens, K choices of a token, E experts, P physical experts (every replica is one), R and G ranks, S ranks that hold
tokens or, of sizes, steps (exchanges of one all-to-all), X rows, Q (row, expert) pairs of arrived rows, H hidden width.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import (
    MessageFormat,
    gather_rows,
    permutation_by_expert,
    permutation_by_rank,
    weighted_sum,
)
from aurora.moe.permutation_core import sum_by_rank
from aurora.moe.transport import ExchangeStep
from aurora.types.arrays import IntArray


class DispatchLayout(ABC):
    """One batch of a layer, laid out as the rows to send.

    Args:
        expert_map: the layer's map.
        hidden: (N, H) hidden states of this rank's tokens.
        index, weights: (N, K) the experts that every token chose, and their weights.
        mask, tokens_SE: as in `ExpertMap.physical_experts`.

    Attributes:
        rows: (X, row elements) the rows to send.
        counts: int64, number of this rank's rows for each destination; subclasses define the destinations.
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

    def flat_counts(self, counts_RX: torch.Tensor) -> torch.Tensor | None:
        """Converts the `counts` of all ranks to the counts of `flat()`; None if this layout is flat."""
        return None

    def flat(self) -> "DispatchLayout":
        """Returns the layout of the same tokens with one row per rank; this one if it is flat."""
        return self

    @abstractmethod
    def compute(self, rows: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns the outputs (X, H) of this rank's `experts` for the arrived `rows`."""

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `rows`. Returns the rows (X, row elements) that arrive for this rank's experts, sorted by sender."""
        return exchange_rows(exchange, self.rows, self.sizes_SRR[0], self._map.rank)

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Sends `answers` (X, H), the outputs for arrived rows. Returns (X, H), the outputs for this rank's own `rows`."""
        return exchange_rows(exchange, answers, self.sizes_SRR[0].T, self._map.rank)

    def aggregate(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H): for each token the sum of its rows in `answers`, the result of `combine`."""
        return weighted_sum(answers, self._row_NK)


class RowPerExpert(DispatchLayout):
    """Layout of one row per (token, expert) pair: the token's hidden state. Rows are sorted by physical expert.

    The token's own rank applies the router weights, to the outputs that come back. `counts` is (P,), the rows for each
    physical expert; rows arrive sorted by sender and then by slot.
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

    The receiving rank sends back the weighted sum over its experts. This sends fewer bytes than `RowPerExpert`, but sums in
    another sequence, so results may differ in the last bits. A row also has the token's router weights and physical experts
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
        self.counts, token_X, self._row_NK = permutation_by_rank(self.rank_NK, self._map.ranks)
        return token_X

    def gathered(self, counts: torch.Tensor) -> None:
        self.sizes_SRR = counts.numpy()[None]

    def received(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Unpacks arrived rows: hidden states (X, H), router weights (X, K) and slots (X, K), -1 for another rank's expert."""
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
        exchange: function that performs an exchange between all ranks.
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

    `experts` has the call signature of transformers' experts modules.
    """
    if len(rows) == 0:
        return rows
    answers: torch.Tensor = experts(rows, slots[:, None], rows.new_ones(len(rows), 1))
    return answers.view(rows.shape).to(rows.dtype)  # which the other ranks expect
