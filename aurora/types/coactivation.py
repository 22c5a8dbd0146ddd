"""Co-activation: which experts are chosen by the same tokens, within a layer and from one layer to the next."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import IntArray, counts, locked
from aurora.types.value import Value

BLOCK = 1 << 16  # tokens that are counted at a time


@dataclass(frozen=True, eq=False, repr=False)
class CoActivation(Value):
    """Pair counts of experts.

    Attributes:
        together_LEE: (L, E, E) int64, tokens that chose both experts in a layer; the diagonal counts the tokens of each expert.
        next_LEE: (L - 1, E, E) int64, how often a token chose an expert in a layer and another in the next; each of its K
            experts in the one layer counts with each of its K in the other.
    """

    together_LEE: IntArray
    next_LEE: IntArray

    def __post_init__(self) -> None:
        for name in ("together_LEE", "next_LEE"):
            object.__setattr__(self, name, counts(name, getattr(self, name), 3))
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
        """Returns the pair counts of several sets of tokens, summed."""
        within, after = zip(*((part.together_LEE, part.next_LEE) for part in parts), strict=True)
        return cls(sum(within[1:], start=within[0]), sum(after[1:], start=after[0]))

    def check(self, load_LE: IntArray, top_k: int) -> None:
        """Raises BadInput unless shapes, diagonals and sums fit the load of each expert."""
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
