"""Streams that a lost rank ends, in front of a stand-in for the router: clients see them whole, or an error."""

import asyncio
import json

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")
from aiohttp import ClientPayloadError, ClientSession, web
from aiohttp.test_utils import TestServer
from aurora_vllm.serving_changes import STEP_FAILED, ServingChanges
from aurora_vllm.whole_streams import ResumingProxy

CONTEXT, END = 64, 7
SIGNS = [chr(97 + number) for number in range(26)] + ["é", "日"]  # of tokens 0 to 27; the last two come as two tokens each


def next_token(ids):
    """The token that the stand-in's model chooses."""
    return (31 * sum(ids) + 7 * len(ids)) % 26


class Engine:
    """Stands in for router and vLLM: a model of 26 tokens, some of which bring their text one token late, and faults as asked.

    Args:
        faults: for each request in sequence, the number of tokens after which it ends by a fault, and how; None: no fault.
    """

    def __init__(self, *faults, seeded=False):
        self.faults, self.asked, self.seeded = list(faults), [], seeded
        self.changes = ServingChanges(detected_s=0.3)
        self.changes.serving.set()

    async def answer(self, request):
        body = await request.json()
        chat = request.path.endswith("chat/completions")
        self.asked.append((request.path, body))
        after, how = self.faults.pop(0) if self.faults else (None, "")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        ids = [each if isinstance(each, int) else ord(each) % 26 for each in prompt]
        given, text, parts = list(ids), "", []
        most = body.get("max_tokens") or (CONTEXT - len(ids) if chat else 16)
        for _ in range(most):
            token = next_token(given) if not (self.seeded and body.get("seed")) else (len(given) * 5 + len(ids)) % 26
            given.append(token)
            whole = token % 3 == 0 or len(given) - len(ids) == most  # else the text comes with the next token
            text += SIGNS[token]
            parts.append(([token], text if whole and body.get("detokenize", True) else ""))
            text = "" if whole else text
        if how:
            asyncio.get_running_loop().call_later(0.05, self.recover)
            self.changes.serving.clear()
        if not body.get("stream"):
            if how == "500":
                return web.json_response({"error": {"message": "gone"}}, status=500)
            said = "".join(part for _, part in parts[:after])
            return web.json_response({"choices": [{"index": 0, "text": said, "finish_reason": "abort" if how else "length"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat:
            await self.tell(
                response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": ids}
            )
        for number, (tokens, said) in enumerate(parts):
            if number == after:
                break
            choice = {"index": 0, "token_ids": tokens, "finish_reason": "length" if number + 1 == most else None}
            choice |= {"delta": {"content": said}} if chat else {"text": said}
            choice |= {"prompt_token_ids": ids} if not number and not chat else {}
            await self.tell(response, {"choices": [choice]})
        if how == "abort" and after:  # vLLM tells no chunk of a request without tokens
            last = {"delta": {}} if chat else {"text": ""}
            await self.tell(response, {"choices": [{"index": 0, **last, "finish_reason": "abort", "token_ids": []}]})
        elif how == "error":
            await self.tell(response, {"error": {"message": "EngineCore encountered an issue", "code": 500}})
        elif how == "cut":
            request.transport.close()
            return response
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(parts), "total_tokens": len(given)}
            await self.tell(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def recover(self):
        self.changes.number += 1
        self.changes.serving.set()

    async def tell(self, response, chunk):
        head = {"id": f"request-{len(self.asked)}", "object": "a chunk", "created": 1, "model": "m"}
        await response.write(b"data: " + json.dumps(head | chunk).encode() + b"\n\n")


def ask(engine, path="/v1/completions", **body):
    """Status and events of one request through the layer."""

    async def run():
        upstream = web.Application()
        upstream.router.add_post("/v1/completions", engine.answer)
        upstream.router.add_post("/v1/chat/completions", engine.answer)
        async with TestServer(upstream) as router, ClientSession() as session:
            url = str(router.make_url("")).rstrip("/")
            proxy = ResumingProxy(lambda: url, session, engine.changes, CONTEXT)
            async with (
                TestServer(proxy.app()) as front,
                session.post(front.make_url(path), json={"model": "m", **body}) as answer,
            ):
                return answer.status, await answer.text()

    return asyncio.run(run())


def streamed(text):
    """Text, chunks and end of a stream."""
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    said = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return said, chunks, events[-1]


FAULTS = [(0, "abort"), (1, "abort"), (4, "abort"), (5, "error"), (6, "cut"), (12, "abort")]
CHATS = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("asked", [{"prompt": "hello"}, {"prompt": [3, 9, 4], "temperature": 0}, CHATS])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 12, "stream_options": {"include_usage": True}, "return_token_ids": True}])
def test_a_stream_that_a_fault_ends_is_the_stream_without_it(fault, asked, more):
    _, without = ask(Engine(), stream=True, **asked, **more)
    engine = Engine(fault, (2, "abort"))
    status, text = ask(engine, stream=True, **asked, **more)
    said, chunks, end = streamed(text)
    expected, plain, _ = streamed(without)
    assert (status, said, end) == (200, expected, "[DONE]")
    assert len({chunk["id"] for chunk in chunks}) == 1
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert ids == [token for chunk in plain for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert [chunk.get("usage") for chunk in chunks if "usage" in chunk] == [
        chunk["usage"] for chunk in plain if "usage" in chunk
    ]
    assert bool(ids) == bool(more)
    finish = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    assert finish == ["length"]


def test_tokens_without_text_are_told_as_they_come():
    asked = {"prompt": "hello", "max_tokens": 12, "detokenize": False, "return_token_ids": True}
    _, plain, _ = streamed(ask(Engine(), stream=True, **asked)[1])
    engine = Engine((5, "abort"))
    said, chunks, _ = streamed(ask(engine, stream=True, **asked)[1])
    assert said == ""
    tokens, expected = ([token for chunk in found for token in chunk["choices"][0]["token_ids"]] for found in (chunks, plain))
    assert tokens == expected
    assert len(plain) == 12
    assert engine.asked[1][1]["max_tokens"] == 7
    assert engine.asked[1][1]["detokenize"] is False


def test_an_end_without_a_reason_is_one_where_no_rank_was_lost():
    engine = Engine((0, "abort"))
    engine.recover = engine.changes.serving.set
    assert streamed(ask(engine, stream=True, prompt="hello")[1]) == ("", [], "[DONE]")


def test_several_answers_and_their_tokens_pass_unchanged():
    for more in ({"n": 2}, {"logprobs": 1}, {"prompt": ["a", "b"]}):
        engine = Engine()
        _, text = ask(engine, stream=True, **{"prompt": "hello", **more})
        assert "return_token_ids" not in engine.asked[0][1]
        assert len(streamed(text)[1]) == 16  # also chunks without text


def test_an_error_of_its_own_reaches_the_client():
    engine = Engine((4, "error"))
    engine.recover = engine.changes.serving.set  # nobody was lost
    assert "EngineCore encountered an issue" in streamed(ask(engine, stream=True, prompt="hello")[1])[1][-1]["error"]["message"]


def test_delivered_tokens_are_not_computed_again():
    engine = Engine((9, "abort"))
    ask(engine, stream=True, prompt="hello", max_tokens=40)
    (_, first), (path, second) = engine.asked
    kept = len(second["prompt"]) - 5
    assert path == "/v1/completions"
    assert first["prompt"] == "hello"
    assert 0 < kept <= 9
    assert second["max_tokens"] == 40 - kept


def test_a_resumed_request_asks_for_what_is_left_of_the_most_and_least_tokens():
    engine = Engine((4, "abort"), (3, "abort"))
    ask(engine, stream=True, prompt=[3, 9, 4], temperature=0, detokenize=False, max_tokens=12, min_tokens=6)
    assert [(body["max_tokens"], body["min_tokens"]) for _, body in engine.asked] == [(12, 6), (8, 2), (5, 0)]


@pytest.mark.parametrize("more", [{"seed": 3}, {"stop": ["zzz"], "temperature": 0}, {"seed": 3, "frequency_penalty": 1.0}])
def test_what_depends_on_where_the_answer_begins_is_computed_again_from_there(more):
    expected, _, _ = streamed(ask(Engine(seeded=True), stream=True, prompt="hello", **more)[1])
    engine = Engine((9, "abort"), seeded=True)
    said, _, _ = streamed(ask(engine, stream=True, prompt="hello", **more)[1])
    assert said == expected
    assert [body["prompt"] for _, body in engine.asked] == ["hello", "hello"]


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"logprobs": 1}, {"stop": ["zzz"]}, {"frequency_penalty": 0.1}, {"response_format": {"type": "json_object"}}],
)
def test_what_cannot_be_resumed_ends_with_an_error(more):
    engine = Engine((9, "abort"))
    _, text = ask(engine, stream=True, prompt="hello", **more)
    assert len(engine.asked) == 1
    assert streamed(text)[1][-1]["error"]["type"] == "RankLost"


