"""Member of an elastic run: takes part in rounds (torchft quorums) at the lighthouse, and creates an epoch's process groups.

In a round every member submits an Entry and receives all entries. So all members draw the same conclusions, and need no other
agreement. A member serves in an epoch, or waits for the next one. An epoch is over when one of its members is missing from a
round or has left the epoch. The next epoch begins at the first round in which no member serves.
"""

import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import psutil
import torch
from msgspec import Struct

from aurora.elastic.abandoned_calls import unless_stopped
from aurora.elastic.epoch_groups import Epoch, EpochGroups, EpochTransport, connect_groups
from aurora.elastic.epoch_nccl import EpochNcclTransport, NcclGpu
from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S
from aurora.errors import AuroraError, BadInput, RankFailed
from aurora.moe.transport import Transport, lost_others
from aurora.runtime.distributed.launcher import serve_store
from aurora.types.run_options import address_text


class Entry(Struct, frozen=True):
    """Identity and state that a member submits in a round.

    Args:
        name: the member's unique name; ranks ascend with names.
        process: random text that distinguishes its process from others with the same name.
        since_ms: start of the process, in milliseconds since 1970; of two processes with one name, the earlier keeps it.
        store: address of the torch.distributed store that the member hosts; an epoch uses the store of its first member.
        epoch: number of the last epoch that it was in; 0: none.
        serving: True: it is still in that epoch.
        agreed: True: all members agreed to leave that epoch (see `Member.vote`), so none of them has to be stopped.
        unseen: number of that epoch's members that have not been in a round since the lighthouse was restarted.
        waited_s: seconds that it has waited for the next epoch.
        expected: number of members for which the first epoch waits; the largest value of all entries applies.
        least: least number of members of every epoch; the largest value of all entries applies.
        data: JSON value for the members of the next epoch, from `Member.join`.
        about: values that must be the same for all members, by description.
    """

    name: str
    process: str
    since_ms: int
    store: str = ""
    epoch: int = 0
    serving: bool = False
    agreed: bool = False
    unseen: int = 0
    waited_s: float = 0.0
    expected: int = 1
    least: int = 1
    data: Any = None
    about: Mapping[str, str] = {}


class OtherRun(BadInput):
    """Exception raised at a member that the others do not admit, because it differs from them in what must be the same."""


def by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Returns the entries by ascending name. If processes share a name, the latest epoch wins, then the earliest start."""
    entry_of: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda record: (record.name, -record.epoch, record.since_ms, record.process)):
        entry_of.setdefault(entry.name, entry)
    return entry_of


def admitted(entries: Mapping[str, Entry], most: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns (the entries of members that may be in one epoch; by name, a sentence on why each other one may not).

    All must be about the same as the first entry. Those that have been in an epoch come first, then those of earlier starts.

    Args:
        entries: entries of a round, by ascending name.
        most: largest number of members of an epoch.
    """
    ranked = sorted(entries.values(), key=lambda entry: (not entry.epoch, entry.since_ms, entry.name))
    alike: set[str] = set()
    refused: dict[str, str] = {}
    for entry in ranked:
        theirs, ours, name = ranked[0].about, entry.about, entry.name
        if (what := next((key for key in (*theirs, *ours) if theirs.get(key) != ours.get(key)), None)) is not None:
            refused[name] = f"{name}: expected {what} {theirs.get(what)} as the other ranks have, found {ours.get(what)}"
        elif len(alike) == most:
            refused[name] = f"{name}: expected at most {most} ranks, a sample of `batch` for each, found {most} others"
        else:
            alike.add(name)
    return {name: entry for name, entry in entries.items() if name in alike}, refused


def over(entries: Mapping[str, Entry], number: int, processes: Mapping[str, str], unseen: Collection[str] = ()) -> str | None:
    """Returns a sentence on why an epoch is over, or None if it continues.

    Args:
        entries: entries of a round, by name.
        number: the epoch's number.
        processes: `Entry.process` of the epoch's members, by name.
        unseen: members that may be missing from the round, because they have not reached a restarted lighthouse yet.
    """
    for name, process in processes.items():
        entry = entries.get(name)
        if entry is None or entry.process != process:
            if name not in unseen:
                return f"{name} was lost"
        elif entry.epoch != number or not (entry.serving or entry.agreed):
            return f"{name} has left the epoch"
    return None


def others_wait(entries: Mapping[str, Entry], processes: Mapping[str, str]) -> bool:
    """Returns True if a process outside the present epoch waits for the next one; arguments as in `over`."""
    return any(not entry.serving and processes.get(name) != entry.process for name, entry in entries.items())


