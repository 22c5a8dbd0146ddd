"""Stores of torch.distributed that listen on loopback alone where that is their address; torch's listen on all interfaces."""

import functools
import socket
from typing import Any

from aurora_vllm.vllm_internals.replaced import replace, replaced

LOOPBACK = "127.0.0.1"
STORE = "torch.distributed:TCPStore.__init__"


def listen_on_loopback() -> None:
    """Patches torch's TCP store: as a server whose address is LOOPBACK it listens there alone. Idempotent."""
    if not replaced(STORE):
        replace(STORE, _local)


def _local(original: Any) -> Any:
    @functools.wraps(original)
    def create(self: Any, host_name: str, port: int, *args: Any, **named: Any) -> None:
        if named.get("is_master") and host_name == LOOPBACK and "master_listen_fd" not in named:
            listener = socket.create_server((LOOPBACK, port))
            port = listener.getsockname()[1]
            named["master_listen_fd"] = listener.detach()
        original(self, host_name, port, *args, **named)

    return create
