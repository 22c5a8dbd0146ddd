"""Tells compute times that were measured while other work had the machine."""

from collections.abc import Mapping

SPREAD = "spread of repeats on "  # key of provenance, before the kind of GPU
MOST_SPREAD = 0.2  # distance of the quartiles of repeats / their median


def timing_doubts(provenance: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a sentence for each kind of GPU whose compute times were measured with a spread above MOST_SPREAD.

    Args:
        provenance: as in Profile and ComputeCurves.

    Example:
        >>> timing_doubts({"spread of repeats on cpu": "31%", "spread of repeats on H100": "2%"})
        ('compute times of cpu: repeats are 31% apart, so the machine was busy: measure again while nothing else runs',)
    """
    spreads = {key.removeprefix(SPREAD): text for key, text in provenance.items() if key.startswith(SPREAD)}
    return tuple(
        f"compute times of {kind}: repeats are {text} apart, so the machine was busy: measure again while nothing else runs"
        for kind, text in spreads.items()
        if text.removesuffix("%").isdecimal() and int(text.removesuffix("%")) > 100 * MOST_SPREAD
    )
