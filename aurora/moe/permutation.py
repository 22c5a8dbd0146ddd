"""Token kernels: permute tokens into rows, pack rows into messages, and sum the rows that come back.

On a CUDA device with Triton, kernels of `aurora.moe.permutation_triton` do the work, elsewhere torch and compiled CPU code; the
results are the same.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from aurora.moe import permutation_core as core
from aurora.types.profile import ALIGNED_BYTES  # so that a device can read each part in whole words

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def permutation_by_expert(physical_NK: torch.Tensor, num_physical: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the choices of tokens by physical expert, and then by token.

    Args:
        physical_NK: (N, K) int64, the physical expert of every choice; `num_physical` for none.
        num_physical: number of physical experts P.

    Returns:
        counts_P, (P,) number of choices of each physical expert; token_X, (X,) the token of each sorted choice; row_NK, (N, K)
        the position of each choice among the X sorted choices, -1 for none.
    """
    top_k = physical_NK.shape[1]
    if physical_NK.is_cuda:
        physical = physical_NK.flatten()
        counts_P = torch.bincount(physical, minlength=num_physical + 1)[:num_physical]
        choice_X = torch.argsort(physical, stable=True)[: int(counts_P.sum())]
        row = torch.full_like(physical, -1)
        row[choice_X] = torch.arange(len(choice_X), device=physical.device)
        return counts_P, choice_X // top_k, row.view(physical_NK.shape)
    counts_P, token_X, row_NK = map(
        torch.from_numpy, core.permutation_by_expert(physical_NK.contiguous().numpy(), num_physical)
    )
    return counts_P, token_X, row_NK


