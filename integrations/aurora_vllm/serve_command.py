"""Implementation of `aurora vllm`: checks before loading, the servers' command lines, advice while serving, and shutdown."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from aiohttp import ClientError, ClientSession, web
from filelock import FileLock, Timeout

from aurora.advisor.engines.vllm import rank_words
from aurora.algorithms.gpu_slots import redundant_experts
from aurora.algorithms.workload.model_structure import expert_count
from aurora.errors import BadInput, MissingDependency, RankFailed
from aurora.io import load_cluster, load_model_config, load_plan, save_cluster
from aurora.io.files import make_folder
from aurora.io.model_configs import HUB_NAME, served_model
from aurora.models.hub import model_folder
from aurora.profiler.devices import find_devices
from aurora.types import Cluster, Gpu, Plan
from aurora.types.options import MOST_PORT
from aurora_vllm.child_processes import free_ports
from aurora_vllm.model_files import ModelFiles
from aurora_vllm.rank_servers import RankServers
from aurora_vllm.settings import PREFIX, read_settings
from aurora_vllm.whole_streams import ResumingProxy

ENOUGH_TOKENS = 50_000  # of traffic, after which it is told what a plan would bring
ASKED_EVERY_S = 2.0
RECORD_EVERY_S = 10.0
RECOVERY_S = 180  # that an engine waits for the change after a fault, or for the one after that
CPU_Bps = 1e9  # of a CPU rank's port, which nobody has measured
CPU_RANKS, CPU_HEAD = 2, 32
NEVER = str(10**12)  # steps between two rearrangements of EPLB, the first of which comes after a quarter of them
STALLED = re.compile(r"Rearranged experts +in ([0-9.]+) s")  # in vLLM's log, after EPLB has moved experts while serving waits
SHUTDOWN_S = "5"  # for workers to write their records
CPU_OPTIONS = (("--dtype", "float32"), ("--enforce-eager", ""))
API_KEY = "--api-key"
LOCAL = "127.0.0.1"
PORTS = SIZES = range(1, MOST_PORT + 1)
Read = tuple[str | None, Callable[[str], Any] | range, Any]  # an option's short name, its type or range, and its default
READ: dict[str, Read] = {  # options of vLLM that are read, and given to each server anew
    "--data-parallel-size": ("-dp", SIZES, None), "--tensor-parallel-size": ("-tp", SIZES, None),
    "--data-parallel-start-rank": ("-dpr", range(MOST_PORT), 0), "--data-parallel-size-local": ("-dpl", SIZES, None),
    "--data-parallel-address": ("-dpa", str, LOCAL), "--data-parallel-rpc-port": ("-dpp", PORTS, None),
    "--host": (None, str, LOCAL), "--port": (None, PORTS, 8000), "--additional-config": (None, json.loads, {}),
    "--revision": (None, str, None),
}  # fmt: skip
REFUSED = (  # options of vLLM that divide ranks over servers in another way, or that what is in front cannot speak
    "--data-parallel-rank", "-dpn", "--headless", "--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph",
    "--data-parallel-multi-port-external-lb", "--api-server-count", "-asc", "--nnodes", "--uds", "--ssl-keyfile",
)  # fmt: skip


@dataclass(frozen=True)
class ServeCommand:
    """Checked parameters of one `aurora vllm`: the model, vLLM's options, the ranks and the plan.

    Attributes:
        model: the model's folder or name, passed to vLLM.
        given: values of the vLLM options that aurora reads (READ), by name with underscores.
        words: vLLM's other options, including ones that aurora adds.
        ranks: numbers of the data-parallel ranks of this host; a single number if one server serves all ranks.
        size: number of data-parallel ranks on all hosts.
        tensor: number of GPUs of a data-parallel rank.
        state: folder for logs, record and plan.
        survive: True: the other ranks continue when a rank is lost.
        cpu: True: ranks compute on CPUs.
        by_tokens: True: the front port chooses the rank of each request.
        lock: held on `state`, which one command uses at a time.
    """

    model: str
    given: argparse.Namespace
    words: tuple[str, ...]
    ranks: range
    size: int
    tensor: int
    state: Path
    survive: bool
    cpu: bool
    by_tokens: bool
    lock: FileLock

    @property
    def api_key(self) -> str | None:
        """One of the keys that servers ask for, chosen as vLLM does: options, or else VLLM_API_KEY; None: they ask for none."""
        return next(filter(None, self.given.api_key or [os.environ.get("VLLM_API_KEY")]), None)

    def command(self, rank: int, port: int, store: str, rpc_port: int) -> tuple[list[str], dict[str, str]]:
        """Returns the command line, as a list, and the environment of a rank's server.

        Args:
            rank: the data-parallel rank.
            port: port of its server.
            store: address of the keeper's store; empty without `survive`.
            rpc_port: data-parallel RPC port, equal for all ranks.
        """
        options, chosen = self.given, dict[str, str]()
        alone = len(self.ranks) == self.size and options.data_parallel_address == LOCAL  # all ranks are on this host
        environ = {"VLLM_HOST_IP": LOCAL, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if alone else {}
        settings = options.additional_config["aurora"] | ({"fault_store": store} if store else {})
        config = {**options.additional_config, "aurora": settings}
        words = [self.model, *self.words, "--tensor-parallel-size", str(self.tensor), "--additional-config", json.dumps(config)]
        words += ["--revision", options.revision] if options.revision else []
        words += [API_KEY, *options.api_key] if options.api_key else []
        if self.size > 1:
            meeting = options.data_parallel_address, options.data_parallel_rpc_port or rpc_port
            words = rank_words(words, rank, self.size, port, meeting)
        else:
            words += ["--host", options.host, "--port", str(port)]
        if self.cpu:
            threads = str(max(1, (os.cpu_count() or 1) // (len(self.ranks) * self.tensor)))
            environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        elif self.size > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            numbers = visible if visible != [""] else [str(number) for number in range(len(self.ranks) * self.tensor)]
            first = self.ranks.index(rank) * self.tensor
            chosen = {"CUDA_VISIBLE_DEVICES": ",".join(numbers[first : first + self.tensor])}
        if "aurora" not in (allowed := os.environ.get("VLLM_PLUGINS", "aurora").split(",")):
            chosen["VLLM_PLUGINS"] = ",".join([*allowed, "aurora"])
        environ = {name: value for name, value in environ.items() if name not in os.environ} | chosen
        return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", *words], environ


def prepare(
    model: str,
    words: list[str],
    cluster: Path | None,
    state: Path | None,
    apply: bool,
    survive: bool,
    say: Callable[[str], None],
) -> ServeCommand:
    """Checks model, options and cluster before anything is loaded, and returns the parameters with which to start vLLM.

    Args:
        model: the model's folder or name, as for vLLM, or a shipped model's name.
        words: vLLM's own options.
        cluster: cluster file; None: the GPUs that NVML or vLLM's platform reports.
        state: folder for logs, record and plan; None: a default folder for this model and number of ranks.
        apply: True: serve with the plan in `state`, if there is one.
        survive: True: the other ranks continue when a rank is lost.
        say: called with sentences for the user.

    Raises:
        BadInput: if the model, an option or the cluster is unsuitable.
        MissingDependency: if a required package is not installed.
    """
    if model.startswith("-"):
        raise BadInput(f"`model`: expected the model first and vLLM's own arguments after it, found {model}")
    if find_spec("vllm") is None:
        raise MissingDependency('vllm is needed: pip install "aurora-moe[vllm]"')
    options, words = _read(words)
    if refused := [name for name in REFUSED if _has(words, name)]:
        one_each = "starts one server for each data-parallel rank, behind one port that speaks plain HTTP"
        raise BadInput(f"{refused[0]}: expected none, as `aurora vllm` {one_each}")
    try:
        socket.create_server((options.host, options.port)).close()
    except OSError as error:
        raise _no_port(options, error) from None
    if HUB_NAME.fullmatch(model) and not Path(model).exists() and not os.environ.get("HF_HUB_OFFLINE"):
        with suppress(Exception):  # then the next line says what is missing
            from huggingface_hub import hf_hub_download

            hf_hub_download(model, "config.json")
    config, path, cpu = load_model_config(model), Path(model), "cpu" in metadata.version("vllm")
    served = served_model(model) if not path.exists() else str(path if path.is_dir() else path.parent)  # never a base model
    experts = expert_count(config)
    if cpu and (width := int(config.get("head_dim") or CPU_HEAD)) < CPU_HEAD:
        raise BadInput(f"`model`: expected attention heads of {CPU_HEAD} or more, which vLLM has on CPUs, found {width}")
    machine = None if cpu else find_devices().cluster
    described = load_cluster(cluster) if cluster is not None else None
    size, tensor, parallel = options.data_parallel_size, options.tensor_parallel_size or 1, "--pipeline-parallel-size"
    if size is None and options.tensor_parallel_size is None and not _has(words, parallel) and not _has(words, "-pp"):
        size = len(described or machine or range(CPU_RANKS))
        where = "on the CPU" if cpu else "on as many GPUs"
        say(f"{size} data-parallel ranks {where}; --data-parallel-size chooses otherwise")
    size = size or 1
    first, local = options.data_parallel_start_rank, options.data_parallel_size_local or size
    whole = described or _cluster(machine, size * tensor)
    if len(whole) != size * tensor:
        raise BadInput(f"`cluster`: expected {size * tensor} GPUs, one for each rank, found {len(whole)}")
    here = Counter({"cpu": local * tensor} if machine is None else [gpu.kind for gpu in machine.gpus])
    if missing := Counter(gpu.kind for gpu in whole.gpus[first * tensor : (first + local) * tensor]) - here:
        lacks, has = (", ".join(f"{number} {kind}" for kind, number in kinds.items()) for kinds in (missing, here))
        raise BadInput(f"`cluster`: expected ranks on what this host has, {has}, found {lacks} beyond that")
    if described is None:
        rests = "a default" if cpu else "as datasheets say"
        say(f"cluster: {len(whole)} {whole.gpus[0].kind} at {whole.gpus[0].out_Bps:.3g} bytes/s, {rests}, not measured")
    if survive and (size == 1 or local != size):
        raise BadInput("`survive`: expected several data-parallel ranks, all on this host")
    if size > 1 and find_spec("vllm_router") is None:
        raise MissingDependency('vllm-router is needed for data-parallel ranks: pip install "aurora-moe[vllm]"')
    slug = re.sub(r"[^\w.-]+", "-", served).strip("-.")[-80:]
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    folder = (state or base / "aurora-vllm" / f"{slug}-{size}x{tensor}").resolve()
    make_folder(folder / "seen")
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BadInput(f"`state`: expected a folder that no other `aurora vllm` uses, found {folder}") from None
    plan = folder / "recommended/plan.json" if apply and (folder / "recommended/plan.json").exists() else None
    if survive and plan is not None and not _survives(load_plan(plan)):
        plan = None
    say(f"state folder {folder}" + (f"; serves by {plan}" if plan else "; no plan yet" if apply else ""))
    added = _options(words, experts, size * tensor, cpu, apply, survive, load_plan(plan) if plan else None)
    settings = {"record": str(folder / "seen"), "record_every_s": RECORD_EVERY_S}
    settings |= {"plan": str(plan)} if plan else {}
    settings |= {"adapt": True} if apply and not survive and _has([*added, *words], "--enable-eplb") else {}
    settings = {name: value for name, value in settings.items() if PREFIX + name.upper() not in os.environ}
    options.additional_config["aurora"] = settings | options.additional_config.get("aurora", {})
    chosen = read_settings(options.additional_config["aurora"], os.environ)
    assert chosen is not None
    if chosen.fault_store is not None:
        raise BadInput("fault_store: expected --survive, which gives servers one, found it among the settings")
    for old in [*(folder / "seen").glob("rank-*.npz"), *folder.glob("*.log")]:
        old.unlink()
    save_cluster(whole, folder / "cluster.toml", [])
    ranks = range(first, first + local) if size > 1 else range(1)
    by_tokens = chosen.requests != "stock"
    return ServeCommand(served, options, (*added, *words), ranks, size, tensor, folder, survive, cpu, by_tokens, lock)


def _no_port(options: argparse.Namespace, error: OSError) -> BadInput:
    """Returns the error of a port that cannot be listened on."""
    return BadInput(f"--port: expected a free one on {options.host}, found {options.port}: {error.strerror}")


def _read(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the values of READ, and the other words. Raises BadInput if a value is of another type."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument(API_KEY, "--api_key", nargs="+", default=[])
    for name, (short, kind, default) in READ.items():
        names = [name, "--" + name[2:].replace("-", "_"), *([short] if short else [])]
        parser.add_argument(*dict.fromkeys(names), type=_value(name, kind), default=default)
    try:
        options, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:  # without its value
        raise BadInput(f"{str(error.argument_name).partition('/')[0]}: {error.message}") from None
    config = options.additional_config
    if not isinstance(config, dict) or not isinstance(config.get("aurora", {}), dict):
        raise BadInput(f"--additional-config: expected a JSON object, found {config}")
    options.additional_config = dict(config)
    return options, rest


def _value(name: str, kind: Callable[[str], Any] | range) -> Callable[[str], Any]:
    """Returns what reads an option's value, and raises BadInput if it is of another type or out of range."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if not isinstance(kind, range):
                return kind(text)
            if (number := int(text)) in kind:
                return number
        expected = f"a whole number from {kind[0]} to {kind[-1]}" if isinstance(kind, range) else "JSON"
        raise BadInput(f"{name}: expected {expected}, found {text!r}")

    return read


