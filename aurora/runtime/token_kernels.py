"""Rows of tensors on their way: permuted for sending, packed into one message, and summed where they come back.

On a CUDA device with Triton its kernels do the work, elsewhere torch; both give the same.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from aurora.runtime.token_permutation import bags, sorted_choices
from aurora.types.profile import ALIGNED_BYTES  # so that a device can read each part in whole words


def by_place(place_NK: torch.Tensor, places: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sorts the choices of tokens, int64 place_NK (N, K), each below `places` or that for none: how many have each place
    (P,), whose token's choice comes at each row, by place and then by token, and (N, K) the row of each, -1 for none."""
    top_k = place_NK.shape[1]
    if place_NK.is_cuda:
        place_X = place_NK.flatten()
        counts_P = torch.bincount(place_X, minlength=places + 1)[:places]
        taken_X = torch.argsort(place_X, stable=True)[: int(counts_P.sum())]
        row_X = torch.full_like(place_X, -1)
        row_X[taken_X] = torch.arange(len(taken_X), device=place_X.device)
        return counts_P, taken_X // top_k, row_X.view(place_NK.shape)
    counts, token, row = sorted_choices(place_NK.numpy(), places)
    return torch.from_numpy(counts), torch.from_numpy(token), torch.from_numpy(row)


def gather_rows(rows: torch.Tensor, index_P: torch.Tensor, out: torch.Tensor) -> None:
    """out (P, H) gets the rows (N, H) at index_P (P,) int64. out may be a view into wider rows."""
    if on_triton(rows):
        from aurora.runtime import triton_kernels

        with torch.cuda.device(rows.device):
            triton_kernels.gather_rows(rows, index_P, out)
    else:
        torch.index_select(rows, 0, index_P, out=out)


def weighted_sum(rows: torch.Tensor, place_NK: torch.Tensor, weights_NK: torch.Tensor | None = None) -> torch.Tensor:
    """(N, H): the sum over k of weights_NK (ones by default) times the row of rows (P, H) at place_NK; -1 is none.

    Products and sums are taken in at least float32 and in the order of k, then rounded once to the rows' dtype.
    """
    if on_triton(rows):
        from aurora.runtime import triton_kernels

        with torch.cuda.device(rows.device):
            return triton_kernels.weighted_sum(rows, place_NK, weights_NK)
    if len(rows) == 0:
        return rows.new_zeros(len(place_NK), rows.shape[1])
    exact = exact_dtype(rows.dtype)
    if place_NK.is_cuda:
        there_NK = place_NK >= 0
        count_N = there_NK.sum(dim=1)
        place_Q, choice_Q, first_N = place_NK[there_NK], there_NK.flatten().nonzero()[:, 0], count_N.cumsum(0) - count_N
    else:
        place_Q, choice_Q, first_N = map(torch.from_numpy, bags(place_NK.numpy()))
    weights_Q = None
    if weights_NK is not None:
        weights_Q = weights_NK.to(exact).reshape(-1)
        weights_Q = weights_Q if len(choice_Q) == place_NK.numel() else weights_Q[choice_Q]
    return torch.embedding_bag(rows.to(exact), place_Q, first_N, mode=0, per_sample_weights=weights_Q)[0].to(rows.dtype)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What rows of `dtype` are weighted and summed in."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_triton(rows: torch.Tensor) -> bool:
    """Whether Triton's kernels work on this tensor."""
    return rows.is_cuda and _has_triton() and rows.dtype != torch.float64


@dataclass(frozen=True)
class MessageFormat:
    """One token for one rank as a row of bytes: its hidden state (width,), top_k weights, and top_k experts, -1 for none.

    Experts are int32, weights as they are summed; every part and the whole are aligned.
    """

    width: int
    top_k: int
    dtype: torch.dtype

    @property
    def weights_at(self) -> int:
        return _aligned(self.width * self.dtype.itemsize)

    @property
    def experts_at(self) -> int:
        return self.weights_at + _aligned(self.top_k * exact_dtype(self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        return self.experts_at + _aligned(self.top_k * 4)

    def new(self, rows: int, device: torch.device) -> torch.Tensor:
        """An empty message: (rows, row_bytes) uint8."""
        return torch.empty(rows, self.row_bytes, dtype=torch.uint8, device=device)

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of a message's hidden states (rows, width), weights and experts (rows, top_k)."""
        exact = exact_dtype(self.dtype)
        return (
            message[:, : self.width * self.dtype.itemsize].view(self.dtype),
            message[:, self.weights_at : self.weights_at + self.top_k * exact.itemsize].view(exact),
            message[:, self.experts_at : self.experts_at + self.top_k * 4].view(torch.int32),
        )


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
