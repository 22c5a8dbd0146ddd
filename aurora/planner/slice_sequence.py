"""The sequence of a port's time slices among the models that share it; the same on every rank."""

from collections.abc import Sequence

from aurora.types import SlicePolicy, has_next_slice

MOST_OVERTAKEN = 16  # times that compute that waits for a GPU is overtaken by more urgent compute


class SliceSequence:
    """Says which model has the next time slice of one port; see `has_next_slice`.

    All models are in the sequence at first, from the virtual time 0 on.

    Args:
        policies_M: the models' weights.
    """

    def __init__(self, policies_M: Sequence[SlicePolicy]) -> None:
        self._weight_M = [policy.weight for policy in policies_M]
        self._base_M, self._done_M = [0.0] * len(policies_M), [0] * len(policies_M)
        self._next_M = [0.0] * len(policies_M)

    def has_next(self, model: int) -> bool:
        """Returns whether the next slice is the model's."""
        return has_next_slice(self._next_M, model)

    def finish(self, model: int) -> None:
        """Ends a slice of the model."""
        self._done_M[model] += 1
        self._next_M[model] = self._base_M[model] + self._done_M[model] / self._weight_M[model]

    def leave(self, model: int) -> None:
        """Takes the model out of the sequence: its slices are skipped from now on."""
        self._next_M[model] = float("inf")
