"""Launcher of local ranks, as processes (`launch`) or threads (`launch_threads`). Each rank gets a `RankInfo`.

Ranks start from a fork server that has imported torch already, die with their parent, and leave no process behind.
"""

import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from aurora.errors import AuroraError, BadInput, RankFailed, first_line

# Imported once, in the process that ranks are forked from: seconds that every rank would spend by itself.
PRELOAD = [
    "aurora.runtime.distributed.fork_server",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.processing_utils",
    "transformers.tokenization_utils_tokenizers",
    "aurora.runtime.distributed.launcher",
    "aurora.runtime.serving_rank",  # with what ranks of every run import
]
LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
_STARTING = threading.Lock()  # while a process starts, this one has another environment, signal mask or main module
GRACE_S = 1.0  # after a first failure, how long to wait for other ranks: for a better explanation, or for their end


@dataclass(frozen=True)
class RankInfo:
    """Number of a rank in a run, and address of the store at which the ranks meet.

    Args:
        rank, ranks: this rank's number, and how many ranks the whole run has.
        host, port: address of the store. Port 0: there is no store, and `host` is the address on which the rank's own process
            groups listen (empty: loopback).
        timeout_s: seconds to wait for a peer.
        local_rank, local_ranks: this rank's number among the ranks of its machine, and how many ranks the machine has.
        launched: True if `launch` started the rank and hosts the store; False if torchrun did.
    """

    rank: int
    ranks: int
    host: str
    port: int
    timeout_s: float
    local_rank: int
    local_ranks: int
    launched: bool


