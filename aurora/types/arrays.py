"""Array types, helpers that copy, check and lock arrays, and the base of the frozen values that hold them.

Array names end in an underscore and one letter for each axis: load_LE is (layers, experts). A digit is an axis of that length:
pairs_X2 is (X, 2), load_E1 is (E, 1). docs/glossary.md explains the letters. Scalar names end in their units: `_s` seconds,
`_Bps` bytes per second, `_bytes` bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.errors import BadInput

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

MOST_COUNT = 2**63 - 1  # of int64
MOST_LAYERS = 4096  # larger layer numbers are typing errors


def as_array(what: str, value: ArrayLike) -> NDArray[Any]:
    """Converts a value to an array, after checking that it has equal rows and no booleans.

    Raises:
        BadInput: if its rows differ in length, or booleans are among its numbers; the message calls it `what`.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise BadInput(f"{what}: expected rows of one length") from None
    if isinstance(value, list | tuple) and array.dtype != np.bool_ and _has_bool(value):  # which NumPy takes for 0 and 1
        raise BadInput(f"{what}: expected numbers, found true or false among them")
    return array


def _has_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_has_bool, value)))


def counts(what: str, value: ArrayLike, ndim: int) -> IntArray:
    """Returns an array of integers of zero or more as locked int64: a copy, unless it is `_locked_alone`.

    Raises:
        BadInput: if `value` is anything else, or has not `ndim` axes; the message calls it `what`.
    """
    array = as_array(what, value)
    if array.ndim != ndim:
        raise BadInput(f"{what}: expected {ndim} axes, found shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise BadInput(f"{what}: expected integers, found {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > MOST_COUNT:
        raise BadInput(f"{what}: {int(array.max())} does not fit into 64 bits")
    if array.size and int(array.min()) < 0:
        raise BadInput(f"{what}: expected counts of zero or more, found {int(array.min())}")
    return array if _locked_alone(array, np.int64) else locked(np.array(array, dtype=np.int64))


def numbers(what: str, value: ArrayLike, ndim: int = 1) -> FloatArray:
    """Returns an array of finite numbers as locked float64: a copy, unless it is `_locked_alone`.

    Raises:
        BadInput: if `value` is anything else, or has not `ndim` axes; the message calls it `what`.
    """
    array = as_array(what, value)
    if array.dtype.kind not in "iuf" or array.ndim != ndim:
        raise BadInput(f"{what}: expected numbers with {ndim} axes, found {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise BadInput(f"{what}: expected finite numbers, found {array[~np.isfinite(array)].flat[0]}")
    return array if _locked_alone(array, np.float64) else locked(np.array(array, dtype=np.float64))


def _locked_alone(array: NDArray[Any], dtype: type) -> bool:
    """Returns whether an array is locked and no view of another, such as one that a value holds: nothing changes it."""
    return not array.flags.writeable and array.base is None and array.dtype == dtype and type(array) is np.ndarray


Check = Callable[[str, ArrayLike, int], NDArray[Any]]


@cache
def _array_fields(kind: Any) -> list[tuple[str, str, Check]]:
    """Name, axes and check of each array field of a dataclass: the check that its annotation stands for."""
    checks: dict[Any, Check] = {IntArray: counts, FloatArray: numbers}
    kinds = {field.name: (field.type, *get_args(field.type)) for field in fields(kind)}  # of IntArray | None both
    return [(name, name.rpartition("_")[2], checks[hint]) for name, types in kinds.items() for hint in checks if hint in types]


def check_arrays(value: Any, what: str, apart: str = "") -> None:
    """Replaces the array fields of a frozen value by checked, locked copies; fields that are None stay.

    A field's annotation says whether it holds counts (IntArray) or finite numbers (FloatArray). The letters after the last
    underscore of its name are its axes: load_LE has two. Fields are equally long along an axis that they share, and an
    axis 2 or 3 is as long.

    Args:
        value: the value; called from its `__post_init__`.
        what: beginning of error messages; the field's name follows it.
        apart: axes that fields share by name alone, and whose lengths differ.

    Raises:
        BadInput: if an array is anything else.
    """
    lengths, checked = {"2": 2, "3": 3}, _array_fields(type(value))  # type: ignore[arg-type]
    for name, axes, check in checked:
        if (values := getattr(value, name)) is not None:
            array = check(f"{what}{name}", values, len(axes))
            object.__setattr__(value, name, array)
            for axis, length in zip(axes, array.shape, strict=True):
                if (expected := lengths.setdefault(axis, length)) != length and axis not in apart:
                    first = next(other for other, letters, _ in checked if axis in letters)
                    raise BadInput(f"{what}{name}: expected {expected} along {axis} as in {first}, found {length}")


def layer_numbers(what: str, value: Sequence[int]) -> tuple[int, ...]:
    """Returns indices of decoder layers as a tuple, after checking them.

    Args:
        what: name of the indices in error messages.
        value: the indices.

    Raises:
        BadInput: unless they are ascending whole numbers from 0 to MOST_LAYERS.
    """
    numbers = tuple(value)
    wrong = any(type(number) is not int or not 0 <= number < MOST_LAYERS for number in numbers)
    if wrong or sorted(set(numbers)) != list(numbers):
        raise BadInput(f"{what}: expected ascending layer numbers below {MOST_LAYERS}, found {str(numbers)[:80]}")
    return numbers


def check_name(what: str, name: object) -> None:
    """Raises BadInput unless a name is text without control characters, which could rewrite a terminal.

    Args:
        what: description of the name in error messages, such as "model".
        name: the name.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise BadInput(f"{what} must be text without control characters, found {name!r}")


def locked(array: NDArray[Any]) -> NDArray[Any]:
    """Makes an array read-only and returns it."""
    array.setflags(write=False)
    return array


def square_bytes(what: str, value: ArrayLike) -> IntArray:
    """Returns a traffic matrix as a locked (G, G) int64 array; the diagonal becomes zero, because local tokens are not sent.

    Raises BadInput as `counts`, also if its sum does not fit into 64 bits; messages call the matrix `what`.
    """
    matrix = counts(what, value, 2)
    if matrix.shape[0] != matrix.shape[1]:
        raise BadInput(f"{what}: expected a square matrix, found shape {matrix.shape}")
    if int(matrix.max(initial=0)) * matrix.size > MOST_COUNT // 2 < float(matrix.sum(dtype=np.float64)):
        raise BadInput(f"{what}: the matrix sums to more than 64 bits hold")
    matrix = matrix.copy() if matrix is value else matrix
    matrix.setflags(write=True)  # a copy that nobody else has
    matrix.flat[:: len(matrix) + 1] = 0  # the diagonal
    return locked(matrix)


def evenly_spaced(count: int, most: int) -> IntArray:
    """Returns up to `most` of the numbers from 0 to count - 1, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def gap(value: float, bound: float) -> float:
    """Returns the gap value / bound - 1 of a value to a lower bound on it; zero if both are zero."""
    if bound > 0:
        return value / bound - 1
    return 0.0 if value <= 0 else float("inf")


LONGEST = 4  # elements of a tuple or mapping that `repr` shows one by one


class Value:
    """Gives a frozen dataclass (declared with eq=False, repr=False) `==`, `hash` and a `repr` that fits a screen.

    Two values are equal if they have the same class and equal fields (arrays are compared byte by byte). Values must not be
    changed after they are made, so that their hash stays the same.
    """

    @classmethod
    def made(cls, *members: Any) -> Self:
        """Returns the value with these first fields, without the checks and copies that take longer than making its arrays.

        The maker answers for them, and has locked the arrays.
        """
        value = object.__new__(cls)
        value.__dict__.update(zip(cls.__dataclass_fields__, members, strict=False))  # type: ignore[attr-defined]
        return value

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_key(getattr(self, name)) == _key(getattr(other, name)) for name in _names(self))

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(_key(getattr(self, name)) for name in _names(self))))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Locks the arrays of a value that was pickled or copied: NumPy forgets that they are read-only."""
        for entry in state.values():
            for array in entry if isinstance(entry, tuple) else (entry,):
                if isinstance(array, np.ndarray):
                    locked(array)
        self.__dict__.update(state)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_short(getattr(self, name))}" for name in _names(self))
        return f"{type(self).__name__}({shown})"


def _names(value: Value) -> tuple[str, ...]:
    """Names of the value's fields."""
    return tuple(field.name for field in fields(value))  # type: ignore[arg-type]


def _key(value: Any) -> Any:
    """A hashable stand-in that is equal for equal contents."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return frozenset((key, _key(member)) for key, member in value.items())
    if isinstance(value, tuple):
        return tuple(_key(member) for member in value)
    return value


def _short(value: Any) -> str:
    """A short text of `value`: arrays by type and shape, long sequences by length, nested values by their class."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Value):
        return f"{type(value).__name__}(...)"
    if isinstance(value, tuple | Mapping) and len(value) > LONGEST:
        return f"<{len(value)} {'entries' if isinstance(value, Mapping) else 'items'}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_short(member)}" for key, member in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(_short(member) for member in value)}{',' if len(value) == 1 else ''})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
