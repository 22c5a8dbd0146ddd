"""Start R local ranks, collect what they return, and leave no process behind."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from aurora.errors import AuroraError, BadInput, RankFailed

# Imported once, in the process that ranks are forked from: seconds that every rank would spend by itself.
PRELOAD = [
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.processing_utils",
    "transformers.tokenization_utils_tokenizers",
    "aurora.runtime.distributed.launcher",
]
GRACE_S = 1.0  # after a first failure, how long to wait for a better explanation from other ranks


@dataclass(frozen=True)
class RankInfo:
    """A rank's place among `ranks`, and where their store listens.

    timeout_s: how long to wait for a peer. local_rank, local_ranks: the same on this machine. launched: by `launch`, which
    hosts the store; else by torchrun, which does.
    """

    rank: int
    ranks: int
    host: str
    port: int
    timeout_s: float
    local_rank: int
    local_ranks: int
    launched: bool


def launch(target: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300.0, port: int = 0) -> list[Any]:
    """Run `target(seat, *args)` in `ranks` processes on this machine; gives what each returned, by rank.

    The store that the ranks meet at lives here, on `port` (0: any free one), so it outlives every rank. timeout_s: how long a
    rank waits for a peer. When a rank raises an AuroraError it is raised here; when one dies, RankFailed says which. All
    processes are gone on return.
    """
    children: list[tuple[Any, Connection]] = []
    with hosted_store(port) as (host, listening):
        try:
            for rank in range(ranks):
                seat = RankInfo(rank, ranks, host, listening, timeout_s, rank, ranks, launched=True)
                children.append(start(seat, _answer, target, args))
            return _collect(children)
        finally:
            for child, connection in children:
                if child.is_alive():
                    child.kill()
                child.join()
                connection.close()


@contextmanager
def hosted_store(port: int) -> Iterator[tuple[str, int]]:
    """Host and port of a store that lives in this process, on `port` or with 0 on any free one. BadInput where it cannot."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    loopback = "127.0.0.1"
    try:
        listener = socket.create_server((loopback, port))
    except OSError as error:
        raise BadInput(f"port {port} on {loopback} cannot be used: {error.strerror}") from None
    listening = listener.getsockname()[1]
    store = TCPStore(loopback, listening, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield loopback, listening
    finally:
        del store


def start(seat: RankInfo, main: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that runs `main(connection, seat, *args)` and dies with this one, and our end of the connection."""
    context = prepare()
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, seat, main, args), name=f"aurora-rank-{seat.rank}")
    with _no_main():
        child.start()
    theirs.close()
    return child, ours


def launch_threads(target: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Like `launch`, with threads of this process as ranks, which no store joins."""
    answers: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def run(seat: RankInfo) -> None:
        try:
            answers.put((seat.rank, target(seat, *args), None))
        except BaseException as error:
            answers.put((seat.rank, None, error))

    for rank in range(ranks):
        seat = RankInfo(rank, ranks, "", 0, timeout_s, rank, ranks, launched=True)
        threading.Thread(target=run, args=(seat,), name=f"aurora-rank-{rank}", daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < ranks:
        rank, result, error = answers.get()
        if error is not None:
            raise error
        results[rank] = result
    return [results[rank] for rank in range(ranks)]


def prepare() -> ForkServerContext:
    """Start importing for ranks in the background; gives the context that they are forked in."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _no_main() -> Iterator[None]:
    """Children run `target` by its name; the caller's main module, which may have no guard or no file, stays out of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(children: list[tuple[Any, Connection]]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, AuroraError] = {}
    deaths: dict[int, int] = {}
    deadline = float("inf")  # until something fails
    while len(results) < len(children):
        open_ranks = [r for r in range(len(children)) if r not in results and r not in failures and r not in deaths]
        left_s = deadline - time.monotonic()
        if not open_ranks or left_s <= 0:
            break
        ready = multiprocessing.connection.wait(
            [children[r][1] for r in open_ranks], timeout=None if deadline == float("inf") else left_s
        )
        for rank in open_ranks:
            child, connection = children[rank]
            if connection not in ready:
                continue
            try:
                fine, value = connection.recv()
            except (EOFError, OSError):
                child.join()
                deaths[rank] = child.exitcode
            else:
                if fine:
                    results[rank] = value
                else:
                    failures[rank] = value
        if failures or deaths:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if deaths:
        rank, code = min(deaths.items())
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise RankFailed(f"rank {rank} of {len(children)} died ({how}); the others were stopped")
    if failures:
        # A rank that lost its peer fails too: what a user can mend is the better explanation.
        raise min(failures.values(), key=lambda error: isinstance(error, RankFailed))
    return [results[rank] for rank in range(len(children))]


def _child(connection: Connection, seat: RankInfo, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _settle(seat)
    main(connection, seat, *args)
    connection.close()
    os._exit(0)  # no interpreter shutdown: threads of the transports may still wait for lost peers


def _answer(connection: Connection, seat: RankInfo, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = (True, target(seat, *args))
    except AuroraError as error:
        answer = (False, error)
    except BaseException as error:
        answer = (False, RankFailed(f"rank {seat.rank}: {what_happened(error)}"))
    connection.send(answer)


def what_happened(error: BaseException) -> str:
    """An unexpected error in a sentence; with AURORA_DEBUG set its traceback is printed too."""
    if os.environ.get("AURORA_DEBUG"):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}: {reason}"


def _settle(seat: RankInfo) -> None:
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // seat.ranks))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
