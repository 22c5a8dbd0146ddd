"""Which rank is stuck: drawn faults of stand-ins for vLLM's ranks, and how soon the plugin's watchdog names the right one.

`python bench/vllm_stuck.py [--cases 30] [--healthy 600]` writes bench/results/vllm_stuck-DATE.md. A stand-in is a process that
goes through the phases of a vLLM rank (a rank's tokens, layers with a dispatch and a combine each, over gloo) and computes by
waiting. As root, each is in a network namespace of its own. Faults, of a drawn rank among 3 to 5, at a drawn moment:

- stopped: SIGSTOP. gone: SIGKILL. slow: its compute takes 3 times as long from then on. link: its host is taken off the switch.
- healthy: nothing happens; tokens differ from rank to rank, up to 64 times as many, and compute goes with them. Every name is
  false. `--server URL` watches a real server instead: it says for how long no rank was named on its /metrics.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from aurora_vllm.rank_progress import RankFiles, RankProgress, file_of
from aurora_vllm.stuck_rank import COMBINE, DISPATCH, STEP
from aurora_vllm.watchdog import Watchdog
from machine import machine
from network import net
from prometheus_client import CollectorRegistry
from tables import Table, write

KINDS = ("stopped", "slow", "link", "gone")
CAUSE = {"stopped": "stopped", "slow": "slow", "link": "link", "gone": "gone"}
LAYERS, COMPUTE_S, JITTER, SLOW = 4, 0.004, 0.2, 3.0
PORT, RATE_BPS, BUFFER = 29531, 1e9, 1 << 20
LIMIT_S, SETTLE_S = 20.0, 3.0


def serve(rank: int, ranks: int, namespace: str | None, folder: Path, uneven: bool, seed: int) -> None:
    """Is one rank, until it is killed."""
    slow = [1.0]
    signal.signal(signal.SIGUSR1, lambda *_: slow.__setitem__(0, SLOW))
    first = "127.0.0.1"
    if namespace is not None:
        net.enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"], first = "eth0", f"{net.SUBNET}.1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{first}:{PORT}", rank=rank, world_size=ranks)
    progress = RankProgress(file_of(folder, rank))
    said = (folder / f"said-{rank}").open("w", buffering=1)
    dog = Watchdog(rank, progress, RankFiles(folder, [*range(ranks)]), True, "m", lambda: told(), CollectorRegistry())

    def told() -> None:
        said.write("" if dog.told is None else f"{time.monotonic()} {dog.told.rank} {dog.told.cause} {dog.told}\n")

    dist.barrier()
    progress.serve()
    with suppress(RuntimeError):  # the others notice that a rank is gone, as vLLM's do some seconds before they end
        run(rank, ranks, progress, uneven, slow, np.random.default_rng(seed))
    time.sleep(LIMIT_S)


def run(rank: int, ranks: int, progress: RankProgress, uneven: bool, slow: list[float], rng: np.random.Generator) -> None:
    """Runs forward passes without end."""
    step, dispatch, combine = (progress.exchange[phase] for phase in (STEP, DISPATCH, COMBINE))
    rows = torch.ones(ranks * 8, 1024)
    received = torch.empty_like(rows)
    while True:
        tokens_G = 2 ** rng.integers(0, 7, ranks) if uneven else np.full(ranks, 8)  # the same on all ranks
        jitter_G = rng.uniform(1 - JITTER, 1 + JITTER, ranks)
        own_s = COMPUTE_S * slow[0] * jitter_G[rank] * (tokens_G[rank] / 8 if uneven else 1.0)
        progress.begin_pass(int(tokens_G[rank]))
        with step:
            dist.all_reduce(torch.ones(ranks))
        for layer in range(LAYERS):
            progress.layer(layer)
            time.sleep(own_s)
            for waiting in (dispatch, combine):
                with waiting:
                    dist.all_to_all_single(received, rows)
                time.sleep(COMPUTE_S * slow[0] * (waiting is dispatch))
        progress.end_pass()


class Ranks:
    """Processes of all ranks inside `with`."""

    def __init__(self, namespaces: list[str | None], uneven: bool = False, seed: int = 0) -> None:
        self._given, self._namespaces = (uneven, seed), namespaces
        self.processes: list[BaseProcess] = []

    def __enter__(self) -> "Ranks":
        self._temporary = tempfile.TemporaryDirectory()
        self.folder, ranks = Path(self._temporary.name), len(self._namespaces)
        for rank, namespace in enumerate(self._namespaces):
            given = (rank, ranks, namespace, self.folder, *self._given)
            self.processes.append(multiprocessing.get_context("fork").Process(target=serve, args=given, daemon=True))
            self.processes[-1].start()
        files = RankFiles(self.folder, [*range(ranks)])
        while not files.serving():
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._temporary.cleanup()

    def said(self) -> list[list[str]]:
        """Returns (moment, rank, cause, sentence) of each name that was told, in sequence."""
        return sorted(line.split(" ", 3) for path in self.folder.glob("said-*") for line in path.read_text().splitlines())

    def inflict(self, kind: str, rank: int) -> None:
        """Makes a rank stuck."""
        if kind == "link":
            net.unplug(rank)
        else:
            name = {"stopped": signal.SIGSTOP, "slow": signal.SIGUSR1, "gone": signal.SIGKILL}[kind]
            os.kill(self.processes[rank].pid or 0, name)


def case(kind: str, ranks: int, victim: int, after_s: float, isolated: bool, seed: int) -> tuple[float, str, bool]:
    """Inflicts one fault. Returns how long it took until a rank was named, what was said, and whether it is right."""
    with (
        net.network([RATE_BPS] * ranks, BUFFER) as hosts,
        Ranks([*hosts] if isolated else [None] * ranks, seed=seed) as running,
    ):
        time.sleep(after_s)
        before = running.said()
        began_s = time.monotonic()
        running.inflict(kind, victim)
        while not (said := running.said()) and time.monotonic() - began_s < LIMIT_S:
            time.sleep(0.02)
        if before or not said:
            return LIMIT_S, f"too early: {before[0][3]}" if before else "nothing", False
        moment, rank, cause, sentence = said[0]
        return float(moment) - began_s, sentence, rank == str(victim) and cause == CAUSE[kind]


def drawn(cases: int) -> list[str]:
    """Returns the table of drawn faults."""
    table = Table("Drawn faults", "fault | ranks | rank | named after s | right | said", f"{machine()}.")
    if (refusal := net.refusal()) is not None:
        raise SystemExit(f"network namespaces: {refusal}")
    rng, took, right = np.random.default_rng(0), [], 0
    for number in range(cases):
        kind, ranks = KINDS[:3][number % 3] if number < 30 else KINDS[3], int(rng.integers(3, 6))
        victim = int(rng.integers(ranks))
        seconds, said, fine = case(kind, ranks, victim, float(rng.uniform(0, 2)), True, number)
        took, right = [*took, seconds], right + (fine and seconds <= 5)
        table.add(kind, ranks, victim, f"{seconds:.1f}", "yes" if fine else "no", said)
    load = os.getloadavg()[0]
    within = f"median {statistics.median(took):.1f} s, longest {max(took):.1f} s"
    table.lines += ["", f"{right} of {cases} right within 5 s; {within}. Load of the machine at the end: {load:.1f}."]
    print(table.lines[-1])
    return table.lines


def healthy(seconds: float) -> list[str]:
    """Returns the table of names told while nothing happened."""
    table = Table("Healthy stand-ins", "ranks | seconds | passes of rank 0 | false names", f"{machine()}.")
    for ranks in (2, 4):
        with Ranks([None] * ranks, uneven=True) as running:
            time.sleep(seconds / 2)
            passes = RankFiles(running.folder, [0])
            passes.serving()
            table.add(ranks, f"{seconds / 2:.0f}", max(passes.states(60.0)[0].passes) // (1 + 2 * LAYERS), len(running.said()))
            for said in running.said():
                print(said)
    return table.lines


def server(url: str, seconds: float) -> None:
    """Watches the metrics of a server."""
    names, until = set(), time.monotonic() + seconds
    while time.monotonic() < until:
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            names |= {line for line in reply.read().decode().splitlines() if line.startswith("aurora_stuck_rank{")}
        time.sleep(1)
    print(f"{seconds:.0f} s, load {os.getloadavg()[0]:.1f}, names: {sorted(names) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--healthy", type=float, default=600.0, help="seconds")
    parser.add_argument("--server", help="address of a server to watch for --healthy seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.server:
        server(args.server, args.healthy)
        return
    sections = [drawn(args.cases)] if args.cases else []
    write("vllm_stuck", *sections, *([healthy(args.healthy)] if args.healthy else []), out=args.out)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
