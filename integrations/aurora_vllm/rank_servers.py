"""Parent process of vLLM's servers, one per data-parallel rank: starts them, detects lost ranks, and informs the survivors.

A change is a numbered switch from one set of serving ranks to another, when ranks are lost or join."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from aurora.errors import RankFailed
from aurora_vllm.model_files import ModelFiles
from aurora_vllm.serving_ranks import Look, ServingRanks, describe_exit
from aurora_vllm.settings import JOINS, SECRET
from aurora_vllm.whole_streams import ServingChanges

# A process that becomes the server: code between fork and exec is not safe in a parent with threads. SIGTERM ends the server,
# which ends its engine; shells have background jobs ignore SIGINT.
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
LOOK_S = 0.25  # between two looks at all ranks
STALLED_S = 1.0  # by which a sleep of LOOK_S is longer if this process did not run: that time counts for no rank
SILENT_S = 5.0  # after which start-up is told again
ENDED_S = 10.0  # for servers to end by themselves, which write their records then
WITHIN_S = 40.0  # for survivors to wait for each other in a change: one may be in its first pass
PAUSE_S, TRIES = 30.0, 3  # between two starts of a lost rank, and how many there are
SLOWER, LEAST_S = 3.0, 300.0  # of its starts, than the start of all was, until it counts as stalled; and seconds at least
PATIENCE_S = 60.0  # of a rank that could join, while streams are under way that it would end
STARTED, SERVES = "starting processes", "serving"
PHASES = {  # what a rank does from a line of its log on
    "Initializing a V": "loading the model",
    "Loading weights took": "warming up",
    "init engine (": "waiting for the others",
}
FIRST_PORT, DRAWN = 10240, 200  # of ports for servers, below those of connections; and how many are tried
OF_ENGINE = "VLLM::"  # how vLLM's own names of its processes begin


@dataclass(eq=False)
class RankServer:
    """Handle of a vLLM server process, which serves one data-parallel rank or all ranks."""

    rank: int
    url: str
    process: asyncio.subprocess.Process
    log: Path
    phase: str = STARTED
    _read: int = field(default=0)

    def new_lines(self) -> list[str]:
        """Returns the complete log lines since the last call, and updates `phase` from them."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + bool(whole)
        lines = whole.decode(errors="replace").splitlines()
        for line in lines:
            self.phase = next((phase for text, phase in PHASES.items() if text in line), self.phase)
        return lines


