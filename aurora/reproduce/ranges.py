"""Ranges of numbers, as papers state them and as evaluations find them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Lowest, mean and highest over cases or draws; None where that is not said."""

    lowest: float | None = None
    mean: float | None = None
    highest: float | None = None
