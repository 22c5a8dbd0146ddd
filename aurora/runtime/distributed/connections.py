"""Connections that are marked urgent."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from aurora.runtime.distributed.close_connections import connected, open_sockets

URGENT_TOS = 0x10  # of IP packets, "minimise delay": Linux's queues of three bands serve them first, switches if told to
TYPE_OF_SERVICE = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}  # where it is set, by address family


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
