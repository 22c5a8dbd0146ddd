"""Ranges of numbers, as papers state them and as evaluations find them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The lowest, mean and highest value over some cases or draws; a number that is not known is None."""

    lowest: float | None = None
    mean: float | None = None
    highest: float | None = None
