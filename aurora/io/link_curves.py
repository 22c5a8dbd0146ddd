"""The [[link_curve]] tables of a cluster: measured seconds of exchanges by bytes and partners."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.files import check_keys
from aurora.types import TransferCurve
from aurora.types.arrays import FloatArray

KEYS = ("partners", "bytes", "seconds")


def read_link_curves(path: str, rows: Any) -> tuple[TransferCurve, ...]:
    """Returns the curves of [[link_curve]] tables.

    Args:
        path: the file's name, for messages.
        rows: the tables.

    Raises:
        BadInput: if a key is unknown, missing or has a wrong value.
    """
    if not isinstance(rows, list):
        raise BadInput(f"{path}: expected [[link_curve]] tables, found {rows!r}")
    curves = []
    for number, row in enumerate(rows):
        where = f"[[link_curve]] {number}"
        if not isinstance(row, dict):
            raise BadInput(f"{path}: {where}: expected a table, found {row!r}")
        check_keys(path, where, row, set(KEYS))
        if missing := [key for key in KEYS if key not in row]:
            raise BadInput(f"{path}: {where}: lacks {', '.join(missing)}")
        for key in KEYS[1:]:
            if not isinstance(row[key], list) or any(type(each) not in (int, float) for each in row[key]):
                raise BadInput(f"{path}: {where}: {key} must be a list of numbers, found {str(row[key])[:80]}")
        try:
            curves.append(TransferCurve(row["partners"], _floats(row["bytes"]), _floats(row["seconds"])))
        except (BadInput, OverflowError) as error:
            raise BadInput(f"{path}: {where}: {error}") from None
    return tuple(curves)


def _floats(values: Sequence[float]) -> FloatArray:
    """The numbers as an array; raises OverflowError if a whole number is too large."""
    return np.array([float(value) for value in values])


def link_curves_json(curves: Sequence[TransferCurve]) -> list[dict[str, Any]]:
    """Returns curves as tables that `read_link_curves` reads back as the same curves.

    Args:
        curves: the curves.
    """
    return [
        {"partners": curve.partners, "bytes": curve.bytes_X.tolist(), "seconds": curve.seconds_X.tolist()} for curve in curves
    ]
