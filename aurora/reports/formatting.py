"""Formats numbers with their units."""

from collections.abc import Mapping, Sequence

from aurora.types.arrays import gap

DASH = "\N{EN DASH}"  # where there is no value


def seconds(value: float) -> str:
    """Formats seconds with three significant digits and a unit: "1.23 ms"."""
    return _with_unit(value, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def size(value: float) -> str:
    """Formats bytes with three significant digits and a unit: "1.23 MB"."""
    return _with_unit(value, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0})


def percent(value: float) -> str:
    """Formats a share in percent, with one decimal below 100 % and none from there on; 0.125 gives "12.5%"."""
    return f"{round(value, 3) + 0.0:.1%}" if abs(value) < 1 else f"{value:.0%}"


def speedup(before_s: float, after_s: float) -> str:
    """Formats the speed-up before_s / after_s as a factor, such as "1.25x"."""
    return f"{gap(before_s, after_s) + 1:.2f}x"


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the model names, with numbers appended if two are equal.

    Example:
        >>> distinct(["mixtral", "mixtral"])
        ('mixtral (0)', 'mixtral (1)')
    """
    return tuple(names) if len(set(names)) == len(names) else tuple(f"{name} ({number})" for number, name in enumerate(names))


def _with_unit(value: float, units: Mapping[str, float]) -> str:
    """Formats a number in the largest of some units, largest first, that it reaches, or else in the smallest."""
    rounded = float(f"{value:.3g}")  # 0.9996 s are a second, not a thousand milliseconds
    unit, scale = next(((unit, scale) for unit, scale in units.items() if rounded >= scale), list(units.items())[-1])
    return f"{value / scale:.3g} {unit}" if rounded < 1000 * scale else f"{value / scale:.0f} {unit}"
