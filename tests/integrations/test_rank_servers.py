"""The parent of rank servers: who is lost, what the others are told, and that no process is left; with stand-ins for vLLM."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from aurora_vllm import child_processes, keeper_and_router, rank_servers
from aurora_vllm.child_processes import free_ports, process_groups
from aurora_vllm.model_files import ModelFiles
from aurora_vllm.rank_servers import RankServers
from aurora_vllm.serving_ranks import Look, ServingRanks
from aurora_vllm.settings import JOINS
from aurora_vllm.whole_streams import ResumedStream, ResumingProxy

from aurora.errors import RankFailed

HANG_S = 1.5
SERVER = """
import asyncio, json, os, subprocess, sys, time
from aiohttp import web

rank, port = map(int, sys.argv[1:3])
if sys.argv[3] == "broken":
    sys.exit("ValueError: no such model")
engine = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'VLLM::Engine'); time.sleep(600)"
ERROR = "Worker failed with error 'no slot', please check the stack trace above for the root cause"
state = {"id": rank, "status": "healthy", "change": 0}
told = []
subprocess.Popen([sys.executable, "-c", engine])
print("INFO Initializing a V1 LLM engine")
print("INFO [plugin] aurora: rank %d places experts" % rank)

async def health(request):
    if sys.argv[3] == "loads":
        await asyncio.sleep(600)
    return web.json_response({})

async def status(request):
    return web.json_response({"engines": [state], "told": told})

async def complete(request):
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    ids, changes = list(body["prompt"]), len(told)
    for number in range(body["max_tokens"]):
        ids.append(sum(ids) % 251)
        await asyncio.sleep(0.02)
        fault = len(told) > changes
        last = number + 1 == body["max_tokens"]
        choice = {"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"} if fault else {
            "index": 0, "text": chr(300 + ids[-1]), "token_ids": ids[-1:], "finish_reason": "length" if last else None}
        choice["prompt_token_ids"] = body["prompt"]
        await response.write(b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\\n\\n")
        if fault:
            break
    await response.write(b"data: [DONE]\\n\\n")
    return response

async def metrics(request):
    return web.Response(text='# TYPE vllm:tokens_total counter\\nvllm:tokens_total{engine="0"} %d\\n' % (rank + 1))

async def models(request):
    key = os.environ.get("VLLM_API_KEY")
    if key and request.headers.get("Authorization") != "Bearer " + key:
        return web.json_response({"error": "Unauthorized"}, status=401)
    return web.json_response({"data": [{"max_model_len": 512}]})

async def apply(request):
    body = await request.json()
    if body.pop("secret", None) != os.environ["AURORA_COMMAND_SECRET"]:
        return web.json_response({}, status=403)
    told.append(body)
    if sys.argv[3] == "dies" and "AURORA_RANK_JOINS" in os.environ:
        os._exit(1)
    if sys.argv[3] in ("refuses", "sticks"):
        state.update(status="unhealthy" if sys.argv[3] == "refuses" else "healthy", ft_error=ERROR, last_ft_request_id="r")
    elif sys.argv[3] != "waits":
        state.update(status="healthy", change=body["params"]["change"])
    return web.json_response({"request_id": "r"}, status=202)

app = web.Application()
app.add_routes([web.get("/health", health), web.get("/fault_tolerance/status", status), web.post("/fault_tolerance/apply", apply)])
app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models), web.get("/metrics", metrics)])
time.sleep(0.5)
web.run_app(app, host="127.0.0.1", port=port, print=None)
"""
ROUTER = """
import sys
from aiohttp import ClientSession, web

removed, added, asked = [], [], []
urls = [word for word in sys.argv[sys.argv.index("--worker-urls") :] if word.startswith("http")]

async def deal(request):
    alive = [url for url in urls + added if url not in removed]
    asked.append(url := alive[len(asked) % len(alive)])
    response = web.StreamResponse()
    sent = {"data": await request.read(), "headers": request.headers}
    async with ClientSession() as session, session.request(request.method, url + request.path, **sent) as answer:
        response.set_status(answer.status)
        await response.prepare(request)
        async for part in answer.content.iter_any():
            await response.write(part)
    return response

async def remove(request):
    removed.append(request.query["url"])
    return web.json_response({})

async def add(request):
    added.append(request.query["url"])
    return web.json_response({})

async def health(request):
    return web.json_response({"removed": removed, "added": added})