@pytest.mark.parametrize("how", ["abort", "500"])
def test_an_answer_in_one_piece_is_asked_for_anew(how):
    engine = Engine((3, how))
    assert ask(engine, prompt="hello") == ask(Engine(), prompt="hello")
    assert len(engine.asked) == 2


def test_an_error_without_a_lost_rank_is_passed_on():
    engine = Engine()

    async def refuse(request):
        engine.asked.append(request.path)
        return web.json_response({"error": {"message": "this prompt"}}, status=500)

    engine.answer = refuse
    assert ask(engine, prompt="hello")[0] == 500
    assert len(engine.asked) == 1


@pytest.mark.parametrize(("delivered", "stream", "asked"), [([], True, 3), ([], False, 3), ([0, 0, 6], True, 5)])
def test_a_request_with_which_steps_fail_is_not_sent_for_ever(delivered, stream, asked):
    engine = Engine(*[(tokens, "abort") for tokens in [*delivered, *[0] * 9]])
    engine.changes.why = STEP_FAILED
    status, text = ask(engine, stream=stream, prompt="hello")
    message = (streamed(text)[1][-1] if stream else json.loads(text))["error"]["message"]
    assert (status, message) == (200 if stream else 500, "steps that compute this request fail, and it is not sent again")
    assert len(engine.asked) == asked, "tokens are a reason to go on"


