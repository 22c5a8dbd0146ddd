"""Port arbiter for models that run in separate processes and share the GPUs of one machine: a client of an arbiter process.

The first client starts the arbiter process (`aurora.runtime.arbiter_process`), which has the rules.
"""

import json
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aurora.errors import BadInput, RankFailed
from aurora.runtime import arbiter_process
from aurora.runtime.arbiter_process import MOST_BYTES, SOCKET, peer_user
from aurora.runtime.port_arbiter import GatherNumber
from aurora.runtime.private_folders import make_private
from aurora.types import SlicePolicy
from aurora.types.program import INTERACTIVE_LEVEL

LOG = logging.getLogger("aurora.run")
VERSION = 2  # of the packets
TURN_S = 5.0  # how long others wait for one use of the GPU or the port
START_S = 60.0  # how long an arbiter process may take to start
AGAIN_S = 0.05  # between two attempts to reach it


def colocation_folder(name: str) -> Path:
    """Returns the folder through which models colocate under `name`: all processes of this user on this machine share it.

    The folder is created if it is missing. It is in the folder for temporary files, so that processes with and without a login
    session find it.

    Args:
        name: name of the colocation, without a slash.

    Raises:
        BadInput: if the folder or its parent cannot be created, or if other users can write to it.
    """
    ours = Path(tempfile.gettempdir()) / f"aurora-runtime-{os.getuid()}"
    folder = ours / f"{name}.arbiter-{VERSION}"
    for path in (ours, folder):
        try:
            make_private(path)
        except BadInput as error:
            raise BadInput(f"`colocate`: {error}") from None
    return folder


