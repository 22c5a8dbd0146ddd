"""The sequence of a port's time slices among the models that share it; the same on every rank.

A model joins at a virtual time that rank 0 draws. Ranks agree on it while no slice begins on any of them: first all say that
they are ready, then each stops its port, then rank 0 draws, and its time is sent to all. So no rank runs a slice of another
in ignorance of one that comes before it.
"""

from collections.abc import Sequence

import numpy as np

from aurora.types import Network, SlicePolicy, has_next_slice
from aurora.types.arrays import IntArray

MOST_OVERTAKEN = 16  # times that compute that waits for a GPU is overtaken by more urgent compute
AHEAD = 2  # slices that a model's other ranks may be ahead of rank 0: those of a layer, as counts are gathered from all
MOST_PIECES = 256  # of one exchange
OUT = float("inf")


def slices_of(bytes_GG: IntArray, network: Network, slice_s: float) -> int:
    """Returns into how many time slices an exchange is cut so that none takes longer than `slice_s` on any port.

    Args:
        bytes_GG: (G, G) bytes from each GPU (row) to each GPU (column).
        network: the ports' rates.
        slice_s: seconds of a port.
    """
    sent_GG = bytes_GG - np.diag(np.diag(bytes_GG))
    took_s = max((sent_GG.sum(axis=1) / network.out_Bps_G).max(), (sent_GG.sum(axis=0) / network.in_Bps_G).max())
    return int(np.clip(np.ceil(took_s / slice_s), 1, MOST_PIECES))


def piece(count: int, number: int, pieces: int) -> slice:
    """Returns which of `count` rows are in a piece, where they are cut evenly.

    Example:
        >>> [piece(5, number, 2) for number in range(2)]
        [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(count * number // pieces, count * (number + 1) // pieces)


class SliceSequence:
    """Says which model has the next time slice of one port; see `has_next_slice`.

    Models are in the sequence from the virtual time 0 on, but for those that join for each exchange (`SlicePolicy.joins`).

    Args:
        policies_M: the models' policies.
    """

    def __init__(self, policies_M: Sequence[SlicePolicy]) -> None:
        self._weight_M = [policy.weight for policy in policies_M]
        self._base_M, self._done_M = [0.0] * len(policies_M), [0] * len(policies_M)
        self._slices_M: list[int | None] = [None] * len(policies_M)
        self._next_M = [OUT if policy.joins else 0.0 for policy in policies_M]
        self._past = 0.0  # no model that has left had a slice at this time or later

    def has_next(self, model: int) -> bool:
        """Returns whether the next slice is the model's."""
        return has_next_slice(self._next_M, model)

    def finish(self, model: int) -> None:
        """Ends a slice of the model."""
        self._done_M[model] += 1
        self._next_M[model] = self._time(model, self._done_M[model])
        if self._done_M[model] == self._slices_M[model]:
            self.leave(model)

    def leave(self, model: int) -> None:
        """Takes the model out of the sequence: its slices are skipped from now on."""
        if self._next_M[model] < OUT:
            self._past = max(self._past, self._next_M[model])
            self._next_M[model] = OUT

    def draw(self) -> float:
        """Returns a virtual time, on rank 0, that no slice on any rank has reached or been promised."""
        there = [model for model, time in enumerate(self._next_M) if time < OUT]
        return max([self._past, *(self._time(model, self._slices_M[model] or self._done_M[model] + AHEAD) for model in there)])

    def join(self, model: int, base: float, slices: int | None = None) -> None:
        """Puts a model that is not in the sequence into it.

        Args:
            model: the model.
            base: virtual time of its first slice, drawn by rank 0.
            slices: after how many slices the model leaves; None: when `leave` is called.
        """
        self._base_M[model], self._done_M[model], self._slices_M[model] = base, 0, slices
        self._next_M[model] = base

    def _time(self, model: int, done: int) -> float:
        """The virtual time of a model's next slice once `done` are over."""
        return self._base_M[model] + done / self._weight_M[model]
