"""Launchers of a training run over several hosts: of the host that leads, and of each host that joins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.host_agreement import difference
from aurora.runtime.distributed.host_link import HostLink
from aurora.runtime.distributed.lighthouse import HEARTBEAT_S, Lighthouse
from aurora.runtime.distributed.rank_processes import RankProcesses
from aurora.training.elastic_launcher import Launcher, Watch
from aurora.training.host_messages import (
    FinalStep,
    HostDone,
    JoinTraining,
    RankLost,
    RunMessage,
    RunOver,
    Welcome,
    pack,
    unpack,
)
from aurora.training.shared_run import has_mark
from aurora.training.training_run import LOG, TrainResult, logged_steps
from aurora.types import TrainOptions
from aurora.types.addresses import address_text


class HostQueue:
    """Queue of what the lighthouse hears of hosts, for the launcher's thread."""

    def __init__(self) -> None:
        self._events: SimpleQueue[tuple[str, Mapping[str, Any] | str]] = SimpleQueue()

    def say(self, name: str, data: Mapping[str, Any]) -> None:
        """Takes a message of the host `name`; see Lighthouse."""
        self._events.put((name, data))

    def lose(self, name: str, reason: str) -> None:
        """Takes note that `name`, a host or a member, is lost; see Lighthouse."""
        self._events.put((name, reason))

    def heard(self) -> list[tuple[str, Mapping[str, Any] | str]]:
        """Returns what has come since the last call: names with a message, or with how they were lost."""
        found = []
        try:
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found


class LeadingLauncher(Launcher):
    """Launcher of the host that leads: admits hosts that have the same as it has, and keeps the steps of all.

    Args:
        processes, options, output, watch: as of Launcher.
        lighthouse: of the run.
        queue: what it hears.
        shared: what hosts have to have as this one has it; see `shared_by_hosts`.
        welcome: to hosts that take part.
    """

    def __init__(
        self, processes: RankProcesses, options: TrainOptions, output: Path, watch: Watch,
        lighthouse: Lighthouse, queue: HostQueue, shared: Mapping[str, str], welcome: Welcome,
    ) -> None:  # fmt: skip
        super().__init__(processes, options, output, watch)
        self._lighthouse, self._queue, self._shared, self._welcome = lighthouse, queue, dict(shared), welcome
        self._hosts: dict[str, JoinTraining] = {}  # by the name of the host's link

    def run(self) -> TrainResult:
        """Runs as Launcher does, and tells all hosts when the run is over."""
        try:
            result = super().run()
        except BaseException as error:
            self._end_hosts(str(error) or type(error).__name__)
            raise
        self._end_hosts("")
        return result

    @property
    def _elsewhere(self) -> int:
        return sum(host.ranks for host in self._hosts.values())

    def _hear_hosts(self) -> None:
        for name, data in self._queue.heard():
            if not isinstance(data, str):
                self._hear(name, data)
            elif (host := self._hosts.pop(name, None)) is not None:
                self._note(f"host {host.host} with {host.ranks} ranks was lost after {len(self._steps)} steps: {data}")
                self._check_left()

    def _hear(self, name: str, data: Mapping[str, Any]) -> None:
        """Handles one message of a host."""
        try:
            message = unpack(data)
        except ValueError as error:
            self._say(name, RunOver(f"the leader got {error}"))
            return
        match message:
            case JoinTraining():
                self._say(name, self._answer(name, message))
            case FinalStep() if name in self._hosts:
                self._take(message)
            case RankLost(sentence) if name in self._hosts:
                self._note(f"host {self._hosts[name].host}: {sentence}")
            case HostDone(remarks) if name in self._hosts:
                self._remarks += remarks
                del self._hosts[name]
                self._check_left()

    def _answer(self, name: str, request: JoinTraining) -> Welcome | RunOver:
        """Admits a host, or says why not."""
        if self._ended_s is not None:
            return RunOver("")
        others = sum(host.ranks for each, host in self._hosts.items() if each != name)
        if (ranks := self._options.ranks + others + request.ranks) > self._options.batch:
            expected = f"expected a sample for each of {ranks} ranks or more, found {self._options.batch}"
            return RunOver(f"host {request.host}: `batch`: {expected}")
        if (sentence := difference(self._shared, request.shared)) is not None:
            return RunOver(f"host {request.host}: {sentence}")
        self._hosts[name] = request
        self._most_elsewhere = max(self._most_elsewhere, self._elsewhere)
        return self._welcome

    def _finish(self) -> None:
        if self._ended_s is None:
            for name in self._hosts:
                self._say(name, RunOver(""))
        super()._finish()

    def _check_left(self, wanted: int | None = None) -> None:
        super()._check_left(1)  # others may come; members wait for them until their time-out

    def _end_hosts(self, reason: str) -> None:
        for name in self._hosts:
            self._say(name, RunOver(reason))

    def _say(self, name: str, message: RunMessage) -> None:
        self._lighthouse.send_to_host(name, pack(message))


