"""Finds sockets of this process, such as those that a process group has opened; and runs calls that can be abandoned."""

import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from aurora.errors import BadInput, RankFailed

URGENT_TOS = 0x10  # of IP packets, "minimise delay": Linux's queues of three bands serve them first, switches if told to
TYPE_OF_SERVICE = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}  # where it is set, by address family


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens only on the given address of this machine. Port 0 picks a free port.

    Raises:
        BadInput: if the address cannot be used.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"port {port} on {host} cannot be used: {error.strerror}") from None


@contextmanager
def marked_urgent() -> Iterator[None]:
    """Context manager that sets IP type-of-service URGENT_TOS on the connections opened inside it."""
    before = open_sockets()
    yield
    for connection in connected(number for inode, number in open_sockets().items() if inode not in before):
        with connection:
            option = TYPE_OF_SERVICE.get(connection.family)
            if option is not None:
                connection.setsockopt(*option, URGENT_TOS)


def open_sockets() -> dict[int, int]:
    """Returns this process's open sockets as {inode: descriptor}; an inode identifies a socket, a descriptor is reused."""
    sockets = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since
            continue
        if stat.S_ISSOCK(status.st_mode):
            sockets[status.st_ino] = int(name)
    return sockets


def connected(descriptors: Iterable[int]) -> list[socket.socket]:
    """Returns those of the socket `descriptors` that have a peer, as new socket objects on duplicated descriptors."""
    connections = []
    for descriptor in descriptors:
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        try:
            connection.getpeername()
            connections.append(connection)
        except OSError:  # it listens
            connection.close()
    return connections


POLL_S = 0.02
STUCK_S = 0.3  # after connections were shut, until gloo counts as stuck
_own = threading.local()  # `waiting`: this thread's _WaitingThread, unless a call runs in it


def unless_stopped(stopped: threading.Event, call: Callable[[], None]) -> None:
    """Runs a blocking `call` in another thread, waits for its end, and abandons it soon after `stopped` is set.

    Raises:
        RankFailed: if `call` still runs STUCK_S seconds after `stopped` was set; its thread is not ended.
        Exception: any exception that `call` raises.
    """
    if not call_ends(call, stopped, STUCK_S):
        raise RankFailed("gloo waits on although its connections are shut")


class _WaitingThread:
    """Runs calls that wait for peers, one after the other. It ends when nothing refers to it and its call has ended."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.outcomes: SimpleQueue[BaseException | None] = SimpleQueue()  # of each call what it has raised
        args = self.calls, self.outcomes
        threading.Thread(target=_run_calls, args=args, daemon=True, name="aurora-waiting").start()

    def __del__(self) -> None:
        self.calls.put(None)


def _run_calls(calls: SimpleQueue[Callable[[], None] | None], outcomes: SimpleQueue[BaseException | None]) -> None:
    """The thread of a _WaitingThread. Between two calls it holds nothing of the last one."""
    while (call := calls.get()) is not None:
        outcome = None
        try:
            call()
        except BaseException as error:
            outcome = error
        outcomes.put(outcome)
        del call, outcome


def call_ends(call: Callable[[], None], stopped: threading.Event, grace_s: float, timeout_s: float = math.inf) -> bool:
    """Runs `call` in another thread and waits for its end; raises any exception that it raises.

    Returns True if `call` has ended; False if it still runs `grace_s` seconds after `stopped` was set, or after timeout_s: it
    is then abandoned. Each calling thread keeps one helper thread, because starting a thread takes longer than most calls.
    """
    waiting = getattr(_own, "waiting", None) or _WaitingThread()
    _own.waiting = None  # a thread whose call is left behind is not used again
    waiting.calls.put(call)
    end_s, over = time.monotonic() + timeout_s, False  # when to leave the call behind
    while True:
        try:
            outcome = waiting.outcomes.get(timeout=POLL_S)
            break
        except Empty:
            if stopped.is_set() and not over:
                end_s, over = min(end_s, time.monotonic() + grace_s), True
            if time.monotonic() >= end_s:
                return False
    _own.waiting = waiting
    if outcome is not None:
        try:
            raise outcome
        finally:
            del outcome  # or the error would refer to itself, and keep all that its frames hold until Python looks for cycles
    return True
