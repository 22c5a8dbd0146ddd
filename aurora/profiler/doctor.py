"""`aurora doctor`: checks which parts of aurora work on this machine, and what the others need; or checks a vLLM server."""

import importlib
import os
import platform
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.errors import BadInput, MissingDependency, RankFailed, first_line, network_reason

if TYPE_CHECKING:
    from aurora.runtime.distributed.launcher import RankInfo

WORKS, MISSING, BROKEN = "works", "missing", "broken"
OLDEST = {"torch": (2, 11), "transformers": (5, 0), "numpy": (2, 0), "scipy": (1, 13), "numba": (0, 60)}
ALLOW = "where VLLM_PLUGINS is set, add aurora to it"
SERVER_S, SILENT_S = 10.0, 6.0  # in which a server answers, and its watchdogs look, at least
SAMPLE = re.compile(r"aurora_(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MEND = {  # by the cause that the watchdog of the vLLM plugin gives
    "gone": "restart the server; the log has the process's last lines",
    "stopped": "look at the process: a signal, a debugger, memory that is full",
    "slow": "look at the GPU's clocks and temperature, and at other processes there",
    "late": "look at the rank's engine process",
    "link": "look at cables, NICs, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    "balancer": "restart; --eplb-config.use_async false moves experts without a background thread",
}
RENDEZVOUS_S = 30.0  # how long two ranks wait for each other
TRIPS = 20
MPS_FOLDER = "/tmp/nvidia-mps"  # CUDA's default
SHARED = "for two vLLM servers on the same GPUs: --gpu-memory-utilization 0.45 each"
GROUPS = ["torch.distributed", "aurora.runtime.transports.gloo", "aurora.runtime.transports.process_groups"]  # not models


@dataclass(frozen=True)
class Finding:
    """Result of one check: whether a part of the installation works, and how to mend it."""

    name: str  # the part
    state: str  # WORKS, MISSING or BROKEN
    found: str  # its version or what is wrong, in words
    mend: str = ""  # what to do; empty if nothing is needed
    basic: bool = False  # whether planning needs it


def examine(progress: Progress = no_progress) -> list[Finding]:
    """Checks every part of the installation, basic parts first, even if others fail. Returns one Finding per part.

    Args:
        progress: called with ("examining", parts examined, all parts) before each part.
    """
    ready = _begin_ranks()
    parts: list[Callable[[], Finding]] = [_python]
    parts += [partial(_library, name, basic=True) for name in ("numpy", "scipy")]
    parts += [_numba, *(partial(_library, name, "run") for name in ("torch", "transformers"))]
    parts += [_cuda, _gpus, partial(_ranks, ready), partial(_library, "jinja2", "report")]
    parts += [_vllm, _compiler]
    findings = []
    for number, part in enumerate(parts):
        progress("examining", number, len(parts))
        findings.append(part())
    return findings


