"""Elastic training over several hosts, here on loopback: hosts that lead, join, lose ranks, differ, and are lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from aurora.elastic.host_connection import difference
from aurora.elastic.hosts import Lead, LedRanks
from aurora.elastic.steps import Pause, Version
from aurora.errors import BadInput, RankFailed
from aurora.training.data import read_samples, samples_digest
from aurora.training.elastic_run import WIRE, JoinedTraining, MemberFinished, join_training, train_elastic
from aurora.training.member_training import nodes_of
from aurora.training.run import train
from aurora.training.training_run import (
    LOG,
    CommittedStep,
    FinalStep,
    has_mark,
    leaders_options,
    log_step,
    shared_by_hosts,
    sole_run,
)
from aurora.types import TrainOptions
from aurora.types.run_options import parse_address
from tests.elastic.certificates import certificate, certificate_file
from tests.elastic.processes import free_leaders_port
from tests.models.architectures import build

pytestmark = pytest.mark.full

OPTIONS = TrainOptions(steps=10, batch=8, length=8, dtype="float64", checkpoint_every=3, timeout_s=120.0, elastic=True)
STEP = CommittedStep(3, 2.5, 0.0, 1.0, 0.1, 2, Pause(1.0, 2, quorum_s=0.5))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model's folder, a file of text, and the losses of a run on one thread."""
    home = tmp_path_factory.mktemp("hosts")
    (home / "text.txt").write_text("def f(x): return x + 1\n" * 20)
    folder = build("qwen3_moe", home / "qwen3_moe")
    result = train(
        folder, [home / "text.txt"], replace(OPTIONS, elastic=False, transport="memory"), output=home / "undisturbed"
    )
    return folder, home / "text.txt", [step.loss for step in result.steps]


@pytest.fixture
def address(monkeypatch):
    """An address of this host with a free port after it, and the certificate in the environment."""
    monkeypatch.setenv("AURORA_CERTIFICATE", str(certificate_file()))
    return f"127.0.0.1:{free_leaders_port()}"


class Host(threading.Thread):
    """A host's run, as a thread of this process; `result` waits for it."""

    def __init__(self, made, output, options, watch=lambda step, pids: None):
        super().__init__(daemon=True)
        self.folder, self.text = made[:2]
        self.output, self.options, self.watch, self.found = output, options, watch, None
        self.start()

    def run(self):
        try:
            if self.options.join:
                self.found = join_training(str(self.folder), [self.text], self.options, self.output, self.watch)
            else:
                samples_NT = read_samples(self.folder, [self.text], self.options.length)
                self.found = train_elastic(str(self.folder), samples_NT, self.options, self.output, self.watch)
        except Exception as error:
            self.found = error

    def result(self):
        self.join(240)
        assert not self.is_alive()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def losses(result):
    return [step.loss for step in result.steps]


def test_a_host_that_joins_loses_a_rank_and_the_leader_writes_what_all_have_done(made, address, tmp_path):
    struck = []

    def watch(step, pids):
        if step >= 3 and not struck:
            struck.append(step)
            os.kill(pids[0], signal.SIGKILL)

    leader = Host(made, tmp_path, replace(OPTIONS, ranks=2, min_ranks=3, lead=address))
    joiner = Host(made, tmp_path, TrainOptions(ranks=1, elastic=True, join=address, respawn=1), watch)
    led, joined = leader.result(), joiner.result()
    assert struck
    assert (led.ranks, joined.ranks, led.min_replicas) == (3, 1, 2)
    np.testing.assert_allclose(losses(led), made[2], rtol=0, atol=1e-9)
    assert losses(joined) == [loss for step, loss in enumerate(losses(led)) if step in {each.step for each in joined.steps}]
    (lost,) = led.lost
    assert lost.startswith("host 127.0.0.1-")
    assert ": rank 0 was lost after " in lost
    (lost_there,) = joined.lost
    assert lost_there.startswith("rank 0 was lost after ")
    assert lost.endswith(": killed by signal 9")
    logged = {json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()}
    assert logged == set(range(OPTIONS.steps))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert not list(tmp_path.glob(".run"))


