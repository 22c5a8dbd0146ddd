"""`aurora profile --vllm`: a profile of what a running vLLM serves, by its plugin's commands over HTTP."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from aurora.errors import BadInput
from aurora.io.engine_records import load_records
from aurora.types import Profile

ANSWER_S = 120.0  # a server answers commands between forward passes


def profile_vllm_server(url: str, folder: Path, seconds: float, sleep: Callable[[float], None] = time.sleep) -> Profile:
    """Record the server's traffic for so long into `folder`, which its ranks and this process share, and read it.

    Raises BadInput where there is no server, it takes no commands, or nothing was served.
    """
    if any(folder.glob("rank-*.npz")):
        raise BadInput(f"{folder}: expected a folder without records, found some")
    _command(url, "start", str(folder.resolve()))
    sleep(seconds)
    _command(url, "stop")
    return load_records(folder)


def _command(url: str, *words: str) -> None:
    body = json.dumps({"method": "aurora", "args": list(words)}).encode()
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/collective_rpc", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        why = {
            404: "takes no commands; serve with VLLM_SERVER_DEV_MODE=1",
            500: "does not know the command; serve with --additional-config '{\"aurora\": {}}'",
        }
        raise BadInput(f"{url}: the server {why.get(error.code, f'answers {error.code}')}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{url}: no server answers: {error}") from None
