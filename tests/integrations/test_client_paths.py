"""What a stranger reaches through the front port of `aurora vllm`, what obeys commands, and what an API key opens."""

import asyncio
import importlib.util
import json
import os
import signal
from contextlib import closing, nullcontext
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from aurora_vllm import serve_command
from aurora_vllm.child_processes import free_ports
from aurora_vllm.client_paths import CLIENT_PATHS
from aurora_vllm.serving_changes import ServingChanges
from aurora_vllm.settings import SECRET
from aurora_vllm.vllm_internals import local_stores
from aurora_vllm.vllm_internals.fault_tolerance import VALIDATE, secured
from aurora_vllm.vllm_internals.replaced import replace, restore
from aurora_vllm.whole_streams import ResumingProxy

from aurora.errors import RankFailed
from tests.integrations.test_rank_servers import HANG_S, Parent, engine_of, get, until

ADMIN = [
    "/fault_tolerance/apply", "/fault_tolerance/status", "/list_workers", "/add_worker?url=http://127.0.0.1:1",
    "/remove_worker?url=http://127.0.0.1:1", "/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/pause",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/scale_elastic_ep", "/start_profile", "/server_info",
    "/workers/1", "/flush_cache", "/", "/docs", "/v1/responses/a/b", "/v1/responses/..", "/v1/responses/",
]  # fmt: skip
TRICKS = [
    "//list_workers", "/v1/models/../list_workers", "/v1/models/%2e%2e/list_workers", "/./list_workers", "/%6cist_workers",
    "/LIST_WORKERS", "/list_workers/", "/v1/models/", "/V1/models", "//v1/models", "/v1%2fmodels", "/v1/models%3f/../list_workers",
    "/v1/models;/../list_workers", "/v1/models%00", "/v1/models#/../list_workers", "/v1/responses/%2e%2e",
    "/v1/responses/..%2f..%2flist_workers", "http://127.0.0.1/list_workers", "http://127.0.0.1/v1/models",
]  # fmt: skip


def test_strangers_reach_clients_paths_alone():
    """Requests are written to a socket as they stand: HTTP clients would tidy such paths up."""
    asked = []

    async def answer(request):
        asked.append(request.raw_path)
        return web.json_response({"data": []})

    def ask(port, path, method):
        with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection._validate_path = lambda _: None
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, reply.read()

    async def run():
        upstream = web.Application()
        upstream.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(upstream) as router, ClientSession() as session:
            url = str(router.make_url("")).rstrip("/")
            proxy = ResumingProxy(lambda: url, session, ServingChanges(0.1), 64, lambda: {0: url})
            async with TestServer(proxy.app()) as front:
                for path in (*ADMIN, *TRICKS):
                    for method in ("GET", "POST", "DELETE"):
                        status, said = await asyncio.to_thread(ask, front.port, path, method)
                        assert status == 404, (method, path)
                        assert json.loads(said)["error"]["message"].startswith("path: expected one that clients use"), path
                assert asked == []
                paths = sorted(CLIENT_PATHS | {"/v1/responses/resp_1-a", "/v1/responses/resp_1/cancel", "/v1/models?limit=2"})
                for path in paths:
                    assert (await asyncio.to_thread(ask, front.port, path, "GET"))[0] == 200, path
                assert asked == [path for path in paths if path not in ("/health", "/ping")]  # which the front answers

    asyncio.run(run())


def test_commands_are_obeyed_with_the_secret_alone():
    validate = secured(lambda body: (body["instruction"], {}), "made-at-start")
    assert validate({"instruction": "change_ranks", "secret": "made-at-start"}) == ("change_ranks", {})
    for given in ("", None, ["made-at-start"], "made-at-starte", "é"):
        with pytest.raises(Refused, match="403"):
            validate({"instruction": "change_ranks", "secret": given})
    for body in ({}, [], "é", None):
        with pytest.raises(Refused, match="403, 'secret: expected that of the `aurora vllm`"):
            validate(body)


class Refused(Exception):
    """Stands in for FastAPI's HTTPException."""


HTTPException = Refused


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm installs it")
def test_vllms_own_endpoint_refuses_commands_without_the_secret():
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.fault_tolerance import api_router

    obeyed = []

    async def handle_fault(request):
        obeyed.append((request.instruction, request.params))
        return SimpleNamespace(success=True)

    replace(VALIDATE, lambda validate: secured(validate, "made-at-start"))
    app = FastAPI()
    app.state.engine_client = SimpleNamespace(handle_fault=handle_fault)
    api_router.register_fault_tolerance_api_router(app)
    client = TestClient(app)
    command = {"instruction": "retry", "params": {"a": 1}}
    for more, status in (({}, 403), ({"secret": "guess"}, 403), ({"secret": "made-at-start"}, 202)):
        assert client.post("/fault_tolerance/apply", json=command | more).status_code == status
    assert obeyed == [("retry", {"a": 1})]
    change = {"instruction": "change_ranks", "params": {"change": 1}, "secret": "made-at-start"}
    assert client.post("/fault_tolerance/apply", json=change).status_code == 202
    assert client.post("/fault_tolerance/apply", json=change | {"instruction": "another"}).status_code == 400
    assert obeyed[1:] == [("change_ranks", {"change": 1})]
    restore(VALIDATE)


