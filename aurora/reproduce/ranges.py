"""Ranges of numbers, as papers state them and as evaluations find them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A range over cases or draws; None where a number is not given."""

    lowest: float | None = None
    mean: float | None = None
    highest: float | None = None
