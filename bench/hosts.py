"""Hosts that disappear while they serve: `python bench/hosts.py --hosts 4 --events 100` writes bench/results/hosts-DATE.md.

Hosts are network namespaces (bench/network/net.py; needs root). One leads and answers prompts; the others join it by
`aurora run --join`. Again and again, once all ranks serve, the link of one of them is cut at a drawn moment, and mended when
the others go on; then it joins again. Are answers the same, how long are pauses, and is anything left behind?

The pause is from the last token before a change of membership to the first after it, of any request. Detection is from the cut
to the moment when the leader knows.
"""

import argparse
import datetime
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
from machine import machine

sys.path.insert(0, str(Path(__file__).parent / "network"))
import net

from aurora.elastic import serving as running
from aurora.elastic.serving import RequestJournal
from aurora.io import save, shipped
from aurora.models.decoding import greedy_decode
from aurora.models.loading import load_model
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.types import Cluster, Gpu, PlanOptions, ProfileOptions, RunOptions

MODEL = "models/mixtral-topics"
LEADER = f"{net.SUBNET}.1:29600"
NEW_TOKENS = 16
PROMPTS = 20_000  # more than are answered: the run is over after the last event
CHECKED = 200  # answers that are compared with the plain model's
REST_S = 1.5  # at most, from when all ranks serve to the next cut
TIMEOUT_S = 60.0


class Cuts:
    """Cuts the link of one host after the other, and mends it when the others have gone on."""

    def __init__(self, hosts: int, events: int, rng: random.Random) -> None:
        self.hosts, self.events, self.rng = hosts, events, rng
        self.cut_s: list[float] = []
        self.known_s: list[float] = []
        self.over = False
        self._whole, self._victim = False, None
        self._lock = threading.Lock()

    def watch(self, epoch: int, pids: dict[int, int]) -> None:
        """All ranks serve: cuts a link. One is missing: mends the link that was cut."""
        self._whole = len(pids) == self.hosts
        threading.Thread(target=self._act, args=(self._whole,), daemon=True).start()

    def lost(self) -> None:
        """The leader knows that a host is gone."""
        if len(self.known_s) < len(self.cut_s):
            self.known_s.append(time.perf_counter())

    def _act(self, whole: bool) -> None:
        time.sleep(self.rng.uniform(0.3, REST_S))
        with self._lock:
            if whole != self._whole or whole != (self._victim is None):  # another epoch has begun meanwhile
                return
            if not whole:
                net.plug_in_again(self._victim)
                self._victim = None
            elif len(self.cut_s) == self.events:
                self.over = True
            else:
                self._victim = self.rng.randrange(1, self.hosts)
                self.cut_s.append(time.perf_counter())
                net.unplug(self._victim)


def journal_of(cuts: Cuts) -> type[RequestJournal]:
    """A journal that ends the run after the last event, and tells `cuts` of losses."""

    class Journal(RequestJournal):
        @property
        def finished(self) -> bool:
            return cuts.over or super().finished

        def on_lost(self, rank: int, reason: str) -> None:
            cuts.lost()
            super().on_lost(rank, reason)

    return Journal


@contextmanager
def joined(host: str, node: int, plan: Path):
    """A host that has joined; gives its process."""
    command = [sys.executable, "-m", "aurora", "run", plan, "--model", shipped(MODEL), "--survive", "--join", LEADER]
    process = subprocess.Popen(
        ["ip", "netns", "exec", host, *map(str, command), "--node", str(node), "--timeout", str(10 * TIMEOUT_S)],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_S)
        process.kill()
        process.wait()