app = web.Application()
app.add_routes([web.get("/health", health), web.post("/remove_worker", remove), web.post("/add_worker", add)])
app.add_routes([web.get("/list_workers", health), web.route("*", "/{path:.*}", deal)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)
"""

KEEPER = """
import os, socket, sys

assert socket.socket(fileno=os.dup(int(sys.argv[1]))).getsockname()[0] == "127.0.0.1"
if sys.stdin.readline():
    print("serves", flush=True)
for line in sys.stdin:
    print(line.strip(), file=sys.stderr, flush=True)
"""


def looks(**changed):
    """A look at each of three ranks that serve."""
    usual = {rank: Look(processes=frozenset({10 + rank})) for rank in range(3)}
    return usual | {int(name.removeprefix("rank")): look for name, look in changed.items()}


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (Look(exit_code=-9), "its server ended, killed by signal 9"),
        (Look(exit_code=1), "its server ended, exit code 1"),
        (Look(), "its process 11 ended"),
        (Look(processes=frozenset({11}), status="dead"), "its workers ended"),
    ],
)
def test_a_rank_whose_process_ended_is_lost_at_once(look, why):
    ranks = ServingRanks(range(3), HANG_S)
    assert ranks.lost(looks(), 0.0) == {}
    assert ranks.lost(looks(rank1=look), 0.1) == {1: why}
    assert (ranks.alive, ranks.dead, ranks.change) == ([0, 2], [1], 1)
    assert ranks.lost(looks(), 0.2) == {}
    assert ranks.change == 1


@pytest.mark.parametrize(
    ("look", "how", "part"),
    [
        (Look(None, frozenset({11}), stopped=True), "is stopped", 0.5),
        (Look(None, frozenset({11}), status=None), "does not answer", 1.0),
    ],
)
def test_a_rank_that_is_silent_is_lost_after_a_while_and_not_if_it_comes_back(look, how, part):
    ranks = ServingRanks(range(3), HANG_S)
    for now, each in ((0.0, looks()), (0.5, looks(rank1=look)), (1.0, looks(rank1=look)), (1.5, looks())):
        assert ranks.lost(each, now * part) == {}
    assert not any(ranks.lost(looks(rank1=look), now * part) for now in (2.0, 2.9))
    assert ranks.lost(looks(rank1=look), 3.0 * part) == {1: f"it {how} for {HANG_S * part:.3g} s"}


def test_a_busy_machine_makes_no_rank_lost():
    """Time counts for no rank while the parent itself does not run, and a rank that waits for a processor has longer."""
    silent, starved = (Look(None, frozenset({11}), runnable=runnable, status=None) for runnable in (False, True))
    ranks = ServingRanks(range(3), HANG_S)
    for now_s, look in ((0.0, Look(processes=frozenset({11}))), (1.0, silent)):
        assert ranks.lost(looks(rank1=look), now_s) == {}
    ranks.stalled(8.0)
    assert not any(ranks.lost(looks(rank1=silent), now_s) for now_s in (9.0, 9.4))
    assert ranks.lost(looks(rank1=silent), 9.5) == {1: "it does not answer for 1.5 s"}
    ranks = ServingRanks(range(3), HANG_S)
    ranks.lost(looks(), 0.0)
    waits_s = np.arange(0.5, 4 * HANG_S, 0.5)
    assert not any(ranks.lost(looks(rank1=starved), now_s) for now_s in waits_s)
    assert ranks.lost(looks(rank1=starved), 4 * HANG_S) == {1: "it does not answer for 6 s"}


def test_a_change_is_complete_when_all_that_are_left_have_made_it():
    ranks = ServingRanks(range(3), HANG_S)
    ranks.lost(looks(), 0.0)
    ranks.lost(looks(rank0=Look(exit_code=0)), 0.1)
    made, old = Look(processes=frozenset({11}), change=1), Look(processes=frozenset({12}))
    assert not ranks.complete(looks(rank1=made, rank2=old))
    ranks.lost(looks(rank1=made, rank2=Look(exit_code=0)), 0.2)
    assert ranks.change == 2
    assert not ranks.complete(looks(rank1=made))
    assert ranks.complete(looks(rank1=Look(change=2)))


def test_a_step_that_fails_gets_a_change_though_nobody_is_lost():
    ranks = ServingRanks(range(2), HANG_S)
    waits, serves = Look(status="unhealthy"), Look()
    assert [ranks.faulted({0: serves, 1: serves}, 0.0), ranks.faulted({0: waits, 1: serves}, 0.5)] == [False, False]
    ranks.lost({0: serves, 1: Look(exit_code=1)}, 0.9)  # which has been the reason
    made, waits = Look(change=1), Look(status="unhealthy", change=1)
    told = [
        ranks.faulted({0: look}, now_s) for look, now_s in ((made, 6.0), (waits, 6.5), (made, 7.0), (waits, 7.5), (waits, 8.1))
    ]
    assert told == [False] * 4 + [True]
    assert ranks.change == 2
    assert not ranks.faulted({0: waits}, 9.5)  # has not made it yet
    ranks, failed = ServingRanks(range(2), HANG_S), {0: Look(status="unhealthy"), 1: serves}
    looked = [({0: serves, 1: serves}, 3.0), (failed, 3.5), (failed, 4.1)]
    assert [ranks.faulted(each, now_s) for each, now_s in looked] == [False, False, True]


@pytest.mark.parametrize("first", [Look(), Look(exit_code=1)])
def test_a_rank_that_ends_at_the_first_look_can_come_back(first):
    ranks = ServingRanks(range(2), HANG_S)
    ranks.lost({0: Look(), 1: first}, 0.0)
    ranks.lost({rank: Look() if rank == 0 else Look(exit_code=1) for rank in ranks.alive}, 0.1)
    ranks.join(1)
    assert ranks.lost({0: Look(), 1: Look(exit_code=1)}, 0.2) == {1: "its server ended, exit code 1"}
    ranks.join(1)
    assert ranks.alive == [0, 1]


def test_ports_of_servers_are_none_that_connections_take():
    """A server binds its port a minute after it was drawn."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert lowest <= child_processes.FIRST_PORT or max(ports) < lowest
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_server_that_does_not_obey_ends_after_the_command_all_the_same():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); from aurora_vllm import child_processes\n"
    deaf += "child_processes.end_with_command(0.2); print('deaf', flush=True); time.sleep(600)"
    starts = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    words = [sys.executable, "-c", f"{starts}; time.sleep(600)", deaf]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as command:
        assert command.stdout.readline() == b"deaf\n"
        command.kill()
        command.communicate(timeout=60)  # the pipe ends with the last of both