def _has(words: list[str], name: str) -> bool:
    """Returns whether words of vLLM have an option, however its name is spelt."""
    alike = name.replace("_", "-")
    return any(word.partition("=")[0].replace("_", "-") == alike for word in words)


def _cluster(machine: Cluster | None, ranks: int) -> Cluster:
    """Returns the first GPUs of this machine, or CPU ranks with what is a default."""
    if machine is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
        return Cluster("cpu", tuple(Gpu(f"rank-{rank}", "cpu", 0, CPU_Bps, CPU_Bps, memory) for rank in range(ranks)))
    return Cluster(machine.name, machine.gpus[:ranks])


def _survives(plan: Plan) -> bool:
    """Returns whether two GPUs hold each expert."""
    placement = plan.models[0].placement
    return all(placement.fewest_replicas(layer, range(placement.gpus))[1] > 1 for layer in range(len(placement.slots_LG)))


def _options(words: list[str], experts: int, gpus: int, cpu: bool, apply: bool, survive: bool, plan: Plan | None) -> list[str]:
    """Returns options of vLLM that the words lack."""
    added = [("--shutdown-timeout", SHUTDOWN_S)] + [("--enable-expert-parallel", "")] * (gpus > 1)
    added += CPU_OPTIONS if cpu else ()
    padded = plan is not None and redundant_experts(plan.models[0].placement) > 0
    if gpus > 1 and (survive or padded or (apply and not cpu)):
        added += [("--enable-eplb", "")]
        redundant = survive * experts + -experts * (1 + survive) % gpus
        configured = _has(words, "--eplb-config")
        if redundant and plan is None and not configured:
            added += [("--eplb-config.num_redundant_experts", str(redundant))]
        if survive and not configured:  # EPLB moves replicas to busy experts, and the others then have one holder
            added += [("--eplb-config.step_interval", NEVER)]
    if survive:
        added += [("--enable-fault-tolerance", "")]
        added += [("--fault-tolerance-config", json.dumps({"engine_recovery_timeout_sec": RECOVERY_S}))]
    return [word for name, value in added if not _has(words, name) for word in (name, value) if word]


