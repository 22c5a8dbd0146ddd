"""Closes connections of this process, such as those of process groups that wait for a lost rank."""

import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress


def close_connections(connections: Iterable[socket.socket]) -> None:
    """Shuts down and closes connections: every thread that waits on one, at either end, gets an error at once."""
    for connection in connections:
        with suppress(OSError):  # the other end was faster
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def open_sockets() -> dict[int, int]:
    """Returns this process's open sockets as {inode: descriptor}; an inode identifies a socket, a descriptor is reused."""
    sockets = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since
            continue
        if stat.S_ISSOCK(status.st_mode):
            sockets[status.st_ino] = int(name)
    return sockets


def connected(descriptors: Iterable[int]) -> list[socket.socket]:
    """Returns those of the socket `descriptors` that have a peer, as new socket objects on duplicated descriptors."""
    connections = []
    for descriptor in descriptors:
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        try:
            connection.getpeername()
            connections.append(connection)
        except OSError:  # it listens
            connection.close()
    return connections