class Parent:
    """A parent of stand-ins; what it says and asks."""

    def __init__(self, folder, monkeypatch, kinds, survive=True, rejoin=False):
        (folder / "vllm_router").mkdir()
        (folder / "vllm_router/__init__.py").touch()
        (folder / "vllm_router/launch_router.py").write_text(ROUTER)
        (folder / "server.py").write_text(SERVER)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        self.folder, self.kinds, self.survive, self.rejoin, self.said = folder, kinds, survive, rejoin, []
        self.weights = folder / "model/model.safetensors"
        self.weights.parent.mkdir()
        self.weights.write_bytes(b"weights")

        (folder / "stand_in_keeper.py").write_text(KEEPER)
        monkeypatch.setattr(keeper_and_router, "KEEPER", "stand_in_keeper")

    def command(self, rank, port, store):
        assert bool(store) == self.survive
        return [sys.executable, "-u", str(self.folder / "server.py"), str(rank), str(port), self.kinds[rank]], {}

    def model_folder(self):
        return self.weights.parent

    def watched(self, course):
        """Runs a course beside the watch, which has looked at all ranks once, and which the course may wait for."""

        async def beside(servers, session, groups):
            watch = asyncio.create_task(servers.watch())
            await asyncio.sleep(0.6)
            await course(servers, session, groups, watch)
            watch.cancel()

        self.run(beside)

    def run(self, course):
        async def run():
            async with ClientSession() as session:
                ranks = range(len(self.kinds))
                how = HANG_S, self.survive, session, self.said.append, ModelFiles(self.model_folder), self.rejoin
                servers = RankServers(self.command, ranks, None, self.folder, *how)
                groups = []
                try:
                    await servers.start()
                    groups = [server.process.pid for server in servers.servers.values()]
                    await course(servers, session, groups)
                finally:
                    await servers.end()
                    servers.close()
                assert not any(process_groups().get(group) for group in groups)

        asyncio.run(run())


async def until(condition, limit_s=30.0):
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s
        await asyncio.sleep(0.05)


async def get(session, url):
    async with session.get(url) as answer:
        return await answer.json()


async def told(session, url):
    """The changes that a rank was told of."""
    return [each["params"] for each in (await get(session, f"{url}/fault_tolerance/status"))["told"]]


