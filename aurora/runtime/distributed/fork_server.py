"""Ends the fork server together with the process that started it, also while ranks still run. Imported first in the server.

It also freezes the server's objects for the garbage collector (`gc.freeze`): a rank that scanned them would copy the memory
that it shares with the server.
"""

import atexit
import gc
import os
import select
import shutil
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path


def _end_with(leader: int) -> None:
    """Ends this process when another ends, and removes that one's folder of sockets, which it leaves if it was killed."""
    try:
        select.select([os.pidfd_open(leader)], [], [])
    except ProcessLookupError:  # it has ended
        pass
    except OSError:  # a kernel without pidfd: multiprocessing ends the fork server when no rank runs any more
        return
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as listener:
            folder = Path(os.fsdecode(listener.getsockname()) if listener.family == socket.AF_UNIX else "").parent
            if folder.name.startswith("pymp-"):  # multiprocessing's
                shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _before_fork() -> None:
    """Freezes what is there, and sees to it that this process ends without finalizers, in which Triton tells what it leaks."""
    gc.freeze()
    atexit.unregister(_end_at_once)
    atexit.register(_end_at_once, os.getpid())  # the last to be registered is the first to run


def _end_at_once(fork_server: int) -> None:
    if os.getpid() == fork_server:
        os._exit(0)


if sys.platform == "linux" and sys.orig_argv[-1].startswith("from multiprocessing.forkserver import main"):
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.register_at_fork(before=_before_fork)
