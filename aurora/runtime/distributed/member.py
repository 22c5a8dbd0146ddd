"""Member of an elastic run: joins epoch after epoch at the lighthouse, and makes each epoch's process groups."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from aurora.errors import RankFailed
from aurora.moe.transport import Transport, lost_others
from aurora.runtime.distributed.epoch_gpu import RankGpu
from aurora.runtime.distributed.epoch_groups import EpochGroups, connect_groups, unless_stopped
from aurora.runtime.distributed.epoch_nccl import EpochNcclTransport
from aurora.runtime.distributed.epoch_store import EpochStore
from aurora.runtime.distributed.epoch_transport import EpochTransport
from aurora.runtime.distributed.lighthouse_connection import LighthouseConnection
from aurora.runtime.distributed.quorum import BeginEpoch, JoinEpoch, LeaveEpoch, StopEpoch
from aurora.runtime.distributed.signed_messages import NameTaken, Refused, StoreValue
from aurora.types.addresses import address_text


@dataclass(frozen=True)
class Epoch:
    """An epoch that a member takes part in.

    Args:
        number: greater than that of every epoch before.
        members: names of the members, ascending; a member's rank is its index.
        data: what each member said when it joined, by name.
        rank: this member's rank.
    """

    number: int
    members: tuple[str, ...]
    data: Mapping[str, Any]
    rank: int


class EpochMember:
    """Calls of a member in the process groups of its epoch, however the members agree on epochs.

    Attributes:
        stopped: set while the last epoch is over and the next has not begun.
    """

    stopped: threading.Event
    _changed: threading.Condition  # guards what follows
    _timeout_s: float
    _rank: int  # in the last epoch
    _groups: EpochGroups | None  # of the last epoch that had any
    _leaving: bool

    @property
    def leaving(self) -> bool:
        """True if others wait to join, so that the epoch's members have to agree to leave it; see `vote`."""
        return self._leaving

    def transport(self, group: int = 0) -> Transport:
        """Returns a transport over a process group that `connect` made last: NCCL for tensors if there are GPUs, else gloo."""
        assert self._groups is not None
        control = EpochTransport(self._groups.groups[group], self.perform)
        if (communicators := self._groups.communicators) is None:
            return control
        return EpochNcclTransport(communicators.calls[group], control, self._timeout_s)

    def perform(self, call: Callable[[], Any]) -> None:
        """Performs `call`, a collective of the epoch's process groups; it ends by RankFailed when the epoch is over.

        `call` itself must hold the group. Whoever drops a group last waits for what is under way in it, until gloo's time-out
        if gloo waits although its connections are shut: that must be the thread in which `call` was left behind.
        """
        with lost_others(self._rank):
            unless_stopped(self.stopped, call)

    def vote(self, group: Any, leave: bool) -> bool:
        """Tells the other members of the epoch that this one has prepared its step; a collective call.

        Args:
            group: a process group of the epoch.
            leave: whether this member wants all to leave the epoch after this step.

        Returns:
            Whether all leave. That it returns means that all have prepared the step.

        Raises:
            RankFailed: if a member is lost; others may have seen all votes nevertheless.
        """
        # Not gloo's all-reduce, a ring, in which every message waits for the one before it.
        wish_R = torch.full((group.size(),), leave or self._leaving, dtype=torch.uint8)
        wishes_R = torch.empty_like(wish_R)
        self.perform(lambda: group.alltoall_base(wishes_R, wish_R, [], []).wait())
        return bool(wishes_R.any())

    def leave(self) -> None:
        """Breaks off the epoch at this end, so that members that wait for this one go on."""
        with self._changed:
            if self._groups is not None:
                self._groups.abort()


