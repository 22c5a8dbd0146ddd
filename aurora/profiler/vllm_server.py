"""Profiles the traffic of a running vLLM server; aurora's plugin records it and takes commands over HTTP."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from aurora.errors import BadInput
from aurora.io.engine_records import load_records
from aurora.types import Profile

ANSWER_S = 120.0  # longest wait for an answer; a server answers between forward passes


def profile_vllm_server(url: str, folder: Path, seconds: float, sleep: Callable[[float], None] = time.sleep) -> Profile:
    """Records a vLLM server's routing for some time, and returns it as a Profile.

    Args:
        url: the server's address, e.g. "http://localhost:8000". It runs with aurora's plugin and VLLM_SERVER_DEV_MODE=1.
        folder: folder in which the server's ranks write their records and this process reads them.
        seconds: how long to record.
        sleep: called with `seconds` to wait.

    Raises:
        BadInput: if no server answers or it takes no commands, the folder holds records already, or nothing was served.
    """
    if any(folder.glob("rank-*.npz")):
        raise BadInput(f"{folder}: expected a folder without records, found some")
    _send_command(url, "start", str(folder.resolve()))
    sleep(seconds)
    _send_command(url, "stop")
    return load_records(folder)


def _send_command(url: str, *words: str) -> None:
    """Send a command to the plugin on all of the server's ranks, or raise BadInput."""
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