@dataclass(eq=False)
class RankServers:
    """Runs vLLM's servers, the router in front of them and, with `survive`, the keeper (rendezvous store of the ranks).

    Args:
        command: called with (rank, its port, address of the keeper's store or ""); returns (command line as a list,
            environment) of the rank's server.
        ranks: numbers of the data-parallel ranks; a single number if one server serves all ranks.
        port: port of the only server; None: there are several servers, on free ports behind the router.
        folder: folder for logs.
        hang_s: seconds without an answer after which a rank counts as lost.
        survive: True: the other ranks continue when a rank is lost.
        session: the HTTP client.
        say: called with sentences for the user.
        files: the model's files, which no rank may load in another state than the others.
        rejoin: True: a lost rank is restarted, and joins the others.

    Attributes:
        router: URL of the router.
        servers: the servers by rank, including lost ones.
        changes: ServingChanges, which counts the completed changes of the serving ranks.
    """

    command: Callable[[int, int, str], tuple[list[str], dict[str, str]]]
    ranks: Sequence[int]
    port: int | None
    folder: Path
    hang_s: float
    survive: bool
    session: ClientSession
    say: Callable[[str], None]
    files: ModelFiles
    rejoin: bool = False
    router: str = ""
    servers: dict[int, RankServer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changes = ServingChanges(self.hang_s + 2.0)
        self._starts = 0
        self._store = ""
        self._secret = secrets.token_urlsafe()  # of commands to servers, which know it by their environment
        self._keeper: asyncio.subprocess.Process | None = None
        self._others: list[asyncio.subprocess.Process] = []  # the keeper and the router

    async def start(self) -> None:
        """Starts all servers and the router, and reports their progress. Returns when all accept requests.

        Raises:
            RankFailed: if a server ends before it accepts requests, or the model's files change meanwhile.
        """
        self.say(f"starting {self._name(*self.ranks)}")
        self.files.begin()
        ports = [self.port] if self.port is not None else free_ports(len(self.ranks))
        self._starts += 1  # the logs say why there is another
        self._store = await self._start_keeper() if self.survive else ""
        for rank, port in zip(self.ranks, ports, strict=True):
            await self._start_server(rank, port, {})
        self._newcomer: int | None = None  # a lost rank that is being started
        self._joined: int | None = None  # one that joins in the present change
        self._compared: Future[str] | None = None  # how the files that the newcomer loaded differ
        self._tries, self._pause_until_s, self._ready_s, self._late_s = dict[int, int](), 0.0, 0.0, 0.0
        self._ranks_now, self._asked = ServingRanks(self.ranks, self.hang_s), set[str]()
        self._change_s = self._told_s = 0.0
        began_s = told_s = time.monotonic()
        before: dict[int, str] = {}
        while any(server.phase != SERVES for server in self.servers.values()):
            await asyncio.sleep(LOOK_S)
            self._relay()
            for server in self.servers.values():
                if server.phase != SERVES and await self._ask("GET", f"{server.url}/health", self.hang_s) is not None:
                    server.phase = SERVES
            now_s, phases = time.monotonic(), {rank: server.phase for rank, server in self.servers.items()}
            for server in self.servers.values():
                if (code := server.process.returncode) is not None:
                    raise RankFailed(
                        f"{self._name(server.rank)} ended while it started, {describe_exit(code)}: {reason(server.log)}"
                    )
            if phases != before or now_s - told_s > SILENT_S:
                ranks = {phase: [rank for rank in phases if phases[rank] == phase] for phase in phases.values()}
                self.say(f"{now_s - began_s:.0f} s: " + "; ".join(f"{self._name(*of)} {phase}" for phase, of in ranks.items()))
                before, told_s = phases, now_s
        if changed := self.files.end():
            raise RankFailed(changed)
        self._patience_s = max(LEAST_S, SLOWER * (time.monotonic() - began_s))
        if self.port is None:
            await self._start_router()
        self.changes.number += 1
        self.changes.serving.set()

    async def watch(self) -> str:
        """Monitors the servers, and handles lost and joining ranks, until serving ends. Returns why it ended."""
        requests: dict[int, asyncio.Task[Any]] = {}
        try:
            while not (ended := await self._watch_once(requests)):
                began_s = time.monotonic()
                await asyncio.sleep(LOOK_S)
                if (stalled_s := time.monotonic() - began_s - LOOK_S) > STALLED_S:
                    self._ranks_now.stalled(stalled_s)
            return ended
        finally:
            for task in requests.values():
                task.cancel()

    async def _watch_once(self, requests: dict[int, asyncio.Task[Any]]) -> str:
        """Looks at all ranks once. Returns why they do not serve any more, or nothing.

        Args:
            requests: by rank, the request to its server, which may take longer than until the next look; brought up to date.
        """
        ranks = self._ranks_now
        self._relay()
        groups, answers = process_groups(), {rank: task.result() for rank, task in requests.items() if task.done()}
        looks = {rank: self._look(rank, groups, answers.get(rank)) for rank in ranks.alive}
        for rank in ranks.alive:
            if rank in answers or rank not in requests:
                requests[rank] = asyncio.create_task(self._status(rank))
        reasons = ranks.lost(looks, time.monotonic())
        for rank, why in reasons.items():
            self.say(f"{self._name(rank)} is lost: {why}")
            kill(self.servers[rank].process)
        self._joined = None if self._joined in reasons else self._joined
        if reasons and (not self.survive or not ranks.alive):
            return "; ".join(reasons.values())
        if reasons or (self.survive and ranks.faulted(looks, time.monotonic())):
            await self._begin_change(list(reasons))
        elif not self.changes.serving.is_set() and ranks.complete(looks):
            if self._joined is not None:
                await self._ask("POST", f"{self.router}/add_worker?url={self.servers[self._joined].url}", self.hang_s)
                self._tries.pop(self._joined)
            self._joined = None
            self.changes.number += 1
            self.changes.serving.set()
            self.say(f"{len(ranks.alive)} of {len(self.ranks)} ranks serve on, after {time.monotonic() - self._change_s:.1f} s")
        elif not self.changes.serving.is_set() and (why := self._failure(looks)):
            if (joined := self._joined) is None:
                if (stuck := self._stuck(looks)) and len(stuck) < len(ranks.alive):
                    for rank in stuck:
                        self.say(f"{self._name(rank)} is lost: it is stuck in a step, which a change does not end")
                        kill(self.servers[rank].process)
                        ranks.give_up(rank)
                    await self._begin_change(stuck)
                    return ""
                return f"change {ranks.change} failed: {why}"
            self._give_up(joined, f"could not join: {why}")
            ranks.give_up(joined)
            await self._begin_change([joined])
        elif self.changes.serving.is_set() and self.rejoin:
            await self._bring_back(requests, answers)
        if self.port is None and self._others[-1].returncode is not None:
            await self._start_router()
        return ""

    async def _bring_back(self, requests: dict[int, asyncio.Task[Any]], answers: dict[int, Any]) -> None:
        """Starts a lost rank again, one after the other, and has it join once its server answers; see `_watch_once`."""
        ranks, rank = self._ranks_now, self._newcomer
        if rank is None:
            again = [lost for lost in ranks.dead if self._tries.get(lost, 0) < TRIES]
            if again and time.monotonic() >= self._pause_until_s:
                self._newcomer = rank = again[0]
                if (task := requests.pop(rank, None)) is not None:  # of the server before
                    task.cancel()
                self._tries[rank], self._starts = self._tries.get(rank, 0) + 1, self._starts + 1
                await self.servers[rank].process.wait()
                self.files.begin()
                await self._start_server(rank, free_ports(1)[0], {JOINS: "1"})
                self._late_s = time.monotonic() + self._patience_s
                self.say(f"{self._name(rank)} is started again, and joins the others then")
        elif (code := self.servers[rank].process.returncode) is not None:
            self._give_up(rank, f"did not come back, {describe_exit(code)}: {reason(self.servers[rank].log)}")
        elif self.servers[rank].phase == SERVES or answers.get(rank) is not None:
            server, now_s = self.servers[rank], time.monotonic()
            server.phase, self._ready_s = SERVES, now_s if server.phase != SERVES else self._ready_s
            if now_s - self._ready_s < PATIENCE_S and not all(stream.resumable for stream in self.changes.streams):
                return
            self._compared = self._compared or self.files.compare()
            if not self._compared.done():
                return
            if changed := self._compared.result():
                self._tries[rank] = TRIES  # the files stay as they are
                self._give_up(rank, f"could not join: {changed}")
                return
            self._newcomer, self._joined, self._compared = None, rank, None
            ranks.join(rank)
            await self._begin_change([])
        elif time.monotonic() > self._late_s:
            phase, log = self.servers[rank].phase, self.servers[rank].log
            self._give_up(rank, f"did not come back within {self._patience_s:.0f} s, and was ended while {phase} (see {log})")
        elif rank in answers or rank not in requests:
            requests[rank] = asyncio.create_task(self._ask("GET", f"{self.servers[rank].url}/health", self.hang_s))

    def _give_up(self, rank: int, why: str) -> None:
        """Ends the newest server of a lost rank, which is tried again after a pause unless it has been too often."""
        kill(self.servers[rank].process)
        self._newcomer = self._joined = self._compared = None
        self._pause_until_s = time.monotonic() + PAUSE_S
        self.say(f"{self._name(rank)} {why}; it is {'tried again' if self._tries[rank] < TRIES else 'left out'}")

    def kill(self) -> None:
        """Kills all processes at once."""
        for process in [server.process for server in self.servers.values()] + self._others:
            kill(process)

    async def end(self) -> None:
        """Ends all processes, after they have written their records, and waits for their end."""
        self.changes.serving.clear()
        processes = [server.process for server in self.servers.values()] + self._others
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM if process in self._others else signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), ENDED_S)
        self.kill()
        for process in processes:
            await process.wait()
        while process_groups().keys() & {process.pid for process in processes}:
            await asyncio.sleep(0.05)
        self.servers.clear()
        self._others.clear()

    def urls(self) -> dict[int, str]:
        """Returns the URLs of the serving ranks' servers by rank, without one that is about to join; of none: the router's."""
        alive = [rank for rank in self._ranks_now.alive if rank in self.servers and rank != self._joined]
        return {rank: self.servers[rank].url for rank in alive} or {0: self.router}

    def _name(self, *ranks: int) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if self.port is None else "vLLM"

    def _relay(self) -> None:
        """Tells what the plugin writes into the servers' logs."""
        for server in self.servers.values():
            for line in server.new_lines():
                if (match := re.search(r"(?<= )aurora: .*", line)) is not None:
                    self.say(match[0].removeprefix("aurora: "))

    async def _start_server(self, rank: int, port: int, more: dict[str, str]) -> None:
        words, environ = self.command(rank, port, self._store)
        log = self.folder / f"rank-{rank}{f'-start-{self._starts}' if self._starts > 1 else ''}.log"
        process = await self._run(words, log, {**os.environ, **environ, **more, SECRET: self._secret})
        self.servers[rank] = RankServer(rank, f"http://127.0.0.1:{port}", process, log)

    async def _run(self, words: list[str], log: Path, environ: dict[str, str], **more: Any) -> asyncio.subprocess.Process:
        """Starts a process in a group of its own, which ends with this one."""
        with log.open("wb") as file:
            first = [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT]
            outputs = {"stdout": file, "stderr": file, **more}
            return await asyncio.create_subprocess_exec(*first, *words, env=environ, start_new_session=True, **outputs)

    async def _start_keeper(self) -> str:
        words = [sys.executable, "-P", "-m", "aurora_vllm.vllm_internals.fault_tolerance", str(len(self.ranks))]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        keeper = await self._run(words, self.folder / "keeper.log", dict(os.environ), **pipes)
        self._keeper = keeper
        self._others.append(keeper)
        assert keeper.stdout is not None
        line = await keeper.stdout.readline()
        if not line:
            raise RankFailed(f"the keeper of the ranks' store ended: {reason(self.folder / 'keeper.log')}")
        return str(json.loads(line)["store"])

    async def _start_router(self) -> None:
        port, metrics = free_ports(2)
        self.router = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-P", "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--worker-urls", *self.urls().values(), "--policy", "round_robin", "--prometheus-port", str(metrics)]
        words += ["--worker-startup-check-interval", "1"]
        self._others.append(await self._run(words, self.folder / "router.log", dict(os.environ)))
        while self._others[-1].returncode is None and await self._ask("GET", f"{self.router}/health", 1.0) is None:
            await asyncio.sleep(LOOK_S)
        if self._others[-1].returncode is not None:
            raise RankFailed(f"vllm-router ended: {reason(self.folder / 'router.log')}")

    async def _status(self, rank: int) -> Any:
        path = "/fault_tolerance/status" if self.survive else "/health"
        return await self._ask("GET", self.servers[rank].url + path, self.hang_s)

    def _look(self, rank: int, groups: dict[int, dict[int, tuple[str, str]]], answer: Any) -> Look:
        process = self.servers[rank].process
        states = groups.get(process.pid, {})
        engine = frozenset(pid for pid, (name, _) in states.items() if name.startswith(OF_ENGINE))
        stopped, runnable = (any(state in some for _, state in states.values()) for some in ("Tt", "R"))
        (report,) = ({"status": None},) if answer is None else answer.get("engines", ({"status": "healthy"},))
        failed = str(report.get("last_ft_request_id", ""))
        change = int(report.get("change") or 0)
        return Look(process.returncode, engine, stopped, runnable, report["status"], change, failed)

    async def _ask(self, method: str, url: str, within_s: float, body: Any = None) -> Any:
        """Returns the answer, {} if it is no JSON; None if there is none."""
        try:
            async with self.session.request(method, url, json=body, timeout=ClientTimeout(total=within_s)) as answer:
                text = await answer.text()
                if answer.status >= 500:
                    return None
                return json.loads(text) if text.startswith("{") else {}
        except (ClientError, TimeoutError, ValueError):
            return None

    async def _begin_change(self, lost: list[int]) -> None:
        """Tells the router and all survivors that ranks are lost."""
        ranks = self._ranks_now
        if lost or self.changes.serving.is_set():
            self._change_s = time.monotonic()
        self._told_s = time.monotonic()
        self.changes.serving.clear()
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.write(f"{ranks.change}\n".encode())  # frees survivors that wait for a lost rank
        params = {"change": ranks.change, "dead": sorted(ranks.dead), "alive": ranks.alive, "within_s": WITHIN_S}
        params |= {"changed": changed} if (changed := self.files.touched()) else {}
        body = {"instruction": "change_ranks", "secret": self._secret, "params": params}
        posts: list[tuple[str, Any]] = [(f"{self.servers[rank].url}/fault_tolerance/apply", body) for rank in ranks.alive]
        posts += [(f"{self.router}/remove_worker?url={self.servers[rank].url}", None) for rank in lost]
        answers = await asyncio.gather(*(self._ask("POST", url, self.hang_s, body) for url, body in posts))
        self._asked = {str(answer["request_id"]) for answer in answers if answer and "request_id" in answer}

    def _refused(self, looks: dict[int, Look]) -> list[int]:
        """The ranks that refused the change, or could not make it."""
        return [rank for rank in self._ranks_now.alive if looks[rank].failed and looks[rank].failed in self._asked]

    def _stuck(self, looks: dict[int, Look]) -> list[int]:
        """The ranks that have not left their step for the failed change: others that wait for it are not healthy."""
        refused, late = self._refused(looks), time.monotonic() - self._told_s > WITHIN_S
        suspects = {rank: looks[rank] for rank in self._ranks_now.alive if late or rank in refused}
        return [rank for rank, look in suspects.items() if look.status == "healthy" and look.change != self._ranks_now.change]

    def _failure(self, looks: dict[int, Look]) -> str:
        """Returns why the change cannot be completed; empty while it can."""
        if refused := self._refused(looks):
            return f"rank {refused[0]} refused it, see {self.servers[refused[0]].log}"
        late = time.monotonic() - self._told_s > WITHIN_S + self.hang_s
        return f"no answer within {WITHIN_S + self.hang_s:g} s" if late else ""


def kill(process: asyncio.subprocess.Process) -> None:
    """Kills the process group of which a process is the first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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


def process_groups() -> dict[int, dict[int, tuple[str, str]]]:
    """Returns all live processes as {process group: {process id: (name, state letter)}}, from /proc/PID/stat."""
    groups: dict[int, dict[int, tuple[str, str]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            state, _, group, *_ = rest.split()
            if state not in "ZX":
                groups.setdefault(int(group), {})[int(folder.name)] = (name, state)
    return groups


def reason(log: Path) -> str:
    """Returns the line of a log file that most likely states why the process ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip() and " WARNING " not in line]
    errors = [line for line in lines if re.search(r"^aurora: |\b\w*(Error|Exception): |error: ", line)]
    return f"{(errors or lines[-1:] or ['nothing was written'])[0][-400:]} (see {log})"
