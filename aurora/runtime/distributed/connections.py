"""Sockets that listen, and sockets of this process, such as those that a process group has opened."""

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from aurora.errors import BadInput

URGENT_TOS = 0x10  # of IP packets, "minimise delay": Linux's queues of three bands serve them first, switches if told to
TYPE_OF_SERVICE = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}  # where it is set, by address family


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens only on the given address of this machine. Port 0 picks a free port.

    Raises:
        BadInput: if the address cannot be used.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"port {port} on {host} cannot be used: {error.strerror}") from None


@contextmanager
def marked_urgent() -> Iterator[None]:
    """Context manager that sets IP type-of-service URGENT_TOS on the connections opened inside it."""
    before = open_sockets()
    yield
    for connection in connected(number for inode, number in open_sockets().items() if inode not in before):
        with connection:
            option = TYPE_OF_SERVICE.get(connection.family)
            if option is not None:
                connection.setsockopt(*option, URGENT_TOS)


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
