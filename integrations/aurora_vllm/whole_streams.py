"""HTTP proxy in front of vllm-router: resumes answers that were interrupted by a lost rank, so that clients get all of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout, StreamReader, web

from aurora_vllm.client_paths import only_client_paths
from aurora_vllm.ranks_metrics import metrics_page
from aurora_vllm.serving_changes import STEP_FAILED, ServingChanges

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RANK = "X-data-parallel-rank"  # header with which the user chooses the rank
CHARACTERS = 4  # of a token of text, about
DEFAULT_TOKENS = 16  # vLLM's max_tokens of completions
DONE = b"data: [DONE]\n\n"
NOT_AGAIN = "steps that compute this request fail, and it is not sent again"
NO_REASON: dict[str, Any] = {}  # vLLM ends the stream of a request that it aborts before the first token without a chunk
HOP_BY_HOP = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive", "upgrade"}
KEY_DROPPED = {  # paths on which vllm-router 0.1.17 drops the client's key
    "/v1/responses", "/v1/messages", "/v1/score", "/v1/audio/transcriptions", "/v1/audio/translations",
}  # fmt: skip
LARGEST_BODY = 1 << 29
MOST_FAILED = 3  # steps that may fail one after the other with a request that gets no token
SAMPLING = (  # fields of a request that a resumed one keeps
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop_token_ids", "ignore_eos",
    "logit_bias", "skip_special_tokens", "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "stream_options",
    "priority", "user", "include_stop_str_in_output", "detokenize",
)  # fmt: skip
COUNTED = ("stop", "presence_penalty", "frequency_penalty")  # what they do depends on where the answer begins
NOT_RESUMED = (
    "echo", "logprobs", "top_logprobs", "prompt_logprobs", "suffix", "tools", "functions", "response_format", "use_beam_search",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "kv_transfer_params",
)  # fmt: skip


class ResumedStream:
    """Answer stream of one client. After each fault it continues with a new request to the router ("upstream").

    Requests for several answers, and those with an option in NOT_RESUMED, are passed on unchanged and never resumed.

    Args:
        path: HTTP path of the request.
        body: JSON body of the request.
        context_tokens: largest number of tokens of a prompt plus its answer.

    Attributes:
        fault: the chunk with which the engine aborted the current upstream stream, or NO_REASON if it ended without one; None:
            no fault.
        finished: True once the engine has completed the answer (one of them, if there are several).
    """

    def __init__(self, path: str, body: dict[str, Any], context_tokens: int) -> None:
        self._path, self._body, self._chat, self._context = path, body, path == CHAT, context_tokens
        several = any((body.get(name) or 1) > 1 for name in ("n", "best_of")) or any(
            not isinstance(token, int) for token in body.get("prompt", ()) if isinstance(body["prompt"], list)
        )
        self._whole = not several and not any(body.get(name) for name in NOT_RESUMED)  # else nothing is changed or resumed
        self._textless = body.get("detokenize") is False  # the client is told token ids alone
        self._head: dict[str, Any] = {}  # id and the like, of the first chunk
        self._prompt: list[int] = []
        self._tokens: list[int] = []  # those whose text the client has
        self._held: list[int] = []  # those that have brought no text yet
        self._text = 0  # characters that the client has
        self._drop, self._base = (0, 0), 0  # what a replay repeats: tokens and characters; tokens before a continuation
        self._opened, self.finished, self._converted = False, False, False
        self.fault: dict[str, Any] | None = None

    def first(self) -> tuple[str, dict[str, Any]]:
        """Returns the path and the body of the first upstream request."""
        return self._path, {**self._body, "return_token_ids": True} if self._whole else self._body

    def resumed(self) -> tuple[str, dict[str, Any]] | None:
        """Returns the path and the body of the request that continues the stream after a fault; None if it cannot continue."""
        body, self.fault, self._held = self._body, None, []
        if not self._tokens and not self._text:
            return self.first()
        if not self.resumable or not self._prompt:
            return None
        seeded = body.get("seed") is not None and body.get("temperature") != 0
        if seeded or any(body.get(name) for name in COUNTED):  # the same tokens come again from the beginning
            self._drop, self._base, self._converted = (len(self._tokens), self._text), 0, False
            return self.first()
        self._drop, self._base, self._converted = (0, 0), len(self._tokens), self._chat
        new_body = {name: body[name] for name in SAMPLING if name in body}
        new_body |= {"min_tokens": max(0, body["min_tokens"] - self._base)} if body.get("min_tokens") else {}
        new_body |= {"prompt": self._prompt + self._tokens, "max_tokens": self.left, "stream": True, "return_token_ids": True}
        return COMPLETIONS, new_body

    @property
    def resumable(self) -> bool:
        """True if the stream can continue after a fault that comes after its first token."""
        again = self._body.get("temperature") == 0 or self._body.get("seed") is not None
        return self._whole and (again or not any(self._body.get(name) for name in COUNTED))

    @property
    def left(self) -> int:
        """Number of tokens that may still be generated."""
        most = self._context - len(self._prompt) if self._chat else DEFAULT_TOKENS
        limit = self._body.get("max_completion_tokens") or self._body.get("max_tokens") or most
        return max(0, int(limit) - len(self._tokens))

    @property
    def complete(self) -> bool:
        """True if the client has all tokens of the answer."""
        return self._whole and (self.finished or (bool(self._tokens) and self.left == 0))

    def rest(self) -> bytes:
        """Returns the final events of a complete answer whose stream the engine did not end regularly."""
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length",
            "delta" if self._chat else "text": {} if self._chat else "",
        }
        events = [] if self.finished else [{**self._head, "choices": [choice]}]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            events += [{**self._head, "choices": [], "usage": self._usage(len(self._tokens))}]
        return b"".join(map(event, events)) + DONE

    @property
    def told(self) -> int:
        """Number of characters and tokens that the client has."""
        return self._text + len(self._tokens)

    def _usage(self, answer: int) -> dict[str, int]:
        prompt = len(self._prompt)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def feed(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Processes a chunk from upstream. Returns the chunk to send to the client, or None to send nothing."""
        choices = chunk.get("choices", [])
        aborted = any(choice.get("finish_reason") == "abort" for choice in choices)
        self.fault = chunk if "error" in chunk or aborted else None
        if chunk.get("usage") and not choices and not self.finished:  # of an answer that has not ended
            return None
        if "error" in chunk or not self._whole:
            self._text += self.fault is None
            self.finished |= self.fault is None and any(choice.get("finish_reason") for choice in choices)
            return chunk if self.fault is None else None
        self._head = self._head or {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        passed = {name: value for name, value in chunk.items() if name != "prompt_token_ids"} | self._head
        self._prompt = self._prompt or chunk.get("prompt_token_ids") or []  # of chats
        passed["choices"] = [outgoing for choice in choices if (outgoing := self._choice(dict(choice))) is not None]
        if usage := chunk.get("usage"):
            passed["usage"] = usage | self._usage(usage["completion_tokens"] + self._base)
        return passed if passed["choices"] or not choices else None

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Takes a choice of a chunk. Returns it for the client; None if there is nothing to tell."""
        ids = choice.pop("token_ids", None) or []
        prompt = choice.pop("prompt_token_ids", None) or []
        self._prompt = self._prompt or prompt
        if choice.get("finish_reason") == "abort":
            choice["finish_reason"] = None
        if self._converted:
            choice["delta"] = {"content": choice.pop("text")}
        delta = choice.get("delta", {})
        self._whole &= not any(value for name, value in delta.items() if name not in ("role", "content"))
        text = (delta.get("content") if self._chat else choice.get("text")) or ""
        drop_tokens, drop_text = min(self._drop[0], len(ids)), min(self._drop[1], len(text))
        self._drop = self._drop[0] - drop_tokens, self._drop[1] - drop_text
        ids, text = self._held + ids[drop_tokens:], text[drop_text:]
        ended, opening = choice.get("finish_reason") is not None, bool(delta.get("role")) and not self._opened
        new = text or (self._textless and ids)
        if self._whole and not new and not ended and not opening:  # a part of a character, or a repetition
            self._held = ids
            return None
        self._tokens, self._held, self._text = self._tokens + ids, [], self._text + len(text)
        if not self._chat:
            choice["text"] = text
        elif "content" in delta:
            choice["delta"] = {**delta, "content": text}
        if self._body.get("return_token_ids"):
            choice |= {"token_ids": ids} | ({} if self._opened else {"prompt_token_ids": self._prompt})
        self._opened, self.finished = True, self.finished or ended
        return choice


class ResumingProxy:
    """Forwards requests to the router, and repeats or resumes completions and chats that a lost rank interrupted.

    Args:
        upstream: returns the URL of the router; empty if there is none now: then the proxy chooses the rank of each request.
        session: the HTTP client.
        changes: the changes of the serving ranks.
        context_tokens: largest number of tokens of a prompt plus its answer.
        ranks: returns the URLs of the serving ranks' servers by rank.
        by_tokens: True: the proxy chooses the rank of each completion and chat, by prompt tokens; False: the router does.
    """

    def __init__(
        self, upstream: Callable[[], str], session: ClientSession, changes: ServingChanges, context_tokens: int,
        ranks: Callable[[], dict[int, str]] = dict, by_tokens: bool = False,
    ) -> None:  # fmt: skip
        self._upstream, self._session, self._changes, self._context = upstream, session, changes, context_tokens
        self._ranks, self._by_tokens, self._sent = ranks, by_tokens, 0
        self._prompts: dict[int, tuple[str, int]] = {}  # URL and tokens of prompts that are not computed, by id of the request

    def app(self) -> web.Application:
        """Returns the aiohttp application that serves the proxy."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[only_client_paths])
        app.router.add_post(COMPLETIONS, self._generate)
        app.router.add_post(CHAT, self._generate)
        app.router.add_get("/metrics", metrics_page(self._session, self._ranks, self._changes))
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._ping)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    def _send(self, request: web.Request, path: str, **options: Any) -> Any:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url, of_rank = self._upstream(), self._ranks()
        if not url and not of_rank:
            raise ClientConnectionError("no rank serves now")
        if (
            not url
            or (self._by_tokens and "json" in options)
            or (request.path in KEY_DROPPED and "Authorization" in request.headers)
        ):
            url = self._url_of_rank(of_rank, prompt_tokens(options["json"]) if "json" in options else 0, request)
            headers = {name: value for name, value in headers.items() if name.lower() != RANK.lower()}  # a server has one
        return self._session.request(request.method, url + path, headers=headers, timeout=ClientTimeout(total=None), **options)

    def _url_of_rank(self, urls: dict[int, str], tokens: int, request: web.Request) -> str:
        """Returns the URL of the rank that the user gave, or else of the one with the fewest prompt tokens to compute."""
        tokens_of = {url: sum(count for at, count in self._prompts.values() if at == url) for url in urls.values()}
        fewest = min(urls, key=lambda rank: (tokens_of[urls[rank]], (rank - self._sent) % (max(urls) + 1)))
        given = request.headers.get(RANK, "")
        rank = int(given) if given in map(str, urls) else fewest
        self._prompts[id(request)], self._sent = (urls[rank], tokens), self._sent + 1
        return urls[rank]

    async def _health(self, _request: web.Request) -> web.Response:
        """Readiness: whether ranks serve, or will after a change of them."""
        return web.Response() if self._ranks() else failure(503, f"no rank serves now: {self._changes.why}")

    async def _ping(self, _request: web.Request) -> web.Response:
        """Liveness: this process runs."""
        return web.Response()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """Passes a request on as it is."""
        response = None
        try:
            async with self._send(request, request.path_qs, data=await request.read(), allow_redirects=False) as answer:
                headers = {"Content-Type": answer.headers.get("Content-Type", "")}
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                return response
        except ClientError as error:
            if response is None or not response.prepared:
                return failure(502, f"no rank answers: {error}")
            if request.transport is not None:
                request.transport.close()  # so the client sees that this is not all
            return response
        finally:
            self._prompts.pop(id(request), None)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return await self._pass(request)
        try:
            return await (self._stream if body.get("stream") else self._answer)(request, body)
        finally:
            self._prompts.pop(id(request), None)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answers in one piece. Nothing has reached the client before, so a request that a fault ended is sent anew."""
        failed_steps = 0
        while failed_steps < MOST_FAILED:
            number = self._changes.number
            try:
                async with self._send(request, request.path_qs, json=body) as answer:
                    status, kind, text = answer.status, answer.content_type, await answer.read()
            except ClientError as error:
                status, kind, text = 502, "text/plain", str(error).encode()
            if not (status >= 500 or was_aborted(text)) or not await self._changes.after(number):
                return web.Response(status=status, body=text, content_type=kind)
            failed_steps += self._changes.why == STEP_FAILED
        return failure(500, NOT_AGAIN)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Streams an answer, which is among the `streams` of changes while it is under way."""
        stream = ResumedStream(request.path, body, self._context)
        self._changes.streams.add(stream)
        try:
            return await self._stream_whole(request, stream)
        finally:
            self._changes.streams.remove(stream)

    async def _stream_whole(self, request: web.Request, stream: ResumedStream) -> web.StreamResponse:
        """Streams an answer, over as many upstream streams as it takes."""
        response, failed_steps = None, 0
        path, body = stream.first()
        while True:
            number, told_before, failed = self._changes.number, stream.told, failure(502, "no rank answers")
            try:
                async with self._send(request, path, json=body) as answer:
                    if answer.status != 200:
                        failed = web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
                        if answer.status < 500:
                            refused = f"the rest was refused: {failed.text}"
                            return failed if response is None else await with_error(response, refused, answer.status)
                    else:
                        response = response or await opened(request)
                        if await told(stream, answer.content, response, lambda: self._prompts.pop(id(request), None)):
                            return response
            except ClientError:
                pass
            if response is not None and (request.transport is None or request.transport.is_closing()):
                return response  # the client has gone
            if stream.complete and response is not None:
                await response.write(stream.rest())
                return response
            fault = stream.fault
            resumed = stream.resumed() if await self._changes.after(number) else None
            failed_steps = (failed_steps if stream.told == told_before else 0) + (self._changes.why == STEP_FAILED)
            if resumed is not None and failed_steps >= MOST_FAILED:
                return failure(500, NOT_AGAIN) if response is None else await with_error(response, NOT_AGAIN, 500)
            if resumed is not None:
                path, body = resumed
                self._changes.resumed += response is not None
                continue
            if response is None:
                return failed
            if fault is NO_REASON:  # of no lost rank
                await response.write(DONE)
                return response
            if fault is not None and "error" in fault:
                await response.write(event(fault) + DONE)
                return response
            broken = "serving has ended" if self._changes.ended else "the rank's answer broke off"
            why = self._changes.why if self._changes.number > number else broken
            return await with_error(response, f"{why}, and this stream cannot be resumed", 503)


