"""Token-level routing: the experts that each token chose in each layer."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import IntArray, Value, check_arrays, locked


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
        check_arrays(self, "")
        if len(self.source_U) != len(chosen):
            raise BadInput(f"source_U: expected one for each of {len(chosen)} tokens, found {len(self.source_U)}")
        chosen = chosen.astype(np.uint8 if int(chosen.max()) < 256 else np.uint16)  # a copy
        for layer in range(chosen.shape[1]):
            ranked_UK = np.sort(chosen[:, layer], axis=1)
            if (ranked_UK[:, 1:] == ranked_UK[:, :-1]).any():
                raise BadInput(f"experts_ULK, layer {layer}: expected different experts for a token, found one twice")
        sequence = np.lexsort((self.source_U, self.window_U))
        if (np.diff(sequence) < 0).any():
            chosen = chosen[sequence]
            for name in ("source_U", "window_U", "sequence_U"):
                if (numbers_U := getattr(self, name)) is not None:
                    object.__setattr__(self, name, locked(numbers_U[sequence]))
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
            count_X = np.zeros(windows * sources * experts, dtype=np.int64)
            for choice in range(routing):
                count_X += np.bincount(at_U + self.experts_ULK[:, layer, choice], minlength=len(count_X))
            tokens[:, layer] = count_X.reshape(windows, sources, experts)
        return tokens