def test_each_start_draws_a_secret_that_only_servers_environments_have(tmp_path, monkeypatch):
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 3)
    change = {"instruction": "change_ranks", "params": {"change": 10**9, "dead": [1, 2], "alive": [0]}}

    async def course(servers, session, groups):
        watch, server = asyncio.create_task(servers.watch()), servers.servers[0]
        await asyncio.sleep(0.6)
        environ = dict(word.partition("=")[::2] for word in Path(f"/proc/{server.process.pid}/environ").read_text().split("\0"))
        secret = environ[SECRET]
        assert len(secret) >= 32
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            assert secret not in process.read_text()
        for guess in ({}, {"secret": ""}, {"secret": secret[:-1]}):
            async with session.post(f"{server.url}/fault_tolerance/apply", json=change | guess) as answer:
                assert answer.status == 403
        os.kill(engine_of(groups[1]), signal.SIGKILL)
        await until(lambda: servers.changes.number == 2)  # the parent's own numbers still count
        status = await get(session, f"{server.url}/fault_tolerance/status")
        assert [told["params"]["change"] for told in status["told"]] == [1]
        assert not [log for log in tmp_path.glob("*.log") if secret in log.read_text()]
        watch.cancel()

    parent.run(course)
    assert SECRET not in os.environ


def served(tmp_path, monkeypatch, api_key, ask, again="never"):
    """Runs the whole command with stand-ins for vLLM; `ask` is called with the URL of its front port once it is ready.

    Returns its answer, and what is said at the end. A sentence that begins with `again` is followed by a second Ctrl-C.
    """
    parent = Parent(tmp_path, monkeypatch, ["serves"] * 2)
    (port,) = free_ports(1)
    command = SimpleNamespace(
        given=SimpleNamespace(host="127.0.0.1", port=port, revision=None), api_key=api_key, by_tokens=False,
        ranks=range(2), size=2, survive=True,
        tensor=1, state=tmp_path, model="m", command=lambda rank, own, store, rpc_port: parent.command(rank, own, store),
    )  # fmt: skip
    asked, said = [], []

    async def client():
        try:
            async with ClientSession() as session:
                asked.append(await ask(session, f"http://127.0.0.1:{port}"))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def say(sentence):
        if sentence.startswith("ready on"):
            asked.append(asyncio.get_running_loop().create_task(client()))
        elif asked:
            said.append(sentence)
        if sentence.startswith(again):
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)

    async def advise(*_):
        await asyncio.sleep(0 if again == "never" else 600)
        return {"advice": 1}

    monkeypatch.setattr(serve_command, "advise", advise)
    monkeypatch.setattr(serve_command, "model_folder", lambda *_: parent.model_folder())
    with nullcontext() if again == "never" else pytest.raises(KeyboardInterrupt):
        assert asyncio.run(serve_command.serve(command, HANG_S, None, True, say)) == ("", {"advice": 1})
    return asked[-1], said


def test_a_client_with_the_key_is_served_and_a_stranger_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k1")

    async def ask(session, url):
        change = {"instruction": "change_ranks", "params": {"change": 1, "dead": [1], "alive": [0]}}
        for path in ("list_workers", "add_worker?url=http://127.0.0.1:9", "remove_worker?url=x", "fault_tolerance/apply"):
            async with session.post(f"{url}/{path}", json=change) as answer:
                assert answer.status == 404
        found = []
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer k1"}):
            async with session.get(f"{url}/v1/models", headers=headers) as answer:
                found.append(answer.status)
        return found

    assert served(tmp_path, monkeypatch, "k1", ask)[0] == [401, 401, 200]


def test_a_key_that_the_command_does_not_know_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k1")
    with pytest.raises(RankFailed, match="--api-key: expected the key that vLLM asks for"):
        served(tmp_path, monkeypatch, None, None)
    assert not [
        line for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (line := " ".join(each.info["cmdline"] or []))
    ]


@pytest.mark.parametrize("again", ["ending the servers", "computing what a plan would bring"])
def test_ctrl_c_says_what_follows_and_a_second_one_ends_it_at_once(tmp_path, monkeypatch, again):
    _, said = served(tmp_path, monkeypatch, None, lambda _session, _url: asyncio.sleep(0), again)
    assert said[0] == "ending the servers, which write their records; the same signal again ends all at once"
    if again.startswith("computing"):
        assert said[1] == f"the servers have ended, and their record is in {tmp_path / 'seen'}"
        assert said[2].endswith(
            f"\naurora import {tmp_path}/seen --format vllm-record -o {tmp_path}/profile.npz && aurora recommend --engine vllm "
            f"--model m --profile {tmp_path}/profile.npz --cluster {tmp_path}/cluster.toml -o {tmp_path}/recommended"
        )
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(each.info["cmdline"] or [])]


def test_stores_of_ranks_on_one_host_listen_on_loopback_alone():
    pytest.importorskip("torch")
    from torch.distributed import rendezvous

    local_stores.listen_on_loopback()
    (port,) = free_ports(1)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 1))
    store.set("found", "it")
    assert store.get("found") == b"it"
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [address for address, at in listening if at == port] == ["127.0.0.1"]
    restore(local_stores.STORE)
