"""Elastic training over several hosts, here commands on loopback that meet at torchft's own lighthouse and share a folder."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aurora.elastic.member import OtherRun
from aurora.elastic.steps import Pause, Version
from aurora.errors import BadInput
from aurora.training.data import read_samples
from aurora.training.elastic_run import Launcher, train_elastic
from aurora.training.member_training import nodes_of
from aurora.training.run import train
from aurora.training.training_run import LOG, CommittedStep, FinalStep, log_step, logged_steps, shared_run, sole_run
from aurora.types import TrainOptions
from tests.models.architectures import build

OPTIONS = TrainOptions(
    steps=120, ranks=2, min_ranks=2, batch=8, length=8, dtype="float64", checkpoint_every=20, timeout_s=120.0, elastic=True
)
TORCHFT_LIGHTHOUSE = Path(sysconfig.get_path("scripts")) / "torchft_lighthouse"
COMMON = ["--min-ranks=2", "--batch=8", "--length=8", "--dtype=float64", "--checkpoint-every=20", "--timeout=120"]
STARTED = ["--min_replicas=1", "--join_timeout_ms=2000", "--heartbeat_timeout_ms=2000", "--quorum_tick_ms=50"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model's folder, a file of text, and the losses of a run on one thread."""
    home = tmp_path_factory.mktemp("hosts")
    (home / "text.txt").write_text("def f(x): return x + 1\n" * 20)
    folder = build("qwen3_moe", home / "qwen3_moe")
    alone = replace(OPTIONS, elastic=False, ranks=1, min_ranks=1, transport="memory")
    result = train(folder, [home / "text.txt"], alone, output=home / "undisturbed")
    return folder, home / "text.txt", [step.loss for step in result.steps]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def lighthouse():
    """The address of a running torchft_lighthouse."""
    port = free_port()
    server = subprocess.Popen(
        [TORCHFT_LIGHTHOUSE, f"--bind=127.0.0.1:{port}", *STARTED], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class Host(threading.Thread):
    """A host's run, as a thread of this process; `result` waits for it."""

    def __init__(self, folder, text, output, options, watch=lambda step, pids: None):
        super().__init__(daemon=True)
        self.args = folder, text, output, options, watch
        self.found = None
        self.start()

    def run(self):
        folder, text, output, options, watch = self.args
        try:
            output.mkdir(exist_ok=True)
            self.found = train_elastic(str(folder), read_samples(folder, [text], options.length), options, output, watch)
        except Exception as error:
            self.found = error

    def result(self):
        self.join(240)
        assert not self.is_alive()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def command(folder, text, output, lighthouse):
    """A host's command with OPTIONS, but for its one rank."""
    start = [sys.executable, "-m", "aurora", "train", folder, "--text", text, "--elastic", f"--lighthouse={lighthouse}"]
    return subprocess.Popen([*start, *COMMON, "--steps=120", "-o", output], stdout=subprocess.DEVNULL)


def wait_for_a_rank(lighthouse):
    """Waits until one rank asks to take part."""
    while "-0000/" not in urllib.request.urlopen(f"http://{lighthouse}/status", timeout=60).read().decode():
        time.sleep(0.05)


def log_of(output):
    """{step: loss} of a run's log, in the sequence of its lines."""
    return {step["step"]: step["loss"] for step in map(json.loads, (output / LOG).read_text().splitlines())}


@pytest.mark.full
def test_a_host_that_is_killed_costs_no_step_and_comes_back(made, lighthouse, tmp_path):
    """The first host of two is killed; the other goes on, loses one of its two ranks, and waits for the first host."""
    folder, text, losses = made
    hosts, killed = [command(folder, text, tmp_path, lighthouse)], []

    def watch(step, pids):
        if not killed and step >= 5:
            killed.append(step)
            hosts[0].kill()
        if killed and len(hosts) == 1 and step >= killed[0] + 20:
            os.kill(pids[1], signal.SIGKILL)
            hosts.append(command(folder, text, tmp_path, lighthouse))

    try:
        wait_for_a_rank(lighthouse)
        result = Host(folder, text, tmp_path, replace(OPTIONS, lighthouse=lighthouse), watch).result()
        assert hosts[1].wait(120) == 0
    finally:
        for process in hosts:
            process.kill()
            process.wait()
    (lost,) = result.lost
    assert lost.startswith("rank 1 was lost after ")
    assert result.ranks in (2, 3)
    np.testing.assert_allclose([step.loss for step in result.steps], losses, rtol=0, atol=1e-9)
    assert len(result.pauses) >= 2, "the first host went and came"
    logged = log_of(tmp_path)
    assert list(logged) == list(range(OPTIONS.steps))
    np.testing.assert_allclose(list(logged.values()), losses, rtol=0, atol=1e-9)
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.full
def test_hosts_that_differ_are_refused_and_the_others_train_on(made, lighthouse, tmp_path):
    """The first host waits for another rank since it has lost one of two, until a host comes that does not differ."""
    folder, text, losses = made
    output, options = tmp_path / "out", replace(OPTIONS, lighthouse=lighthouse, steps=10)
    changed = shutil.copytree(folder, tmp_path / "changed")
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    (tmp_path / "other.txt").write_text("def f(x): return x - 1\n" * 20)
    lost = threading.Event()

    def watch(step, pids):
        if step == 2:
            os.kill(pids[1], signal.SIGKILL)
            lost.set()

    first = Host(folder, text, output, options, watch)
    assert lost.wait(120)
    one = replace(options, ranks=1)
    differing = {
        r"`model` \w{16}": Host(changed, text, output, one),
        r"`text` \w{16}": Host(folder, tmp_path / "other.txt", output, one),
        "`steps` 10": Host(folder, text, output, replace(one, steps=11)),
        rf"`output` with the mark {lighthouse} \w{{16}}": Host(folder, text, tmp_path / "elsewhere", one),
    }
    for what, host in differing.items():
        with pytest.raises(OtherRun, match=rf"^127\.0\.0\.1-\w{{6}}-0000: expected {what} as the other ranks have, found "):
            host.result()
    assert first.is_alive()
    joined = Host(folder, text, output, one).result()
    assert joined.steps[-1].step == 9
    np.testing.assert_allclose([step.loss for step in first.result().steps], losses[:10], rtol=0, atol=1e-9)


@pytest.mark.full
def test_under_torchrun_each_process_joins_with_one_rank(made, lighthouse, tmp_path, monkeypatch):
    folder, text, losses = made
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    elastic = ["aurora", "train", folder, "--text", text, "--elastic", f"--lighthouse={lighthouse}", *COMMON, "--steps=5"]
    subprocess.run([*torchrun, *elastic, "-o", tmp_path], check=True, timeout=240)
    logged = log_of(tmp_path)
    np.testing.assert_allclose([logged[step] for step in range(5)], losses[:5], rtol=0, atol=1e-9)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(
        BadInput, match="`elastic`: starts its ranks by itself, expected `lighthouse` under torchrun, found none"
    ):
        train(folder, [text], OPTIONS, output=tmp_path)


def test_hosts_share_a_folder_and_no_other_run_writes_there(tmp_path):
    with shared_run(tmp_path, "a:1", False) as mark:
        (tmp_path / "checkpoints" / "step-00000003-of-2").mkdir(parents=True)
        with shared_run(tmp_path, "a:1", False) as again:
            assert again == mark, "a host that joins later"
        with (
            pytest.raises(BadInput, match=r"\.run: a run at the lighthouse a:1 writes it, expected b:1"),
            shared_run(tmp_path, "b:1", True),
        ):
            pass
        with pytest.raises(BadInput, match=r"\.run: another run writes it"), sole_run(tmp_path):
            pass
    with (
        pytest.raises(BadInput, match="step-00000003-of-2: is of an earlier run: expected `resume`"),
        shared_run(tmp_path, "a:1", False),
    ):
        pass
    with shared_run(tmp_path, "b:1", True) as other:
        assert other != mark
    with sole_run(tmp_path), pytest.raises(BadInput, match=r"\.run: another run writes it"), shared_run(tmp_path, "a:1", True):
        pass


def test_the_host_that_takes_the_log_over_writes_what_is_missing_there(tmp_path):
    step = CommittedStep(0, 2.5, 0.0, 1.0, 0.1, 2, Pause(1.0, 2, quorum_s=0.5))
    launcher = Launcher(OPTIONS, tmp_path, lambda step, pids: None)
    launcher._processes = SimpleNamespace(running={})
    for number in range(6):
        final = FinalStep(Version(1 + number // 5, number + 1), replace(step, step=number), 2, logs=number >= 4)
        launcher._handle(0, final)
        launcher._handle(1, final)
        if number == 2:
            for logged in (0, 2):
                log_step(tmp_path / LOG, replace(step, step=logged))
            with (tmp_path / LOG).open("a") as log:
                log.write('{"step": 3, "lo\n')
    numbers = [int(found) for found in re.findall(r'"step": (\d), "loss', (tmp_path / LOG).read_text())]
    assert numbers == [0, 2, 1, 3, 4, 5]
    assert logged_steps(tmp_path / LOG) == set(range(6))


def test_ranks_of_a_host_are_on_one_node_if_there_are_several_hosts():
    assert nodes_of(["rank-0000", "rank-0001", "rank-0003"], 8, 8, 2) == [0, 1, 2]
    members = ["10.0.0.1-ab-0000", "10.0.0.1-ab-0001", "10.0.0.2-ab-0000", "10.0.0.2-cd-0000"]
    assert nodes_of(members, 4, 8, 2) == [0, 0, 1, 2]
    assert nodes_of(members, 4, 8, 3) == [0, 1, 2, 3], "each of 8 experts on three hosts: there is room for 16 of 24 replicas"


@pytest.mark.parametrize(("change", "said"), [
    ({"elastic": False, "min_ranks": 1, "lighthouse": "a:1"}, "`lighthouse`: is for a run with `elastic`, found a:1 without"),
    ({"lighthouse": ""}, "`lighthouse`: expected ADDRESS:PORT"),
    ({"lighthouse": "0.0.0.0:1"}, "`lighthouse`: expected the address of one host, found 0.0.0.0"),
    ({"min_ranks": 3}, "`min_ranks`: expected at most 2 ranks, found 3"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(change, said):
    with pytest.raises(BadInput, match=said):
        replace(OPTIONS, **change)
