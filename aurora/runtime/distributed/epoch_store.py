"""Rendezvous of an epoch over connections that its members have anyway, so that no store listens."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]


class EpochStore(Store):
    """A torch.distributed Store of one epoch: what a member sets goes to all others.

    It has what gloo and NCCL groups need to find each other. Others of torch's groups, and its debugging, need more.

    Args:
        publish: gives all members the value of a key.
        await_value: waits for the value of a key; raises RuntimeError if the epoch is over before it comes.
    """

    def __init__(self, publish: Callable[[str, bytes], None], await_value: Callable[[str], bytes]) -> None:
        super().__init__()
        self._publish, self._await_value = publish, await_value

    def set(self, key: str, value: Any) -> None:
        self._publish(key, value)

    def get(self, key: str) -> bytes:
        return self._await_value(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._await_value(key)