async def serve(
    command: ServeCommand, hang_s: float, after_s: float | None, as_json: bool, say: Callable[[str], None]
) -> tuple[str, dict[str, Any] | None]:
    """Serves until Ctrl-C or SIGTERM, or until a rank is lost and the others cannot continue. A second Ctrl-C ends it at once.

    Args:
        command: checked parameters, from `prepare`.
        hang_s: seconds without an answer after which a rank counts as lost.
        after_s: seconds of serving after which `aurora recommend` runs; None: after ENOUGH_TOKENS recorded tokens.
        as_json: True: return the advice instead of printing it.
        say: called with sentences for the user.

    Returns:
        (reason why the server ended, empty if the user ended it; the advice with `as_json`, else None).

    Raises:
        RankFailed: if vLLM does not start.
        BadInput: if the port was taken while ranks loaded.
        KeyboardInterrupt: after a second signal.
    """
    serving: Any = asyncio.current_task()
    advice: asyncio.Task[Any] | None = None
    signals = 0

    def end() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            servers.kill()
            if advice is not None:
                advice.cancel()
        elif not servers.changes.ended:
            say("ending the servers, which write their records; the same signal again ends all at once")
            serving.cancel()

    host, port = command.given.host, command.given.port
    (rpc_port,) = free_ports(1)
    async with ClientSession() as session:
        servers = RankServers(
            lambda rank, rank_port, store: command.command(rank, rank_port, store, rpc_port), command.ranks,
            None if command.size > 1 else port, command.state, hang_s, command.survive, session, say,
            ModelFiles(lambda: model_folder(command.model, command.given.revision)), command.survive and command.tensor == 1,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)
        lost, front = "", None
        try:
            while True:
                await servers.start()
                if command.size > 1 and front is None:
                    context = await _context_tokens(session, servers.servers[command.ranks[0]].url, command.api_key)
                    given = session, servers.changes, context, servers.urls, command.by_tokens
                    proxy = ResumingProxy(lambda: servers.router.url, *given)
                    front = web.AppRunner(proxy.app(), shutdown_timeout=1.0)
                    await front.setup()
                    try:
                        await web.TCPSite(front, host, port).start()
                    except OSError as error:  # taken while ranks loaded
                        raise _no_port(command.given, error) from None
                say(f"ready on http://{host}:{port}")
                advice = advice or asyncio.create_task(_advise_in_time(command, session, servers, after_s, as_json, say))
                lost = await servers.watch()
                if not command.survive:
                    break
                say(f"all servers are started anew: {lost}")
                servers.changes.begin(lost)
                await servers.end()
        except asyncio.CancelledError:  # by a signal
            lost = ""
        finally:
            servers.changes.ended = True
            if front is not None:
                await front.cleanup()
            await servers.end()
            servers.close()
            unfinished = advice is not None and not advice.done()
            if advice is not None:
                advice.cancel()
    if unfinished and not lost and signals < 2:
        later = " && ".join(f"aurora {shlex.join(words)}" for words in advice_words(command))
        say(f"the servers have ended, and their record is in {command.state / 'seen'}")
        say(f"computing what a plan would bring; Ctrl-C ends this, and later does it:\n{later}")
        advice = asyncio.create_task(advise(command, as_json, say))
        with suppress(asyncio.CancelledError):
            await advice
    if signals > 1:
        raise KeyboardInterrupt
    return lost, None if advice is None or advice.cancelled() or not advice.done() else advice.result()


