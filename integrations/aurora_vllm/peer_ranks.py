"""Agreement of a server's ranks, through a shared store, on whether to use the plan; and detection of lost ranks.

Either every rank uses the plan, or none does. When a collective fails, lost ranks are found by their process ids, because
gloo's error messages name an address and no rank.
"""

import datetime
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from aurora.errors import RankFailed, first_line
from aurora_vllm.stuck_rank import GONE, RUNS, STOPPED

ACCEPTED = "go"
REPLY_MARGIN_S = 10.0  # other ranks wait this much longer for rank 0's verdict than rank 0 waits for their reports


class Verdict(NamedTuple):
    """Common decision of all ranks on the plan: `refusal` is None if they use it, else the reason why not."""

    refusal: str | None  # why the ranks do not serve by the plan; None if they do
    report_here: bool  # whether this rank is the one that logs the refusal


def agree(
    store: Any, key: str, rank: int, ranks: int, fingerprint: str, refusal: str | None, timeout_s: float
) -> Verdict:  # fmt: skip
    """Publishes whether this rank can use the plan, and returns the common decision, which is the same on all ranks.

    Rank 0 decides. If it does not answer in time, the first rank whose wait times out decides for all.

    Args:
        store: a torch.distributed Store that all ranks reach.
        key: prefix of the store's keys.
        rank: this rank.
        ranks: number of ranks.
        fingerprint: digest of the plan and settings, which must be equal on all ranks.
        refusal: why this rank cannot use the plan; None if it can.
        timeout_s: seconds that rank 0 waits for the others.
    """

    def decoded(verdict: bytes) -> Verdict:
        author, reason = json.loads(verdict.decode())
        return Verdict(None, False) if reason == ACCEPTED else Verdict(reason, author == rank)

    def decide(reason: str) -> Verdict:
        return decoded(store.compare_set(f"{key}/verdict", "", json.dumps([rank, reason])))

    def silent(silent_ranks: str, waited_s: float) -> Verdict:
        return decide(f"rank {silent_ranks} said nothing within {waited_s:g} s; is the plugin there?")

    store.set(f"{key}/{rank}", json.dumps([fingerprint, refusal]))
    if rank != 0:
        waited_s = timeout_s + REPLY_MARGIN_S
        try:
            store.wait([f"{key}/verdict"], datetime.timedelta(seconds=waited_s))
        except RuntimeError:
            return silent("0", waited_s)
        return decoded(store.get(f"{key}/verdict"))
    try:
        store.wait([f"{key}/{other}" for other in range(ranks)], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [str(other) for other in range(ranks) if not store.check([f"{key}/{other}"])]
        return silent(", ".join(missing), timeout_s)
    return decide(_judge([json.loads(store.get(f"{key}/{other}").decode()) for other in range(ranks)]))


def _judge(reports_R: list[tuple[str, str | None]]) -> str:
    """ACCEPTED, or the reason why not, given every rank's (fingerprint, refusal)."""
    for rank, (_, refusal) in enumerate(reports_R):
        if refusal is not None:
            return f"rank {rank}: {refusal}"
    for rank, (fingerprint, _) in enumerate(reports_R):
        if fingerprint != reports_R[0][0]:
            return f"rank {rank}: its plan or settings are not rank 0's"
    return ACCEPTED


EXIT_S = 2.0  # within which a dying process is seen to have exited


class PeerProcesses:
    """Host, process id and status folder of every rank, exchanged once through a torch.distributed Store."""

    def __init__(self, store: Any, key: str, rank: int, ranks: int, folder: str = "") -> None:
        """Publishes this rank's process."""
        self._store, self._key, self._rank, self._ranks = store, key, rank, ranks
        self._host = socket.gethostname()
        store.set(f"{key}/process/{rank}", f"{self._host} {os.getpid()} {folder}")
        self._process_R: dict[int, tuple[str, int, str]] = {}

    def read_all(self) -> bool:
        """Reads the entries that the ranks published. Returns False if one has not published its entry."""
        if not self._store.check([f"{self._key}/process/{rank}" for rank in range(self._ranks)]):
            return False
        for rank in range(self._ranks):
            host, pid, folder = self._store.get(f"{self._key}/process/{rank}").decode().split(" ", 2)
            self._process_R[rank] = (host, int(pid), folder)
        return True

    def keep(self, kept: Sequence[int]) -> None:
        """Drops all ranks except those at positions `kept` in the present list of ranks; rank numbers do not change."""
        left = list(self._process_R)
        self._process_R = {left[index]: self._process_R[left[index]] for index in kept}

    @property
    def here(self) -> dict[int, str]:
        """{rank: its status folder} of the ranks on this host, ascending."""
        return {rank: folder for rank, (host, _, folder) in sorted(self._process_R.items()) if host == self._host}

    @property
    def on_one_host(self) -> bool:
        """True if all ranks run on this host."""
        return len(self.here) == self._ranks

    def lost(self) -> list[int]:
        """Returns the other ranks of this host whose processes have exited."""
        return [
            rank
            for rank, (host, pid, _) in self._process_R.items()
            if host == self._host and rank != self._rank and not is_running(pid)
        ]


def is_running(pid: int) -> bool:
    """Returns True if a process of this host exists, running or stopped; False for a zombie."""
    return process_state(pid) != GONE


def process_state(pid: int) -> str:
    """Returns the state of a process of this host: RUNS, STOPPED or GONE. A zombie is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return GONE
    return GONE if letter in "ZX" else STOPPED if letter in "Tt" else RUNS


class Processes(Protocol):
    """Interface of objects that detect ranks whose processes have exited."""

    def lost(self) -> list[int]:
        """Returns the ranks whose process has exited."""


def end_with_parent() -> None:
    """Makes this process end as soon as its parent has ended, even while a call blocks."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="aurora-parent").start()


@contextmanager
def naming_lost_ranks(processes: Processes | None) -> Iterator[None]:
    """Context manager that turns an error into a RankFailed which names the lost ranks.

    Errors pass unchanged if no rank is known to be lost, or if `processes` is None.
    """
    try:
        yield
    except (RuntimeError, RankFailed) as error:
        until = time.monotonic() + EXIT_S
        while processes is not None and not (lost := processes.lost()) and time.monotonic() < until:
            time.sleep(0.05)
        if processes is None or not lost:
            raise
        gone = ", ".join(map(str, lost))
        raise RankFailed(f"expert-parallel rank {gone} is gone: {first_line(error)}") from error
