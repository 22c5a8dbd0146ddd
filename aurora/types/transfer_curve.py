"""TransferCurve: measured seconds of exchanges by bytes, for one number of partners."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, numbers
from aurora.types.value import Value

MOST_PARTNERS = 4096  # as many as a cluster's GPUs


@dataclass(frozen=True, eq=False, repr=False)
class TransferCurve(Value):
    """Measured seconds of exchanges in which each GPU sends equally many bytes to each of its partners, posted together.

    Args:
        partners: how many GPUs each GPU sends to, and receives from.
        bytes_X: (X,) float64, bytes that a port sends in all, rising, above zero.
        seconds_X: (X,) float64, seconds from the start to the last byte, above zero, never falling.

    Raises:
        BadInput: if lengths differ or are zero, or numbers are out of range.
    """

    partners: int
    bytes_X: FloatArray
    seconds_X: FloatArray

    def __post_init__(self) -> None:
        if type(self.partners) is not int or not 1 <= self.partners <= MOST_PARTNERS:
            raise BadInput(f"link curve: partners must be a whole number from 1 to {MOST_PARTNERS}, found {self.partners!r}")
        what = f"link curve of {self.partners} partners"
        for name in ("bytes_X", "seconds_X"):
            object.__setattr__(self, name, numbers(f"{what}: {name[:-2]}", getattr(self, name)))
        if not len(self.bytes_X) or len(self.bytes_X) != len(self.seconds_X):
            raise BadInput(
                f"{what}: expected as many seconds as bytes, one at least, found {len(self.seconds_X)} and {len(self.bytes_X)}"
            )
        if self.bytes_X[0] <= 0 or (np.diff(self.bytes_X) <= 0).any():
            raise BadInput(f"{what}: expected bytes above zero that rise")
        if self.seconds_X[0] <= 0 or (np.diff(self.seconds_X) < 0).any():
            raise BadInput(f"{what}: expected seconds above zero that never fall")

    def at_rate(self, times: float) -> "TransferCurve":
        """Returns the curve of ports that are so many times as fast: their start-up stays, and bytes take less time."""
        return TransferCurve(self.partners, self.bytes_X * times, self.seconds_X)


def by_partners(what: str, curves: Sequence[TransferCurve]) -> tuple[TransferCurve, ...]:
    """Returns curves by rising partners.

    Args:
        what: how errors name their owner.
        curves: the curves.

    Raises:
        BadInput: if two have the same number of partners.
    """
    rising = tuple(sorted(curves, key=lambda curve: curve.partners))
    for one, other in pairwise(rising):
        if one.partners == other.partners:
            raise BadInput(f"{what}: expected one link curve for each number of partners, found two of {one.partners}")
    return rising


def check_curves(what: str, curves: Sequence[TransferCurve], fabric: bool, incast: float) -> None:
    """Raises BadInput if there are curves beside a fabric, or beside incast.

    Args:
        what: how errors name their owner.
        curves: the curves.
        fabric: whether their owner has a fabric.
        incast: its incast.
    """
    if curves and fabric:
        raise BadInput(f"{what}: expected no fabric beside link curves, which hold for ports alone")
    if curves and incast:
        raise BadInput(f"{what}: expected no incast beside link curves, which include it, found {incast}")