def test_a_leader_that_is_killed_and_started_again_goes_on_with_the_host_that_waits(made, address, tmp_path):
    joins = TrainOptions(elastic=True, join=address, timeout_s=120.0)
    arguments = {
        "steps": 30,
        "batch": 8,
        "length": 8,
        "dtype": "float64",
        "checkpoint-every": 3,
        "min-ranks": 2,
        "timeout": 120,
    }
    line = [f"--{name}={value}" for name, value in arguments.items()]
    command = [sys.executable, "-m", "aurora", "train", made[0], "--text", made[1], *line, "--elastic", "-o", tmp_path]
    first = subprocess.Popen([*command, f"--lead={address}"], stdout=subprocess.DEVNULL)
    try:
        joiner = Host(made, tmp_path, joins)
        while not list(tmp_path.glob("checkpoints/step-*/shard-*")):
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    again = Host(made, tmp_path, replace(OPTIONS, steps=30, min_ranks=2, lead=address, resume=True)).result()
    assert again.steps[-1].step == joiner.result().steps[-1].step == 29
    logged = {}
    for text in (tmp_path / "log.jsonl").read_text().splitlines():
        step = json.loads(text)
        logged[step["step"]] = step["loss"]
    assert set(logged) == set(range(30))
    for step, loss in enumerate(made[2]):
        assert abs(logged[step] - loss) < 1e-9


@contextmanager
def leading(address, *jobs, refusal=lambda host: None):
    """A leader that tells hosts that join one job after the other, and starts none of their ranks."""
    left = list(jobs)

    class Silent(LedRanks):
        def _start(self, host, rank):
            """It only says what to do."""

    lead = Lead(parse_address("lead", address), certificate(), (), WIRE, refusal, lambda: left.pop(0))
    led = Silent(None, (), 0, lead, 120.0)
    try:
        yield led
    finally:
        led.close(False)


def test_a_host_whose_leader_is_lost_ends_with_a_sentence(made, address, tmp_path):
    options = TrainOptions(elastic=True, join=address, timeout_s=0.5)
    with pytest.raises(RankFailed, match=f"no leader at {address} for 0.5 s: "):
        Host(made, tmp_path, options).result()
    samples_NT = read_samples(made[0], [made[1]], OPTIONS.length)
    with sole_run(tmp_path) as mark:
        with leading(address, (mark, leaders_options(OPTIONS), samples_digest(samples_NT))) as leader:
            joiner = Host(made, tmp_path, replace(options, timeout_s=60.0))
            while not leader.joined:
                time.sleep(0.01)
        with pytest.raises(RankFailed, match=f"the leader, {address}, ended the run before it was complete"):
            joiner.result()


def test_what_a_leader_was_told_and_has_not_logged_is_told_to_the_next_one(made, address, tmp_path):
    joined = JoinedTraining(
        str(made[0]), [made[1]], TrainOptions(elastic=True, join=address), tmp_path, lambda step, pids: None
    )
    told = [FinalStep(Version(1, number + 1), replace(STEP, step=number, pause=None)) for number in range(4)]
    (rank,) = joined._request.ranks
    for final in told:
        joined.heard(rank, final)
    for number in (0, 2):
        log_step(tmp_path / LOG, told[number].step)
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 3, "lo')
    joined._processes = SimpleNamespace(running={rank: SimpleNamespace(pid=7)})
    joined.admitted = 1
    assert list(joined.unheard()) == [], "the leader is the first"
    joined.admitted = 2
    assert list(joined.unheard()) == [(rank, told[1]), (rank, told[3])]
    assert joined.result().steps == tuple(final.step for final in told)


@pytest.mark.parametrize("message", [
    FinalStep(Version(5, 4), STEP), FinalStep(Version(5, 4), replace(STEP, pause=None)), MemberFinished(("one", "two")),
])  # fmt: skip
def test_messages_are_what_was_packed(message):
    assert WIRE.unpack(WIRE.pack(message)) == message


