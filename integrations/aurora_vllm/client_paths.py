"""Allow-list of the HTTP paths that the front port of `aurora vllm` passes on: those of clients, none that changes servers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

CLIENT_PATHS = frozenset(
    {
        "/health", "/ping", "/metrics", "/version", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/v1/score",
        "/rerank", "/v1/rerank", "/v2/rerank", "/v1/embeddings", "/v2/embed", "/v1/models", "/v1/completions",
        "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/audio/transcriptions", "/v1/audio/translations",
    }
)  # fmt: skip
RESPONSE = re.compile(r"/v1/responses/[\w-]+(/cancel)?", re.ASCII)  # one answer, by its id
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware  # type: ignore[untyped-decorator]
async def only_client_paths(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers 404 unless the path, as the client wrote it, is in CLIENT_PATHS or RESPONSE.

    The text is compared before any decoding, so that no other spelling of a path (`//`, `..`, `%2e`, capitals) gets through.
    """
    path = request.raw_path.partition("?")[0]
    if path in CLIENT_PATHS or RESPONSE.fullmatch(path):
        return await handler(request)
    message = f"path: expected one that clients use, such as /v1/completions, found {path[:200]}"
    return web.json_response({"error": {"message": message, "type": "NotFoundError", "code": 404}}, status=404)
