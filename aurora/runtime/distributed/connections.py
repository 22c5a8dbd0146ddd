"""Connections between members and their lighthouse: watched by the kernel, and kept apart from those of process groups."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

UNACKNOWLEDGED_S = 0.2  # after the first retransmission, which the kernel sends 0.2 s after what it repeats

_kept_apart: set[int] = set()  # inodes


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
