"""Rebalances a placement in force, for live systems: changes few slots; all layers of a model take milliseconds.

The search is in `rebalance_core`.
"""

import time

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.gpu_slots import gpu_loads
from aurora.algorithms.layers_in_threads import map_layers
from aurora.algorithms.replicas.rebalance_core import rebalance_layers
from aurora.errors import BadInput
from aurora.types import GpuSlots, Placement, Rebalanced
from aurora.types.arrays import FloatArray, IntArray, as_array, counts
from aurora.types.placement import EMPTY, expert_loads

CHUNKS = 4  # of layers, in threads: working memory is made for each


def rebalance(
    loads: ArrayLike,
    held: Placement | ArrayLike,
    slots: GpuSlots | None = None,
    max_moves: int | None = None,
    enough: float = 0.01,
    min_replicas: int = 1,
    domain_G: ArrayLike | None = None,
) -> Rebalanced:
    """Changes a few slots of a placement in force to balance new loads; takes milliseconds, for live systems.

    Replicas share their expert's load evenly, as in engines. A layer's slots change until its largest load is near enough to
    the mean (`enough`), or no change lowers it; the next placement is never worse than the one in force.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        held: the placement in force: a Placement, or (L, G, P) whole numbers, the expert in each slot and -1 for none.
        slots: how many experts fit on each GPU, and what load costs there; None: as many as `held` has, on equal GPUs.
        max_moves: maximum number of experts that GPUs fetch in a layer; None: no limit.
        enough: from zero to below one; a layer is good enough if its largest load is at most (1 + enough) x the mean.
        min_replicas: minimum number of GPUs, and of failure domains, that hold each expert; if `held` has fewer, as many as
            there.
        domain_G: (G,) whole numbers of zero or more: the failure domain of each GPU; None: each is its own.

    Returns:
        The next placement, with the moves and the largest loads before and after in every layer.

    Raises:
        BadInput: if an argument is out of range, or `held` does not fit the loads or the slots.

    Example:
        >>> import aurora
        >>> after = aurora.rebalance([600, 560, 120, 120, 20, 10], [[[0, 1], [2, 3], [4, 5]]])
        >>> after.held_LGP.tolist(), after.moves_L.tolist(), after.max_load_L.tolist()
        ([[[4, 1], [2, 3], [0, 5]]], [2], [610.0])
    """
    load_LE = expert_loads("loads", loads).copy()
    held_LGP = _table(held)
    if slots is None:
        used_G = np.maximum((held_LGP >= 0).sum(axis=2).max(axis=0), 1) if isinstance(held, Placement) else held_LGP.shape[2]
        slots = GpuSlots(np.full(held_LGP.shape[1], used_G), np.ones(held_LGP.shape[1]))
    held_LGP = _checked(held_LGP, load_LE, slots)
    whole = isinstance(max_moves, int | np.integer) and not isinstance(max_moves, bool)
    if max_moves is not None and (not whole or max_moves < 0):
        raise BadInput(f"`max_moves`: expected a whole number of zero or more, found {max_moves}")
    if not 0 <= enough < 1:
        raise BadInput(f"`enough`: expected a number from zero to below one, found {enough}")
    keeps = checked_min_replicas(min_replicas, domain_G, slots.gpus)
    began = time.perf_counter()
    moves_L, before_L, after_L = change_layers(load_LE, held_LGP, slots.slots_G.copy(), slots.cost_G, enough, max_moves, keeps)
    mean_L = load_LE.sum(axis=1) / (1 / slots.cost_G).sum()
    return Rebalanced(held_LGP, moves_L, before_L, after_L, mean_L, time.perf_counter() - began)