def engine_of(group):
    return next(pid for pid, state in process_groups()[group].items() if state.name.startswith("VLLM::"))


def test_survivors_are_told_of_lost_ranks_in_numbered_changes(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 4)

    async def course(servers, session, groups, watch):
        urls = {rank: server.url for rank, server in servers.servers.items()}
        os.kill(engine_of(groups[2]), signal.SIGKILL)  # a worker
        await until(lambda: servers.changes.number == 2)
        os.killpg(groups[0], signal.SIGSTOP)
        await until(lambda: servers.changes.number == 3)
        assert groups[0] not in process_groups()
        assert groups[2] not in process_groups()
        first, second = await told(session, urls[1])
        assert first == {"change": 1, "dead": [2], "alive": [0, 1, 3], "within_s": 40.0}
        assert second == {"change": 2, "dead": [0, 2], "alive": [1, 3], "within_s": 40.0}
        assert (await get(session, f"{servers.router.url}/health"))["removed"] == [urls[2], urls[0]]
        os.kill(groups[1], signal.SIGKILL)  # an API server
        await until(lambda: servers.changes.number == 4)
        os.kill(groups[3], signal.SIGKILL)
        assert await watch == "its server ended, killed by signal 9"

    parent.watched(course)
    assert any(said.startswith("rank 0 is lost: it is stopped for ") for said in parent.said)
    assert "rank 1 places experts" in parent.said
    assert any(said.endswith("ranks 0, 1, 2, 3 serving") for said in parent.said)


async def stream(session, url, prompt):
    body = {"model": "m", "prompt": prompt, "max_tokens": 60, "stream": True, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


async def page(session, url):
    """The lines of an answer, without comments."""
    async with session.get(url) as answer:
        assert answer.status == 200
        return [line for line in (await answer.text()).splitlines() if not line.startswith("#")]


def test_clients_see_whole_streams_while_ranks_are_lost(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 3)

    async def course(servers, session, groups):
        watch = asyncio.create_task(servers.watch())
        proxy = ResumingProxy(lambda: servers.router.url, session, servers.changes, 512)
        async with TestServer(proxy.app()) as front:
            url = str(front.make_url("")).rstrip("/")
            prompts = [[number, 7, 11] for number in range(6)]
            expected = await asyncio.gather(*(stream(session, url, prompt) for prompt in prompts))
            assert {len(text) for text in expected} == {60}
            for lost in (1, 0):
                again = asyncio.gather(*(stream(session, url, prompt) for prompt in prompts))
                await asyncio.sleep(0.5)
                os.killpg(groups[lost], signal.SIGKILL)
                assert await again == expected
        watch.cancel()

    parent.run(course)
    assert sum("serve on" in said for said in parent.said) == 2


@pytest.mark.parametrize("settled_s", [0.0, 600.0])
def test_a_lost_rank_is_started_again_and_joins_the_others(tmp_path, monkeypatch, settled_s):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 3, rejoin=True)
    for name, value in (("SETTLED_S", settled_s), ("PAUSE_S", 60.0)):
        monkeypatch.setattr(rank_servers, name, value)

    async def course(servers, session, groups, watch):
        servers.changes.streams.add(ResumedStream("/v1/completions", {"n": 2}, 100))  # which a join would end
        os.killpg(groups[1], signal.SIGKILL)
        await until(lambda: servers.servers[1].phase == "serving" and servers.servers[1].process.pid != groups[1])
        await asyncio.sleep(0.6)
        assert servers.changes.number == 2
        servers.changes.streams.clear()
        await until(lambda: servers.changes.number == 3)
        assert await told(session, servers.servers[0].url) == [
            {"change": 1, "dead": [1], "alive": [0, 2], "within_s": 40.0},
            {"change": 2, "dead": [], "alive": [0, 1, 2], "within_s": 40.0},
        ]
        again = servers.servers[1]
        assert [each["change"] for each in await told(session, again.url)] == [2]
        assert (await get(session, f"{servers.router.url}/health"))["added"] == [again.url]
        assert f"{JOINS}=1" in Path(f"/proc/{again.process.pid}/environ").read_text().split("\0")
        os.kill(engine_of(again.process.pid), signal.SIGKILL)
        await until(lambda: servers.changes.number == (4 if settled_s else 5))
        await asyncio.sleep(1.0 if settled_s else 0.0)
        assert servers.changes.starts[1] == (2 if settled_s else 3)

    parent.watched(course)
    waits = "rank 1 was lost soon after it came back, and is started again after 60 s"
    assert parent.said.count(waits) == (1 if settled_s else 0)
    assert sum(said.startswith("3 of 3 ranks serve on") for said in parent.said) == (1 if settled_s else 2)


