"""Faults of every process under `aurora vllm --survive`: `.venv-vllm/bin/python bench/vllm_faults.py [--faults 60]`.

Needs what `make test-vllm` installs. A random Qwen3-MoE of three layers and eight experts, two ranks hold each expert, four
data-parallel ranks on the CPU (`--ranks`). While six streams run, one process or two at once are killed (SIGKILL), stopped
(SIGSTOP), or run out of memory (in a cgroup with a limit, as root): a rank's server, engine or worker, the router, the keeper.
The command is stopped for six seconds, or killed, which ends a server. With CLOSES_NETWORK=1, in a network namespace of its
own (`unshare -n`, `ip link set lo up`), the network is closed for three seconds. The next rank is lost when three or all
serve. Counted are wrong answers (against those before any fault), requests that hang (no token within 150 s), faults that no
line names, and processes that are left. The pause of a fault is the longest time without a token of any stream, from the fault
on, and the time of a request that is sent at the fault. Results: bench/results/vllm-faults-DATE.json, written after each
fault.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Hangs
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from machine import machine  # noqa: E402
from tables import today  # noqa: E402

from tests.integrations.survivors import Command, left  # noqa: E402

STREAMS, NEW = 6, 150
START_S, BACK_S, HANGS_S = 1200, 900, 150
PROMPTS = [[random.Random(seed).randrange(1, 250) for _ in range(5 + 7 * seed)] for seed in range(STREAMS)]
MEMORY = Path("/sys/fs/cgroup/memory")  # cgroup v1
IN_RANK, HELPERS, PARENT, NETWORK = ("server", "Engine", "Worker"), ("router", "keeper"), "command", "network"


FILLS = "import sys; open(sys.argv[1], 'w').write('0'); open('/proc/self/oom_score_adj', 'w').write('0'); b'x' * (64 << 20)"


def send(how: str, pid: int) -> None:
    """Kills or stops a process; or has the kernel kill it, as the largest of a cgroup whose memory another one uses up."""
    if how != "memory":
        os.kill(pid, signal.Signals[f"SIG{how}"])
        return
    group = MEMORY / f"aurora-faults-{pid}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("16M")
    (group / "cgroup.procs").write_text(str(pid))
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    subprocess.run([sys.executable, "-c", FILLS, str(group / "cgroup.procs")])


class Faults:
    """Faults of one server after the other."""

    def __init__(self, folder: Path, ranks: int, rng: random.Random, hows: list[str]) -> None:
        self.folder, self.ranks, self.rng, self.hows, self.alive = folder, ranks, rng, hows, list[int]()
        self.lost_s = 0.0  # when a rank was lost last
        self.each, self.starts_s, self.back_s, self.failed = list[dict[str, Any]](), list[float](), list[float](), list[str]()

    def start(self, model: Path) -> None:
        """Starts a server, and takes its answers before any fault."""
        self.command, began_s = Command(model, self.folder / "state", self.ranks), time.monotonic()
        self.starts_s.append(round(self.command.said("ready on", began_s, START_S) - began_s, 1))
        self.alive = list(range(self.ranks))
        with ThreadPoolExecutor(STREAMS) as pool:
            self.expected = list(pool.map(self.command.stream, PROMPTS, [NEW] * STREAMS))

    def draw(self) -> list[tuple[str, int | None, str]]:
        """Returns the faults to come: (process, its rank, how)."""
        targets: list[tuple[str, int | None]] = [(self.rng.choice(HELPERS), None)] * 2
        whole = len(self.alive) == self.ranks
        if whole or len(self.alive) > 2:
            targets += [(self.rng.choice(IN_RANK), rank) for rank in self.rng.sample(self.alive, 2)]
        chosen = self.rng.sample(targets, 1 + (whole and self.rng.random() < 0.3))
        if self.ranks < 4 and all(rank is not None for _, rank in chosen):
            chosen = chosen[:1]  # the others would have too few slots
        return [(name, rank, self.rng.choice(self.hows)) for name, rank in dict.fromkeys(chosen)]

    def cause(self, faults: list[tuple[str, int | None, str]]) -> None:
        """Causes faults while streams run, and notes what becomes of the streams."""
        command, pool = self.command, ThreadPoolExecutor(STREAMS + 1)
        command.find_servers()
        times: list[list[float]] = [[] for _ in PROMPTS]
        streams = [pool.submit(command.stream, PROMPTS[index], NEW, times[index]) for index in range(STREAMS)]
        time.sleep(self.rng.uniform(0.5, 2.0))
        began_s, groups = time.monotonic(), [command.servers[rank] for _, rank, _ in faults if rank is not None]
        for name, rank, how in faults:
            if name == NETWORK:
                for state in ("down", "up"):
                    subprocess.run(["ip", "link", "set", "lo", state], check=True)
                    time.sleep(3 if state == "down" else 0)
            elif name == PARENT:
                os.kill(command.process.pid, signal.Signals[f"SIG{how}"])
                if how == "STOP":
                    time.sleep(6)
                    os.kill(command.process.pid, signal.SIGCONT)
            else:
                send(how, command.helpers[name] if rank is None else command.processes(rank)[name])
        times.append([began_s])
        probe = pool.submit(command.stream, PROMPTS[0], 1, times[-1])
        found = {"faults": faults, "load": os.getloadavg()[0], **self.outcome(streams, probe, times, began_s)}
        ended = (PARENT, None, "KILL") in faults
        if not ended:
            self.alive = [rank for rank in self.alive if rank not in {of for _, of, _ in faults}]
            self.lost_s = began_s if groups else self.lost_s
            found["unsaid"] = [name for name, rank, _ in faults if not self.said(name, rank, began_s)]
            found["left"] = sum(map(left, groups))
        else:
            found["left"] = sum(left(group, 15) for group in {*command.servers.values(), *command.helpers.values()})
        self.each.append(found)
        print(found, flush=True)
        pool.shutdown(wait=False)

    def outcome(
        self, streams: list[Future[list[int]]], probe: Future[list[int]], times: list[list[float]], began_s: float
    ) -> dict[str, Any]:  # fmt: skip
        """Waits for the streams and the request at the fault. Returns which were wrong, broken or hung, and the pause."""
        wrong, hanging, broken = 0, 0, list[str]()
        answers = zip([*streams, probe], [*self.expected, self.expected[0][:1]], times, strict=True)
        for future, tokens, times_N in answers:
            try:
                while not future.done() and time.monotonic() - max([began_s, *times_N[-1:]]) < HANGS_S:
                    time.sleep(0.1)
                wrong += future.result(0) != tokens
            except Hangs:
                hanging += 1
            except Exception as error:
                broken.append(f"{type(error).__name__}: {error}"[:200])
        gaps = [later - max(earlier, began_s) for each in times for earlier, later in pairwise(each)]
        return {"wrong": wrong, "hanging": hanging, "broken": broken, "pause_s": round(max(gaps, default=0.0), 2)}

    def said(self, name: str, rank: int | None, since_s: float) -> bool:
        """Waits for the line that names a fault, and for the end of its effect."""
        if name in (PARENT, NETWORK):
            return True
        text, after = (f"rank {rank} is lost", "serve on") if rank is not None else (f"the {name} ", "a new router deals")
        try:
            self.command.said(text, since_s, 30)
            self.command.said("serve on" if name == "keeper" else after, since_s, 120)
        except TimeoutError as error:
            self.failed.append(f"{name}: {error}")
            return False
        return True

    def wait_for_all(self) -> None:
        """Waits until all ranks serve again."""
        at_s = self.command.said(f"{self.ranks} of {self.ranks} ranks serve on", self.lost_s, BACK_S)
        self.back_s.append(round(at_s - self.lost_s, 1))
        self.alive = list(range(self.ranks))

    def summary(self) -> dict[str, Any]:
        """The figures of all faults."""

        def pauses(selects: Callable[[dict[str, Any]], bool]) -> dict[str, float]:
            found = [each["pause_s"] for each in self.each if selects(each)] or [np.nan]
            figures = zip(("p50", "p95", "most"), np.quantile(found, [0.5, 0.95, 1]).round(2).tolist(), strict=True)
            return {"faults": len(found), **dict(figures)}

        def of_rank(each: dict[str, Any]) -> bool:
            return any(rank is not None for _, rank, _ in each["faults"])

        def stopped(each: dict[str, Any]) -> bool:
            return any(how == "STOP" for _, _, how in each["faults"])

        return {
            "what": " ".join((__doc__ or "").split("\n\n")[1].split()), "machine": machine(), "command": sys.argv[1:],
            "faults": len(self.each), "at_once": sum(len(each["faults"]) > 1 for each in self.each),
            **{name: sum(each[name] for each in self.each) for name in ("wrong", "hanging", "left")},
            "broken": sum(len(each["broken"]) for each in self.each if (PARENT, None, "KILL") not in each["faults"]),
            "unsaid": sum(len(each.get("unsaid", ())) for each in self.each), "failed": self.failed,
            "pause_s": {
                "ranks killed": pauses(lambda each: of_rank(each) and not stopped(each)),
                "ranks stopped": pauses(lambda each: of_rank(each) and stopped(each)),
                **{name: pauses(lambda each, name=name: each["faults"][0][0] == name and not of_rank(each))  # type: ignore[misc]
                   for name in (*HELPERS, PARENT, NETWORK)},
            },
            "starts_s": self.starts_s, "all_back_s": self.back_s, "each": self.each,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--per-start", type=int, default=30, help="after which the command is killed, and started anew")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / f"bench/results/vllm-faults-{today()}.json")
    args = parser.parse_args()
    until_s = time.monotonic() + args.minutes * 60
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        subprocess.run([sys.executable, str(ROOT / "tests/integrations/tiny.py"), "qwen3moe", str(model)], check=True)
        hows = ["KILL", "KILL", "STOP"] + ["memory"] * os.access(MEMORY, os.W_OK)
        faults, closes = Faults(Path(temporary), args.ranks, random.Random(args.seed), hows), os.environ.get("CLOSES_NETWORK")
        while len(faults.each) < args.faults and time.monotonic() < until_s:
            try:
                faults.start(model)
                first = len(faults.each)
                while len(faults.each) < min(args.faults, first + args.per_start) and time.monotonic() < until_s:
                    number = len(faults.each) - first
                    special = {4: (PARENT, None, "STOP"), **({7: (NETWORK, None, "closed")} if closes else {})}.get(number)
                    waits = len(faults.alive) < min(3, args.ranks)
                    faults.cause([special] if special else faults.draw())
                    args.out.write_text(json.dumps(faults.summary(), indent=1) + "\n")
                    if waits:
                        faults.wait_for_all()
                faults.cause([(PARENT, None, "KILL")])
            except (AssertionError, TimeoutError, OSError) as error:
                faults.failed.append(str(error))
                print(error, flush=True)
            finally:
                faults.command.end()
                for group in MEMORY.glob("aurora-faults-*"):
                    with suppress(OSError):
                        group.rmdir()
            args.out.write_text(json.dumps(faults.summary(), indent=1) + "\n")


if __name__ == "__main__":
    main()