class Member(LighthouseConnection, EpochMember):
    """Takes part in the epochs that a lighthouse forms, as `name`.

    Args:
        lighthouse: its host and port. The member's own process groups listen on the address from which it reaches this one.
        name: tells this member from the others; ranks ascend with names.
        secret: what all members and the lighthouse share.
        timeout_s: seconds to wait for an epoch to begin, and in it for the other members.
        gpu: this member's GPU, for NCCL communicators of each epoch; None: its epochs have gloo groups only.

    Attributes:
        stopped: set while the last epoch is over and the next has not begun.
    """

    def __init__(
        self, lighthouse: tuple[str, int], name: str, secret: bytes, *, timeout_s: float = 60.0, gpu: RankGpu | None = None
    ) -> None:
        super().__init__(lighthouse, name, secret)
        self._timeout_s, self._rank, self._gpu = timeout_s, 0, gpu
        self.stopped = threading.Event()
        self._request: JoinEpoch | None = None  # what to say when the connection has to be made anew
        self._begun: BeginEpoch | None = None  # the epoch that this member was told of last
        self._asked = False  # whether it waits for one
        self._leaving = False
        self._values: dict[str, bytes] = {}  # of the epoch's rendezvous
        self._groups: EpochGroups | None = None  # of the last epoch that had any
        self._connecting = False  # whether an epoch has begun and its groups are not made yet

    def join(self, data: Any, agreed: bool = False) -> Epoch:
        """Waits for the next epoch.

        Args:
            data: what the other members are told of this one; JSON.
            agreed: whether all members leave the last epoch by agreement; if not, they are stopped.

        Raises:
            RankFailed: if no epoch begins within timeout_s.
        """
        with self._changed:
            last, self._asked = self._begun, True
            number, members = (last.epoch, tuple(last.data)) if last else (0, ())
            self._request = JoinEpoch(number, members, serving=False, agreed=agreed, data=data)
            self._send(self._request)
            self._start()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._asked, self._timeout_s):
                waited = f"no epoch began within {self._timeout_s:g} s"
                raise RankFailed(f"{self._name}: {waited}; lighthouse {address_text(self._lighthouse)}: {self._reason}")
            begun = self._begun
        assert begun is not None
        if self._groups is not None:
            self._groups.abort()  # not before: others may still have been reading
        members = tuple(begun.data)
        self._rank = members.index(self._name)
        return Epoch(begun.epoch, members, begun.data, self._rank)

    def connect(self, epoch: Epoch, groups: int = 1) -> list[Any]:
        """Makes gloo process groups of an epoch's members; a collective call. They end when the epoch is over.

        Raises:
            RankFailed: if the epoch is over before all have joined.
            RuntimeError: if this member's GPU cannot be used any more.
        """
        if self._groups is not None:
            self._groups.drain()

        def store() -> Store:
            return EpochStore(partial(self.publish, epoch.number), self.await_value)

        found = connect_groups(
            store, epoch.number, epoch.rank, len(epoch.members), groups, self._timeout_s, self.stopped, self._host,
            self._gpu,
        )  # fmt: skip
        with self._changed:
            self._groups, self._connecting = found, False
            if self.stopped.is_set():
                found.abort()
        return found.groups

    def close(self) -> None:
        """Ends the process groups, and says goodbye to the lighthouse."""
        self._closed.set()
        self.leave()
        super().close()

    def publish(self, epoch: int, key: str, value: bytes) -> None:
        """Gives the members of an epoch a value of its rendezvous."""
        with self._changed:
            self._values[key] = value
            self._send(StoreValue(epoch, key, value.hex()))

    def await_value(self, key: str) -> bytes:
        """Waits for a value of the rendezvous. Raises RuntimeError if the epoch is over before it comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self.stopped.is_set(), self._timeout_s):
                raise RuntimeError(f"nothing came within {self._timeout_s:g} s")
            if key not in self._values:
                raise RuntimeError("the epoch is over")
            return self._values[key]

    def _on_connect(self) -> None:
        """Tells the lighthouse where this member stands."""
        assert self._request is not None
        if self._connecting:  # what the others have published meanwhile is lost
            self.stopped.set()
        self._send(self._request)

    def _handle(self, message: Any) -> None:
        """Handles what the lighthouse says."""
        serving = self._begun.epoch if self._begun is not None and not self._asked else None
        match message:
            case BeginEpoch():
                self._begun, self._asked, self._connecting, self._leaving, self._values = message, False, True, False, {}
                self._request = JoinEpoch(message.epoch, tuple(message.data), serving=True)
                self.stopped.clear()
            case StopEpoch(epoch) if epoch == serving:
                self.stopped.set()
                if self._groups is not None:
                    self._groups.abort()
            case LeaveEpoch(epoch) if epoch == serving:
                self._leaving = True
            case StoreValue(epoch, key, value) if epoch == serving:
                self._values[key] = bytes.fromhex(value)
            case NameTaken():
                raise Refused(f"another process is {self._name}")