async def _context_tokens(session: ClientSession, url: str, api_key: str | None) -> int:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with session.get(f"{url}/v1/models", headers=headers) as answer:
        if answer.status == HTTPStatus.UNAUTHORIZED:  # a key in a --config file
            raise RankFailed(f"{API_KEY}: expected the key that vLLM asks for, here or in VLLM_API_KEY, found another or none")
        return int((await answer.json())["data"][0]["max_model_len"])


async def _advise_in_time(
    command: ServeCommand, session: ClientSession, servers: RankServers, after_s: float | None, *how: Any
) -> dict[str, Any] | None:
    """Asks for advice when there was enough traffic."""
    tokens = 0.0
    while after_s is None and tokens < ENOUGH_TOKENS:
        await asyncio.sleep(ASKED_EVERY_S)
        tokens = sum([await _tokens(session, server.url) for server in list(servers.servers.values())])
    await asyncio.sleep(RECORD_EVERY_S if after_s is None else after_s)
    return await advise(command, *how)


async def _tokens(session: ClientSession, url: str) -> float:
    """Returns the tokens that a server has computed; 0 if it does not answer."""
    with suppress(ClientError):
        async with session.get(f"{url}/metrics") as answer:
            counts = re.findall(r"^vllm:(?:prompt|generation)_tokens_total\{.*\} (\S+)$", await answer.text(), re.MULTILINE)
            return sum(map(float, counts))
    return 0.0


