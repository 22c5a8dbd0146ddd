"""Profiles the traffic of a running vLLM server; aurora's plugin records it and takes commands over HTTP."""

import http.client
import json
import secrets
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

    The record is written to a new folder in `folder`. Records that the server makes beside it are left alone.

    Args:
        url: the server's address, e.g. "http://localhost:8000". It runs with aurora's plugin and VLLM_SERVER_DEV_MODE=1.
        folder: the folder that the server's setting "record" names, as this process sees it.
        seconds: how long to record.
        sleep: called with `seconds` to wait.

    Raises:
        BadInput: if no server answers, it refuses to record, `folder` is not the server's, or nothing was served.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    _send_command(url, "start", name)
    try:
        sleep(seconds)
    finally:
        answer = _send_command(url, "stop", name)
    if not (folder / name).is_dir():
        raise BadInput(f'{folder}: expected the folder of the setting "record"; the server answers: {answer}')
    return load_records(folder / name)


def _send_command(url: str, *words: str) -> str:
    """Sends a command to the plugin on all of the server's ranks. Returns the first rank's answer, or raises BadInput."""
    body = json.dumps({"method": "aurora", "args": list(words)}).encode()
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/collective_rpc", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            answers = json.load(reply)["results"]
    except urllib.error.HTTPError as error:
        why = {
            404: "takes no commands; serve with VLLM_SERVER_DEV_MODE=1",
            500: 'does not know the command; serve with --additional-config \'{"aurora": {"record": "seen"}}\'',
        }
        raise BadInput(f"{url}: the server {why.get(error.code, f'answers {error.code}')}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadInput(f"{url}: no server answers: {error}") from None
    except (KeyError, TypeError):
        raise BadInput(f"{url}: expected the answers of vLLM's ranks, found something else") from None
    if not isinstance(answers, list):
        raise BadInput(f"{url}: expected the answers of vLLM's ranks, found {answers!r}")
    if refused := [answer for answer in answers if ": refused: " in str(answer)]:
        raise BadInput(f"{url}: {refused[0]}")
    return str(answers[0]) if answers else "nothing"
