"""Training with redundancy: the steps are those of one process, whichever workers' messages count, are late, or never come."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from aurora.algorithms.gradient_codes import load_of, make_code
from aurora.errors import BadInput, InfeasiblePlan
from aurora.models.loading import load_model
from aurora.models.own_weights import load_without_experts
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.training.coded_aggregation import AggregationJob, AggregationRound, Answer, partial_sum
from aurora.training.coded_gradients import STEP, WEIGHTS, CodedGradients, PartGradients, code_of, train_coded
from aurora.training.data import GlobalBatches, read_samples
from aurora.training.run import train
from aurora.training.trainer import Trainer, alike_ranks
from aurora.types import TrainOptions
from tests.models.architectures import build
from tests.training.test_training import plain

OPTIONS = TrainOptions(
    ranks=4, batch=5, length=12, dtype="float64", learning_rate=3e-3, max_norm=0.5, router_loss=0.02, redundancy=2, seed=1
)
SAMPLES_NT = np.random.default_rng(0).integers(3, 259, (7, 12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("qwen3_moe", tmp_path_factory.mktemp("coded") / "qwen3_moe")


class DrawnAggregator:
    """Performs the rounds of an aggregator in this thread; workers answer in drawn sequences, and the slow one never does."""

    def __init__(self, job, rng, slow=None):
        self.lost = {}
        self._job, self._rng, self._slow, self._rounds = job, rng, slow, 0

    def aggregate(self, like, arguments):
        self._rounds += 1
        job = self._job
        current = AggregationRound(self._rounds, job.code, like)
        for worker in self._rng.permutation(len(job.code.holds_WB)).tolist():
            if not current.determined and worker != self._slow:
                total = partial_sum(job.work, job.code, worker, arguments)
                current.take(worker, Answer(self._rounds, total))
        return current.result()


def trained(folder, options, rng, slow=None, steps=3):
    """(steps, 3): loss, router loss and gradient norm of each step."""
    model = load_without_experts(folder, dtype=torch.float64)
    trainer = Trainer(model, GlobalBatches(SAMPLES_NT, options.batch, options.seed), options)
    trainer.join(MemoryTransport(Memory(1, 10.0), 0), alike_ranks([0]))
    trainer.place(trainer.planned())
    job = AggregationJob(PartGradients(str(folder), SAMPLES_NT, options, options.ranks), code_of(options), None)
    coded = CodedGradients(trainer, DrawnAggregator(job, rng, slow), options.router_loss)
    found = []
    for _ in range(steps):
        prepared = coded.prepare()
        trainer.commit(prepared)
        found.append((prepared.loss, prepared.router_loss, prepared.gradient_norm))
        assert slow is None or slow in coded.not_waited_for
    return np.array(found)


@pytest.mark.parametrize(
    ("scheme", "redundancy", "router_loss"),
    [
        ("balanced", 2, 0.02),
        ("balanced", 2, 0.0),
        pytest.param("bcc", 2, 0.02, marks=pytest.mark.full),
    ],
)
def test_the_steps_are_those_of_plain_torch_whoever_is_slow(folder, scheme, redundancy, router_loss):
    options = replace(OPTIONS, scheme=scheme, redundancy=redundancy, router_loss=router_loss)
    expected, _ = plain(folder, options, steps=3)
    if not router_loss:
        expected[:, 1] = 0.0
    drawn, slow = trained(folder, options, np.random.default_rng(0)), trained(folder, options, np.random.default_rng(1), slow=3)
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(slow, expected, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(
        drawn, slow
    )  # a group's sum is the same from each of its workers, and groups have one sequence


@pytest.mark.full
def test_slowed_stopped_and_killed_ranks_change_no_step(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x + 1\n" * 20)
    options = replace(OPTIONS, steps=7, ranks=2, redundancy=1, transport="memory")
    straight = train(folder, [text], options, output=tmp_path / "straight")
    train(folder, [text], replace(options, steps=2), output=tmp_path / "coded")

    options = replace(OPTIONS, steps=7, resume=True)
    code = make_code("balanced", 4, 4, load_of(4, 4, 2), np.random.default_rng(options.seed))
    groups = sorted({tuple(np.flatnonzero((code.holds_WB == row).all(axis=1)).tolist()) for row in code.holds_WB})
    (stopped, killed), (slowed, _) = groups

    def disturb(step, pids):
        for at, rank, sent in ((2, stopped, signal.SIGSTOP), (4, stopped, signal.SIGCONT), (5, killed, signal.SIGKILL)):
            if step == at:
                os.kill(pids[rank], sent)
            while step == at and sent == signal.SIGKILL and lives(pids[rank]):
                time.sleep(0.01)

    samples_NT = read_samples(folder, [text], options.length)
    result = train_coded(str(folder), samples_NT, options, tmp_path / "coded", Slowed(slowed), disturb)
    assert (result.resumed, [step.step for step in result.steps], result.remarks) == (2, [2, 3, 4, 5, 6], ())
    assert result.lost == (f"rank {killed} was lost after 6 steps: killed by signal 9",)
    assert all(slowed in step.not_waited_for for step in result.steps)
    assert all(stopped in step.not_waited_for for step in result.steps if step.step in (3, 4))
    assert stopped not in result.steps[-1].not_waited_for, "it has the weights of steps that it missed"
    for ours, theirs in zip(result.steps, straight.steps[2:], strict=True):
        assert abs(ours.loss - theirs.loss) < 1e-9
    weights, expected = (load_file(each.model / "model.safetensors") for each in (result, straight))
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Slowed:
    """Delays one worker for longer than any step takes."""

    def __init__(self, worker):
        self._worker = worker

    def __call__(self, worker, _round):
        return 3600.0 if worker == self._worker else 0.0


def test_a_gradient_that_is_not_finite_is_a_sentence(folder):
    options = replace(OPTIONS, router_loss=0.0)
    count = sum(each.numel() for each in load_model(folder).model.parameters())
    work = PartGradients(str(folder), SAMPLES_NT, options, parts=4)
    with pytest.raises(BadInput, match=r"step 3: expected a finite loss and gradient; try a smaller `learning_rate`"):
        work(0, {STEP: np.array([3]), WEIGHTS: np.full(count, np.nan)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"redundancy": 1, "scheme": "bcc"}, "`scheme`: is for a run with `redundancy` above 1, found bcc"),
        ({"elastic": True}, "`redundancy`: goes on with lost ranks by itself, expected 1 with `elastic`"),
        ({"transport": "gloo"}, "`redundancy`: gradients travel over pipes, expected `transport` auto, found gloo"),
        ({"min_replicas": 2}, "so it holds all experts: expected `min_replicas` 4, the number of ranks, or none, found 2"),
        ({"slots_per_gpu": 3}, "`slots_per_gpu`: expected none with `redundancy`, where each rank holds all experts, found 3"),
        ({"rebalance_every": 5}, "`rebalance_every`: expected none with `redundancy`, where each rank holds all experts"),
    ],
)
def test_options_that_redundancy_does_not_go_with_are_refused(change, said):
    with pytest.raises(BadInput, match=said):
        replace(OPTIONS, **change)


def test_codes_that_do_not_fit_are_refused_before_any_rank_starts(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x + 1\n" * 20)
    for change, error, said in (
        ({"redundancy": 5}, BadInput, "`redundancy`: expected from 1 to the 4 workers, found 5"),
        ({"scheme": "none"}, BadInput, "`scheme`: expected one of balanced, bcc"),
        ({"scheme": "bcc", "seed": 4}, InfeasiblePlan, "no worker of 4 drew group"),
    ):
        with pytest.raises(error, match=said):
            train(folder, [text], replace(OPTIONS, steps=1, **change), output=tmp_path / "out")
        assert not (tmp_path / "out").exists()
