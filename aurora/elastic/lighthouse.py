"""Runs torchft's lighthouse, the rendezvous of the members of an elastic run, in a child process.

It holds no state of steps: if it is restarted, members find it again and lose nothing. It trusts every process that reaches its
port, so it listens on loopback only, at a free port.
"""

import os
import threading
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

from aurora.errors import BadInput, MissingDependency, first_line
from aurora.runtime.distributed.launcher import LOOPBACK, RankInfo, end_processes, start_process
from aurora.types.run_options import address_text

HEARTBEAT_TIMEOUT_S = 2.0  # a member that gives no sign of life for so long is left out of rounds
START_S = 60.0
_TICK_S = 0.05  # between two looks at whether a round is complete


class Lighthouse:
    """Runs torchft's lighthouse in a child process until `close`, and restarts it when it dies; a context manager.

    Attributes:
        address: the host and port on which it listens.

    Raises:
        BadInput: if it does not start.
        MissingDependency: if torchft is not installed.
    """

    def __init__(self) -> None:
        check_torchft()
        self._closed = threading.Event()
        self.address = LOOPBACK, 0  # until it has a port
        self._child = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="aurora-lighthouse")
        self._keeper.start()

    def close(self) -> None:
        """Ends the lighthouse. Running epochs continue without it."""
        self._closed.set()
        self._child[0].kill()
        self._keeper.join()
        end_processes([self._child])

    def _start(self) -> tuple[Any, Connection]:
        """Starts the process, and takes note of its port."""
        host, port = self.address
        info = RankInfo(0, 1, "", 0, START_S, 0, 1, launched=True)
        child = start_process(info, _serve, host, port)
        try:
            answer = child[1].recv() if child[1].poll(START_S) else "nothing came from it"
        except (EOFError, OSError):
            answer = "its process ended"
        if not isinstance(answer, int):
            end_processes([child])
            raise BadInput(f"{address_text(self.address)}: the lighthouse did not start: {answer}")
        self.address = host, answer
        return child

    def _keep(self) -> None:
        """Starts the process anew when it was lost: members find it again at its port."""
        while not self._closed.is_set():
            wait([self._child[0].sentinel])
            if not self._closed.is_set():
                with suppress(BadInput):
                    self._child = self._start()

    def __enter__(self) -> "Lighthouse":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_torchft() -> None:
    """Raises MissingDependency if torchft is not installed; does not import it."""
    if find_spec("torchft") is None:
        raise MissingDependency('runs that go on when ranks are lost need torchft: pip install "aurora-moe[elastic]"')


def serve(host: str, port: int) -> tuple[Any, int]:
    """Starts torchft's lighthouse server in this process, with a run's settings. Returns the server and its port."""
    from torchft.coordination import LighthouseServer

    timeout_ms = round(HEARTBEAT_TIMEOUT_S * 1000)
    server = LighthouseServer(
        bind=address_text((host, port)), min_replicas=1, join_timeout_ms=timeout_ms,
        quorum_tick_ms=round(_TICK_S * 1000), heartbeat_timeout_ms=timeout_ms,
    )  # fmt: skip
    return server, int(server.address().rpartition(":")[2])  # beside the name of this host, on which it does not listen


def _serve(connection: Connection, _info: RankInfo, host: str, port: int) -> None:
    """The child's main function: sends the port, or why there is none; ends when the other end does."""
    with open(os.devnull, "w") as silent:  # it logs every request
        os.dup2(silent.fileno(), 1)
        os.dup2(silent.fileno(), 2)
    try:
        server, port = serve(host, port)
    except RuntimeError as error:
        connection.send(first_line(error))
        return
    connection.send(port)
    try:
        connection.recv()
    except (EOFError, OSError):
        server.shutdown()
