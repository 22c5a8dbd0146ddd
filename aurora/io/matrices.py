"""Reads users' own arrays (.csv without a header, or .npy): the traffic matrix of an all-to-all, the tokens of each expert.

Tokens of each expert are also read from a .csv with the columns layer,expert,count.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.io.files import csv_rows, load_csv, load_npy, naming, read_text
from aurora.io.schema import FileTable, converted
from aurora.types.arrays import FloatArray, IntArray, square_bytes
from aurora.types.placement import expert_loads


def load_matrix(path: str | Path) -> IntArray:
    """Read a (G, G) matrix of whole numbers of zero or more, G two or more, as int64. Raises BadInput for anything else."""
    with naming(path, "a matrix of whole numbers"):
        bytes_GG = square_bytes(str(path), _load_array(Path(path), ".csv, .npy, or a profile (.npz)", np.int64))
    if len(bytes_GG) < 2:
        raise BadInput(f"{path}: expected a matrix with rows of two GPUs or more, found {len(bytes_GG)}")
    return bytes_GG


def load_loads(path: str | Path) -> FloatArray:
    """Read loads of zero or more as (L, E) float64; a single row is one layer. Raises BadInput for anything else.

    Args:
        path: a .csv without a header or .npy, one row per layer; or a .csv of columns layer,expert,count.
    """
    path = Path(path)
    with naming(path, "a table of loads"):
        if path.suffix == ".csv" and read_text(path).partition("\n")[0].strip() == ",".join(COLUMNS):
            return expert_loads(str(path), expert_counts(path)[1])
        return expert_loads(str(path), _load_array(path, ".csv, .npy or a profile (.npz)", np.float64))


class ExpertCount(FileTable):
    """A row of a CSV of counts."""

    layer: Annotated[int, Meta(ge=0)]
    expert: Annotated[int, Meta(ge=0)]
    count: Annotated[int, Meta(ge=0, lt=10**15)]


COLUMNS = ExpertCount.__struct_fields__
MOST_LOADS = 1 << 24  # of all layers: a larger number of an expert is a typing error


def expert_counts(path: Path, columns: tuple[str, ...] = COLUMNS) -> tuple[tuple[int, ...], IntArray]:
    """Reads a .csv with a row for each expert of each layer that has any tokens.

    Args:
        path: the file.
        columns: its names of COLUMNS; others are ignored.

    Returns:
        The layers that it names, ascending, and (L, E) int64, their tokens of each expert up to the last that it names.

    Raises:
        BadInput: if a column is missing, a value is no such number, an expert of a layer comes twice, or there is none.
    """
    count_of: dict[tuple[int, int], int] = {}
    for number, row in csv_rows(path):
        if missing := [column for column in columns if column not in row]:
            raise BadInput(f"expected columns {', '.join(missing)}, found {', '.join(row)[:200]}")
        named = {name: row[column] for name, column in zip(COLUMNS, columns, strict=True)}
        of = converted(named, ExpertCount, f"line {number}", strict=False)
        if (of.layer, of.expert) in count_of:
            raise BadInput(f"line {number}: expected one row of expert {of.expert} of layer {of.layer}, found two")
        count_of[of.layer, of.expert] = of.count
    if not count_of:
        raise BadInput("expected rows of counts, found none")
    layers, experts = sorted({layer for layer, _ in count_of}), 1 + max(expert for _, expert in count_of)
    if len(layers) * experts > MOST_LOADS:
        raise BadInput(f"expected at most {MOST_LOADS} experts in {len(layers)} layers, found expert {experts - 1}")
    return tuple(layers), np.array([[count_of.get((layer, expert), 0) for expert in range(experts)] for layer in layers])


def _load_array(path: Path, suffixes: str, dtype: type) -> NDArray[Any]:
    match path.suffix:
        case ".npy":
            return load_npy(path)
        case ".csv":
            return load_csv(path, dtype)
    raise BadInput(f"expected {suffixes}, found {path.suffix or 'no suffix'}")