def next_epoch(entries: Mapping[str, Entry], now_ms: int, absent_s: float) -> int:
    """Returns the number of the epoch that begins with a round; 0: no epoch begins.

    The number is greater than that of every earlier epoch. It is at least `now_ms`, so that this also holds for epochs that no
    present member remembers.

    Args:
        entries: entries of the round, by name.
        now_ms: end of the round, by the lighthouse's clock, in milliseconds since 1970.
        absent_s: how long the first epoch waits for `expected` members, in seconds after the latest arrival.
    """
    everyone = entries.values()
    if any(entry.serving or entry.unseen for entry in everyone) or len(entries) < max(
        (entry.least for entry in everyone), default=1
    ):
        return 0
    latest = max(entry.epoch for entry in everyone)
    few = len(entries) < max(entry.expected for entry in everyone)
    if latest == 0 and few and min(entry.waited_s for entry in everyone) < absent_s:
        return 0
    return max(latest + 1, now_ms)


ROUND_S = 0.5  # between two rounds, and between two signs of life
WAITING_S = 0.05  # between two rounds of a member that waits for an epoch
CONNECT_S = 2.0  # for one attempt to reach the lighthouse
ANSWER_S = 3 * HEARTBEAT_TIMEOUT_S  # for a round to end: the lighthouse waits so long for a member that was lost, and more
ABSENT_S = 10.0
HANG_S = 20.0