class ProcessPortArbiter:
    """PortArbiter of one model on one GPU, for models that run in separate processes.

    Every rank of the model creates one; all ranks must have created theirs before any is used.

    Args:
        folder: the folder shared with the other models' processes, which only this user can write to; see `colocation_folder`.
        gpu: number of the GPU on this machine.
        slot: the model's number at the arbiter. Rank 0 passes None and gets one; the other ranks pass that number.
        finish: called before the GPU or the port is released to other models; must wait for the submitted GPU work.
        turn_s: seconds after which another model that holds the GPU or the port is skipped.
        policy: how the model shares the GPUs and ports, the same on all of its ranks.

    Attributes:
        slot: the model's number.

    Raises:
        BadInput: if the arbiter cannot be started, or refuses this client.
    """

    joins = False  # a model takes part by asking

    def __init__(
        self,
        folder: Path,
        gpu: int,
        slot: int | None = None,
        finish: Callable[[], None] = lambda: None,
        turn_s: float = TURN_S,
        policy: SlicePolicy = SlicePolicy(),
    ) -> None:
        self._finish, self._interactive, self._level, self._turn_s = finish, policy.interactive, 0, turn_s
        self._models, self._urgent = 1, False  # as last heard
        self._failure: str | None = None
        join = ("join", gpu, slot, policy.interactive, f"process {os.getpid()}")
        until_s = time.monotonic() + START_S
        while (joined := _joined(folder, join)) is None:
            if time.monotonic() > until_s:
                raise BadInput(f"`colocate`: no arbiter process answers in {folder} within {START_S:g} s")
            _start_arbiter(folder)
        self._socket, self.slot = joined
        self._answer = select.poll()
        self._answer.register(self._socket, select.POLLIN)

    @property
    def exclusive(self) -> bool:
        """True if no other model shares these GPUs."""
        self._hear_all()
        return self._models == 1

    def start_compute(self, level: int = 0) -> None:
        """Waits for the GPU; see `PortArbiter.start_compute`."""
        self._level = INTERACTIVE_LEVEL if self._interactive else level
        self._request("compute", self._level)

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        """Lets waiting work of a higher level run first; see `PortArbiter.yield_to_priority`."""
        self._hear_all()
        if not self._urgent:
            return False
        self._finish()
        on_yield()
        self._request("give_way", self._level)
        return True

    def stop_compute(self) -> None:
        """Releases the GPU. If other models share it, first waits until the work submitted to it has finished."""
        if not self.exclusive:
            self._finish()
        self._tell("computed")

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        """Context manager that grants this model the port; see `PortArbiter.exchange`."""
        self._request("exchange")
        try:
            yield
            if not self.exclusive:
                self._finish()
        except BaseException:
            with suppress(RankFailed):
                self._tell("exchanged", False)
            raise
        self._tell("exchanged", hold_port)

    def leave(self) -> None:
        """Ends this model's exchanges on this GPU, and leaves the arbiter."""
        self._socket.close()

    def pause(self) -> None:
        """Does nothing: nobody waits for a model that does not ask."""

    def join(self, gather: GatherNumber, first: bool, slices: int | None = None) -> None:
        """Does nothing; see `joins`."""

    def abort(self, error: BaseException) -> None:
        """Releases the GPU and the port after this model failed with `error`; its further waits raise RankFailed."""
        self._failure = self._failure or f"stopped, because the other model on this rank failed: {error}"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _request(self, *packet: Any) -> None:
        """Sends a packet, and waits until it is granted."""
        self._tell(*packet)
        try:
            while True:
                if not self._answer.poll(1000 * self._turn_s):
                    self._tell("late", self._turn_s)
                elif self._hear() == "granted":
                    return
        except OSError:
            raise self._lost() from None

    def _tell(self, *packet: Any) -> None:
        try:
            self._socket.send(json.dumps(packet).encode())
        except OSError:
            raise self._lost() from None

    def _lost(self) -> RankFailed:
        return RankFailed(self._failure or "the arbiter of the GPUs that this model shares has ended: start their models again")

    def _hear(self, flags: int = 0) -> str:
        """Takes the arbiter's next packet. Returns its kind. Raises OSError if there is none, or the arbiter is gone."""
        if not (packet := self._socket.recv(MOST_BYTES, flags)):
            raise ConnectionResetError
        kind, *values = json.loads(packet)
        if kind == "urgent":
            self._urgent = True
            return "urgent"
        if kind == "passed_on":
            LOG.warning("%s for more than %g s: the others go on", values[0], self._turn_s)
            return "passed_on"
        self._models, self._urgent = int(values[0]), self._urgent and kind != "granted"
        return str(kind)

    def _hear_all(self) -> None:
        """Takes the packets that are here; that the arbiter is gone is said by the next request."""
        with suppress(OSError):
            while True:
                self._hear(socket.MSG_DONTWAIT)


def _joined(folder: Path, join: tuple[Any, ...]) -> tuple[socket.socket, int] | None:
    """Returns a socket to the arbiter, and the model's number there; None if no arbiter of this user listens in the folder.

    Raises:
        BadInput: if the folder cannot be used, or the arbiter refuses.
    """
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise BadInput(f"`colocate`: {folder} cannot be used: {error.strerror}") from None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")  # a socket's path is short
        if peer_user(connection) != os.getuid():
            raise BadInput(f"`colocate`: expected an arbiter of this user in {folder}, found one of {peer_user(connection)}")
        connection.send(json.dumps(join).encode())
        kind, value = json.loads(connection.recv(MOST_BYTES) or b"[null, null]")
        if kind == "joined":
            return connection, value
        if kind == "refused":
            raise BadInput(f"`colocate`: {value}")
    except OSError:
        pass  # none listens, or it ends just now
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(directory)
    connection.close()
    return None


def _start_arbiter(folder: Path) -> None:
    """Starts an arbiter process, unless one runs. Raises BadInput if that fails."""
    command = [sys.executable, "-P", "-m", arbiter_process.__name__, str(folder)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    if done.returncode:
        raise BadInput(f"`colocate`: {folder} cannot be used: {done.stderr.strip().splitlines()[-1]}")
    time.sleep(AGAIN_S)