def permutation_by_rank(
    rank_NK: torch.Tensor, ranks: int, pairs: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts (token, rank) pairs, without duplicates, of the ranks that compute a token's choices, by rank and then by token.

    Args:
        rank_NK: (N, K) int64, the rank of every choice; `ranks` for none.
        ranks: number of ranks R.
        pairs: number of pairs X, if known; the host then does not wait for a GPU to count them. None: unknown.

    Returns:
        counts_R, (R,) how many tokens go to each rank; token_X, (X,) the token of each sorted pair; row_NK, (N, min(R, K)) the
        positions of each token's pairs among the X sorted ones, in descending order, then -1.
    """
    if rank_NK.is_cuda:
        return _permutation_by_rank(rank_NK, ranks, pairs)
    counts_R, token_X, row_NK = map(torch.from_numpy, core.permutation_by_rank(rank_NK.contiguous().numpy(), ranks))
    return counts_R, token_X, row_NK


def _permutation_by_rank(
    rank_NK: torch.Tensor, ranks: int, pairs: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`permutation_by_rank` on any device."""
    tokens, top_k = rank_NK.shape
    goes_RN = torch.zeros(ranks + 1, tokens, dtype=torch.bool, device=rank_NK.device)
    goes_RN.scatter_(0, rank_NK.T, True)
    goes_RN = goes_RN[:ranks]
    row_RN = goes_RN.flatten().cumsum(0).view(ranks, tokens) - 1
    counts_R = goes_RN.sum(dim=1)
    pairs = int(counts_R.sum()) if pairs is None else pairs
    pair_X = torch.empty(pairs + 1, dtype=torch.long, device=rank_NK.device)  # what goes nowhere is written to the last
    pair_X.scatter_(0, row_RN.masked_fill(~goes_RN, pairs).flatten(), torch.arange(goes_RN.numel(), device=rank_NK.device))
    row_NK = row_RN.masked_fill(~goes_RN, -1).T.topk(min(ranks, top_k)).values  # the -1 come last
    return counts_R, pair_X[:pairs] % tokens, row_NK


def needed_by_piece(
    rank_NK: torch.Tensor, server_R: torch.Tensor, sent_N: torch.Tensor, token_X: torch.Tensor, pieces: int
) -> torch.Tensor:
    """Counts, for each piece of one rank's rows in a hierarchical dispatch (`Hierarchy`), the rows that each rank needs.

    Row x is token token_X[x], sent to one server; every rank of the server that computes one of its choices needs it.

    Args:
        rank_NK: (N, K) int64, the rank of every choice; R for none.
        server_R: (R,) int64, the server of each rank.
        sent_N: (N,) int64, number of rows for each server.
        token_X: (X,) int64, the token of each row; rows are sorted by server.
        pieces: number of pieces C into which the rows for a server are cut.

    Returns:
        (C, R) int64, number of rows of each piece that each rank needs.
    """
    rows, ranks, device = len(token_X), len(server_R), rank_NK.device
    server_X = torch.arange(len(sent_N), device=device).repeat_interleave(sent_N, output_size=rows)
    number_X = torch.arange(rows, device=device) - (sent_N.cumsum(0) - sent_N)[server_X]
    piece_X = ((number_X + 1) * pieces - 1) // sent_N[server_X]
    needs_XR = torch.zeros(rows, ranks + 1, dtype=torch.bool, device=device)
    needs_XR.scatter_(1, rank_NK.index_select(0, token_X), True)
    needs_XR = needs_XR[:, :ranks] & (server_R == server_X[:, None])
    return torch.zeros(pieces, ranks, dtype=torch.long, device=device).index_add_(0, piece_X, needs_XR.long())


def gather_rows(rows: torch.Tensor, index_X: torch.Tensor, out: torch.Tensor) -> None:
    """Copies rows[index_X] to `out` (X, H), which may be a view into wider rows."""
    if rows.dtype in FLOAT8:
        rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    if uses_triton(rows):
        from aurora.moe import permutation_triton

        with torch.cuda.device(rows.device):
            permutation_triton.gather_rows(rows, index_X, out)
    else:
        torch.index_select(rows, 0, index_X, out=out)


def weighted_sum(rows: torch.Tensor, row_NK: torch.Tensor, weights_NK: torch.Tensor | None = None) -> torch.Tensor:
    """Returns (N, H): for token n the sum over k of rows[row_NK[n, k]] * weights_NK[n, k].

    Entries of -1 in row_NK are skipped; weights_NK None: weights of 1. Products and sums are computed in at least float32 and
    in the order of k, then rounded once to the rows' dtype.
    """
    if uses_triton(rows):
        from aurora.moe import permutation_triton

        with torch.cuda.device(rows.device):
            return permutation_triton.weighted_sum(rows, row_NK, weights_NK)
    if len(rows) == 0:
        return rows.new_zeros(len(row_NK), rows.shape[1])
    exact = exact_dtype(rows.dtype)
    there_NK = row_NK >= 0
    count_N = there_NK.sum(dim=1)
    weights_Q = None if weights_NK is None else weights_NK.to(exact)[there_NK]
    bags = torch.embedding_bag(
        rows.to(exact), row_NK[there_NK], count_N.cumsum(0) - count_N, mode=0, per_sample_weights=weights_Q
    )
    return bags[0].to(rows.dtype)


def warm_up(hidden: torch.Tensor, top_k: int) -> None:
    """Compiles and loads the Triton kernels for hidden states (N, H) of this dtype and width, with top_k experts a token.

    Does nothing without Triton or for tensors that are not on a CUDA device."""
    if uses_triton(hidden):
        token_X = torch.arange(len(hidden), device=hidden.device)
        place_NK = token_X[:, None].repeat(1, top_k)
        weights_NK = torch.ones_like(place_NK, dtype=torch.float32)
        gather_rows(hidden, token_X, torch.empty_like(hidden))
        MessageFormat(hidden.shape[1], top_k, hidden.dtype).pack(hidden, weights_NK, place_NK, token_X)
        for sent, weights in ((hidden, None), (hidden, weights_NK), (hidden, weights_NK.to(hidden.dtype))):
            weighted_sum(sent, place_NK, weights)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the accumulation dtype, in which rows of `dtype` are weighted and summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32  # torch promotes no float8


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(rows: torch.Tensor) -> bool:
    """Returns whether the Triton kernels support this tensor: on a CUDA device, with Triton, and neither float64 nor float8."""
    return rows.is_cuda and _has_triton() and rows.dtype not in (torch.float64, *FLOAT8)


@dataclass(frozen=True)
class MessageFormat:
    """Byte layout of a row with one token: its hidden state, router weights and physical experts, in this sequence.

    Every part, and so the whole row, begins at a multiple of ALIGNED_BYTES.

    Attributes:
        width: number of elements of the hidden state.
        top_k: number of weights (in `exact_dtype(dtype)`), and of physical experts (int32).
        dtype: dtype of the hidden state.
    """

    width: int
    top_k: int
    dtype: torch.dtype

    @property
    def weights_at(self) -> int:
        """Byte of a row at which the weights begin."""
        return aligned(self.width * self.dtype.itemsize)

    @property
    def physical_at(self) -> int:
        """Byte of a row at which the physical experts begin."""
        return self.weights_at + aligned(self.top_k * exact_dtype(self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.physical_at + aligned(self.top_k * 4)

    def pack(
        self, hidden: torch.Tensor, weights: torch.Tensor, physical_NK: torch.Tensor, token_X: torch.Tensor
    ) -> torch.Tensor:
        """Returns (X, row_bytes) uint8: a row for each of the tokens token_X (X,).

        The hidden states (N, H), weights (N, K) and physical experts (N, K) are those of all N tokens of the batch.
        """
        message = torch.empty(len(token_X), self.row_bytes, dtype=torch.uint8, device=hidden.device)
        hidden_X, weights_XK, physical_XK = self.parts(message)
        gather_rows(hidden, token_X, hidden_X)
        gather_rows(weights.to(exact_dtype(hidden.dtype)), token_X, weights_XK)
        physical_XK.copy_(physical_NK.index_select(0, token_X))
        return message

    def tail(self, weights: torch.Tensor, physical_NK: torch.Tensor) -> torch.Tensor:
        """Returns (N, bytes) uint8, the end of each row: weights, physical experts."""
        message = torch.zeros(len(weights), self.row_bytes, dtype=torch.uint8, device=weights.device)
        _, weights_NK, into_NK = self.parts(message)
        weights_NK.copy_(weights)
        into_NK.copy_(physical_NK)
        return message[:, self.weights_at :]

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns hidden states (rows, width), weights and physical experts (rows, top_k) of a message, as views."""
        exact = exact_dtype(self.dtype)
        return (
            message[:, : self.width * self.dtype.itemsize].view(self.dtype),
            message[:, self.weights_at : self.weights_at + self.top_k * exact.itemsize].view(exact),
            message[:, self.physical_at : self.physical_at + self.top_k * 4].view(torch.int32),
        )


def aligned(size: int, to: int = ALIGNED_BYTES) -> int:
    """Returns `size` rounded up to a multiple of `to`."""
    return -(-size // to) * to
