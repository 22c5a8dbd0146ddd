"""Reads users' own arrays (.csv without a header, or .npy): the traffic matrix of an all-to-all, the tokens of each expert."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.io.files import load_csv, load_npy, naming
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
    """Read loads of zero or more as (L, E) float64; a single row is one layer. Raises BadInput for anything else."""
    with naming(path, "a table of loads"):
        return expert_loads(str(path), _load_array(Path(path), ".csv or .npy", np.float64))


def _load_array(path: Path, suffixes: str, dtype: type) -> NDArray[Any]:
    match path.suffix:
        case ".npy":
            return load_npy(path)
        case ".csv":
            return load_csv(path, dtype)
    raise BadInput(f"expected {suffixes}, found {path.suffix or 'no suffix'}")
