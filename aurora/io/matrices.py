"""Reads users' own arrays (.csv without a header, or .npy): the traffic matrix of an all-to-all, the tokens of each expert."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.errors import AuroraError, BadInput
from aurora.io.files import load_npy, naming, read_text
from aurora.types.arrays import FloatArray, IntArray, square_bytes
from aurora.types.placement import expert_loads
from aurora.types.read_numbers import finite_number, whole_number


def load_matrix(path: str | Path) -> IntArray:
    """Read a (G, G) matrix of whole numbers of zero or more, G two or more, as int64. Raises BadInput for anything else."""
    names = ".csv, .npy, or a profile (.npz)", "a matrix of whole numbers"
    bytes_GG: IntArray = _load_array(Path(path), *names, whole_number, square_bytes)
    if len(bytes_GG) < 2:
        raise BadInput(f"{path}: expected a matrix with rows of two GPUs or more, found {len(bytes_GG)}")
    return bytes_GG


def load_loads(path: str | Path) -> FloatArray:
    """Read loads of zero or more as (L, E) float64; a single row is one layer. Raises BadInput for anything else."""
    return _load_array(Path(path), ".csv or .npy", "a table of loads", finite_number, expert_loads)


def _load_array(
    path: Path,
    suffixes: str,
    what: str,
    read_cell: Callable[[str], Any],
    check: Callable[[str, ArrayLike], NDArray[Any]],
) -> NDArray[Any]:
    try:
        with naming(path):
            if path.suffix == ".npy":
                array = load_npy(path)
            elif path.suffix == ".csv":
                array = _read_csv(path, what, read_cell)
            else:
                raise BadInput(f"expected {suffixes}, found {path.suffix or 'no suffix'}")
            return check(str(path), array)
    except AuroraError:
        raise
    except Exception as error:  # numpy raises many kinds for a file that is not its own
        raise BadInput(f"{path}: not {what}: {error}") from None


def _read_csv(path: Path, what: str, read_cell: Callable[[str], Any]) -> NDArray[Any]:
    rows = [line.split(",") for line in read_text(path).splitlines() if line.strip()]
    if len(lengths := {len(row) for row in rows}) > 1:
        raise BadInput(f"{path}: not {what}: expected rows of one length, found {min(lengths)} to {max(lengths)} cells")
    cells = np.array([[read_cell(cell) for cell in row] for row in rows], dtype=object)
    cells = cells.reshape(len(rows), -1) if rows else np.zeros((0, 0), dtype=np.int64)
    return cells.astype(np.int64 if read_cell is whole_number else np.float64) if cells.dtype == object else cells
