"""Progress display on standard error, if that is a terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from aurora.cli.subcommand import terminal
from aurora.types import WorkerReport


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
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def move(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield move


@contextmanager
def workers_shown(printed: bool = True) -> Iterator[Callable[[Sequence[WorkerReport]], None]]:
    """Context manager that yields a function; called with reports, it shows them as a live table. `printed`: the last stays."""
    from rich.live import Live

    from aurora.reports.trace_tables import workers_table

    console = Console(stderr=True)
    latest: list[WorkerReport] = []
    with Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:

        def watch(shares: Sequence[WorkerReport]) -> None:
            latest[:] = shares
            if live is not None:
                live.update(workers_table(latest), refresh=True)

        yield watch
    if latest and printed:
        terminal().print(workers_table(latest))
