"""Connections between the processes of a run: where they are taken, watched by the kernel, kept apart from process groups'."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from aurora.errors import BadInput

CONNECT_S = 2.0  # for one attempt: the kernel's own next one may be a minute away when a link comes back
HELLO_S = 10.0  # for a new connection to say who it is, and to prove it
UNACKNOWLEDGED_S = 0.2  # after the first retransmission, which the kernel sends 0.2 s after what it repeats

_kept_apart: set[int] = set()  # inodes


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on one address of this machine, and on no other; port 0: any free one.

    Raises:
        BadInput: if the address cannot be used.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"port {port} on {host} cannot be used: {error.strerror}") from None


@contextmanager
def watched(connection: socket.socket) -> Iterator[None]:
    """Context manager in which a connection ends by an error when the other host's kernel acknowledges nothing any more.

    Inside, `kept_apart` is true of it: it may be made while a process group is, and must not end with that.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNACKNOWLEDGED_S * 1000))
    inode = os.fstat(connection.fileno()).st_ino
    _kept_apart.add(inode)
    try:
        yield
    finally:
        _kept_apart.discard(inode)


def kept_apart(connection: socket.socket) -> bool:
    """Returns whether a connection, or one that it is a copy of, is `watched`."""
    return os.fstat(connection.fileno()).st_ino in _kept_apart
