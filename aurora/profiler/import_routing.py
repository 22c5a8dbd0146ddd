"""Makes Profiles from routing that an engine recorded: from its files, or from a running vLLM server with aurora's plugin."""

import hashlib
import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aurora.algorithms.workload.attention import known_kv_bytes
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput, network_reason
from aurora.io.files import naming
from aurora.io.routing_dumps import RecordedRouting, read_dump
from aurora.profiler.merge_records import load_records
from aurora.types import Profile, ProfileOptions, TokenRouting
from aurora.types.arrays import IntArray
from aurora.types.profile import deal_counts

ANSWER_S = 120.0  # longest wait for an answer; a server answers between forward passes


def import_profile(
    files: Sequence[Path],
    form: str,
    config: Mapping[str, Any],
    sources: int | None = None,
) -> Profile:
    """Makes a Profile of recorded routing; compute times are estimated from the model's shape.

    Files of a format with one file per rank form one recording, in which each rank is a source rank. Any other file
    is a traffic domain, with its own source ranks, over which its tokens are divided evenly. If there are more domains than
    `sources`, domains share ranks.

    Args:
        files: files of one format and one model.
        form: the format, one of ROUTING_FORMATS.
        config: the model's transformers config.json.
        sources: number of source ranks over which tokens are divided; None: as in the files, or ProfileOptions' default.

    Raises:
        BadInput: if a file is not of the format or not of the model, files differ in their layers, a rank's file is missing,
            there is no token, or a number is below one.
    """
    if not files:
        raise BadInput("import: expected a file, found none")
    ProfileOptions(sources=1 if sources is None else sources)  # refuses what no profile has
    shape = Shape.of(config)
    domains = [read_dump(path, form, shape) for path in files]
    left_out = [f"{path.name}: {domain.left_out}" for path, domain in zip(files, domains, strict=True) if domain.left_out]
    if len(layers := {domain.which for domain in domains}) > 1:
        raise BadInput(f"import: expected the same layers in every file, found {' and '.join(sorted(layers))}")
    if not any(domain.counts_TLE.any() for domain in domains):
        raise BadInput("import: expected tokens, found none")
    if len(domains) > 1 and domains[0].rank is not None:
        domains, ranks = _by_rank(domains, sources), [np.array([rank]) for rank in range(len(domains))]
        sources, dealt = len(domains), f"{len(domains)} ranks, as recorded"
    else:
        sources = sources or ProfileOptions().sources
        ranks = [sources_of(number, len(domains), sources) for number in range(len(domains))]
        dealt = f"{len(domains)} domains dealt to {sources} sources, which the files do not name"
    about = {
        "tool": f"aurora import --format {form}",
        "traffic": ", ".join(f"{path.name} sha256:{file_digest(path)}" for path in files),
        "sources": dealt,
    }
    if left_out:
        about["left out"] = "; ".join(left_out)
    if domains[0].experts_ULK is None:
        counted = _counted(domains, ranks, sources)
        return shape.profile(counted, about, recorded=domains[0].layers, kv_bytes=known_kv_bytes(config))
    routing = _routing(domains, ranks)
    tokens_TLSE = routing.tokens_TLSE(int(routing.window_U.max()) + 1, sources, shape.experts)
    return shape.profile(tokens_TLSE, about, routing, kv_bytes=known_kv_bytes(config))


def _by_rank(files: Sequence[RecordedRouting], sources: int | None) -> list[RecordedRouting]:
    """The files of all ranks by rank, or BadInput."""
    ranks = sorted(file.rank for file in files if file.rank is not None)
    if ranks != list(range(len(files))):
        raise BadInput(f"import: expected one file of each rank from 0 on, found ranks {', '.join(map(str, ranks))}")
    if sources not in (None, len(files)):
        raise BadInput(f"`sources`: expected {len(files)}, the ranks that were recorded, found {sources}")
    if all(np.array_equal(file.counts_TLE, files[0].counts_TLE) for file in files):
        raise BadInput(
            "import: all ranks recorded the same tokens, as without data parallelism, so that they do not tell sources; import "
            "one rank's file"
        )
    return sorted(files, key=lambda file: -1 if file.rank is None else file.rank)


def _steps_of(domains: Sequence[RecordedRouting]) -> tuple[int, list[IntArray]]:
    """Returns the number of steps in all, and the steps of each domain: by forward pass, or the same from the first on."""
    if any(domain.pass_T is None for domain in domains):
        return max(len(domain.counts_TLE) for domain in domains), [np.arange(len(domain.counts_TLE)) for domain in domains]
    passes = [domain.pass_T for domain in domains if domain.pass_T is not None]
    all_T = np.unique(np.concatenate(passes))
    return len(all_T), [np.searchsorted(all_T, pass_T) for pass_T in passes]


