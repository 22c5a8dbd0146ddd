"""Elastic training over NCCL on emulated GPUs: whatever call a member is lost in, the others' losses are those of no loss."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from aurora.elastic.epoch_nccl import transport_of_host
from aurora.elastic.lighthouse import Lighthouse
from aurora.elastic.member import Member
from aurora.elastic.steps import run_elastic
from aurora.errors import BadInput
from aurora.training import elastic_run
from aurora.training.data import read_samples
from aurora.training.elastic_run import train_elastic
from aurora.training.member_training import MemberTraining
from aurora.training.run import train
from aurora.training.trainer import load_trainer
from aurora.types import TrainOptions
from tests.elastic.emulated_gpu import EmulatedGpu, Killed, die
from tests.elastic.processes import end
from tests.models.architectures import build

pytestmark = pytest.mark.full

FIXED = TrainOptions(steps=12, batch=8, length=8, dtype="float64", timeout_s=60.0, transport="memory")
OPTIONS = replace(FIXED, transport="nccl", elastic=True, ranks=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model's folder, the samples, and the losses of a run on one thread."""
    folder = tmp_path_factory.mktemp("elastic-gpu")
    (folder / "text.txt").write_text("def f(x): return x + 1\n" * 20)
    model = build("qwen3_moe", folder / "qwen3_moe")
    result = train(model, [folder / "text.txt"], FIXED, output=folder / "undisturbed")
    return str(model), read_samples(model, [folder / "text.txt"], FIXED.length), [step.loss for step in result.steps]


class Members:
    """Members as threads, each of which trains on a GPU of its own, and may die in one of its calls."""

    def __init__(self, made, output, lighthouse):
        self.made, self.output, self.lighthouse = made, output, lighthouse
        self.works, self.gpus, self.final, self.errors, self._threads = {}, {}, {}, [], []
        self.at_step = {}  # by step what to do when it is final

    def prepare(self, name, dies=None):
        """Makes a member, which dies when its GPU is about to make the call `dies`: the numbers of its group and of the call."""

        def on_call(*call):
            if call == dies:
                die(member)

        def final(said):
            self.final[said.version] = said.step.loss
            self.at_step.pop(said.step.step, lambda: None)()

        model, samples_NT, _ = self.made
        self.gpus[name] = EmulatedGpu(on_call)
        member = Member(self.lighthouse.address, name, timeout_s=60.0, expected=3, gpu=self.gpus[name])
        load = lambda: load_trainer(model, self.gpus[name].device, samples_NT, OPTIONS)  # noqa: E731
        work = MemberTraining(load, model, OPTIONS, self.output, lambda *_: member.transport(), final)
        self.works[name] = (member, work)

    def start(self, name):
        member, work = self.works[name]

        def run():
            try:
                run_elastic(member, work, work.paused)
                work.close()
                member.close()
            except Killed:
                pass
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        for member, _ in self.works.values():
            end(member)
        assert self.errors == []


def test_members_lost_in_an_exchange_in_a_first_call_and_in_a_migration_cost_no_step(made, tmp_path, monkeypatch):
    monkeypatch.setattr("aurora.elastic.member.ROUND_S", 0.1)  # the steps are over soon
    with Lighthouse() as lighthouse:
        members = Members(made, tmp_path, lighthouse)
        for name, dies in {"a": None, "b": None, "c": (0, 40), "d": (0, 0), "e": (0, 6)}.items():
            members.prepare(name, dies)
        members.at_step = {3: lambda: members.start("d"), 6: lambda: members.start("e")}
        for name in "abc":
            members.start(name)
        members.join()
    for name in "ab":
        _, work = members.works[name]
        assert work.step == work.steps
        groups = members.gpus[name].groups
        assert [group.aborts for group in groups if group.made] == [1] * 5
        assert len(groups) <= 6  # the one with "d", if its end was not heard of before it was begun
    losses = [loss for _, loss in sorted((version.step, loss) for version, loss in members.final.items())]
    np.testing.assert_allclose(losses, made[2], rtol=0, atol=1e-9)


def train_emulated(*args):
    """A rank's process, whose GPU is emulated."""
    elastic_run.gpu_of_rank = lambda transport, *_: EmulatedGpu() if transport == "nccl" else None
    elastic_run.train_member(*args)


def test_a_run_over_nccl_is_a_run_over_nccl(made, tmp_path, monkeypatch):
    """Real processes, from the command's function on."""
    model, samples_NT, losses = made
    monkeypatch.setattr(elastic_run, "transport_of_host", lambda *_: "nccl")
    monkeypatch.setattr(elastic_run, "train_member", train_emulated)
    result = train_elastic(model, samples_NT, replace(OPTIONS, ranks=2, steps=3), tmp_path)
    assert (result.transport, result.lost) == ("nccl", ())
    np.testing.assert_allclose([step.loss for step in result.steps], losses[:3], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("gpus", "asked", "found"), [
    (0, "auto", "gloo"), (2, "auto", "gloo"), (3, "auto", "nccl"), (4, "nccl", "nccl"), (4, "gloo", "gloo"), (0, "gloo", "gloo"),
])  # fmt: skip
def test_nccl_is_taken_where_each_rank_has_a_gpu(monkeypatch, gpus, asked, found):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert transport_of_host(asked, 3) == found


def test_too_few_gpus_are_refused(made, tmp_path):
    model, samples_NT, _ = made
    with pytest.raises(BadInput, match=r"^`transport` nccl: expected a CUDA device for each of 3 ranks, found 0$"):
        train_elastic(model, samples_NT, OPTIONS, tmp_path)