class Member:
    """Makes this process a member of an elastic run: joins epochs, connects their process groups, and votes on steps.

    From the first `join` on, it has two threads: one takes part in rounds, one sends heartbeats.

    Args:
        lighthouse: host and port of torchft's lighthouse. The member's store and process groups listen on the local address
            from which it reaches the lighthouse.
        name: unique name of this member; ranks ascend with names.
        timeout_s: seconds to wait for an epoch to begin, and in it for the other members.
        expected: number of members for which the first epoch waits; the largest value of all members applies.
        least: least number of members of an epoch; the largest value of all members applies.
        absent_s: how long the first epoch waits for `expected` members, in seconds after the latest arrival. Also how long an
            epoch waits for members that have not reached a restarted lighthouse yet.
        hang_s: if the member's epoch is over and it does not call `join` within `hang_s` seconds, it stops to take part in
            rounds until it does.
        gpu: this member's GPU, for an NCCL communicator; None: epochs have a gloo group only.
        about: values that must be the same for all members, by description; who differs from the others is refused.
        most: largest number of members of an epoch, the same for all members; later ones are refused.

    Attributes:
        name: as given.
        gpu: as given; may be set until `connect` is called.
        groups: process groups from the last `connect`; none before.
        stopped: event that is set from the end of an epoch to the start of the next one.
        leaving: True if other processes wait to join, so that `vote` will make the epoch's members leave it.
    """

    def __init__(
        self,
        lighthouse: tuple[str, int],
        name: str,
        *,
        timeout_s: float = 60.0,
        expected: int = 1,
        least: int = 1,
        absent_s: float = ABSENT_S,
        hang_s: float = HANG_S,
        gpu: NcclGpu | None = None,
        about: Mapping[str, str] = {},
        most: int = 1 << 16,
    ) -> None:
        self._most = most
        self.name, self._lighthouse, self._timeout_s, self.gpu = name, lighthouse, timeout_s, gpu
        self._absent_s, self._hang_s = absent_s, hang_s
        host = own_address(lighthouse)
        self._interface = _interface_of(host)
        self._store, port = serve_store(host)
        store, since_ms = address_text((host, port)), time.time_ns() // 1_000_000
        self._said = Entry(name, secrets.token_hex(8), since_ms, store, expected=expected, least=least, about=about)
        self.stopped = threading.Event()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._asked_s: float | None = None  # since when it waits for an epoch
        self._over_s: float | None = None  # since when its epoch is over
        self._epoch = Epoch(0, (), {}, 0)
        self._processes: dict[str, str] = {}  # of the epoch's members, by name
        self._unseen: set[str] = set()  # of them, those that were in no round since the lighthouse was lost
        self._unseen_until_s = 0.0
        self.leaving = False
        self._reason = "it does not answer"  # why no epoch begins
        self._refused: AuroraError | None = None
        self.groups = EpochGroups(None, [])

    def join(self, data: Any = None, agreed: bool = False) -> Epoch:
        """Leaves the present epoch, waits for the next one, and returns it.

        Args:
            data: JSON value for the other members (`Epoch.data`).
            agreed: True: all members leave the epoch by agreement (see `vote`); False: the other members are stopped.

        Raises:
            RankFailed: if no epoch begins in time, another process has this name, or `close` is called.
            OtherRun: if it differs from the other members in a value of `about`, or is one too many.
        """
        with self._changed:
            self._said = msgspec.structs.replace(self._said, serving=False, agreed=agreed, data=data)
            self._asked_s = time.monotonic()
            self.stopped.set()
            if not self._threads:
                for target in (self._take_rounds, self._give_signs):
                    self._threads.append(threading.Thread(target=target, daemon=True, name=f"aurora-member{target.__name__}"))
                    self._threads[-1].start()
            self._changed.notify_all()
            answered = self._changed.wait_for(lambda: self._asked_s is None or self._refused or self._closed, self._timeout_s)
            if self._refused or self._closed:
                raise self._refused or RankFailed(f"{self.name} has left the run")
            if not answered:
                where = f"lighthouse {address_text(self._lighthouse)}: {self._reason}"
                raise RankFailed(f"{self.name}: no epoch began within {self._timeout_s:g} s; {where}")
            epoch = self._epoch
        self.groups.abort()  # not before: others may still have been reading
        return epoch

    def connect(self, epoch: Epoch) -> None:
        """Makes the process groups of an epoch's members, aborted when the epoch is over. A collective call.

        Args:
            epoch: the result of the last `join`.

        Raises:
            RankFailed: if the epoch is over before all members have connected.
            RuntimeError: if this member's GPU has become unusable.
        """
        self.groups.drain()
        os.environ["GLOO_SOCKET_IFNAME"] = self._interface
        epoch_groups = connect_groups(epoch, self._timeout_s, self.stopped, self.gpu)
        with self._changed:
            self.groups = epoch_groups
            if self.stopped.is_set():
                epoch_groups.abort()

    def transport(self) -> Transport:
        """Returns a transport over the groups of the last `connect`: NCCL if the member has a GPU, else gloo."""
        control = EpochTransport(self.groups.group, self.perform)
        if (communicator := self.groups.communicator) is None:
            return control
        assert communicator.calls is not None, "`connect` has made it"
        return EpochNcclTransport(communicator.calls, control, self._timeout_s)

    def perform(self, call: Callable[[], Any]) -> None:
        """Runs `call`, a collective of the epoch's process groups; raises RankFailed when the epoch is over.

        `call` must hold a reference to its group. The thread that drops the last reference to a group waits for the group's
        calls, perhaps until gloo's time-out; that must be the helper thread in which `call` was abandoned.
        """
        with lost_others(self._epoch.rank):
            unless_stopped(self.stopped, call)

    def vote(self, leave: bool) -> bool:
        """Announces to the other members that this one has prepared its step, and waits until all have. A collective call.

        Args:
            leave: True: request that all members leave the epoch after this step.

        Returns:
            True if all members must leave the epoch after this step, because at least one requested it or sees others wait.

        Raises:
            RankFailed: if a member is lost; other members may have received all votes nevertheless.
        """
        # Not gloo's all-reduce, a ring, in which every message waits for the one before it.
        group = self.groups.group
        wish_R = torch.full((group.size(),), leave or self.leaving, dtype=torch.uint8)
        wishes_R = torch.empty_like(wish_R)
        self.perform(lambda: group.alltoall_base(wishes_R, wish_R, [], []).wait())
        return bool(wishes_R.any())

    def leave(self) -> None:
        """Aborts the epoch's process groups at this member, so that members that wait for it get an error and continue."""
        with self._changed:
            self.groups.abort()

    def stop(self, epoch: int) -> None:
        """Ends an epoch at this member, as if another member were lost. May be called from any thread.

        Args:
            epoch: number of the epoch; if it is not the present one, nothing happens.
        """
        with self._changed:
            if self._epoch.number == epoch and self._asked_s is None and not self.stopped.is_set():
                self._end()

    def close(self) -> None:
        """Aborts the process groups and ends the threads; the member leaves the run."""
        with self._changed:
            self._closed = True
            self._end()

    def _client(self) -> Any:
        """Returns a new connection to the lighthouse."""
        from torchft.coordination import LighthouseClient  # takes a while

        return LighthouseClient(f"http://{address_text(self._lighthouse)}", timedelta(seconds=CONNECT_S))

    @property
    def _here(self) -> bool:
        """True if it takes part in rounds."""
        return self._over_s is None or self._asked_s is not None or time.monotonic() - self._over_s < self._hang_s

    @property
    def _key(self) -> str:
        """Name of this member at the lighthouse: a process that takes a dead one's name is not kept alive by it."""
        return f"{self.name}/{self._said.process}"

    def _entry(self) -> Entry:
        """Entry for the next round; `_changed` is held."""
        waited_s = 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
        return msgspec.structs.replace(self._said, waited_s=waited_s, unseen=len(self._unseen))

    def _take_rounds(self) -> None:
        """Takes part in rounds."""
        client, answer = None, timedelta(seconds=ANSWER_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._here)
                if self._closed or self._refused:
                    return
                entry = self._entry()
            try:
                client = client or self._client()
                quorum = client.quorum(
                    self._key, answer, address="", store_address=entry.store, step=entry.epoch, world_size=1,
                    shrink_only=False, data={"entry": msgspec.json.encode(entry).decode()},
                )  # fmt: skip
            except (RuntimeError, TimeoutError, OSError) as error:
                client = None
                self._miss(str(error).strip() or "it does not answer")
            else:
                self._take(quorum)
            with self._changed:
                if self._asked_s is None:
                    self._changed.wait_for(lambda: self._closed or self._asked_s is not None, ROUND_S)
                else:
                    self._changed.wait_for(lambda: self._closed, WAITING_S)

    def _give_signs(self) -> None:
        """Sends signs of life."""
        client, answer = None, timedelta(seconds=HEARTBEAT_TIMEOUT_S)
        while not (self._closed or self._refused):
            if self._here:
                try:
                    client = client or self._client()
                    client.heartbeat(self._key, answer)
                except (RuntimeError, TimeoutError, OSError):
                    client = None
            time.sleep(ROUND_S)

    def _miss(self, reason: str) -> None:
        """Takes note that a round failed: the lighthouse may be another one, which does not know all members yet."""
        with self._changed:
            self._reason = reason
            self._unseen = set(self._processes)
            self._unseen_until_s = time.monotonic() + self._absent_s

    def _take(self, quorum: Any) -> None:
        """Takes what was said in a round."""
        entries, refused = admitted(by_name(filter(None, map(_entry_of, quorum.participants))), self._most)
        with self._changed:
            ours, number = entries.get(self.name), self._epoch.number
            self._unseen -= entries.keys() if time.monotonic() < self._unseen_until_s else set(self._unseen)
            if ours is not None and ours.process != self._said.process:
                self._refused = RankFailed(f"{self.name}: another process is {self.name}")
            elif self.name in refused:
                self._refused = OtherRun(refused[self.name])
            elif ours is not None and self._asked_s is not None and not ours.serving:
                now_ms = quorum.created.seconds * 1000 + quorum.created.nanos // 1_000_000
                if (number := next_epoch(entries, now_ms, self._absent_s)) > self._epoch.number:
                    self._begin(number, entries)
                self._reason = f"{len(entries)} members wait for others"
            elif self._asked_s is None and not self.stopped.is_set():
                if over(entries, number, self._processes, self._unseen):
                    self._end()
                self.leaving = self.leaving or others_wait(entries, self._processes)
            self._changed.notify_all()

    def _begin(self, number: int, entries: Mapping[str, Entry]) -> None:
        """Begins an epoch of those who took part in a round."""
        members = tuple(entries)
        data, store = {name: entry.data for name, entry in entries.items()}, next(iter(entries.values())).store
        self._epoch = Epoch(number, members, data, members.index(self.name), store)
        self._processes = {name: entry.process for name, entry in entries.items()}
        self._said = msgspec.structs.replace(self._said, epoch=number, serving=True, agreed=False, data=None)
        self._unseen, self.leaving, self._asked_s, self._over_s = set(), False, None, None
        self.stopped.clear()

    def _end(self) -> None:
        """Ends the epoch at this end."""
        self._over_s = time.monotonic()
        self.stopped.set()
        self._changed.notify_all()
        self.groups.abort()


def keep_collections_short() -> None:
    """Exempts all present objects of this process from garbage collection, which would delay its heartbeats.

    No thread runs during a collection. A rank that has loaded its models has 400,000 objects; a collection takes 0.2 s of a
    core, and seconds on a loaded host.
    """
    gc.collect()
    gc.freeze()


def own_address(lighthouse: tuple[str, int]) -> str:
    """Returns this host's local IP address on the route to the lighthouse; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(*lighthouse, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """Returns the name of the network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    raise BadInput(f"expected an interface of this machine with address {address}, found none")


def _entry_of(participant: Any) -> Entry | None:
    """Returns the entry of a participant in a round; None if it is no member of such a run."""
    try:
        return msgspec.json.decode(participant.data["entry"], type=Entry)
    except (KeyError, TypeError, msgspec.DecodeError):
        return None