def test_a_rank_that_dies_whenever_it_joins_waits_longer_each_time(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves", "dies", "serves"], rejoin=True)
    monkeypatch.setattr(rank_servers, "PAUSE_S", 0.5)

    async def course(servers, session, groups, watch):
        os.killpg(groups[1], signal.SIGKILL)
        await until(lambda: servers.changes.losses[1] == 4 and servers.changes.serving.is_set(), 60.0)
        assert not watch.done()

    parent.watched(course)
    assert [said.rpartition("after ")[2] for said in parent.said if "soon after it came back" in said] == [
        "0.5 s",
        "1 s",
        "2 s",
    ]


@pytest.mark.parametrize("room", [2**60, 0])
def test_lost_ranks_are_started_side_by_side_while_there_is_memory(tmp_path, monkeypatch, room):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 4, rejoin=True)
    monkeypatch.setattr(rank_servers, "free_memory", lambda: room)

    async def course(servers, session, groups, watch):
        for lost in (1, 2):
            os.killpg(groups[lost], signal.SIGKILL)
        await until(lambda: any(said.startswith("4 of 4 ranks serve on") for said in parent.said))
        assert servers.changes.starts == {0: 1, 1: 2, 2: 2, 3: 1}
        assert servers.changes.losses == {1: 1, 2: 1}

    parent.watched(course)
    started = [at for at, said in enumerate(parent.said) if "is started again" in said]
    between = [said for said in parent.said[slice(*started)] if "serve on" in said]
    assert between == [] if room else between[0].startswith("3 of 4 ranks serve on")


