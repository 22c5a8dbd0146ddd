"""Parent process of vLLM's servers, one per data-parallel rank: starts them, detects lost ranks, and informs the survivors.

A change is a numbered switch from one set of serving ranks to another, when ranks are lost or join."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from aurora.errors import RankFailed
from aurora_vllm.child_processes import (
    RECORDS_S,
    ProcessGroups,
    describe_exit,
    free_memory,
    free_ports,
    kill,
    process_groups,
    reason,
    start_process,
)
from aurora_vllm.keeper_and_router import Keeper, Router
from aurora_vllm.model_files import ModelFiles
from aurora_vllm.serving_changes import STEP_FAILED, ServingChanges
from aurora_vllm.serving_ranks import Look, ServingRanks
from aurora_vllm.settings import JOINS, SECRET, SHARED_FOLDER

LOOK_S = 0.25  # between two looks at all ranks
STALLED_S = 1.0  # by which a sleep of LOOK_S is longer if this process did not run: that time counts for no rank
SILENT_S = 5.0  # after which start-up is told again
GONE_S = 30.0  # for killed processes to be gone
WITHIN_S = 40.0  # for survivors to wait for each other in a change: one may be in its first pass
PAUSE_S, TRIES = 30.0, 3  # between two starts of a lost rank, and how many there are
SETTLED_S = 60.0  # for which a rank that came back has to serve: one that is lost before waits twice as long each time
SLOWER, LEAST_S = 3.0, 300.0  # of its starts, than the start of all was, until it counts as stalled; and seconds at least
PATIENCE_S = 60.0  # of a rank that could join, while streams are under way that it would end
STARTED, SERVES = "starting processes", "serving"
PHASES = {  # what a rank does from a line of its log on
    "Initializing a V": "loading the model",
    "Loading weights took": "warming up",
    "init engine (": "waiting for the others",
}
WORKERS_ERROR = re.compile("Worker failed with error '(.*)', please")  # in vLLM's text of an engine's error
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
        whole = b""
        with suppress(FileNotFoundError), self.log.open("rb") as file:  # a user may remove it
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + bool(whole)
        lines = whole.decode(errors="replace").splitlines()
        for line in lines:
            self.phase = next((phase for text, phase in PHASES.items() if text in line), self.phase)
        return lines


@dataclass(eq=False)
class Newcomer:
    """A lost rank whose server is started again.

    Attributes:
        late_s: when it counts as stalled.
        ready_s: when its server answered; None: it has not answered.
        compared: how the files that it loaded differ; None: they are not compared yet.
    """

    late_s: float
    ready_s: float | None = None
    compared: Future[str] | None = None


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
        router: the router.
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
    servers: dict[int, RankServer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changes = ServingChanges(self.hang_s + 2.0)
        self._logs = Counter[str]()
        self._secret = secrets.token_urlsafe()  # of commands to servers, which know it by their environment
        self._shared = tempfile.TemporaryDirectory(prefix="aurora-vllm-")  # for sockets and status files of all processes
        self._keeper = Keeper(self._log, self._shared.name) if self.survive else None
        self._background = set[asyncio.Task[None]]()  # kept until it is done
        self.router = Router(self._log, self.urls, self._ask, self.hang_s)

    async def start(self) -> None:
        """Starts all servers and the router, and reports their progress. Returns when all accept requests.

        Raises:
            RankFailed: if a server ends before it accepts requests, or the model's files change meanwhile.
        """
        self.say(f"starting {self._name(*self.ranks)}")
        self.files.begin()
        ports = [self.port] if self.port is not None else free_ports(len(self.ranks))
        if self._keeper is not None:
            await self._keeper.start({})
        for rank, port in zip(self.ranks, ports, strict=True):
            await self._start_server(rank, port, {})
        self._newcomers = dict[int, Newcomer]()
        self._joined = set[int]()  # ranks that join in the present change
        self._tries, self._pause_until_s = Counter[int](), dict[int, float]()
        self._why = dict[int, str]()  # why ranks did not come back the last time
        self._settled_s = dict[int, float]()  # when they have come back
        self._soon = Counter[int]()  # how often ranks were lost in a row before that
        self._ranks_now, self._asked = ServingRanks((), self.hang_s), set[str]()  # none serves yet
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
            if self._keeper is not None and (failed := await self._keeper.renew(process_groups(), self.hang_s, self.say)):
                raise RankFailed(failed)
            if phases != before or now_s - told_s > SILENT_S:
                ranks = {phase: [rank for rank in phases if phases[rank] == phase] for phase in phases.values()}
                self.say(f"{now_s - began_s:.0f} s: " + "; ".join(f"{self._name(*of)} {phase}" for phase, of in ranks.items()))
                before, told_s = phases, now_s
        if changed := self.files.end():
            raise RankFailed(changed)
        self._patience_s = max(LEAST_S, SLOWER * (time.monotonic() - began_s))
        self._ranks_now = ServingRanks(self.ranks, self.hang_s)
        if self.port is None:
            await self.router.start()
        self.changes.complete()

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
            self._tries.pop(rank, None)
            if rank in self._joined or time.monotonic() < self._settled_s.get(rank, 0.0):
                pause_s = PAUSE_S * 2 ** self._soon[rank]
                self._soon[rank], self._pause_until_s[rank] = self._soon[rank] + 1, time.monotonic() + pause_s
                self.say(f"{self._name(rank)} was lost soon after it came back, and is started again after {pause_s:g} s")
            else:
                self._soon.pop(rank, None)
        self.changes.losses.update(reasons.keys())
        self._joined -= reasons.keys()
        if reasons and (not self.survive or not ranks.alive):
            return "; ".join(reasons.values())
        if self._keeper is not None and (failed := await self._keeper.renew(groups, self.hang_s, self.say)):
            return failed
        if self._keeper is not None and self._keeper.ready:
            await self._keeper.keep_a_spare()
        if (failed := self.router.renew(groups, self.say)) and self.changes.serving.is_set():
            self.changes.begin(failed)
            self.changes.complete()
        if reasons or (self.survive and ranks.faulted(looks, time.monotonic())):
            await self._begin_change(list(reasons), self._lost(*reasons) if reasons else STEP_FAILED)
        elif not self.changes.serving.is_set() and ranks.complete(looks):
            for rank in sorted(self._joined):
                await self.router.tell("add", self.servers[rank].url)
                self._settled_s[rank] = time.monotonic() + SETTLED_S
                self._why.pop(rank, None)
            self._joined.clear()
            self.changes.complete()
            self.say(f"{len(ranks.alive)} of {len(self.ranks)} ranks serve on, after {time.monotonic() - self._change_s:.1f} s")
        elif not self.changes.serving.is_set() and (why := self._failure(looks)):
            if not self._joined:
                if (stuck := self._stuck(looks)) and len(stuck) < len(ranks.alive):
                    for rank in stuck:
                        self.say(f"{self._name(rank)} is lost: its step does not end, and the others wait for it")
                        kill(self.servers[rank].process)
                        ranks.give_up(rank)
                    self.changes.losses.update(stuck)
                    await self._begin_change(stuck, self._lost(*stuck))
                    return ""
                return f"the switch to {self._name(*ranks.alive)} failed: {why}"
            refused = [rank for rank in self._refused(looks) if rank in self._joined] or sorted(self._joined)
            for rank in refused:
                self._give_up(rank, f"could not join: {why}")
                ranks.give_up(rank)
            await self._begin_change(refused, f"{self._name(*refused)} could not join")
        elif self.changes.serving.is_set() and self._keeper is not None and self._keeper.renewed:
            if self._keeper.ready:
                ranks.change += 1
                await self._begin_change([], "a new keeper serves the ranks")
        elif self.changes.serving.is_set() and self.rejoin:
            await self._bring_back(groups, requests, answers)
        return ""

    async def _bring_back(
        self, groups: ProcessGroups, requests: dict[int, asyncio.Task[Any]], answers: dict[int, Any]
    ) -> None:  # fmt: skip
        """Starts lost ranks again, side by side while there is memory, and has them join once their servers answer."""
        ranks, now_s = self._ranks_now, time.monotonic()
        for rank in ranks.dead:
            waits = rank in self._newcomers or now_s < self._pause_until_s.get(rank, 0.0)
            if self._tries[rank] < TRIES and not waits and self._has_memory(groups):
                await self._start_again(rank, requests)
                answers.pop(rank, None)  # of the server before
        ready = [rank for rank in list(self._newcomers) if self._is_ready(rank, requests, answers)]
        if not ready:
            return
        for rank in ready:
            del self._newcomers[rank]
            ranks.join(rank)
        self._joined.update(ready)
        await self._begin_change([], f"{self._name(*ready)} {'joins' if len(ready) == 1 else 'join'} the others")

    def _has_memory(self, groups: ProcessGroups) -> bool:
        """Returns whether one more rank can load beside the newcomers, which may still need as much as a rank that serves."""
        if not self._newcomers:
            return True
        used = [groups.get(self.servers[rank].process.pid, {}).values() for rank in self._ranks_now.alive]
        most = max(sum(state.resident for state in states) for states in used)
        return (1 + sum(newcomer.ready_s is None for newcomer in self._newcomers.values())) * most < free_memory()

    async def _start_again(self, rank: int, requests: dict[int, asyncio.Task[Any]]) -> None:
        if (task := requests.pop(rank, None)) is not None:  # of the server before
            task.cancel()
        self._tries[rank] += 1
        await self.servers[rank].process.wait()
        if not self._newcomers:  # else the files count as they were before the first of them
            self.files.begin()
        await self._start_server(rank, free_ports(1)[0], {JOINS: "1"})
        self._newcomers[rank] = Newcomer(time.monotonic() + self._patience_s)
        self.say(f"{self._name(rank)} is started again, and joins the others then")

    def _is_ready(self, rank: int, requests: dict[int, asyncio.Task[Any]], answers: dict[int, Any]) -> bool:
        """Returns whether a newcomer can join now; gives it up if it never can."""
        newcomer, server, now_s = self._newcomers[rank], self.servers[rank], time.monotonic()
        if (code := server.process.returncode) is not None:
            self._give_up(rank, f"did not come back, {describe_exit(code)}: {reason(server.log)}")
        elif server.phase == SERVES or answers.get(rank) is not None:
            server.phase, newcomer.ready_s = SERVES, newcomer.ready_s or now_s
            if now_s - newcomer.ready_s < PATIENCE_S and not all(stream.resumable for stream in self.changes.streams):
                return False
            newcomer.compared = newcomer.compared or self.files.compare()
            if newcomer.compared.done() and not (changed := newcomer.compared.result()):
                return True
            if newcomer.compared.done():
                self._tries[rank] = TRIES  # the files stay as they are
                self._give_up(rank, f"could not join: {changed}")
        elif now_s > newcomer.late_s:
            what = f"was ended while {server.phase} (see {server.log})"
            self._give_up(rank, f"did not come back within {self._patience_s:.0f} s, and {what}")
        elif rank in answers or rank not in requests:
            requests[rank] = asyncio.create_task(self._ask("GET", f"{server.url}/health", self.hang_s))
        return False

    def _give_up(self, rank: int, why: str) -> None:
        """Ends the newest server of a lost rank, which is tried again after a pause unless that is hopeless."""
        kill(self.servers[rank].process)
        self._newcomers.pop(rank, None)
        self._joined.discard(rank)
        self._pause_until_s[rank] = time.monotonic() + PAUSE_S
        cause = why.partition(" (see")[0]
        self._tries[rank] = TRIES if cause == self._why.get(rank) else self._tries[rank]
        self._why[rank] = cause
        self.say(f"{self._name(rank)} {why}; it is {'tried again' if self._tries[rank] < TRIES else 'left out'}")

    def kill(self) -> None:
        """Kills all processes at once."""
        for process in self._processes():
            kill(process)

    async def end(self) -> None:
        """Ends all processes, after those that serve have written their records, and waits for their end."""
        self.changes.serving.clear()
        self.router.end()
        self._ranks_now = ServingRanks((), self.hang_s)
        phases, processes = {server.process: server.phase for server in self.servers.values()}, self._processes()
        for process in processes:
            if phases.get(process, SERVES) != SERVES:
                kill(process)
                continue
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT if process in phases else signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), RECORDS_S)
        self.kill()
        for process in processes:
            await process.wait()
        until_s = time.monotonic() + GONE_S
        while (remaining := process_groups().keys() & {process.pid for process in processes}) and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        if remaining:
            self.say(f"process groups {', '.join(map(str, sorted(remaining)))} do not end although they were killed")
        self.servers.clear()
        self.router.helper = None
        if self._keeper is not None:
            self._keeper.helper = self._keeper.spare = None

    def close(self) -> None:
        """Removes what all processes share. Called after the last `end`."""
        self._shared.cleanup()
        if self._keeper is not None:
            self._keeper.close()

    def urls(self) -> dict[int, str]:
        """Returns the URLs of the serving ranks' servers by rank, without those that are about to join."""
        return {r: self.servers[r].url for r in self._ranks_now.alive if r in self.servers and r not in self._joined}

    def _processes(self) -> list[asyncio.subprocess.Process]:
        helpers = [self.router.helper] + ([] if self._keeper is None else [self._keeper.helper, self._keeper.spare])
        return [each.process for each in (*self.servers.values(), *helpers) if each is not None]

    def _name(self, *ranks: int) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if self.port is None else "vLLM"

    def _lost(self, *ranks: int) -> str:
        return f"{self._name(*ranks)} {'is' if len(ranks) == 1 else 'are'} lost"

    def _relay(self) -> None:
        """Tells what the plugin writes into the servers' logs."""
        for server in self.servers.values():
            for line in server.new_lines():
                if (match := re.search(r"(?<= )aurora: .*", line)) is not None:
                    self.say(match[0].removeprefix("aurora: "))

    async def _start_server(self, rank: int, port: int, more: dict[str, str]) -> None:
        words, environ = self.command(rank, port, "" if self._keeper is None else self._keeper.store)
        log = self._log(f"rank-{rank}")
        self.changes.starts[rank] += 1
        environ = {**os.environ, **environ, **more, SECRET: self._secret, SHARED_FOLDER: self._shared.name}
        self.servers[rank] = RankServer(rank, f"http://127.0.0.1:{port}", await start_process(words, log, environ), log)

    def _log(self, name: str) -> Path:
        """Returns a new log's path: those of processes before it say why there is another."""
        self._logs[name] += 1
        return self.folder / (f"{name}-start-{self._logs[name]}.log" if self._logs[name] > 1 else f"{name}.log")

    async def _status(self, rank: int) -> Any:
        path = "/fault_tolerance/status" if self.survive else "/health"
        return await self._ask("GET", self.servers[rank].url + path, self.hang_s)

    def _look(self, rank: int, groups: ProcessGroups, answer: Any) -> Look:
        process = self.servers[rank].process
        states = groups.get(process.pid, {})
        engine = frozenset(pid for pid, state in states.items() if state.name.startswith(OF_ENGINE))
        stopped, runnable = any(each.stopped for each in states.values()), any(each.letter == "R" for each in states.values())
        (report,) = ({"status": None},) if answer is None else answer.get("engines", ({"status": "healthy"},))
        failed, error = (str(report.get(name, "")) for name in ("last_ft_request_id", "ft_error"))
        change = int(report.get("change") or 0)
        return Look(process.returncode, engine, stopped, runnable, report["status"], change, failed, error)

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

    async def _begin_change(self, lost: list[int], why: str) -> None:
        """Tells the router and all survivors of a change of ranks, of which `lost` do not serve any more."""
        ranks = self._ranks_now
        if lost or self.changes.serving.is_set():
            self._change_s = time.monotonic()
        self._told_s = time.monotonic()
        self.changes.begin(why)
        if self._keeper is not None:
            self._keeper.announce(ranks.change)
        params = {"change": ranks.change, "dead": sorted(ranks.dead), "alive": ranks.alive, "within_s": WITHIN_S}
        params |= {"changed": changed} if (changed := self.files.touched()) else {}
        body = {"instruction": "change_ranks", "secret": self._secret, "params": params}
        for rank in lost:
            self._background.add(task := asyncio.create_task(self.router.tell("remove", self.servers[rank].url)))
            task.add_done_callback(self._background.discard)
        urls = [f"{self.servers[rank].url}/fault_tolerance/apply" for rank in ranks.alive]
        answers = await asyncio.gather(*(self._ask("POST", url, self.hang_s, body) for url in urls))
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
            error = looks[refused[0]].error
            cause = match[1] if (match := WORKERS_ERROR.search(error)) else error
            return f"rank {refused[0]} refused it: {cause} (see {self.servers[refused[0]].log})"
        late = time.monotonic() - self._told_s > WITHIN_S + self.hang_s
        return f"no answer within {WITHIN_S + self.hang_s:g} s" if late else ""
