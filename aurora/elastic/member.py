"""Member of an elastic run: takes part in round after round at the lighthouse, and makes each epoch's process groups."""

import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from aurora.elastic.board import Entry, by_name, next_epoch, others_wait, over
from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S
from aurora.errors import RankFailed
from aurora.runtime.distributed.epoch_gpu import RankGpu
from aurora.runtime.distributed.epoch_groups import EpochGroups, connect_groups
from aurora.runtime.distributed.launcher import serve_store
from aurora.runtime.distributed.member import Epoch, EpochMember
from aurora.types.addresses import address_text, parse_address

ROUND_S = 0.2  # between two rounds, and between two signs of life
WAITING_S = 0.05  # between two rounds of a member that waits for an epoch
CONNECT_S = 2.0  # for one attempt to reach the lighthouse
ANSWER_S = 3 * HEARTBEAT_TIMEOUT_S  # for a round to end: the lighthouse waits so long for a member that was lost, and more
ABSENT_S = 10.0
HANG_S = 20.0


@dataclass(frozen=True)
class BoardEpoch(Epoch):
    """An epoch that a round at the lighthouse has begun.

    Args:
        store: address of the torch.distributed store of its first member.
    """

    store: str = ""


class BoardMember(EpochMember):
    """Takes part in the epochs of a run, as `name`.

    Two threads serve it from the first `join` on: one takes part in rounds, one sends signs of life.

    Args:
        lighthouse: host and port of torchft's lighthouse. The member's own store and process groups listen on the address from
            which it reaches that.
        name: tells this member from the others; ranks ascend with names.
        timeout_s: seconds to wait for an epoch to begin, and in it for the other members.
        expected: how many members the first epoch waits for; the greatest of all members' counts.
        least: no epoch has fewer members; the greatest counts.
        absent_s: seconds after the last arrival for which the first epoch waits for `expected` members, and an epoch for those
            that the lighthouse has not heard since it was started again.
        hang_s: a member whose epoch is over and that does not join within so many seconds takes part in no round until it does.
        gpu: this member's GPU, for NCCL communicators of each epoch; None: its epochs have gloo groups only.

    Attributes:
        name: its name.
        stopped: set while the last epoch is over and the next has not begun.
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
        gpu: RankGpu | None = None,
    ) -> None:
        self.name, self._lighthouse, self._timeout_s, self._gpu = name, lighthouse, timeout_s, gpu
        self._absent_s, self._hang_s = absent_s, hang_s
        self._host = _own_address(lighthouse)
        self._store, port = serve_store(self._host)
        store, since_ms = address_text((self._host, port)), time.time_ns() // 1_000_000
        self._said = Entry(name, secrets.token_hex(8), since_ms, store, expected=expected, least=least)
        self.stopped = threading.Event()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._asked_s: float | None = None  # since when it waits for an epoch
        self._over_s: float | None = None  # since when its epoch is over
        self._epoch, self._rank = BoardEpoch(0, (), {}, 0), 0
        self._processes: dict[str, str] = {}  # of the epoch's members, by name
        self._unseen: set[str] = set()  # of them, those that were in no round since the lighthouse was lost
        self._unseen_until_s = 0.0
        self._leaving = False
        self._reason = "it does not answer"  # why no epoch begins
        self._refused: str | None = None
        self._groups: EpochGroups | None = None  # of the last epoch that had any

    def join(self, data: Any = None, agreed: bool = False) -> BoardEpoch:
        """Waits for the next epoch.

        Args:
            data: what the other members are told of this one; JSON.
            agreed: whether all members leave the last epoch by agreement; if not, they are stopped.

        Raises:
            RankFailed: if no epoch begins within timeout_s, or another process has this name.
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
            if not self._changed.wait_for(lambda: self._asked_s is None or self._refused, self._timeout_s):
                where = f"lighthouse {address_text(self._lighthouse)}: {self._reason}"
                raise RankFailed(f"{self.name}: no epoch began within {self._timeout_s:g} s; {where}")
            if self._refused:
                raise RankFailed(self._refused)
            epoch = self._epoch
        if self._groups is not None:
            self._groups.abort()  # not before: others may still have been reading
        return epoch

    def connect(self, epoch: BoardEpoch, groups: int = 1, urgent: Collection[int] = ()) -> list[Any]:
        """Makes gloo process groups of an epoch's members; a collective call. They end when the epoch is over.

        Args:
            epoch: what `join` has returned last.
            groups: how many.
            urgent: which of them have packets that are to go before others; see `marked_urgent`.

        Raises:
            RankFailed: if the epoch is over before all have joined.
            RuntimeError: if this member's GPU cannot be used any more.
        """
        if self._groups is not None:
            self._groups.drain()
        found = connect_groups(
            partial(self._open_store, epoch), epoch.number, epoch.rank, len(epoch.members), groups, self._timeout_s,
            self.stopped, self._host, self._gpu, urgent,
        )  # fmt: skip
        with self._changed:
            self._groups = found
            if self.stopped.is_set():
                found.abort()
        return found.groups

    def close(self) -> None:
        """Ends the process groups, and takes part in no more rounds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.leave()

    def _open_store(self, epoch: BoardEpoch) -> Store:
        host, port = parse_address("store", epoch.store)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s))

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
                found = client.quorum(
                    self._key, answer, address="", store_address=entry.store, step=entry.epoch, world_size=1,
                    shrink_only=False, data={"entry": msgspec.json.encode(entry).decode()},
                )  # fmt: skip
            except (RuntimeError, TimeoutError, OSError) as error:
                client = None
                self._miss(str(error).strip() or "it does not answer")
            else:
                self._take(found)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, ROUND_S if self._asked_s is None else WAITING_S)

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

    def _take(self, found: Any) -> None:
        """Takes what was said in a round."""
        said = (msgspec.json.decode(each.data["entry"], type=Entry) for each in found.participants)
        entries = by_name(said)
        with self._changed:
            ours, number = entries.get(self.name), self._epoch.number
            self._unseen -= entries.keys() if time.monotonic() < self._unseen_until_s else set(self._unseen)
            if ours is not None and ours.process != self._said.process:
                self._refused = f"{self.name}: another process is {self.name}"
            elif ours is not None and self._asked_s is not None and not ours.serving:
                now_ms = found.created.seconds * 1000 + found.created.nanos // 1_000_000
                if (number := next_epoch(entries, now_ms, self._absent_s)) > self._epoch.number:
                    self._begin(number, entries)
                self._reason = f"{len(entries)} members wait for others"
            elif self._asked_s is None and not self.stopped.is_set():
                if over(entries, number, self._processes, self._unseen):
                    self._end()
                self._leaving = self._leaving or others_wait(entries, self._processes)
            self._changed.notify_all()

    def _begin(self, number: int, entries: Mapping[str, Entry]) -> None:
        """Begins an epoch of those who took part in a round."""
        members = tuple(entries)
        data, store = {name: entry.data for name, entry in entries.items()}, next(iter(entries.values())).store
        self._epoch = BoardEpoch(number, members, data, members.index(self.name), store)
        self._rank = self._epoch.rank
        self._processes = {name: entry.process for name, entry in entries.items()}
        self._said = msgspec.structs.replace(self._said, epoch=number, serving=True, agreed=False, data=None)
        self._unseen, self._leaving, self._asked_s, self._over_s = set(), False, None, None
        self.stopped.clear()

    def _end(self) -> None:
        """Ends the epoch at this end."""
        self._over_s = time.monotonic()
        self.stopped.set()
        if self._groups is not None:
            self._groups.abort()


def _own_address(lighthouse: tuple[str, int]) -> str:
    """Returns the address of this host from which it reaches the lighthouse; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(*lighthouse, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
