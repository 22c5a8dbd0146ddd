"""Progress display on standard error, if that is a terminal; and that functions are compiled, in any case."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

COMPILING_S = 3.0  # of compilation, after which it is told
COMPILING = "aurora: functions are compiled when they are first used, once after installation: a minute or two"


@contextmanager
def shown() -> Iterator[Callable[[str, int, int], None]]:
    """Context manager that yields a function; called with (what, done, total), it moves the progress bar of `what`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bars, _compilation_told(console):
        tasks = {}

        def move(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield move


@contextmanager
def _compilation_told(console: Console) -> Iterator[None]:
    """Context manager in which COMPILING is printed once if the first use of functions has taken COMPILING_S seconds."""
    from numba.core import event

    class Told(event.Listener):  # type: ignore[misc]
        """Adds up the seconds of compilation; functions that are compiled for others count with these."""

        def __init__(self) -> None:
            self.depth, self.began_s, self.left_s = 0, 0.0, COMPILING_S

        def on_start(self, _: object) -> None:
            self.depth += 1
            if self.depth == 1:
                self.began_s = time.perf_counter()

        def on_end(self, _: object) -> None:
            self.depth -= 1
            if self.depth or self.left_s <= 0:
                return
            self.left_s -= time.perf_counter() - self.began_s
            if self.left_s <= 0:
                console.print(COMPILING, soft_wrap=True, highlight=False)

    with event.install_listener("numba:compile", Told()):
        yield