def test_a_lost_rank_is_no_fault_of_the_request():
    said, _, _ = streamed(ask(Engine(*[(0, "abort")] * 9), stream=True, prompt="hello")[1])
    assert said == streamed(ask(Engine(), stream=True, prompt="hello")[1])[0]


def test_why_the_rest_of_a_stream_is_refused_reaches_the_client():
    engine = Engine((9, "abort"))
    begins = engine.answer

    async def answer(request):
        return await begins(request) if not engine.asked else web.json_response({"detail": "too long"}, status=400)

    engine.answer = answer
    said = streamed(ask(engine, stream=True, prompt="hello")[1])[1][-1]["error"]
    assert (said["code"], said["message"]) == (400, 'the rest was refused: {"detail": "too long"}')


def test_without_ranks_that_serve_again_requests_end():
    engine = Engine((3, "abort"))
    engine.recover = lambda: setattr(engine.changes, "ended", True)
    _, text = ask(engine, stream=True, prompt="hello")
    assert streamed(text)[1][-1]["error"]["code"] == 503


def test_the_proxy_sends_requests_to_the_rank_with_the_fewest_prompt_tokens():
    """Prompts of 30, 4, 30 and 4 tokens at once; then one whose rank the user gives."""

    async def go():
        asked, held = [[], []], asyncio.Event()

        async def answer(request, rank):
            asked[rank].append((len((await request.json())["prompt"]), request.headers.get("x-data-parallel-rank")))
            await held.wait()
            return web.json_response({"choices": []})

        servers = []
        for rank in range(2):
            app = web.Application()
            app.router.add_post("/v1/completions", lambda request, rank=rank: answer(request, rank))
            servers.append(TestServer(app))
            await servers[-1].start_server()
        urls = {rank: str(server.make_url("")).rstrip("/") for rank, server in enumerate(servers)}
        async with ClientSession() as session:
            front = TestServer(ResumingProxy(lambda: "", session, Engine().changes, CONTEXT, lambda: urls, True).app())
            await front.start_server()
            sent = []
            for tokens in (30, 4, 30, 4, 3):
                header = {"X-Data-Parallel-Rank": "1"} if tokens == 3 else {}
                url = front.make_url("/v1/completions")
                sent.append(asyncio.create_task(session.post(url, json={"prompt": [1] * tokens}, headers=header)))
                while sum(map(len, asked)) < len(sent):
                    assert not sent[-1].done(), await sent[-1].result().text()
                    await asyncio.sleep(0.01)
            held.set()
            assert [(await reply).status for reply in sent] == [200] * 5
            await asyncio.gather(front.close(), *(server.close() for server in servers))
        return asked

    assert asyncio.run(go()) == [[(30, None), (4, None)], [(4, None), (30, None), (3, None)]]


def test_requests_whose_key_the_router_drops_go_to_a_rank():
    asked = []

    def server(name):
        async def answer(request):
            asked.append((name, request.path, request.headers.get("Authorization")))
            return web.json_response({})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        return TestServer(app)

    async def go():
        async with server("router") as router, server("rank") as rank, ClientSession() as session:
            urls = [str(each.make_url("")).rstrip("/") for each in (router, rank)]
            proxy = ResumingProxy(lambda: urls[0], session, Engine().changes, CONTEXT, lambda: {0: urls[1]})
            async with TestServer(proxy.app()) as front:
                for path in ("/v1/responses", "/v1/embeddings"):
                    for headers in ({"Authorization": "Bearer k"}, {}):
                        async with session.post(front.make_url(path), json={}, headers=headers) as answer:
                            assert answer.status == 200

    asyncio.run(go())
    assert asked == [
        ("rank", "/v1/responses", "Bearer k"),
        ("router", "/v1/responses", None),
        ("router", "/v1/embeddings", "Bearer k"),
        ("router", "/v1/embeddings", None),
    ]


def test_a_client_sees_that_what_is_passed_on_has_broken_off():
    async def breaks_off(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"the first part")
        request.transport.close()
        return response

    async def go():
        app = web.Application()
        app.router.add_get("/v1/models", breaks_off)
        async with TestServer(app) as rank, ClientSession() as session:
            url = str(rank.make_url("")).rstrip("/")
            proxy = ResumingProxy(lambda: url, session, Engine().changes, CONTEXT)
            async with TestServer(proxy.app()) as front, session.get(front.make_url("/v1/models")) as answer:
                assert answer.status == 200
                with pytest.raises(ClientPayloadError):
                    await answer.read()

    asyncio.run(go())