async def opened(request: web.Request) -> web.StreamResponse:
    """Opens a stream of server-sent events to the client that made `request`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def told(stream: ResumedStream, content: StreamReader, response: web.StreamResponse, begun: Callable[[], object]) -> bool:
    """Forwards the chunks from upstream to the client. Returns True if the upstream stream ended regularly.

    Args:
        stream: the stream.
        content: the chunks from upstream.
        response: the stream to the client.
        begun: called at each chunk: the prompt is computed.
    """
    async for chunk in chunks(content):
        begun()
        if chunk is None and stream.finished:
            await response.write(DONE)
            return True
        if chunk is None:
            stream.fault = NO_REASON
            break
        if (passed := stream.feed(chunk)) is not None:
            await response.write(event(passed))
        if stream.fault is not None:
            break
    return False


def prompt_tokens(body: dict[str, Any]) -> int:
    """Returns the tokens of a request's prompt, exactly if it is given as tokens; text has about one for CHARACTERS."""
    prompt = body.get("prompt", body.get("messages"))
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    return len(json.dumps(prompt)) // CHARACTERS


def was_aborted(text: bytes) -> bool:
    """Returns True if the JSON text of an answer has a choice that the engine aborted."""
    if b'"abort"' not in text:
        return False
    try:
        choices = json.loads(text)["choices"]
        return any(choice.get("finish_reason") == "abort" for choice in choices)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def event(chunk: dict[str, Any]) -> bytes:
    """Returns a chunk encoded as a server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def api_error(status: int, message: str) -> dict[str, Any]:
    """Returns an error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": "RankLost" if status > 500 else "RequestFailed", "code": status}}


def failure(status: int, message: str) -> web.Response:
    """Returns an HTTP response with an error."""
    return web.json_response(api_error(status, message), status=status)


async def with_error(response: web.StreamResponse, message: str, status: int) -> web.StreamResponse:
    """Ends a stream with an error."""
    await response.write(event(api_error(status, message)) + DONE)
    return response


async def chunks(content: StreamReader) -> AsyncIterator[dict[str, Any] | None]:
    """Yields the chunks of a stream of server-sent events; None for the event that marks its regular end."""
    buffer = b""
    async for part in content.iter_any():
        *events, buffer = (buffer + part).split(b"\n\n")
        for message in events:
            data = message.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                yield None
            elif data.startswith(b"{"):
                yield json.loads(data)
