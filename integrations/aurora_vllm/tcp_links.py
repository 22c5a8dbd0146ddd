"""Finds broken links of this process: from the state of its TCP connections, and by test connections to addresses."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

RESENT = 2  # times that bytes were sent again before they count as unacknowledged
ANSWER_S = 0.5  # within which a host answers
CLOSED_PORT = 9  # nobody listens there, so that a host refuses at once


def connections() -> tuple[set[str], set[str], set[str]]:
    """Returns IP addresses of this process's TCP connections: (local ones, peers, peers that acknowledge nothing)."""
    own, peers, silent, inodes = set[str](), set[str](), set[str](), set(_sockets())
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/thread-self/net/{name}") as file:
            for line in file.readlines()[1:]:
                _, local, remote, state, _, timer, resent, _, _, inode, *_ = line.split()
                if inode in inodes and state == "01":
                    own.add(_address(local))
                    peers.add(_address(remote))
                    if timer.startswith("01:") and int(resent, 16) >= RESENT:
                        silent.add(_address(remote))
    return own, peers - own, silent


def unanswering(addresses: set[str]) -> set[str]:
    """Returns the addresses that neither accept nor refuse a test connection within ANSWER_S.

    If no address answers at all, returns an empty set, because a firewall may drop all test connections.
    """
    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        silent = {address for address, answers in zip(addresses, pool.map(_answers, addresses), strict=True) if not answers}
    return silent if silent < addresses else set()


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, CLOSED_PORT), ANSWER_S).close()
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return True


def _address(text: str) -> str:
    """The address in the kernel's "address:port"; of an IPv4 address in IPv6 the former."""
    words = bytes.fromhex(text.partition(":")[0])
    address = ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _sockets() -> Iterator[str]:
    """The inodes of this process's sockets."""
    for each in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            if (target := os.readlink(each.path)).startswith("socket:["):
                yield target[8:-1]
