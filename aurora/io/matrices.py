"""Reads users' own arrays (.csv without a header, or .npy): the traffic matrix of an all-to-all, the tokens of each expert."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.errors import AuroraError, BadInput
from aurora.io.files import load_csv, load_npy, naming
from aurora.types.arrays import FloatArray, IntArray, square_bytes
from aurora.types.placement import expert_loads


def load_matrix(path: str | Path) -> IntArray:
    """Read a (G, G) matrix of whole numbers of zero or more, G two or more, as int64. Raises BadInput for anything else."""
    names = ".csv, .npy, or a profile (.npz)", "a matrix of whole numbers"
    bytes_GG: IntArray = _load_array(Path(path), *names, np.int64, square_bytes)
    if len(bytes_GG) < 2:
        raise BadInput(f"{path}: expected a matrix with rows of two GPUs or more, found {len(bytes_GG)}")
    return bytes_GG


def load_loads(path: str | Path) -> FloatArray:
    """Read loads of zero or more as (L, E) float64; a single row is one layer. Raises BadInput for anything else."""
    return _load_array(Path(path), ".csv or .npy", "a table of loads", np.float64, expert_loads)


def _load_array(
    path: Path,
    suffixes: str,
    what: str,
    dtype: type,
    check: Callable[[str, ArrayLike], NDArray[Any]],
) -> NDArray[Any]:
    try:
        with naming(path):
            if path.suffix == ".npy":
                array = load_npy(path)
            elif path.suffix == ".csv":
                array = load_csv(path, dtype)
            else:
                raise BadInput(f"expected {suffixes}, found {path.suffix or 'no suffix'}")
            return check(str(path), array)
    except AuroraError:
        raise
    except Exception as error:  # numpy raises many kinds for a file that is not its own
        raise BadInput(f"{path}: not {what}: {error}") from None
