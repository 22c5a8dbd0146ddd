"""Reads users' own arrays (.csv without a header, or .npy): the traffic matrix of an all-to-all, the tokens of each expert.

Tokens of each expert are also read from a .csv with the columns layer,expert,count.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.io.files import load_csv, load_npy, naming, read_text
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
        if path.suffix == ".csv" and read_text(path).partition("\n")[0].strip() == COUNTED:
            return expert_loads(str(path), _counted(path))
        return expert_loads(str(path), _load_array(path, ".csv, .npy or a profile (.npz)", np.float64))


COUNTED = "layer,expert,count"
MOST_LOADS = 1 << 24  # of all layers: a larger number of an expert is a typing error


def _counted(path: Path) -> FloatArray:
    """The counts of a .csv with a row for each expert of each layer that has any, layers in rising sequence."""
    rows_X3 = load_csv(path, np.int64, header=True)
    if rows_X3.shape[1] != 3 or (rows_X3 < 0).any():
        raise BadInput(f"expected rows of a layer, an expert and a count of zero or more, found {rows_X3.shape[1]} columns")
    layers, at_X = np.unique(rows_X3[:, 0], return_inverse=True)
    experts = int(rows_X3[:, 1].max()) + 1
    if len(layers) * experts > MOST_LOADS:
        raise BadInput(f"expected at most {MOST_LOADS} experts in {len(layers)} layers, found expert {experts - 1}")
    if twice := len(rows_X3) - len(np.unique(at_X * experts + rows_X3[:, 1])):
        raise BadInput(f"expected one row for each expert of a layer, found {twice} repeated")
    load_LE = np.zeros((len(layers), experts))
    load_LE[at_X, rows_X3[:, 1]] = rows_X3[:, 2]
    return load_LE


def _load_array(path: Path, suffixes: str, dtype: type) -> NDArray[Any]:
    match path.suffix:
        case ".npy":
            return load_npy(path)
        case ".csv":
            return load_csv(path, dtype)
    raise BadInput(f"expected {suffixes}, found {path.suffix or 'no suffix'}")