def examine_server(url: str) -> list[Finding]:
    """Checks a vLLM server that runs aurora's plugin, by its metrics, which it serves even while its ranks are stuck.

    Args:
        url: the server's address.

    Raises:
        BadInput: if no vLLM server answers at `url`.
    """
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(f"{url.rstrip('/')}/metrics", timeout=SERVER_S) as reply:
            lines, date = reply.read().decode().splitlines(), reply.headers["Date"]
    except (OSError, ValueError, HTTPException) as error:
        why = network_reason(error)
        raise BadInput(f"--vllm: expected the address of a vLLM server that answers, found {url}: {why}") from None
    now_s = time.time() if date is None else parsedate_to_datetime(date).timestamp()
    matches = [match for line in lines if (match := SAMPLE.fullmatch(line)) is not None]
    shown = [(match[1], dict(LABEL.findall(match[2])), float(match[3])) for match in matches]
    engaged = {labels["ep_rank"] for name, labels, value in shown if name == "engaged" and value}
    refused = {labels["reason"] for name, labels, value in shown if name == "engaged" and not value}
    if not engaged and not refused:
        start = f"start with --additional-config '{{\"aurora\": {{}}}}'; {ALLOW}"
        return [Finding("plugin", MISSING, "no metrics of it", start)]
    findings = [Finding("plugin", BROKEN, reason, "see the server's log") for reason in sorted(refused)]
    findings += [] if refused else [Finding("plugin", WORKS, f"engaged on {len(engaged)} ranks")]
    looked = {labels["ep_rank"]: now_s - value for name, labels, value in shown if name == "watchdog_timestamp_seconds"}
    silent = [rank for rank, ago_s in looked.items() if ago_s > SILENT_S]
    if not looked:
        findings.append(Finding("watchdog", MISSING, "none", "it is there for several expert-parallel ranks"))
    elif silent:
        said = f"silent on rank {', '.join(sorted(silent, key=int))}"
        findings.append(Finding("watchdog", BROKEN, said, "these ranks are stopped, or have ended"))
    else:
        findings.append(Finding("watchdog", WORKS, f"looked {max(looked.values()):.0f} s ago or less, on {len(looked)} ranks"))
    for name, labels, value in shown:
        if name == "stuck_rank" and value:
            rank = f"rank {labels['ep_rank']}" if labels["ep_rank"] else "a rank"
            findings.append(Finding(rank, BROKEN, labels["reason"].replace(r"\"", '"'), MEND[labels["cause"]]))
    return findings


def healthy(findings: list[Finding]) -> bool:
    """Returns whether all parts that planning needs work."""
    return all(finding.state == WORKS for finding in findings if finding.basic)


def _python() -> Finding:
    """The interpreter and the machine."""
    version = f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    return Finding("python", WORKS, version, basic=True)


