"""Runs a function on each layer of a model, in threads; compiled functions with nogil=True run in parallel."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

_Result = TypeVar("_Result")
Progress = Callable[[str, int, int], None]  # told of what is done, how much of it, and how much there is in all


def no_progress(_what: str, _done: int, _total: int) -> None:
    """Default Progress, which reports nothing."""


def map_layers(work: Callable[[int], _Result], layers: int, what: str, progress: Progress = no_progress) -> list[_Result]:
    """Calls `work` for every layer, in threads, and returns the results in the layers' order.

    Args:
        work: called with the number of a layer, in any sequence and in several threads. Its result must depend on the layer
            alone, and random numbers must come from one generator per layer; then the number of threads changes no result.
        layers: number of layers.
        what: name of the work, for `progress`.
        progress: called in this thread with (what, layers done, layers in all) after each layer.

    Raises:
        Exception: what `work` raises for the first layer that fails.
    """
    results: list[_Result] = []
    progress(what, 0, layers)
    threads = min(layers, _cores())
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        for result in (pool.map if pool else map)(work, range(layers)):
            results.append(result)
            progress(what, len(results), layers)
    return results


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
