"""Elastic training over NCCL on emulated GPUs: whatever call a member is lost in, the others' losses are those of no loss."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from aurora.elastic.epoch_nccl import transport_of_host
from aurora.elastic.lighthouse import Lighthouse
from aurora.errors import BadInput
from aurora.training import elastic_run
from aurora.training.data import read_samples
from aurora.training.elastic_run import train_elastic
from aurora.training.member_training import MemberTraining
from aurora.training.run import train
from aurora.training.trainer import load_trainer
from aurora.types import TrainOptions
from tests.elastic.emulated_gpu import EmulatedGpu, die
from tests.elastic.processes import Threads
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


def test_members_lost_in_an_exchange_in_a_first_call_and_in_a_migration_cost_no_step(made, tmp_path, monkeypatch):
    """Each trains on a GPU of its own, and may die when that is about to make a call: the numbers of its group and of the call."""
    monkeypatch.setattr("aurora.elastic.member.ROUND_S", 0.1)  # the steps are over soon
    (model, samples_NT, expected), gpus, losses, joins = made, {}, {}, {3: "d", 6: "e"}

    def final(said):
        losses[said.version] = said.step.loss
        if said.step.step in joins:
            members.start(joins.pop(said.step.step))

    def make(name, dies):
        def on_call(*call):
            if call == dies:
                die(member)

        gpu = gpus[name] = EmulatedGpu(on_call)
        load = partial(load_trainer, model, gpu.device, samples_NT, OPTIONS)
        member = members.make(
            name, lambda member: MemberTraining(load, model, OPTIONS, tmp_path, lambda: member.transport(), final), gpu
        )

    with Lighthouse() as lighthouse:
        members = Threads(lighthouse)
        for name, dies in {"a": None, "b": None, "c": (0, 40), "d": (0, 0), "e": (0, 6)}.items():
            make(name, dies)
        members.start(*"abc")
        works = members.results()
    for name in "ab":
        works[name].close()
        assert works[name].step == works[name].steps
        groups = gpus[name].groups
        assert [group.aborts for group in groups if group.made] == [1] * 5
        assert len(groups) <= 6  # the one with "d", if its end was not heard of before it was begun
    found = [loss for _, loss in sorted((version.step, loss) for version, loss in losses.items())]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


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
