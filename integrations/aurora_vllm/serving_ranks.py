"""Ranks that serve and ranks that are lost, decided from observations of each; numbers the changes between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from aurora_vllm.child_processes import describe_exit

STARVED = 4  # times the seconds after which a silent rank is lost, if its processes only wait for a processor
STOPPED = 0.5  # times the same seconds, after which a stopped process is lost: that it is stopped is seen, not inferred
FAULT_S = 1.0  # of a rank that waits for a change, in which a rank that is lost is seen


@dataclass(frozen=True)
class Look:
    """Observed state of one rank at one time.

    Attributes:
        exit_code: exit code of its server; None while it runs.
        processes: process ids of its engine and workers.
        stopped: True: one of its processes is stopped (SIGSTOP).
        runnable: True: one of its processes is running or waits for a CPU.
        status: status of its engine in vLLM's fault-tolerance API; None: no answer.
        change: number of the last change that it has completed.
        failed: id of the request whose change it refused or could not complete; empty: none.
        error: why it could not.
    """

    exit_code: int | None = None
    processes: frozenset[int] = frozenset()
    stopped: bool = False
    runnable: bool = False
    status: str | None = "healthy"
    change: int = 0
    failed: str = ""
    error: str = ""


class ServingRanks:
    """Decides from observations which ranks are lost, and numbers the changes. Does no I/O.

    Args:
        ranks: the numbers of the ranks.
        hang_s: seconds without an answer after which a rank counts as lost; STOPPED times as long if one of its processes is
            stopped, and STARVED times while they are runnable, because they may only wait for a busy CPU.

    Attributes:
        alive: ranks that serve.
        dead: ranks that were lost.
        change: number of the last change that began; 0: none yet.
    """

    def __init__(self, ranks: Sequence[int], hang_s: float) -> None:
        self.alive, self.dead, self.change, self._hang_s = list(ranks), list[int](), 0, hang_s
        self._answered_s: dict[int, float] = {}
        self._runnable_s: dict[int, float] = {}
        self._healthy_s = 0.0
        self._processes: dict[int, frozenset[int]] = {}

    def lost(self, looks: dict[int, Look], now_s: float) -> dict[int, str]:
        """Moves lost ranks from `alive` to `dead`, and begins a change if there are any.

        Args:
            looks: an observation of each rank in `alive`.
            now_s: the time of the observations, in seconds.

        Returns:
            {rank: reason} of the ranks that this call found lost.
        """
        reasons = {rank: why for rank in self.alive if (why := self._reason(rank, looks[rank], now_s))}
        self.alive = [rank for rank in self.alive if rank not in reasons]
        self.dead += reasons
        self.change += bool(reasons)
        return reasons

    def stalled(self, seconds: float) -> None:
        """Excludes `seconds`, during which this process itself did not run, from the time since the ranks' last answers."""
        for since_s in (self._answered_s, self._runnable_s):
            since_s.update({rank: at_s + seconds for rank, at_s in since_s.items()})

    def _reason(self, rank: int, look: Look, now_s: float) -> str:
        missing = self._processes.setdefault(rank, look.processes) - look.processes
        if look.exit_code is not None:
            return f"its server ended, {describe_exit(look.exit_code)}"
        if missing:
            return f"its process {min(missing)} ended"
        if look.status == "dead":
            return "its workers ended"
        if look.status is not None and not look.stopped:
            self._answered_s[rank] = now_s
        if look.runnable and not look.stopped:
            self._runnable_s[rank] = now_s
        answered_s = self._answered_s.setdefault(rank, now_s)
        starved_s = min(self._runnable_s.get(rank, answered_s), answered_s + (STARVED - 1) * self._hang_s)
        if now_s - max(answered_s, starved_s) < (STOPPED if look.stopped else 1) * self._hang_s:
            return ""
        return f"{'it is stopped' if look.stopped else 'it does not answer'} for {now_s - answered_s:.3g} s"

    def join(self, rank: int) -> None:
        """Moves a restarted rank from `dead` to `alive`, and begins a change."""
        self.dead.remove(rank)
        self.alive, self.change = sorted([*self.alive, rank]), self.change + 1
        for of_rank in (self._processes, self._answered_s, self._runnable_s):  # of the server before
            of_rank.pop(rank, None)

    def give_up(self, rank: int) -> None:
        """Moves a rank that failed to join back from `alive` to `dead`, and begins a change."""
        self.alive.remove(rank)
        self.dead.append(rank)
        self.change += 1

    def faulted(self, looks: dict[int, Look], now_s: float) -> bool:
        """Returns True, and begins a change, if a step has failed: a rank has been unhealthy for FAULT_S since the last change.

        Args: as in `lost`.
        """
        failed = any(looks[rank].status == "unhealthy" and looks[rank].change == self.change for rank in self.alive)
        self._healthy_s = self._healthy_s if failed else now_s
        if fault := now_s - self._healthy_s > FAULT_S:
            self.change, self._healthy_s = self.change + 1, now_s
        return fault

    def complete(self, looks: dict[int, Look]) -> bool:
        """Returns True if all ranks in `alive` are healthy and have completed the last change."""
        return all(looks[rank].status == "healthy" and looks[rank].change == self.change for rank in self.alive)
