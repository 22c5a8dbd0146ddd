"""`aurora doctor`: what of aurora does not work on this machine, and what mends it; or what is wrong with a vLLM server."""

import importlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import metadata

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.errors import BadInput, MissingDependency, first_line, need, network_reason
from aurora.profiler.devices import visible_devices
from aurora.runtime.distributed.launcher import RankInfo, launch, start_fork_server
from aurora.runtime.transports.nvlink import open_nvml

WORKS, MISSING, BROKEN = "works", "missing", "broken"
ALLOW = "where VLLM_PLUGINS is set, add aurora to it"
SERVER_S, SILENT_S = 10.0, 6.0  # in which a server answers, and its watchdogs look, at least
SAMPLE = re.compile(r"aurora_(\w+)(?:\{(.*)\})? (\S+)")
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
GROUPS = ["torch.distributed", "aurora.runtime.transports.gloo", "aurora.runtime.transports.process_groups"]  # not models


@dataclass(frozen=True)
class Finding:
    """Result of one check: whether a part works, and how to mend it."""

    name: str  # the part
    state: str  # WORKS, MISSING or BROKEN
    found: str  # what is there or what is wrong, in words
    mend: str = ""  # what to do; empty if nothing is needed


def examine(progress: Progress = no_progress) -> list[Finding]:
    """Checks every part that a user can mend, even if others fail. Returns one Finding per part.

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
        return Finding(name, WORKS, check())
    except Exception as error:  # whatever a broken installation raises
        state = MISSING if isinstance(error, MissingDependency | ModuleNotFoundError) else BROKEN
        return Finding(name, state, first_line(error), mend)


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
    shown = [
        (match[1], dict(LABEL.findall(match[2] or "")), float(match[3])) for match in map(SAMPLE.fullmatch, lines) if match
    ]
    plugins = [(labels["ep_rank"], labels["reason"], value) for name, labels, value in shown if name == "engaged"]
    if not plugins:
        start = f"start with --additional-config '{{\"aurora\": {{}}}}'; {ALLOW}"
        return [Finding("plugin", MISSING, "no metrics of it", start)]
    refused = sorted({reason for _, reason, value in plugins if not value})
    findings = [Finding("plugin", BROKEN, reason, "see the server's log") for reason in refused]
    findings += [] if refused else [Finding("plugin", WORKS, f"engaged on {len({rank for rank, _, _ in plugins})} ranks")]
    ranks = {name: int(value) for name, _, value in shown if name in ("ranks", "ranks_serving")}  # of `aurora vllm`
    if ranks:
        lost = ranks["ranks_serving"] < ranks["ranks"]
        found = f"{ranks['ranks_serving']} of {ranks['ranks']} serve"
        findings.append(Finding("ranks", BROKEN, found, "`aurora vllm` says why") if lost else Finding("ranks", WORKS, found))
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


def _compiled() -> str:
    """Imports one of the modules that are compiled when aurora is installed, and returns the name of its file."""
    core = importlib.import_module("aurora.algorithms.search.slots_core")
    return f"such as {os.path.basename(str(core.__file__))}"


def _models() -> str:
    """Imports what runs models."""
    need("torch", "transformers")
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))


def _vllm() -> str:
    """Returns vLLM's version, unless it may not load the plugin."""
    try:
        version, allowed = metadata.version("vllm"), os.environ.get("VLLM_PLUGINS", "aurora")
    except metadata.PackageNotFoundError:
        raise MissingDependency("not installed") from None
    if "aurora" not in allowed.split(","):  # vLLM leaves it out in silence
        raise BadInput(f"{version}, VLLM_PLUGINS={allowed} leaves the plugin out")
    return version


def _gpus() -> str:
    """Computes with torch on a GPU. Returns the GPUs that NVML finds."""
    with open_nvml() as nvml:
        devices, driver = visible_devices(nvml), nvml.nvmlSystemGetDriverVersion()
    need("torch")
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(f"torch {torch.__version__} finds no GPU")
    torch.ones(2, device="cuda").sum().item()
    kinds = [device.kind for device in devices]
    return f"{', '.join(f'{kinds.count(kind)} x {kind}' for kind in dict.fromkeys(kinds))}; driver {driver}"


def _ranks() -> str:
    """Connects two local ranks over gloo."""
    need("torch")
    began_s = time.perf_counter()
    launch(rendezvous, 2, timeout_s=RENDEZVOUS_S)
    return f"two connect in {time.perf_counter() - began_s:.1f} s"


def rendezvous(rank_info: RankInfo) -> None:
    """Gathers over gloo; all ranks call it."""
    import torch

    from aurora.runtime.transports.gloo import GlooTransport
    from aurora.runtime.transports.process_groups import default_process_group

    with default_process_group(rank_info):
        GlooTransport().gather(torch.tensor([rank_info.rank]))


def _compiler() -> str:
    """Returns the path of a C compiler."""
    if (path := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")) is None:
        raise MissingDependency("none on the path")
    return path


INSTALL = 'pip install --upgrade "aurora-moe[%s]"'
PLANNING = "compiled modules"  # the part that planning needs
PARTS: dict[str, tuple[Callable[[], str], str]] = {  # what examines each part, and what mends it
    PLANNING: (_compiled, "install aurora again; from its sources this needs a C compiler, such as gcc"),
    "models": (_models, INSTALL % "run"),
    "ranks over gloo": (_ranks, "ranks need torch, and TCP on loopback: look at GLOO_SOCKET_IFNAME and the firewall"),
    "GPUs": (_gpus, f"on a GPU machine, install the NVIDIA driver, torch for its CUDA (pytorch.org), and {INSTALL % 'gpu'}"),
    "vllm": (_vllm, f"to serve with vLLM, {INSTALL % 'vllm'}; {ALLOW}"),
    "C compiler": (_compiler, "Triton's kernels on GPUs need it: install gcc"),
}