def _counted(domains: Sequence[RecordedRouting], ranks: Sequence[IntArray], sources: int) -> IntArray:
    """(T, L, S, E) int64: the domains' counts, each dealt to its own sources."""
    steps, at = _steps_of(domains)
    _, layers, experts = domains[0].counts_TLE.shape
    tokens_TLSE = np.zeros((steps, layers, sources, experts), dtype=np.int64)
    for domain, own_S, at_T in zip(domains, ranks, at, strict=True):
        tokens_TLSE[np.ix_(at_T, np.arange(layers), own_S)] += deal_counts(domain.counts_TLE, len(own_S))
    return tokens_TLSE[tokens_TLSE.any(axis=(1, 2, 3))]


def _routing(domains: Sequence[RecordedRouting], ranks: Sequence[IntArray]) -> TokenRouting:
    """Token-level routing: sequences are dealt round robin, in one window. Of recorded passes, each is a window."""
    if domains[0].pass_T is not None:
        return _routing_of_passes(domains, ranks)
    experts, source, sequence = [], [], []
    before = 0
    for domain, own_S in zip(domains, ranks, strict=True):
        assert domain.experts_ULK is not None
        assert domain.lengths_Q is not None
        sequences_Q = np.arange(len(domain.lengths_Q))
        experts.append(domain.experts_ULK)
        source.append(np.repeat(own_S[sequences_Q % len(own_S)], domain.lengths_Q))
        sequence.append(np.repeat(before + sequences_Q, domain.lengths_Q))
        before += len(sequences_Q)
    chosen, source_U, sequence_U = (np.concatenate(parts) for parts in (experts, source, sequence))
    return TokenRouting(chosen, source_U, np.zeros_like(source_U), sequence_U)


def _routing_of_passes(domains: Sequence[RecordedRouting], ranks: Sequence[IntArray]) -> TokenRouting:
    """Token-level routing of recorded forward passes: a pass's tokens are dealt round robin to the domain's own sources."""
    steps, at = _steps_of(domains)
    lengths = [np.asarray(domain.lengths_Q) for domain in domains]
    tokens_T = np.zeros(steps, dtype=np.int64)
    for at_T, lengths_T in zip(at, lengths, strict=True):
        tokens_T[at_T] += lengths_T
    window_T = np.cumsum(tokens_T > 0) - 1  # passes without a token are left out
    return TokenRouting(
        np.concatenate([domain.experts_ULK for domain in domains if domain.experts_ULK is not None]),
        np.concatenate([own_S[np.arange(sum(many)) % len(own_S)] for own_S, many in zip(ranks, lengths, strict=True)]),
        np.concatenate([np.repeat(window_T[at_T], many) for at_T, many in zip(at, lengths, strict=True)]),
    )


def file_digest(path: str | Path) -> str:
    """Returns the first 16 hexadecimal digits of a file's SHA-256. Raises BadInput if the file cannot be read."""
    with naming(path), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def profile_vllm_server(url: str, folder: Path, seconds: float, sleep: Callable[[float], None] = time.sleep) -> Profile:
    """Records a vLLM server's routing for some time, and returns it as a Profile.

    The record is written to a new folder in `folder`. Other records of the server are not affected.

    Args:
        url: the server's address, e.g. "http://localhost:8000". It runs with aurora's plugin and VLLM_SERVER_DEV_MODE=1.
        folder: the folder that the server's setting "record" names, as this process sees it.
        seconds: duration of the recording.
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
        raise BadInput(f"{url}: no server answers: {network_reason(error)}") from None
    except (KeyError, TypeError):
        raise BadInput(f"{url}: expected the answers of vLLM's ranks, found something else") from None
    if not isinstance(answers, list):
        raise BadInput(f"{url}: expected the answers of vLLM's ranks, found {answers!r}")
    if refused := [answer for answer in answers if ": refused: " in str(answer)]:
        raise BadInput(f"{url}: {refused[0]}")
    return str(answers[0]) if answers else "nothing"


def sources_of(domain: int, domains: int, sources: int) -> IntArray:
    """Returns the source ranks that serve a domain of traffic.

    Domains take ranks in turn: the ranks `domain`, `domain` + `domains`, and so on. With more domains than ranks, several
    domains share a rank.
    """
    return np.arange(domain, sources, domains) if domains <= sources else np.array([domain % sources])