def change_layers(
    load_LE: FloatArray,
    held_LGP: IntArray,
    slots_G: IntArray,
    cost_G: FloatArray,
    enough: float,
    max_moves: int | None = None,
    keeps: tuple[int, IntArray] | None = None,
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Changes slots in place as `rebalance` does, whose checks are made.

    Args:
        load_LE, enough, max_moves: as in `rebalance`.
        held_LGP: (L, G, P) int64, the expert in each slot, which are as many as the largest of slots_G.
        slots_G, cost_G: the slots and the cost of each GPU.
        keeps: minimum replicas of each expert, and the failure domain of each GPU, (G,) int64; None: one replica.

    Returns:
        (moves_L, before_L, after_L): (L,) int64 moves, and float64 largest loads, of each layer.
    """
    most, keeps = held_LGP[0].size if max_moves is None else max_moves, keeps or (1, np.arange(len(cost_G)))
    mean_L = load_LE.sum(axis=1) / (1 / cost_G).sum()
    moves_L, before_L = np.zeros(len(load_LE), dtype=np.int64), gpu_loads(load_LE[None], held_LGP, cost_G)[0].max(axis=1)
    after_L, target_L = before_L.copy(), mean_L * (1 + enough)
    begin_C = np.linspace(0, len(load_LE), min(len(load_LE), CHUNKS) + 1).astype(np.int64)

    def chunk(number: int) -> None:
        limits, layers = (most, before_L, mean_L, target_L), begin_C[number : number + 2].tolist()
        rebalance_layers(load_LE, cost_G, slots_G, held_LGP, *limits, *keeps, moves_L, after_L, *layers)

    map_layers(chunk, len(begin_C) - 1, "rebalance layers")
    return moves_L, before_L, after_L


def checked_min_replicas(min_replicas: int, domain_G: ArrayLike | None, gpus: int) -> tuple[int, IntArray]:
    """Checks the options on replicas that moves must keep, and returns (min_replicas, (G,) int64 failure domain of each GPU).

    Args:
        min_replicas: minimum replicas of each expert.
        domain_G: (G,) the failure domain of each GPU; None: each GPU is its own.
        gpus: number of GPUs.

    Raises:
        BadInput: unless min_replicas is a whole number of one or more, and there is a domain for each GPU.
    """
    if isinstance(min_replicas, bool) or not isinstance(min_replicas, int | np.integer) or min_replicas < 1:
        raise BadInput(f"`min_replicas`: expected a whole number of one or more, found {min_replicas}")
    if domain_G is None:
        return int(min_replicas), np.arange(gpus)
    number_G = counts("`domain_G`", domain_G, 1)
    if len(number_G) != gpus:
        raise BadInput(f"`domain_G`: expected a failure domain for each of {gpus} GPUs, found {len(number_G)}")
    return int(min_replicas), np.unique(number_G, return_inverse=True)[1].astype(np.int64)


def _table(placement: Placement | ArrayLike) -> IntArray:
    """(L, G, P) whole numbers: the expert in each slot, EMPTY for none, of a placement or a table."""
    if isinstance(placement, Placement):
        return placement.held_LGP()
    table = as_array("`held`", placement)
    if table.dtype.kind not in "iu" or table.ndim != 3 or not table.size:
        raise BadInput(f"`held`: expected whole numbers by layer, GPU and slot, found {table.dtype} of shape {table.shape}")
    return table


def _checked(held_LGP: IntArray, load_LE: FloatArray, slots: GpuSlots) -> IntArray:
    """The table as wide as the slots; raises BadInput unless it fits them and the loads, and every expert is held."""
    layers, experts = load_LE.shape
    if len(held_LGP) != layers or held_LGP.shape[1] != slots.gpus:
        raise BadInput(
            f"`held`: expected {layers} layers on {slots.gpus} GPUs, found {held_LGP.shape[0]} on {held_LGP.shape[1]}"
        )
    if held_LGP.min() < EMPTY or held_LGP.max() >= experts:
        raise BadInput(
            f"`held`: expected experts from 0 to {experts - 1}, or {EMPTY}, found {held_LGP.min()} to {held_LGP.max()}"
        )
    width = int(slots.slots_G.max())
    none_LGP = np.full((layers, slots.gpus, max(0, width - held_LGP.shape[2])), EMPTY)
    wide_LGP = np.concatenate([held_LGP.astype(np.int64), none_LGP], axis=2)
    if (wide_LGP[:, np.arange(wide_LGP.shape[2]) >= slots.slots_G[:, None]] != EMPTY).any():
        raise BadInput(f"`held`: expected at most {slots.slots_G.tolist()} slots of each GPU, found experts in more")
    layer_X, expert_X = np.nonzero(wide_LGP >= 0)[0], wide_LGP[wide_LGP >= 0]
    missing_X = np.flatnonzero(np.bincount(layer_X * experts + expert_X, minlength=layers * experts) == 0)
    if len(missing_X):
        raise BadInput(
            f"`held`: expected every expert, found none of expert {missing_X[0] % experts} in layer {missing_X[0] // experts}"
        )
    return np.ascontiguousarray(wide_LGP[:, :, :width])
