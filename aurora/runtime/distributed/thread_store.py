"""Store for threads of one process, whose queues wake whoever waits for them."""

from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]


class ThreadStore(HashStore):
    """A HashStore in which several threads may wait for queues: torch's wakes one of them, whichever queue that waits for."""

    def queue_push(self, key: str, value: Any) -> None:
        """Adds a value to a queue."""
        super().queue_push(key, value)
        super().set("queues", key)  # wakes all that wait; who finds the queue empty waits on
