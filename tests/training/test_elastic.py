"""Elastic training: members are killed and join again, and every committed step is that of a run in which nobody was."""

import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest

from aurora.elastic.epoch_groups import Epoch
from aurora.elastic.member import OtherRun
from aurora.elastic.steps import NOTHING, Settlement, StateLost, Version
from aurora.models.hub import model_digest
from aurora.runtime.distributed.launcher import launch_threads
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.training.data import read_samples
from aurora.training.elastic_run import train_elastic
from aurora.training.member_training import MemberTraining
from aurora.training.run import train
from aurora.training.trainer import load_trainer
from aurora.types import TrainOptions
from tests.models.architectures import build

FIXED = TrainOptions(steps=10, batch=8, length=8, dtype="float64", checkpoint_every=5, timeout_s=60.0, transport="memory")
OPTIONS = replace(FIXED, ranks=3, transport="gloo", elastic=True, respawn=1, min_ranks=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model's folder and a file of text."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "text.txt").write_text("def f(x): return x + 1\n" * 20)
    return build("qwen3_moe", folder / "qwen3_moe"), folder / "text.txt"


@pytest.fixture(scope="module")
def undisturbed(made, tmp_path_factory):
    """The losses of a run on one thread."""
    folder, text = made
    result = train(folder, [text], FIXED, output=tmp_path_factory.mktemp("undisturbed"))
    return [step.loss for step in result.steps]


def test_killed_ranks_cost_no_step_and_join_again(made, undisturbed, tmp_path):
    blows = {2: 2, 4: 1}  # by step the rank that is killed; unless the first is back by then, rank 0 waits until one is
    struck = []

    def watch(step, pids):
        if step in blows:
            os.kill(pids[blows[step]], signal.SIGKILL)
            struck.append(blows.pop(step))

    folder, text = made
    result = train_elastic(str(folder), read_samples(folder, [text], OPTIONS.length), OPTIONS, tmp_path, watch)
    assert struck == [2, 1]
    assert sorted(line.split(" after")[0] for line in result.lost) == [f"rank {rank} was lost" for rank in (1, 2)]
    assert all(line.endswith((": killed by signal 9", ": its process ended")) for line in result.lost)
    assert [step.step for step in result.steps] == list(range(OPTIONS.steps))
    np.testing.assert_allclose([step.loss for step in result.steps], undisturbed, rtol=0, atol=1e-9)
    assert 2 <= len(result.pauses) <= 4, "two losses, and two ranks that join again"
    assert all(0 < pause.quorum_s < pause.seconds for pause in result.pauses)
    logged = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sorted(set(logged)) == list(range(OPTIONS.steps))
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_rank_that_comes_back_to_a_changed_model_is_refused(made, tmp_path):
    """Rank 0 goes on alone, or ends, as `min_ranks` says, and takes nothing from the changed files."""
    folder = shutil.copytree(made[0], tmp_path / "model")

    def watch(step, pids):
        if step == 2:
            weights = bytearray((folder / "model.safetensors").read_bytes())
            weights[-1] ^= 1
            (folder / "model.safetensors").write_bytes(weights)
            os.kill(pids[1], signal.SIGKILL)

    options = replace(OPTIONS, steps=1000, ranks=2)
    samples_NT = read_samples(folder, [made[1]], OPTIONS.length)
    with pytest.raises(
        OtherRun, match=r"^rank-0001: expected `model` [0-9a-f]{16} as the other ranks have, found [0-9a-f]{16}$"
    ):
        train_elastic(str(folder), samples_NT, options, tmp_path, watch)


def test_weights_that_change_while_a_rank_loads_are_not_taken(made, tmp_path):
    folder = shutil.copytree(made[0], tmp_path / "model")
    options = replace(OPTIONS, ranks=1, min_ranks=1)
    samples_NT = read_samples(folder, [made[1]], OPTIONS.length)

    def load():
        loaded = load_trainer(str(folder), "cpu", samples_NT, options)
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
        return loaded

    with pytest.raises(OtherRun, match=r"model: expected `model` [0-9a-f]{16} as when training began, found"):
        MemberTraining(load, str(folder), options, tmp_path, None, None, digest=model_digest(folder))


class Crew:
    """Members that take part in epochs as threads; who is not named in an epoch is lost, or has not joined yet."""

    def __init__(self, made, output, options):
        folder, text = made
        self.samples_NT = read_samples(folder, [text], options.length)
        self.folder, self.output, self.options = str(folder), output, options
        self.works, self.final, self.epoch = {}, {}, 0

    def begin(self, names, version, stale=()):
        """Begins an epoch. Members without a version go back first; returns what each of them raises or None."""
        self.epoch += 1
        transports = Memory(len(names), 60.0)
        for name in names:
            if name not in self.works:
                self.works[name] = self.work()
        if version == NOTHING:
            version = Version(0, {self.works[name].restore() for name in names}.pop())

        def one(rank_info):
            work = self.works[names[rank_info.rank]]
            work._connect = lambda: MemoryTransport(transports, rank_info.rank)
            try:
                work.begin(Epoch(self.epoch, names, {}, rank_info.rank), Settlement(version, frozenset(), frozenset(stale)))
            except StateLost as error:
                return str(error)

        self.names = names
        return launch_threads(one, len(names), timeout_s=60.0)

    def work(self):
        def final(said):
            self.final[said.version] = said.step

        return MemberTraining(lambda: load_trainer(self.folder, "cpu", self.samples_NT, self.options), self.folder, self.options,
                              self.output, None, final)  # fmt: skip

    def prepare(self):
        launch_threads(lambda rank_info: self.works[self.names[rank_info.rank]].prepare(), len(self.names), timeout_s=60.0)

    def steps(self, count):
        for _ in range(count):
            self.prepare()
            for name in self.names:
                self.works[name].commit()
        return Version(self.epoch, self.works[self.names[0]].step)

    def losses(self):
        return [self.final[version].loss for version in sorted(self.final)]


def test_an_epoch_that_ends_before_its_first_step_loses_no_expert(made, undisturbed, tmp_path):
    crew = Crew(made, tmp_path, replace(OPTIONS, min_replicas=1))
    crew.begin(("a", "b"), NOTHING)
    version = crew.steps(2)
    assert crew.begin(("a", "b", "c"), version, stale=["c"]) == [None] * 3
    taken = [set(layer.held) for layer in crew.works["c"]._trainer.state.layers]
    assert any(taken)
    crew.prepare()
    for name in "ab":
        crew.works[name].discard()
    assert crew.begin(("a", "b"), version) == [None] * 2
    crew.steps(3)
    np.testing.assert_allclose(crew.losses(), undisturbed[:4], rtol=0, atol=1e-9)  # the fifth is not known to be final


@pytest.mark.full
@pytest.mark.parametrize(("every", "kept"), [(2, 2), (None, 0)])
def test_members_go_back_to_the_checkpoint_when_all_replicas_of_an_expert_are_lost(made, undisturbed, tmp_path, every, kept):
    crew = Crew(made, tmp_path, replace(OPTIONS, min_replicas=1, checkpoint_every=every, rebalance_every=1))
    crew.begin(("a", "b", "c"), NOTHING)
    version = crew.steps(3)
    for name in "abc":
        crew.works[name].close()
    assert all("no rank holds expert" in said for said in crew.begin(("a", "b"), version))
    assert crew.begin(("a", "b"), NOTHING) == [None] * 2
    assert [crew.works[name].step for name in "ab"] == [kept] * 2
    version = crew.steps(2)
    assert crew.begin(("a", "b", "c"), version, stale=["c"]) == [None] * 3
    crew.steps(2)
    assert {version.epoch for version in crew.final} == {1, 3, 4}
    for version, step in crew.final.items():
        assert abs(step.loss - undisturbed[version.step - 1]) < 1e-9


def test_a_member_that_is_lost_while_the_model_is_written_changes_nothing(made, tmp_path):
    crew = Crew(made, tmp_path, replace(OPTIONS, steps=2))
    crew.begin(("a", "b"), NOTHING)
    version = crew.steps(2)
    crew.prepare()
    file = tmp_path / "model" / "model.safetensors"
    before = file.read_bytes()
    file.unlink()
    crew.works["b"].discard()
    assert crew.begin(("b",), version) == [None]
    crew.steps(1)
    assert crew.works["b"].step == crew.works["b"].steps
    assert file.read_bytes() == before
    assert [version.step for version in crew.final] == [1, 2]
