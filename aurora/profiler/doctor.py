"""`aurora doctor`: checks which parts of aurora work on this machine, and what the others need; or checks a vLLM server."""

import importlib
import os
import platform
import re
import shutil
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import metadata

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.errors import BadInput, MissingDependency, first_line, need, network_reason
from aurora.profiler.devices import inventory, open_nvml
from aurora.runtime.distributed.launcher import RankInfo, launch, start_fork_server

WORKS, MISSING, BROKEN = "works", "missing", "broken"
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
MPS_FOLDER = "/tmp/nvidia-mps"  # CUDA's default
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
    """Checks every part of the installation, even if others fail. Returns one Finding per part.

    Args:
        progress: called with ("examining", parts examined, all parts) before each part.
    """
    start_fork_server(GROUPS)  # imports torch for the two ranks meanwhile
    findings = []
    for number, name in enumerate(PARTS):
        progress("examining", number, len(PARTS))
        findings.append(_examined(name))
    return findings


def _examined(name: str) -> Finding:
    """Returns the Finding of one of PARTS."""
    check, mend = PARTS[name]
    try:
        return Finding(name, WORKS, check(), basic=name in BASIC)
    except Exception as error:  # whatever a broken installation raises
        state = MISSING if isinstance(error, MissingDependency | ModuleNotFoundError) else BROKEN
        found = "not installed" if isinstance(error, metadata.PackageNotFoundError) else first_line(error)
        return Finding(name, state, found, mend, name in BASIC)


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
    shown = [(match[1], dict(LABEL.findall(match[2])), float(match[3])) for match in map(SAMPLE.fullmatch, lines) if match]
    plugins = [(labels["ep_rank"], labels["reason"], value) for name, labels, value in shown if name == "engaged"]
    if not plugins:
        start = f"start with --additional-config '{{\"aurora\": {{}}}}'; {ALLOW}"
        return [Finding("plugin", MISSING, "no metrics of it", start)]
    refused = sorted({reason for _, reason, value in plugins if not value})
    findings = [Finding("plugin", BROKEN, reason, "see the server's log") for reason in refused]
    findings += [] if refused else [Finding("plugin", WORKS, f"engaged on {len({rank for rank, _, _ in plugins})} ranks")]
    looked = {labels["ep_rank"]: now_s - value for name, labels, value in shown if name == "watchdog_timestamp_seconds"}
    if silent := sorted((rank for rank, ago_s in looked.items() if ago_s > SILENT_S), key=int):
        said = f"silent on rank {', '.join(silent)}"
        findings.append(Finding("watchdog", BROKEN, said, "these ranks are stopped, or have ended"))
    elif looked:
        findings.append(Finding("watchdog", WORKS, f"looked {max(looked.values()):.0f} s ago or less, on {len(looked)} ranks"))
    for name, labels, value in shown:
        if name == "stuck_rank" and value:
            rank = f"rank {labels['ep_rank']}" if labels["ep_rank"] else "a rank"
            findings.append(Finding(rank, BROKEN, labels["reason"].replace(r"\"", '"'), MEND[labels["cause"]]))
    return findings


def healthy(findings: list[Finding]) -> bool:
    """Returns whether all parts that planning needs work."""
    return all(finding.state == WORKS for finding in findings if finding.basic)


def _compiled() -> str:
    """Imports one of the modules that are compiled when aurora is installed, and returns the name of its file."""
    core = importlib.import_module("aurora.algorithms.search.slots_core")
    return f"such as {os.path.basename(str(core.__file__))}"


def _library(name: str, *oldest: int) -> str:
    """Returns the version of a library that is present, new enough and imports; of vLLM, that it may load the plugin."""
    version, allowed = metadata.version(name), os.environ.get("VLLM_PLUGINS", "aurora")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < oldest:
        raise BadInput(f"{version}, expected {'.'.join(map(str, oldest))} or newer")
    if name != "vllm":
        importlib.import_module(name)
    elif "aurora" not in allowed.split(","):  # vLLM leaves it out in silence
        raise BadInput(f"{version}, VLLM_PLUGINS={allowed} leaves the plugin out")
    return version


def _cuda() -> str:
    """Computes with torch on a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(f"torch {torch.__version__} finds no GPU")
    torch.ones(2, device="cuda").sum().item()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{torch.version.cuda}, NCCL {nccl}, {torch.cuda.device_count()} devices"


def _gpus() -> str:
    """Returns the GPUs that NVML finds, and whether processes share them by MPS."""
    with open_nvml() as nvml:
        machine = inventory(nvml)
    kinds = [device.kind for device in machine.devices]
    said = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    connections = ", ".join(sorted({link for row in machine.connections_GG for link in row if link})) or "alone"
    mps = os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER), "control"))
    return f"{said}; driver {machine.driver}; {connections}; {'MPS' if mps else 'no MPS'}"


def _ranks() -> str:
    """Connects two local ranks over gloo."""
    need("torch")
    began_s = time.perf_counter()
    trip_s = max(launch(rendezvous, 2, timeout_s=RENDEZVOUS_S))
    return f"two connect in {time.perf_counter() - began_s:.1f} s, a round trip takes {trip_s * 1e6:.0f} us"


def rendezvous(rank_info: RankInfo) -> float:
    """Gathers over gloo, twenty times; all ranks call it. Returns the seconds of the fastest gather."""
    import torch

    from aurora.runtime.transports.gloo import GlooTransport
    from aurora.runtime.transports.process_groups import default_process_group

    with default_process_group(rank_info):
        transport, number = GlooTransport(), torch.tensor([rank_info.rank])
        return min(timeit.repeat(lambda: transport.gather(number), number=1, repeat=20))


def _compiler() -> str:
    """Returns the path of a C compiler."""
    if (path := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")) is None:
        raise MissingDependency("none on the path")
    return path


BASIC = ("python", "compiled modules", "numpy", "scipy")  # parts that planning needs
UPGRADE = 'pip install --upgrade "aurora-moe%s"'
PARTS: dict[str, tuple[Callable[[], str], str]] = {  # what examines each part, and what mends it
    "python": (lambda: f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores", ""),
    "compiled modules": (_compiled, "install aurora again; from its sources this needs a C compiler, such as gcc"),
    "numpy": (partial(_library, "numpy", 2, 0), UPGRADE % ""),
    "scipy": (partial(_library, "scipy", 1, 13), UPGRADE % ""),
    "torch": (partial(_library, "torch", 2, 11), UPGRADE % "[run]"),
    "transformers": (partial(_library, "transformers", 5, 19), UPGRADE % "[run]"),
    "CUDA": (_cuda, "on a GPU machine, install the NVIDIA driver, and torch for its CUDA: pytorch.org"),
    "GPUs": (_gpus, f"on a GPU machine, install the NVIDIA driver, and {UPGRADE % '[gpu]'}"),
    "ranks over gloo": (_ranks, "ranks need torch, and TCP on loopback: look at GLOO_SOCKET_IFNAME and the firewall"),
    "jinja2": (partial(_library, "jinja2", 3, 1), UPGRADE % "[report]"),
    "vllm": (partial(_library, "vllm", 0, 30), f"to serve with vLLM, {UPGRADE % '[vllm]'}; {ALLOW}"),
    "C compiler": (_compiler, "Triton's kernels on GPUs need it: install gcc"),
}
