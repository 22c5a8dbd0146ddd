"""Link of a host that has joined a run to the host that leads it: messages between their launchers, over the lighthouse."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aurora.errors import BadInput
from aurora.runtime.distributed.lighthouse_connection import LighthouseConnection
from aurora.runtime.distributed.secret import SECRET
from aurora.runtime.distributed.signed_messages import HostMessage, NameTaken, Refused
from aurora.types.addresses import address_text

UNHEARD = 3  # connections in sequence that end unheard until the secret counts as another one


class HostLink(LighthouseConnection):
    """This host's link to the leader of a run, kept up until `close`.

    Args:
        leader: host and port at which the leader listens.
        name: tells this host from all others.
        secret: what all hosts share.
        greeting: returns what each connection begins with, by the address of this host that the leader is reached from.
    """

    def __init__(self, leader: tuple[str, int], name: str, secret: bytes, greeting: Callable[[str], dict[str, Any]]) -> None:
        super().__init__(leader, name, secret)
        self._leader = address_text(leader)
        self._greeting = greeting
        self._inbox: deque[dict[str, Any]] = deque()
        self._heard_s = time.monotonic()
        self._start()

    def send(self, data: dict[str, Any]) -> None:
        """Sends a message; it is dropped while there is no connection."""
        with self._changed:
            self._send(HostMessage(data))

    def messages(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Returns the leader's messages since the last call, waiting up to timeout_s seconds for one.

        Raises:
            BadInput: if the leader does not take this host's messages for those of a member.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._inbox) or self._refused, timeout_s)
            if self._refused:
                raise BadInput(f"{SECRET}: is not that of the run which {self._leader} leads")
            found = list(self._inbox)
            self._inbox.clear()
        return found

    def silence(self) -> tuple[float, str]:
        """Returns for how many seconds the leader has not been reached, and why."""
        with self._changed:
            if self._connection is not None:
                self._heard_s = time.monotonic()
            return time.monotonic() - self._heard_s, f"{self._leader}: {self._reason}"

    @property
    def _refused(self) -> bool:
        return self._unheard >= UNHEARD and self._connection is None

    def _on_connect(self) -> None:
        self._send(HostMessage(self._greeting(self._host)))

    def _handle(self, message: Any) -> None:
        match message:
            case HostMessage(data):
                self._inbox.append(data)
            case NameTaken():
                raise Refused(f"another host is {self._name}")