def planned(hosts: int):
    """A plan for hosts of one rank each, every expert on at least two of them."""
    texts = [Path(__file__).parents[1] / name for name in ("LICENSE", "README.md")]
    profile = profile_model(
        shipped(MODEL), texts, ProfileOptions(sources=hosts, prompt_tokens=32, limit=4 * hosts), lambda *_: None
    )
    cluster = Cluster("hosts", tuple(Gpu(f"g{node}", "cpu", node, 1e9, 1e9, 10**9) for node in range(hosts)))
    slots = min(-(-2 * profile.experts // (hosts - 1)) + 1, profile.experts)
    return make_plan(cluster, [profile], PlanOptions(min_replicas=2, slots_per_gpu=slots))


def percentiles(seconds: list[float]) -> str:
    """Median, 95th percentile and worst."""
    if not seconds:
        return "none"
    return ", ".join(f"{value:.2f}" for value in (np.median(seconds), np.percentile(seconds, 95), max(seconds))) + " s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    cuts = Cuts(given.hosts, given.events, random.Random(given.seed))
    running.RequestJournal = journal_of(cuts)
    options = RunOptions(NEW_TOKENS, 4, "gloo", TIMEOUT_S, survive=True, lead=LEADER, node=0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["AURORA_CERTIFICATE"] = certificate = str(folder / "run.pem")
        request = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "30", "-subj", "/CN=aurora"]
        subprocess.run([*request, "-keyout", certificate, "-out", certificate], check=True, capture_output=True)
        hosts = stack.enter_context(net.network([1e9] * given.hosts, buffer_bytes=1 << 20))
        net.enter(hosts[0])  # before this process has started others
        plan, plain = planned(given.hosts), load_model(shipped(MODEL))
        rng = np.random.default_rng(given.seed)
        prompts = [rng.integers(1, plain.vocabulary, 8).tolist() for _ in range(PROMPTS)]
        save(plan, folder / "plan.json")
        others = [stack.enter_context(joined(hosts[node], node, folder / "plan.json")) for node in range(1, given.hosts)]
        result = running.run_elastic(plan, [shipped(MODEL)], [prompts], options, watch=cuts.watch)
        codes = [other.wait(2 * TIMEOUT_S) for other in others]
    left = [rank for child in psutil.Process().children() for rank in child.children()]  # of the fork server
    answers = result.answers_M[0]
    some = sorted(answers.tokens)[:: max(1, len(answers.tokens) // CHECKED)]
    eos, wrong = plain.tokenizer.eos_token_id, 0
    for index in some:
        expected, _ = greedy_decode(plain.model, prompts[index], NEW_TOKENS, eos)
        wrong += answers.tokens[index] != expected[: len(answers.tokens[index])]
    losses = [change for change in result.changes if change.lost and change.stopped_s and change.resumed_s]
    pauses = [change.resumed_s - change.stopped_s for change in losses]
    detections = [known - cut for cut, known in zip(cuts.cut_s, cuts.known_s, strict=False)]
    after = [pause - seen for pause, seen in zip(pauses, detections, strict=False)]
    lines = [
        "# Hosts that disappear while they serve", "", machine(), "",
        f"`python bench/hosts.py --hosts {given.hosts} --events {given.events} --seed {given.seed}`", "",
        "| what | found |", "|---|---|",
        f"| links cut | {len(cuts.cut_s)} |",
        f"| changes with lost ranks; with ranks that joined | {len(losses)}; {sum(bool(c.joined) for c in result.changes)} |",
        f"| detection (median, 95 %, worst) | {percentiles(detections)} |",
        f"| pause, detection included | {percentiles(pauses)} |",
        f"| pause after detection | {percentiles(after)} |",
        f"| experts read from the model's files | {sum(change.from_checkpoint for change in losses)} |",
        f"| wrong answers | {wrong} of {len(some)} compared, {len(answers.tokens)} begun |",
        f"| exit codes of the joined hosts | {codes} |",
        f"| processes left behind | {len(left)} |",
        f"| failure | {result.failure} |",
    ]  # fmt: skip
    path = Path(__file__).parent / "results" / f"hosts-{datetime.date.today()}.md"
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
