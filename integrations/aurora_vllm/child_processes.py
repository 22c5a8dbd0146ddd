"""Child processes of `aurora vllm`: their start and end, their states as the kernel shows them, and free ports."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# A process that becomes the child: code between fork and exec is not safe in a parent with threads. SIGTERM ends a server,
# which ends its engine; shells have background jobs ignore SIGINT.
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""
RECORDS_S = 10.0  # in which a server that ends writes its records
FIRST_PORT, DRAWN = 10240, 200  # of ports for servers, below those of connections; and how many are tried


class ProcessState(NamedTuple):
    """Name, state letter and resident bytes of a process."""

    name: str
    letter: str
    resident: int

    @property
    def stopped(self) -> bool:
        """True if a signal or a debugger has stopped it."""
        return self.letter in "Tt"


ProcessGroups = dict[int, dict[int, ProcessState]]  # by process group and process id


async def start_process(
    words: list[str], log: Path, environ: dict[str, str], **more: Any
) -> asyncio.subprocess.Process:  # fmt: skip
    """Starts a process in a group of its own, which ends with this one, and whose output goes to `log`."""
    with log.open("wb") as file:
        first = [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT, str(os.getpid())]
        outputs = {"stdout": file, "stderr": file, **more}
        return await asyncio.create_subprocess_exec(*first, *words, env=environ, start_new_session=True, **outputs)


def kill(process: asyncio.subprocess.Process) -> None:
    """Kills the process group of which a process is the first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_with_command(within_s: float = RECORDS_S) -> None:
    """Makes this server's process group end soon after `aurora vllm`, also if its start has lost the SIGTERM."""
    command = os.getppid()

    def wait() -> None:
        while os.getppid() == command:
            time.sleep(1.0)
        time.sleep(within_s)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="aurora-command").start()


def process_groups() -> ProcessGroups:
    """Returns all live processes as {process group: {process id: its state}}, from /proc/PID/stat."""
    groups: ProcessGroups = {}
    page = resource.getpagesize()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            letter, _, group, *others = rest.split()
            if letter not in "ZX":
                groups.setdefault(int(group), {})[int(folder.name)] = ProcessState(name, letter, page * int(others[18]))
    return groups


def free_memory() -> int:
    """Returns the bytes that processes may still allocate, on the host and within this container's limit (cgroup v2)."""
    found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    host = 1024 * int(found[1]) if found else 0
    with suppress(OSError, ValueError):  # no limit, or another version
        most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        return min(host, most - used)
    return host


def free_ports(number: int) -> list[int]:
    """Returns `number` free TCP ports of this host, preferably below the kernel's ephemeral port range."""
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    apart = random.sample(range(FIRST_PORT, max(first_of_connections, FIRST_PORT + DRAWN)), DRAWN)
    sockets: list[socket.socket] = []
    for port in (*apart, *[0] * number):
        if len(sockets) < number:
            with suppress(OSError):
                sockets.append(socket.create_server(("127.0.0.1", port)))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def describe_exit(code: int) -> str:
    """Returns an exit code as text: "exit code 1", or "killed by signal 9" for -9."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def reason(log: Path) -> str:
    """Returns the line of a log file that most likely states why the process ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip() and " WARNING " not in line]
    errors = [line for line in lines if re.search(r"^aurora: |\b\w*(Error|Exception): |error: ", line)]
    return f"{(errors or lines[-1:] or ['nothing was written'])[0][-400:]} (see {log})"
