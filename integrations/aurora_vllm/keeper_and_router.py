"""Keeper (rendezvous store and coordinator of the ranks) and vllm-router: each is started again when it ends or is stopped."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aurora.errors import RankFailed
from aurora_vllm.child_processes import ProcessGroups, describe_exit, free_ports, kill, reason, start_process
from aurora_vllm.serving_ranks import STOPPED

KEEPER = "aurora_vllm.vllm_internals.fault_tolerance"  # module that is run
ASKED_EVERY_S = 0.25  # a router that starts
PAUSE_S = 30.0  # after a router that did not start
LONGEST_S = 7 * 86400  # of an answer through the router, which ends it otherwise after half an hour
LOCAL = "127.0.0.1"
Ask = Callable[[str, str, float], Any]  # (method, URL, seconds) -> awaitable answer, None if there is none


@dataclass(eq=False)
class Helper:
    """Process of the keeper or the router, with its log.

    Attributes:
        runs_s: when it was last seen to run.
    """

    name: str
    process: asyncio.subprocess.Process
    log: Path
    runs_s: float = field(default_factory=time.monotonic)

    def runs(self, groups: ProcessGroups) -> bool:
        """Returns whether it has neither ended nor been stopped."""
        return self.process.returncode is None and not any(state.stopped for state in groups.get(self.process.pid, {}).values())

    def failed(self, groups: ProcessGroups, hang_s: float) -> str:
        """Returns why it does not run; empty if it runs, or has been stopped for less than STOPPED * `hang_s` seconds."""
        if (code := self.process.returncode) is not None:
            return f"the {self.name} ended, {describe_exit(code)}"
        if self.runs(groups):
            self.runs_s = time.monotonic()
        stopped_s = time.monotonic() - self.runs_s
        return f"the {self.name} is stopped for {stopped_s:.3g} s" if stopped_s >= STOPPED * hang_s else ""


class Keeper:
    """The keeper. It listens on a socket of this process, which outlives it: a new keeper is reached where the old one was.

    A spare one, which has loaded vLLM and serves nobody, takes the place of one that is lost.

    Args:
        new_log: returns the path of a new log by its name.
        shared: folder for the sockets of the coordinator, whose names are the same for all keepers.

    Attributes:
        helper: the keeper.
        spare: the spare one; None: there is none yet.
        renewed: True: the ranks have not yet met at the present keeper, which is a new one.
    """

    def __init__(self, new_log: Callable[[str], Path], shared: str) -> None:
        self._new_log, self._shared, self.renewed = new_log, shared, False
        self._listener = socket.create_server((LOCAL, 0))
        self.helper: Helper | None = None
        self.spare: Helper | None = None
        self._ready: asyncio.Task[bytes] | None = None  # its line

    @property
    def store(self) -> str:
        """Address of the store, "HOST:PORT"."""
        return f"{LOCAL}:{self._listener.getsockname()[1]}"

    @property
    def ready(self) -> bool:
        """True once the keeper serves."""
        return self._ready is not None and self._ready.done() and bool(self._ready.result())

    async def start(self, groups: ProcessGroups) -> None:
        """Has the spare keeper serve, or starts one. Does not wait for it: ranks that come first wait for it at its socket."""
        if self.spare is not None and not self.spare.runs(groups):
            kill(self.spare.process)
            self.spare = None
        await self.keep_a_spare()
        self.helper, self.spare = self.spare, None
        assert self.helper is not None
        assert self.helper.process.stdin is not None
        assert self.helper.process.stdout is not None
        self.helper.process.stdin.write(b"0\n")
        self._ready = asyncio.create_task(self.helper.process.stdout.readline())

    async def keep_a_spare(self) -> None:
        """Starts a spare keeper unless there is one."""
        if self.spare is None:
            self.spare = await self._loading()

    async def _loading(self) -> Helper:
        """Returns a keeper that loads vLLM, and serves once it is told a number."""
        words = [sys.executable, "-P", "-m", KEEPER, str(self._listener.fileno()), self._shared]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        log = self._new_log("keeper")
        process = await start_process(words, log, dict(os.environ), **pipes, pass_fds=(self._listener.fileno(),))
        return Helper("keeper", process, log)

    async def renew(self, groups: ProcessGroups, hang_s: float, say: Callable[[str], None]) -> str:
        """Starts a new keeper if the present one does not run. Returns why that cannot help: a new one never served; or "".

        Args:
            groups: all processes.
            hang_s: seconds, of which it may be stopped for the part STOPPED.
            say: called with a sentence for the user.
        """
        if self.helper is None or not (failed := self.helper.failed(groups, hang_s)):
            return ""
        kill(self.helper.process)
        if not self.ready:
            return f"{failed}: {reason(self.helper.log)}"
        say(f"{failed}; a new one is started, and the ranks change over to it")
        self.renewed = True
        await self.start(groups)
        return ""

    def announce(self, change: int) -> None:
        """Has the keeper free the ranks that wait for a lost rank, at the beginning of a change."""
        if self.helper is not None and self.helper.process.stdin is not None:
            self.helper.process.stdin.write(f"{change}\n".encode())
            self.renewed &= not self.ready

    def close(self) -> None:
        """Closes the socket; there is no further keeper."""
        self._listener.close()


class Router:
    """vllm-router, which deals requests to the ranks.

    Args:
        new_log: returns the path of a new log by its name.
        ranks: returns the URLs of the ranks that serve.
        ask: the HTTP client.
        hang_s: seconds within which the router answers.

    Attributes:
        url: its URL; empty while there is none that answers.
    """

    def __init__(self, new_log: Callable[[str], Path], ranks: Callable[[], dict[int, str]], ask: Ask, hang_s: float) -> None:
        self._new_log, self._ranks, self._ask, self._hang_s = new_log, ranks, ask, hang_s
        self.url = ""
        self.helper: Helper | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the router, and waits until it answers.

        Raises:
            RankFailed: if it ends before.
        """
        port, metrics = free_ports(2)
        url, dealt = f"http://{LOCAL}:{port}", {*self._ranks().values()}
        words = [sys.executable, "-P", "-m", "vllm_router.launch_router", "--host", LOCAL, "--port", str(port)]
        words += ["--worker-urls", *dealt, "--policy", "round_robin", "--prometheus-port", str(metrics)]
        words += ["--worker-startup-check-interval", "1", "--request-timeout-secs", str(LONGEST_S)]
        log = self._new_log("router")
        self.helper = Helper("router", await start_process(words, log, dict(os.environ)), log)
        while self.helper.process.returncode is None and await self._ask("GET", f"{url}/health", 1.0) is None:
            await asyncio.sleep(ASKED_EVERY_S)
        if self.helper.process.returncode is not None:
            raise RankFailed(f"vllm-router ended: {reason(log)}")
        self.url, now = url, {*self._ranks().values()}
        for rank in dealt ^ now:  # lost or joined meanwhile
            await self.tell("add" if rank in now else "remove", rank)

    async def tell(self, what: str, rank: str) -> None:
        """Has the router "add" or "remove" a rank by its URL; one that starts begins with the ranks of that time."""
        if self.url:
            await self._ask("POST", f"{self.url}/{what}_worker?url={rank}", self._hang_s)

    def renew(self, groups: ProcessGroups, say: Callable[[str], None]) -> str:
        """Begins to start a new router if the present one does not run. Returns what happened, or nothing.

        Args:
            groups: all processes.
            say: called with sentences for the user.
        """
        starting = self._renewal is not None and not self._renewal.done()
        if starting or self.helper is None or not (failed := self.helper.failed(groups, self._hang_s)):
            return ""
        kill(self.helper.process)
        self.url = ""
        say(f"{failed}; requests go to the ranks directly until a new one answers")
        self._renewal = asyncio.create_task(self._renew(say))
        return failed

    async def _renew(self, say: Callable[[str], None]) -> None:
        began_s = time.monotonic()
        try:
            await self.start()
            say(f"a new router deals requests, after {time.monotonic() - began_s:.1f} s")
        except RankFailed as error:
            say(str(error))
            await asyncio.sleep(PAUSE_S)

    def end(self) -> None:
        """Starts no further router."""
        if self._renewal is not None:
            self._renewal.cancel()
        self.url = ""
