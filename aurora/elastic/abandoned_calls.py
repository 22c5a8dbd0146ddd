"""Runs calls that wait for peers, and abandons those that do not end."""

import math
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from aurora.errors import RankFailed

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