def advice_words(command: ServeCommand) -> tuple[list[str], list[str]]:
    """Returns the words of the subcommands of aurora that make a profile of the record, and advice of the profile."""
    folder = command.state
    profile = str(folder / "profile.npz")
    words = ["recommend", "--engine", "vllm", "--model", command.model, "--profile", profile, *measured_stall(folder)]
    words += ["--cluster", str(folder / "cluster.toml"), "-o", str(folder / "recommended")]
    return ["import", str(folder / "seen"), "--format", "vllm-record", "-o", profile], words


async def advise(command: ServeCommand, as_json: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Runs `aurora recommend` on the recorded traffic: it prints the gain of a plan, and stores the plan for the next start.

    It also says whether EPLB pays, with the stalls of this server's own rearrangements if it had any.
    It runs in a separate process beside the servers. With `as_json`, returns its JSON output instead of printing it; None if it
    failed.
    """
    plan, began = command.state / "recommended/plan.json", time.time()
    profiled, advised = advice_words(command)
    if (await _aurora(profiled, quiet=True))[0]:
        return None
    code, text = await _aurora(advised + ["--json"] * as_json, quiet=as_json)
    if command.survive:
        make_folder(plan.parent)
        inputs = ["--profile", profiled[-1], "--cluster", str(command.state / "cluster.toml")]
        await _aurora(["plan", *inputs, "--engine", "vllm", "--min-replicas", "2", "-o", str(plan)], quiet=True)
    if plan.exists() and plan.stat().st_mtime >= began:
        say(f"wrote {plan}; the next `aurora vllm ... --apply` begins with it")
    return json.loads(text) if as_json and code == 0 else None


def measured_stall(folder: Path) -> list[str]:
    """Returns `recommend`'s option with the median stall of EPLB's rearrangements in servers' logs; empty if there are none."""
    found = [float(took_s) for log in folder.glob("*.log") for took_s in STALLED.findall(log.read_text(errors="replace"))]
    return ["--eplb-stall", str(median(found))] if found and median(found) > 0 else []


async def _aurora(words: list[str], quiet: bool) -> tuple[int, str]:
    """Runs a subcommand below the servers' priority; returns its exit code, and its output if it is not shown."""
    process = await asyncio.create_subprocess_exec(
        "nice", sys.executable, "-P", "-m", "aurora", *words, stdout=asyncio.subprocess.PIPE if quiet else None
    )
    try:
        text, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    return process.returncode or 0, (text or b"").decode()