def test_hosts_that_differ_are_told_in_what(made, tmp_path):
    folder, _, _ = made
    ours = shared_by_hosts(str(folder))
    assert difference(ours, shared_by_hosts(str(folder))) is None
    assert difference(ours, ours | {"new": "4"}) == "expected new None as the leader has, found 4"
    assert difference(ours, {}).startswith("expected aurora's version ")
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        (changed / file.name).write_bytes(file.read_bytes() + b" " * (file.name == "config.json"))
    assert shared_by_hosts(str(changed))["`model`"] != ours["`model`"]


def test_a_host_takes_the_leaders_options_and_no_others(made, address, tmp_path):
    """The leader says what it is told to say; this host has other text than it, or another folder."""
    heard = []

    def refusal(host):
        heard.append(host.about)

    options = leaders_options(OPTIONS)
    with sole_run(tmp_path) as mark:
        for job, found in (
            ((mark, options, "t"), "expected `text` t as the leader has, found "),
            ((mark, options | {"steps": 0}, "t"), "sent options of another version"),
            ((mark, options | {"steps": "x"}, "t"), "sent options of another version"),
            ((mark, {"steps": 3}, "t"), "sent options of another version"),
            (("another", options, "t"), f"expected the folder of the run at {address}, shared by all hosts; found another one"),
        ):
            with leading(address, job, refusal=refusal), pytest.raises(BadInput, match=found):
                Host(made, tmp_path, TrainOptions(elastic=True, join=address)).result()
    assert heard == [shared_by_hosts(str(made[0]))] * 5


def test_a_leader_that_is_started_again_with_other_options_is_left(made, address, tmp_path):
    text = samples_digest(read_samples(made[0], [made[1]], OPTIONS.length))
    joined = JoinedTraining(
        str(made[0]), [made[1]], TrainOptions(elastic=True, join=address), tmp_path, lambda step, pids: None
    )
    options = leaders_options(OPTIONS)
    with sole_run(tmp_path) as mark:
        for _ in range(2):
            joined._make_processes((mark, options, text)).close()
        with pytest.raises(BadInput, match="expected `steps` 4 as the leader has, found 10"):
            joined._make_processes((mark, options | {"steps": 4}, text))


def test_a_folder_that_another_run_writes_to_is_refused(made, tmp_path):
    with sole_run(tmp_path) as mark:
        assert has_mark(tmp_path, mark)
        with pytest.raises(BadInput, match=r"\.run: another run writes it"):
            train(made[0], [made[1]], replace(OPTIONS, elastic=False, transport="memory"), output=tmp_path)
    assert not has_mark(tmp_path, mark)
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_host_are_on_one_node_if_there_are_several_hosts():
    assert nodes_of(["rank-0000", "rank-0001", "rank-0003"], 8, 8, 2) == [0, 1, 2]
    members = ["rank-0000", "rank-0001", "rank-at-10.0.0.2-ab-0000", "rank-at-10.0.0.2-cd-0000"]
    assert nodes_of(members, 4, 8, 2) == [0, 0, 1, 2]
    assert nodes_of(members, 4, 8, 3) == [0, 1, 2, 3], "each of 8 experts on three hosts: there is room for 16 of 24 replicas"


@pytest.mark.parametrize(("change", "said"), [
    ({"elastic": False, "lead": "a:1"}, "`lead`: is for a run with `elastic`, found a:1 without"),
    ({"lead": "a:1", "join": "a:1"}, "`join`: expected none on the host that leads, found a:1"),
    ({"lead": "a:1", "port": 5}, "`port`: expected none with `lead` or `join`"),
    ({"join": "a:1", "resume": True}, "`resume`: is for the host that leads the run"),
    ({"join": "a"}, "`join`: expected ADDRESS:PORT"),
    ({"lead": ""}, "`lead`: expected ADDRESS:PORT"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(change, said):
    with pytest.raises(BadInput, match=said):
        replace(OPTIONS, **change)


def test_hosts_without_a_certificate_are_refused(made, tmp_path, monkeypatch):
    for variable in ("AURORA_CERTIFICATE", "AURORA_SECRET"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("lead", "join"):
        expected = f"`{name}`: expected the file of a certificate that all hosts share in AURORA_CERTIFICATE, found none"
        with pytest.raises(BadInput, match=expected):
            train(made[0], [made[1]], replace(OPTIONS, **{name: "127.0.0.1:1"}), output=tmp_path)
