"""Token-level routing: the experts that each token chose in each layer; counts of experts that tokens chose together."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import IntArray, Value, counts, locked, set_checked


@dataclass(frozen=True, eq=False, repr=False)
class TokenRouting(Value):
    """The experts that each of U tokens chose. The constructor sorts tokens by window, then by source rank.

    Attributes:
        experts_ULK: (U, L, K) uint8, or uint16 for expert numbers from 256; the K different experts that each token chose.
        source_U: (U,) int64, the source rank of each token.
        window_U: (U,) int64, its window.
        sequence_U: (U,) int64, the number of the prompt that the token belongs to; tokens of a prompt are adjacent. None if
            unknown.

    Raises:
        BadInput: if shapes differ, numbers are out of range, or a token chose an expert twice.
    """

    experts_ULK: NDArray[Any]
    source_U: IntArray
    window_U: IntArray
    sequence_U: IntArray | None = None

    def __post_init__(self) -> None:
        chosen = np.asarray(self.experts_ULK)
        if chosen.ndim != 3 or chosen.dtype.kind not in "iu" or 0 in chosen.shape:
            raise BadInput(
                f"experts_ULK: expected whole numbers, tokens by layers by choices, found {chosen.dtype} {chosen.shape}"
            )
        if int(chosen.min()) < 0 or int(chosen.max()) >= 1 << 16:
            raise BadInput(f"experts_ULK: expected experts from 0 to 65535, found {chosen.min()} to {chosen.max()}")
        known = ("source_U", "window_U", *(("sequence_U",) if self.sequence_U is not None else ()))
        for name in known:
            set_checked(self, counts, "", name)
            if len(getattr(self, name)) != len(chosen):
                raise BadInput(f"{name}: expected one for each of {len(chosen)} tokens, found {len(getattr(self, name))}")
        chosen = chosen.astype(np.uint8 if int(chosen.max()) < 256 else np.uint16)  # a copy
        for layer in range(chosen.shape[1]):
            ranked_UK = np.sort(chosen[:, layer], axis=1)
            if (ranked_UK[:, 1:] == ranked_UK[:, :-1]).any():
                raise BadInput(f"experts_ULK, layer {layer}: expected different experts for a token, found one twice")
        sequence = np.lexsort((self.source_U, self.window_U))
        if (np.diff(sequence) < 0).any():
            chosen = chosen[sequence]
            for name in known:
                object.__setattr__(self, name, locked(getattr(self, name)[sequence]))
        object.__setattr__(self, "experts_ULK", locked(chosen))

    @property
    def lengths_Q(self) -> IntArray:
        """(Q,) int64: number of tokens of each sequence (prompt).

        Raises:
            BadInput: if sequence_U is None.
        """
        if self.sequence_U is None:
            raise BadInput("sequence_U: expected the sequence of every token, found none")
        return np.unique(self.sequence_U, return_counts=True)[1].astype(np.int64)

    def layer(self, number: int, window: int | None = None) -> tuple[NDArray[Any], IntArray]:
        """Returns experts_UK (U, K) of layer `number` and source_U (U,), in one window or, if `window` is None, in all."""
        if window is None:
            return self.experts_ULK[:, number], self.source_U
        some = slice(*np.searchsorted(self.window_U, (window, window + 1)).tolist())
        return self.experts_ULK[some, number], self.source_U[some]

    def first_windows(self, windows: int) -> Self:
        """Returns the routing of the tokens in the first `windows` windows."""
        upto = int(np.searchsorted(self.window_U, windows))
        sequence_U = None if self.sequence_U is None else self.sequence_U[:upto]
        return replace(
            self,
            experts_ULK=self.experts_ULK[:upto],
            source_U=self.source_U[:upto],
            window_U=self.window_U[:upto],
            sequence_U=sequence_U,
        )

    def tokens_TLSE(self, windows: int, sources: int, experts: int) -> IntArray:
        """Counts (token, expert) pairs: returns (T, L, S, E) int64 by window, layer, source rank and expert, as in Profile.

        Raises:
            BadInput: if a token lies outside the windows, sources or experts.
        """
        for what, most, limit in (
            ("window_U", int(self.window_U.max()), windows),
            ("source_U", int(self.source_U.max()), sources),
            ("experts_ULK", int(self.experts_ULK.max()), experts),
        ):
            if most >= limit:
                raise BadInput(f"{what}: expected numbers below {limit}, found {most}")
        _, layers, routing = self.experts_ULK.shape
        tokens = np.empty((windows, layers, sources, experts), dtype=np.int64)
        at_U = (self.window_U * sources + self.source_U) * experts
        for layer in range(layers):
            found = np.zeros(windows * sources * experts, dtype=np.int64)
            for choice in range(routing):
                found += np.bincount(at_U + self.experts_ULK[:, layer, choice], minlength=len(found))
            tokens[:, layer] = found.reshape(windows, sources, experts)
        return tokens


BLOCK = 1 << 16  # tokens that are counted at a time


@dataclass(frozen=True, eq=False, repr=False)
class CoActivation(Value):
    """Counts of pairs of experts that tokens choose together, in a layer and in consecutive layers.

    Attributes:
        together_LEE: (L, E, E) int64, tokens that chose both experts in a layer; the diagonal counts the tokens of each expert.
        next_LEE: (L - 1, E, E) int64, how often a token chose expert i in a layer and expert j in the next layer. Each token
            counts K * K times: each of its K experts in the one layer with each of its K in the other.
    """

    together_LEE: IntArray
    next_LEE: IntArray

    def __post_init__(self) -> None:
        set_checked(self, counts, "", "together_LEE", "next_LEE")
        layers, experts, _ = self.together_LEE.shape
        if self.together_LEE.shape != (layers, experts, experts) or self.next_LEE.shape != (layers - 1, experts, experts):
            raise BadInput(
                f"pairs: expected experts by experts for every layer and every step to the next, found "
                f"{self.together_LEE.shape} and {self.next_LEE.shape}"
            )

    @classmethod
    def of(cls, experts_ULK: NDArray[Any], experts: int) -> Self:
        """Returns the pair counts of token-level routing."""
        tokens, layers, _ = experts_ULK.shape
        together_LEE = np.zeros((layers, experts, experts), dtype=np.int64)
        next_LEE = np.zeros((layers - 1, experts, experts), dtype=np.int64)
        for block in range(0, tokens, BLOCK):
            rows_ULK = experts_ULK[block : block + BLOCK].astype(np.int64)
            for layer in range(layers):
                together_LEE[layer] += _joint(rows_ULK[:, layer], rows_ULK[:, layer], experts)
                if layer:
                    next_LEE[layer - 1] += _joint(rows_ULK[:, layer - 1], rows_ULK[:, layer], experts)
        return cls(locked(together_LEE), locked(next_LEE))

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> Self:
        """Returns the sum of the pair counts of several sets of tokens."""
        within, after = zip(*((part.together_LEE, part.next_LEE) for part in parts), strict=True)
        return cls(sum(within[1:], start=within[0]), sum(after[1:], start=after[0]))

    def check(self, load_LE: IntArray, top_k: int) -> None:
        """Raises BadInput unless shapes, diagonals and sums fit load_LE (L, E), the tokens of each expert."""
        if self.together_LEE.shape != (*load_LE.shape, load_LE.shape[1]):
            raise BadInput(
                f"pairs: expected {load_LE.shape[1]} experts in {load_LE.shape[0]} layers, found {self.together_LEE.shape}"
            )
        sums = {
            "together_LEE's diagonal": (np.diagonal(self.together_LEE, axis1=1, axis2=2), load_LE),
            "together_LEE's rows": (self.together_LEE.sum(axis=2), top_k * load_LE),
            "together_LEE's columns": (self.together_LEE.sum(axis=1), top_k * load_LE),
            "next_LEE's rows": (self.next_LEE.sum(axis=2), top_k * load_LE[:-1]),
            "next_LEE's columns": (self.next_LEE.sum(axis=1), top_k * load_LE[1:]),
        }
        for what, (found, expected) in sums.items():
            if not np.array_equal(found, expected):
                layer, expert = np.argwhere(found != expected)[0].tolist()
                raise BadInput(
                    f"pairs, layer {layer}, expert {expert}: expected {what} to be {expected[layer, expert]} by the counts, "
                    f"found {found[layer, expert]}"
                )


def _joint(here_UK: IntArray, there_UK: IntArray, experts: int) -> IntArray:
    """(E, E) how often an expert in here_UK comes with one in there_UK, over all pairs of a token's choices."""
    both_U = (here_UK[:, :, None] * experts + there_UK[:, None, :]).ravel()
    return np.bincount(both_U, minlength=experts * experts).reshape(experts, experts)