class JoinedRun:
    """A host's place in a run that another host leads, until `close`.

    Args:
        leader: host and port at which it listens.
        secret: what all hosts share.
        options, output: as in `aurora.train`.
        shared: what this host has to have as the leader has it; see `shared_by_hosts`.

    Attributes:
        host: this host's label in names and messages.
    """

    def __init__(
        self, leader: tuple[str, int], secret: bytes, options: TrainOptions, output: Path, shared: Mapping[str, str]
    ) -> None:
        self.host, self._token = "", token_hex(3)
        self._output, self._timeout_s, self._ranks, self._shared = output, options.timeout_s, options.ranks, dict(shared)
        self._leader = address_text(leader)
        self._welcome: Welcome | None = None  # the first one
        self._link = HostLink(leader, f"host-{self._token}", secret, self._greeting)

    def wait(self) -> Welcome | None:
        """Waits for the leader's word. Returns its welcome; None: all steps are done.

        Raises:
            BadInput: if this host differs from the leader, or does not share its folder or secret.
            RankFailed: if the leader does not answer in time.
        """
        while True:
            for message in self.heard(HEARTBEAT_S):
                if isinstance(message, RunOver) and message.reason:
                    raise BadInput(message.reason)
                return message if isinstance(message, Welcome) else None

    def heard(self, timeout_s: float = 0.0) -> list[RunMessage]:
        """Returns what the leader has said since the last call, waiting up to timeout_s seconds for it.

        Raises:
            BadInput, RankFailed: as `wait`.
        """
        try:
            found = [unpack(data) for data in self._link.messages(timeout_s)]
        except ValueError as error:
            raise BadInput(f"{self._leader} sent {error}") from None
        for message in found:
            if isinstance(message, Welcome):
                self._check(message)
        silent_s, why = self._link.silence()
        if silent_s > self._timeout_s:
            raise RankFailed(f"the host that leads the run has not answered for {self._timeout_s:g} s; {why}")
        return found

    def _check(self, welcome: Welcome) -> None:
        """Raises BadInput if the run is another one than this host can take part in, or has taken part in before."""
        if not has_mark(self._output, welcome.mark):
            expected = f"expected the folder of the run at {self._leader}, shared by all hosts"
            raise BadInput(f"{self._output}: {expected}; found another one or none")
        first = self._welcome = self._welcome or welcome
        before, now = ({f"`{name}`": value for name, value in each.options.items()} | {"`text`": each.text}
                       for each in (first, welcome))  # fmt: skip
        if (sentence := difference(now, before)) is not None:
            raise BadInput(f"the leader was started again with other options: host {self.host}: {sentence}")

    def send(self, message: RunMessage) -> None:
        """Tells the leader."""
        self._link.send(pack(message))

    def close(self, remarks: Sequence[str] = ()) -> None:
        """Leaves the run, with a sentence for each file that could not be used or written."""
        self.send(HostDone(tuple(remarks)))
        self._link.close()

    def _greeting(self, address: str) -> dict[str, Any]:
        self.host = self.host or f"{address}-{self._token}"
        return pack(JoinTraining(self.host, self._ranks, self._shared))


class JoiningLauncher(Launcher):
    """Launcher of a host that joins: tells the leader of each step and loss, and ends when the leader says so.

    Args:
        processes, options, output, watch: as of Launcher.
        joined: this host's place in the run.
    """

    def __init__(self, processes: RankProcesses, options: TrainOptions, output: Path, watch: Watch, joined: JoinedRun) -> None:
        super().__init__(processes, options, output, watch)
        self._joined = joined
        self._taking_part: set[int] = set()  # ranks that have committed a step
        self._over = False

    def run(self) -> TrainResult:
        """Runs as Launcher does, then leaves the run."""
        try:
            return super().run()
        finally:
            self._joined.close(self._remarks)

    @property
    def _here(self) -> int:
        return len(self._running) if self._over else super()._here

    def _hear_hosts(self) -> None:
        for message in self._joined.heard():
            if isinstance(message, RunOver) and message.reason:
                raise RankFailed(f"the host that leads the run has ended it: {message.reason}")
            if isinstance(message, Welcome):  # again: what was told meanwhile may be lost
                for number in sorted(self._steps.keys() - logged_steps(self._output / LOG)):
                    self._keep(self._steps[number])
            if isinstance(message, RunOver) and not self._over:
                self._over = True
                self._finish()
        if self._over:
            for rank in self._running.keys() - self._taking_part:  # too late: all steps are done
                self._end(rank)

    def _handle(self, rank: int, message: Any) -> None:
        if isinstance(message, FinalStep):
            self._taking_part.add(rank)
        super()._handle(rank, message)

    def _keep(self, final: FinalStep) -> None:
        self._joined.send(final)

    def _note(self, sentence: str) -> None:
        super()._note(sentence)
        self._joined.send(RankLost(sentence))

    def _check_left(self, wanted: int | None = None) -> None:
        super()._check_left(1)
