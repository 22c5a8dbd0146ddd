"""Stores of torch.distributed that listen on loopback alone where that is their address; torch's listen on all interfaces."""

import importlib
import socket
from functools import partial
from typing import Any

LOOPBACK = "127.0.0.1"
MAKERS = ("torch.distributed.rendezvous", "vllm.distributed.utils")  # modules that make the stores of ranks


def listen_on_loopback() -> None:
    """Patches MAKERS to make stores by `local_store`."""
    for name in MAKERS:
        module: Any = importlib.import_module(name)
        module.TCPStore = partial(local_store, module.TCPStore)


def local_store(make: Any, *args: Any, **named: Any) -> Any:
    """Returns a store that `make` makes with these arguments; a server whose address is LOOPBACK listens there alone."""
    if named.get("is_master") and named.get("host_name") == LOOPBACK and "master_listen_fd" not in named:
        listener = socket.create_server((LOOPBACK, named["port"]))
        named |= {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
    return make(*args, **named)