@pytest.mark.parametrize("when", ["while it is lost", "while it loads"])
def test_a_lost_rank_that_loads_other_weights_does_not_join(tmp_path, monkeypatch, when):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 3, rejoin=True)
    before = parent.weights.stat()

    def change():
        parent.weights.write_bytes(b"Weights")
        os.utime(parent.weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times does

    async def course(servers, session, groups, watch):
        if when == "while it is lost":
            change()
        os.killpg(groups[1], signal.SIGKILL)
        await until(lambda: servers.servers[1].process.pid != groups[1])
        if when == "while it loads":
            change()
        await until(lambda: any("could not join" in each for each in parent.said))
        assert servers.changes.serving.is_set()
        os.killpg(groups[2], signal.SIGKILL)
        await until(lambda: servers.changes.number == 3)
        assert not watch.done()
        first, second = await told(session, servers.servers[0].url)
        assert [first["alive"], second["alive"]] == [[0, 2], [0]]
        assert second["changed"] == f"{parent.weights} has changed since the serving ranks loaded it"

    parent.watched(course)
    (refused,) = [each for each in parent.said if "could not join" in each]
    why = "the model's files changed while the rank loaded them"
    if when == "while it is lost":
        why = f"{parent.weights} has changed since the serving ranks loaded it"
    assert refused == f"rank 1 could not join: {why}; it is left out"


def test_weights_that_change_while_all_ranks_load_them_end_the_start(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 2)

    async def change():
        await asyncio.sleep(0.3)
        parent.weights.write_bytes(b"other")

    async def course(servers, session, groups):
        await servers.end()
        changing = asyncio.create_task(change())
        with pytest.raises(RankFailed, match=r"model\.safetensors changed while ranks loaded it"):
            await servers.start()
        await changing

    parent.run(course)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("broken", "rank 1 did not come back, exit code 1"),
        ("loads", "rank 1 did not come back within 2 s, and was ended while "),
        ("refuses", "rank 1 could not join: rank 1 refused it: no slot (see "),
        ("waits", "rank 1 could not join: no answer within 2.5 s"),
    ],
)
def test_the_others_serve_on_when_a_lost_rank_does_not_come_back(tmp_path, monkeypatch, kind, said):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 2, rejoin=True)
    within_s, slower = 1.0 if kind == "waits" else 40.0, 0.0 if kind == "loads" else 1e3
    for name, seconds in (("PAUSE_S", 0.1), ("LEAST_S", 2.0), ("SLOWER", slower), ("WITHIN_S", within_s)):
        monkeypatch.setattr(rank_servers, name, seconds)

    async def course(servers, session, groups):
        if kind == "broken":  # ends before it is first looked at
            monkeypatch.setattr(rank_servers, "LOOK_S", 1.2)
        watch = asyncio.create_task(servers.watch())
        await asyncio.sleep(0.6)
        parent.kinds[1] = kind
        os.killpg(groups[1], signal.SIGKILL)
        await until(lambda: watch.done() or any(each.endswith("left out") for each in parent.said), 120.0)
        await until(servers.changes.serving.is_set)
        await asyncio.sleep(1.0)
        assert not watch.done()
        assert not process_groups().get(servers.servers[1].process.pid)
        watch.cancel()

    parent.run(course)
    ends = [each.rpartition("; ")[2] for each in parent.said if each.startswith(said)]
    assert ends == ["it is tried again", "it is left out"], "the same once more is hopeless"
    assert sum("is started again" in each for each in parent.said) == 2


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_new_keeper_and_a_new_router_come_and_streams_are_whole(tmp_path, monkeypatch, sent):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 2)

    async def course(servers, session, groups, watch):
        proxy = ResumingProxy(lambda: servers.router.url, session, servers.changes, 512, servers.urls)
        async with TestServer(proxy.app()) as front:
            url = str(front.make_url("")).rstrip("/")
            expected = await stream(session, url, [7, 11])
            for helped, line, number in ((servers.router, "router", 2), (servers._keeper, "keeper", 3)):
                again = asyncio.create_task(stream(session, url, [7, 11]))
                await asyncio.sleep(0.5)
                old = helped.helper.process
                os.kill(old.pid, sent)
                await until(lambda number=number: servers.changes.number == number)
                assert await again == expected
                assert [await stream(session, url, [7, 11]) for _ in range(3)] == [expected] * 3
                await until(lambda: servers.router.url)
                assert helped.helper.process.pid != old.pid
                how = "ended, killed by signal 9" if sent == signal.SIGKILL else "is stopped for"
                assert sum(said.startswith(f"the {line} {how}") for said in parent.said) == 1
            assert await page(session, f"{url}/health") == await page(session, f"{url}/ping") == []
            shown = await page(session, f"{url}/metrics")
            assert shown[:2] == ["aurora_ranks 2.0", "aurora_ranks_serving 2.0"]
            assert shown[2] == f"aurora_streams_resumed_total {servers.changes.resumed}.0" != "aurora_streams_resumed_total 0.0"
            assert shown[3:5] == [f'aurora_rank_losses_total{{rank="{rank}"}} 0.0' for rank in range(2)]
            assert shown[7:] == [f'vllm:tokens_total{{engine="0",rank="{rank}"}} {rank + 1}.0' for rank in range(2)]
        assert [each["alive"] for each in await told(session, servers.servers[0].url)] == [[0, 1]]
        assert (tmp_path / "keeper-start-2.log").read_text() == "1\n"

    parent.watched(course)


def test_without_survival_a_lost_rank_ends_the_watch(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 2, survive=False)

    async def course(servers, session, groups, watch):
        killed = engine_of(groups[1])
        os.kill(killed, signal.SIGKILL)
        assert await watch == f"its process {killed} ended"

    parent.watched(course)


def test_a_survivor_that_refuses_ends_the_watch(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves", "serves", "refuses"])

    async def course(servers, session, groups, watch):
        os.killpg(groups[0], signal.SIGKILL)
        assert (await watch).startswith("the switch to ranks 1, 2 failed: rank 2 refused it: no slot (see ")

    parent.watched(course)


def test_a_rank_that_is_stuck_in_a_step_is_lost_and_the_others_serve_on(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves", "serves", "sticks", "serves"])

    async def course(servers, session, groups, watch):
        os.killpg(groups[0], signal.SIGKILL)
        await until(lambda: servers.changes.number == 2)
        assert not process_groups().get(groups[2])
        assert [(each["change"], each["dead"]) for each in await told(session, servers.servers[1].url)] == [
            (1, [0]),
            (2, [0, 2]),
        ]

    parent.watched(course)
    assert any(said.startswith("rank 2 is lost: its step does not end") for said in parent.said)


def test_a_server_that_ends_while_it_starts_is_named_with_its_reason(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves", "broken"])
    with pytest.raises(RankFailed, match="rank 1 ended while it started, exit code 1: ValueError: no such model"):
        parent.run(None)
