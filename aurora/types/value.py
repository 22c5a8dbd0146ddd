"""Base of the frozen values that hold arrays: equal by content, short to print, usable as keys."""

from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from aurora.types.arrays import locked

LONGEST = 4  # elements of a tuple or mapping that `repr` shows one by one


class Value:
    """Gives a frozen dataclass (declared with eq=False, repr=False) `==`, `hash` and a `repr` that fits a screen.

    Two values are equal when they are of one class and all their fields are, arrays element by element. Values must not be
    changed after they are made, so their hash never changes.
    """

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in _names(self))

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(_key(getattr(self, name)) for name in _names(self))))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Locks the arrays of a value that was pickled or copied: NumPy forgets that they are read-only."""
        for each in state.values():
            for array in each if isinstance(each, tuple) else (each,):
                if isinstance(array, np.ndarray):
                    locked(array)
        self.__dict__.update(state)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_short(getattr(self, name))}" for name in _names(self))
        return f"{type(self).__name__}({shown})"


def _names(value: Value) -> tuple[str, ...]:
    """Names of the value's fields."""
    return tuple(field.name for field in fields(value))  # type: ignore[arg-type]


def _same(one: Any, other: Any) -> bool:
    """Whether two field values are equal, arrays element by element."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype.kind == other.dtype.kind and np.array_equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _key(value: Any) -> Hashable:
    """A hashable stand-in that is equal for equal contents."""
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return frozenset((key, _key(each)) for key, each in value.items())
    if isinstance(value, tuple):
        return tuple(_key(each) for each in value)
    return hash(value)


def _short(value: Any) -> str:
    """A short text of `value`: arrays by type and shape, long sequences by length, nested values by their class."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Value):
        return f"{type(value).__name__}(...)"
    if isinstance(value, tuple | Mapping) and len(value) > LONGEST:
        return f"<{len(value)} {'entries' if isinstance(value, Mapping) else 'items'}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_short(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(_short(each) for each in value)}{',' if len(value) == 1 else ''})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