def _present(name: str, mend: str, basic: bool = False) -> Finding:
    """Examines if a library is installed and new enough."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, MISSING, "not installed", mend, basic)
    oldest = OLDEST.get(name)
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if oldest is not None and parts < oldest:
        return Finding(name, BROKEN, f"{version}, expected {'.'.join(map(str, oldest))} or newer", mend, basic)
    return Finding(name, WORKS, version, "", basic)


def _vllm() -> Finding:
    """Examines if vLLM is present and may load the plugin, which an allow-list that lacks it would leave out in silence."""
    finding = _present("vllm", "pip install vllm, to serve with vLLM")
    allowed = os.environ.get("VLLM_PLUGINS")
    if finding.state != WORKS or allowed is None or "aurora" in allowed.split(","):
        return finding
    return Finding("vllm", BROKEN, f"{finding.found}, VLLM_PLUGINS={allowed} leaves the plugin out", ALLOW)


def _library(name: str, extra: str = "", basic: bool = False) -> Finding:
    """Examines if a library is present, new enough and imports."""
    mend = f'pip install --upgrade "aurora-moe{f"[{extra}]" if extra else ""}"'
    finding = _present(name, mend, basic)
    if finding.state == WORKS:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            return Finding(name, BROKEN, f"{finding.found} does not import: {first_line(error)}", mend, basic)
    return finding


def _numba() -> Finding:
    """Examines if numba compiles, and where it keeps what it has compiled."""
    finding = _library("numba", basic=True)
    if finding.state != WORKS:
        return finding
    from aurora.types.compiled import VARIABLE, cache_folder, njit

    try:
        compiled = njit(cache=True)(_next)
        value, folder = compiled(1), cache_folder(compiled)
    except Exception as error:
        return Finding("numba", BROKEN, f"{finding.found} does not compile: {first_line(error)}", finding.mend, basic=True)
    assert value == 2
    place = "nowhere, so that every command compiles anew for a minute or two" if folder is None else f"in {folder}"
    mend = f"name a folder that can be written in {VARIABLE}" if folder is None else ""
    return Finding("numba", WORKS, f"{finding.found}, compiles; its code is kept {place}", mend, basic=True)


def _next(x: int) -> int:
    return x + 1


def _cuda() -> Finding:
    """Examines if torch computes on a GPU."""
    try:
        import torch
    except Exception:
        return Finding("CUDA", MISSING, "no torch", 'pip install "aurora-moe[run]"')
    if torch.version.cuda is None and torch.version.hip is None:
        return Finding(
            "CUDA", MISSING, "torch is built for the CPU", "on a GPU machine, install torch for its CUDA: pytorch.org"
        )
    if not torch.cuda.is_available():
        return Finding(
            "CUDA", BROKEN, f"torch is built for {torch.version.cuda}, no device answers", "install the NVIDIA driver"
        )
    nccl = "no NCCL"
    if torch.distributed.is_nccl_available():
        nccl = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    device = torch.ones(2, device="cuda").sum().item()
    assert device == 2
    return Finding(
        "CUDA", WORKS, f"{torch.version.cuda or torch.version.hip}, NCCL {nccl}, {torch.cuda.device_count()} devices"
    )


def _gpus() -> Finding:
    """The GPUs that NVML finds."""
    from aurora.profiler.devices import inventory, open_nvml

    try:
        with open_nvml() as nvml:
            try:
                machine = inventory(nvml)
            except BadInput as error:
                return Finding("GPUs", BROKEN, str(error), "aurora needs whole GPUs that answer")
    except MissingDependency:
        return Finding("GPUs", MISSING, "not looked for: no pynvml", 'pip install "aurora-moe[gpu]"')
    except BadInput as error:
        return Finding("GPUs", MISSING, str(error), "on a GPU machine, install the NVIDIA driver")
    kinds = [device.kind for device in machine.devices]
    said = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    connections = ", ".join(sorted({link for row in machine.connections_GG for link in row if link})) or "alone"
    mps = os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER), "control"))
    summary = f"{said}; driver {machine.driver}; {connections}; {'MPS' if mps else 'no MPS'}"
    return Finding("GPUs", WORKS, summary, SHARED if mps else f"{SHARED}, and nvidia-cuda-mps-control -d before them")


def _begin_ranks() -> bool:
    """Start importing torch for the two ranks in the background. Returns whether torch is installed."""
    try:
        from aurora.runtime.distributed.launcher import start_fork_server

        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    start_fork_server(GROUPS)
    return True


def _ranks(ready: bool) -> Finding:
    """Examines if two local ranks reach each other over gloo."""
    name = "ranks over gloo"
    if not ready:
        return Finding(name, MISSING, "no torch", 'pip install "aurora-moe[run]"')
    from aurora.runtime.distributed.launcher import launch

    began_s = time.perf_counter()
    try:
        trip_s = max(launch(rendezvous, 2, timeout_s=RENDEZVOUS_S))
    except Exception as error:
        return Finding(
            name, BROKEN, first_line(error), "ranks need TCP on loopback: look at GLOO_SOCKET_IFNAME and the firewall"
        )
    return Finding(
        name, WORKS, f"two connect in {time.perf_counter() - began_s:.1f} s, a round trip takes {trip_s * 1e6:.0f} us"
    )


def rendezvous(rank_info: "RankInfo") -> float:
    """Checks by gathers over gloo that ranks reach each other; all ranks call it. Returns the median seconds of a gather."""
    import torch

    from aurora.runtime.transports.gloo import GlooTransport
    from aurora.runtime.transports.process_groups import default_process_group

    with default_process_group(rank_info):
        transport = GlooTransport()
        took_s: list[float] = []
        for _ in range(TRIPS):
            began_s = time.perf_counter()
            ranks = transport.gather(torch.tensor([rank_info.rank])).flatten().tolist()
            took_s.append(time.perf_counter() - began_s)
            if ranks != list(range(rank_info.ranks)):
                raise RankFailed(f"rank {rank_info.rank}: expected every rank's number, found {ranks}")
    return sorted(took_s)[TRIPS // 2]


def _compiler() -> Finding:
    """Looks for a C compiler."""
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if path is None:
        return Finding("C compiler", MISSING, "none on the path", "needed by Triton's kernels on GPUs: install gcc")
    return Finding("C compiler", WORKS, path)
