"""Axis letters of array names, and helpers that copy, check and lock arrays.

Array names end in an underscore and one letter for each axis: load_LE is (layers, experts). A digit is an axis of that length:
pairs_X2 is (X, 2), load_E1 is (E, 1). Scalar names end in their units: `_s` seconds, `_Bps` bytes per second, `_bytes` bytes.

Everywhere:
    T  windows, or steps of a run
    L  MoE layers
    S  source ranks: where tokens start
    E  logical experts
    G  GPUs
    N  nodes
    R  ranks (processes, one per GPU); replicas of one expert; random restarts
    M  models that share GPUs; replicas of an expert at run time; sampled sets
    K  experts per token; numbers counted from 0 or 1, such as failures or messages
    U  tokens
    Q  sequences: the prompts that tokens belong to
    P  expert slots of a GPU (physical experts); pairs of them; processes
    J  groups of experts, one group per GPU
    X  things of one kind, numbered: transfers, replicas, points of a curve, steps
In some modules:
    A  arcs of a network
    B  batches (coded aggregation); bootstrap samples; prompts decoded together
    C  candidates; cases; message sizes that are timed
    D  failure domains; traffic domains of a profile
    F  sets of failed domains; features of a regression
    I  iterations of gradient descent
    V  vertices of a network; tokens with equal choices, counted once; entries of a vocabulary; variants
    W  workers (coded aggregation); windows that are planned for, one scenario each; ways to post an all-to-all
    Y  phases of a layer
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.errors import BadInput

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def counts(what: str, value: ArrayLike, ndim: int) -> IntArray:
    """Returns a locked int64 copy of an array of counts.

    Args:
        what: how errors name the array.
        value: the array.
        ndim: number of axes that it must have.

    Raises:
        BadInput: if it is not an integer array of `ndim` axes, or has negative numbers or numbers beyond 64 bits.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise BadInput(f"{what}: expected rows of one length") from None
    if array.ndim != ndim:
        raise BadInput(f"{what}: expected {ndim} axes, found shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise BadInput(f"{what}: expected integers, found {array.dtype}")
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise BadInput(f"{what}: {int(array.max())} does not fit into 64 bits")
    if array.size and int(array.min()) < 0:
        raise BadInput(f"{what}: expected counts of zero or more, found {int(array.min())}")
    return locked(np.array(array, dtype=np.int64))


def numbers(what: str, value: ArrayLike, ndim: int = 1) -> FloatArray:
    """Returns a locked float64 copy of an array of numbers.

    Args:
        what: how errors name the array.
        value: the array.
        ndim: number of axes that it must have.

    Raises:
        BadInput: if it has another number of axes, or a number that is not finite.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or array.ndim != ndim:
        raise BadInput(f"{what}: expected numbers with {ndim} axes, found {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise BadInput(f"{what}: expected finite numbers, found {array[~np.isfinite(array)].flat[0]}")
    return locked(np.array(array, dtype=np.float64))


def locked(array: NDArray[Any]) -> NDArray[Any]:
    """Makes an array read-only and returns it."""
    array.setflags(write=False)
    return array


def square_bytes(what: str, value: ArrayLike) -> IntArray:
    """Returns a traffic matrix as a locked (G, G) int64 array with a zero diagonal, because local tokens do not travel.

    Args:
        what: how errors name the matrix.
        value: (G, G), bytes from each rank to each other.

    Raises:
        BadInput: if it is not square, integer and non-negative, or its sum does not fit into 64 bits.
    """
    matrix = counts(what, value, 2)
    if matrix.shape[0] != matrix.shape[1]:
        raise BadInput(f"{what}: expected a square matrix, found shape {matrix.shape}")
    if float(matrix.sum(dtype=np.float64)) > np.iinfo(np.int64).max / 2:
        raise BadInput(f"{what}: the matrix sums to more than 64 bits hold")
    off_diagonal = matrix.copy()
    np.fill_diagonal(off_diagonal, 0)
    return locked(off_diagonal)


def gap(value: float, bound: float) -> float:
    """Returns the gap value / bound - 1 of a value to a lower bound on it; zero if both are zero."""
    if bound > 0:
        return value / bound - 1
    return 0.0 if value <= 0 else float("inf")