def launch(target: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Runs the picklable `target(rank_info, *args)` in `ranks` processes on this machine, and returns when all have ended.

    The rendezvous store runs in this process, so it outlives every rank; it listens on loopback only.

    Args:
        target, ranks, args: the function, the number of processes, and further arguments of the function.
        timeout_s: seconds that a rank waits for a peer.

    Returns:
        The return value of each rank's `target`, by rank.

    Raises:
        RankFailed: if a rank dies, or raises an exception other than AuroraError.
        AuroraError: if a rank raises one.
    """
    children: list[tuple[Any, Connection]] = []
    store, store_port = serve_store(LOOPBACK)
    try:
        for rank in range(ranks):
            rank_info = RankInfo(rank, ranks, LOOPBACK, store_port, timeout_s, rank, ranks, launched=True)
            children.append(start_process(rank_info, _send_result, target, args))
        return _receive_results(children)
    finally:
        end_processes(children)
        del store  # it listened until now


def serve_store(host: str) -> tuple[Any, int]:
    """Returns a TCPStore that listens on one address of this machine, at a free port, and the port, which closes with it.

    Raises:
        BadInput: if the address cannot be used.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"{host}: cannot be listened on: {error.strerror}") from None
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def start_process(rank_info: RankInfo, main: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Starts a process that runs the picklable `main(connection, rank_info, *args)`, and is killed when this process ends.

    Returns:
        The process, and this end of the pipe whose other end is `connection`.
    """
    context = start_fork_server()
    ours, theirs = context.Pipe()
    child = context.Process(target=_child_main, args=(theirs, rank_info, main, args), name=f"aurora-rank-{rank_info.rank}")
    with _without_main_module():
        child.start()
    theirs.close()
    return child, ours


def end_processes(children: Iterable[tuple[Any, Connection]]) -> None:
    """Kills processes that `start_process` returned, waits until they have ended, and closes their pipes."""
    for child, connection in children:
        if child.is_alive():
            child.kill()
        child.join()
        connection.close()


def launch_threads(target: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Runs ranks like `launch`, but as threads of this process and without a store. Returns each rank's return value.

    Raises the first error of a rank, after waiting up to GRACE_S for the other ranks to end: a rank that still loads a model
    would disturb the caller's next load.
    """
    answers: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def run(rank_info: RankInfo) -> None:
        try:
            answers.put((rank_info.rank, target(rank_info, *args), None))
        except BaseException as error:
            answers.put((rank_info.rank, None, error))

    threads = []
    for rank in range(ranks):
        rank_info = RankInfo(rank, ranks, "", 0, timeout_s, rank, ranks, launched=True)
        threads.append(threading.Thread(target=run, args=(rank_info,), name=f"aurora-rank-{rank}", daemon=True))
        threads[-1].start()
    results: dict[int, Any] = {}
    while len(results) < ranks:
        rank, result, error = answers.get()
        if error is not None:
            deadline_s = time.monotonic() + GRACE_S
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
            raise error
        results[rank] = result
    return [results[rank] for rank in range(ranks)]


def start_fork_server(preload: list[str] = PRELOAD) -> ForkServerContext:
    """Starts the process from which ranks are forked, and returns its context. It imports `preload` in the background.

    An early call saves the first rank the time of these imports; further calls cost nothing. Ctrl-C (SIGINT) reaches neither
    the fork server nor the ranks; the caller must end them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    with _STARTING:
        before, safe = signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"  # or files of the working folder would be taken for modules
        try:
            multiprocessing.resource_tracker.ensure_running()  # which would unblock signals if it were started next
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ["PYTHONSAFEPATH"]
            os.environ.update({} if safe is None else {"PYTHONSAFEPATH": safe})
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps the caller's main module, which may have no guard or no file, out of children: they find `target` by its name."""
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _receive_results(children: list[tuple[Any, Connection]]) -> list[Any]:
    """Collects what the children return, by rank. Raises the first failure; the others have GRACE_S to explain it."""
    results: dict[int, Any] = {}
    failures: dict[int, AuroraError] = {}
    deaths: dict[int, int] = {}
    rank_of = {connection: rank for rank, (_, connection) in enumerate(children)}  # of those that still run
    deadline_s = inf  # until something fails
    while rank_of and (left_s := deadline_s - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(rank_of), None if left_s == inf else left_s):
            assert isinstance(connection, Connection)
            rank = rank_of.pop(connection)
            try:
                succeeded, value = connection.recv()
            except (EOFError, OSError):
                children[rank][0].join()
                deaths[rank] = children[rank][0].exitcode
            else:
                (results if succeeded else failures)[rank] = value
        if failures or deaths:
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    _raise_failure(failures, deaths, len(children))
    return [results[rank] for rank in range(len(children))]


def _raise_failure(failures: dict[int, AuroraError], deaths: dict[int, int], ranks: int) -> None:
    """Raises the error that explains the end of a run best, if anything failed."""
    if deaths:
        rank, code = min(deaths.items())
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise RankFailed(f"rank {rank} of {ranks} died ({how}); the others were stopped")
    if failures:
        # A rank that lost its peer fails too: an error that a user can mend is the better explanation.
        raise min(failures.values(), key=lambda error: isinstance(error, RankFailed))


def _child_main(connection: Connection, rank_info: RankInfo, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the fork server, even while it is stopped
    _set_up_torch(rank_info)
    main(connection, rank_info, *args)
    connection.close()
    os._exit(0)  # no interpreter shutdown: threads of the transports may still wait for lost peers


def _send_result(connection: Connection, rank_info: RankInfo, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Sends (True, result), or (False, error)."""
    try:
        answer = (True, target(rank_info, *args))
    except AuroraError as error:
        answer = (False, error)
    except BaseException as error:
        answer = (False, RankFailed(f"rank {rank_info.rank}: {describe_error(error)}"))
    connection.send(answer)


def describe_error(error: BaseException) -> str:
    """Describes an unexpected error in one sentence: its type, place and first line. AURORA_DEBUG prints its traceback too."""
    if os.environ.get("AURORA_DEBUG"):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = first_line(error) if str(error).strip() else "no message"
    return f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}: {reason}"


def _set_up_torch(rank_info: RankInfo) -> None:
    """Gives torch an equal part of the threads that it would use, and gloo the loopback interface unless another is set."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // rank_info.local_ranks))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
