"""Work on the layers of a model in threads. Compiled functions that release the GIL (nogil=True) run side by side."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Made = TypeVar("_Made")
Progress = Callable[[str, int, int], None]  # told of what is done, how much of it, and how much there is in all


def untold(_what: str, _done: int, _total: int) -> None:
    """A Progress that nobody sees."""


def of_layers(work: Callable[[int], _Made], layers: int, what: str, progress: Progress = untold) -> list[_Made]:
    """Returns what `work` makes of each layer, in the sequence of the layers.

    Args:
        work: called with the number of a layer, in any sequence and in several threads. What it makes must follow from the
            layer alone; random numbers come from a generator of the layer's own. Then the number of threads changes no result.
        layers: how many layers there are.
        what: what is being done, for `progress`.
        progress: called in this thread, layer by layer.

    Raises:
        Exception: what `work` raises for the first layer that fails.
    """
    made: list[_Made] = []
    progress(what, 0, layers)
    with ThreadPoolExecutor(min(layers, _cores())) as pool:
        for each in pool.map(work, range(layers)):
            made.append(each)
            progress(what, len(made), layers)
    return made


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
