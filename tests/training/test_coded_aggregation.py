"""Sums from redundant processes: those that stall or die change nothing, none is left behind."""

import functools
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from aurora.algorithms.gradient_codes import GradientCode, load_of, make_code
from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.launcher import start_fork_server
from aurora.training.coded_aggregation import AggregationRound, CodedAggregator

pytestmark = pytest.mark.full

COUNTS = np.zeros((3, 4), dtype=np.int64)
REALS = np.zeros(5)


def rng():
    return np.random.default_rng(5)


def me():
    return int(multiprocessing.current_process().name.rsplit("-", 1)[1])


def counts(batch, _arguments=None):
    return np.random.default_rng(batch).integers(0, 1000, COUNTS.shape)


def reals(batch, _arguments=None):
    return np.random.default_rng(batch).standard_normal(5)


def serial(work, batches):
    return sum(work(batch) for batch in range(batches))


def misbehave(how, workers, batch, _arguments=None):
    """The workers named do `how`; the others work."""
    if me() in workers:
        if how == "stall":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(3)
        elif how == "shape":
            return np.ones((2, 2), dtype=np.int64)
        elif how == "type":
            return counts(batch).astype(np.int32)
        elif how == "fail":
            raise BadInput("this batch cannot be read")
        elif how == "sleep":
            time.sleep(60)
    return counts(batch)


def coded_sum(work, batches, workers, redundancy, scheme, like, **options):
    """The sum by one round of a new aggregator."""
    code = make_code(scheme, workers, batches, load_of(workers, batches, redundancy), options.pop("rng"))
    with CodedAggregator(work, code, **options) as aggregator:
        return aggregator.aggregate(like)


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("scheme", "redundancy", "batches"), [("balanced", 2, 6), ("bcc", 2, 3), ("balanced", 1, 2), ("balanced", 2, 5)]
)
def test_counts_are_the_serial_sum_bit_for_bit(scheme, redundancy, batches):
    found = coded_sum(
        counts, batches, 4 if scheme == "bcc" else 3, redundancy, scheme, like=COUNTS, rng=np.random.default_rng(0)
    )
    assert found.total.dtype == np.int64
    assert (found.total == serial(counts, batches)).all()
    assert set(found.states) <= {"used", "not needed", "not waited for"}


FATES = {
    1: ("die", "killed by signal 9"),
    2: ("exit", "exit code 3"),
    3: ("shape", "refused: expected int64 (3, 4), found int64 (2, 2)"),
    4: ("type", "refused: expected int64 (3, 4), found int32 (3, 4)"),
    5: ("stall", "not waited for"),
}


def by_fate(known, batch, _arguments):
    """Worker 0 works once it is known what became of the others, who misbehave each in their own way."""
    if me() == 0:
        wait_for(known)
        return counts(batch)
    return misbehave(FATES[me()][0], (me(),), batch)


def wait_for(path):
    wait_until(path.exists)


def wait_until(true):
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def telling(monkeypatch):
    """Makes a file when none of some workers is at work any more."""

    def tell(path, workers):
        def set_state(current, worker, state):
            original(current, worker, state)
            if all(current._states[w] != "working" for w in workers):
                path.touch()

        original = AggregationRound.set_state
        monkeypatch.setattr(AggregationRound, "set_state", set_state)

    return tell


def test_workers_that_misbehave_change_nothing_and_nobody_is_left(tmp_path, telling):
    known = tmp_path / "known"
    telling(known, range(1, 5))
    code = GradientCode("balanced", np.ones((6, 2)))
    start_fork_server()
    before = children()
    with CodedAggregator(functools.partial(by_fate, known), code) as aggregator:
        found = aggregator.aggregate(COUNTS)
        assert children() > before
    assert (found.total == serial(counts, 2)).all()
    assert found.states == ("used", *(state for _, state in FATES.values()))
    assert children() <= before
    assert not any(thread.name.startswith("aurora-worker") for thread in threading.enumerate())


def nan_of_one(known, batch, _arguments):
    if me() == 0:
        return np.full(5, np.nan)
    wait_for(known)
    return reals(batch)


def test_nan_is_refused(tmp_path, telling):
    known = tmp_path / "known"
    telling(known, [0])
    code = GradientCode("balanced", np.ones((2, 1)))
    with CodedAggregator(functools.partial(nan_of_one, known), code) as aggregator:
        found = aggregator.aggregate(REALS)
    assert found.states[0] == "refused: expected finite numbers, found NaN or infinity"
    assert found.total == pytest.approx(reals(0))


def test_a_batch_that_nobody_can_give_is_named():
    work = functools.partial(misbehave, "die", (0, 1, 2, 3))
    with pytest.raises(
        RankFailed, match=r"batches [0-3, ]* are held by no worker that is left: .*worker \d killed by signal 9"
    ):
        coded_sum(work, 4, 4, 2, "balanced", like=COUNTS, rng=rng())
    with pytest.raises(
        RankFailed, match=r"batches 2 are held by no worker that is left: worker 2 failed: BadInput: this batch"
    ):
        coded_sum(functools.partial(misbehave, "fail", (2,)), 4, 4, 1, "balanced", like=COUNTS, rng=rng())
    first, second = np.flatnonzero(make_code("balanced", 4, 4, 2, rng()).holds_WB[:, 0]).tolist()
    with pytest.raises(
        RankFailed, match=rf"batches 0, 1 are held by no worker that is left: worker {first} .*; worker {second} "
    ):
        coded_sum(functools.partial(misbehave, "exit", (first, second)), 4, 4, 2, "balanced", like=COUNTS, rng=rng())


def test_nothing_for_too_long_is_a_failure():
    with pytest.raises(RankFailed, match=r"nothing came from the workers for 1 s"):
        coded_sum(functools.partial(misbehave, "sleep", (0, 1)), 2, 2, 1, "balanced", like=COUNTS, rng=rng(), timeout_s=1.0)


def scaled(batch, arguments):
    return reals(batch) * arguments["factor"]


def sometimes_late(worker, number):
    return 0.1 if (worker + number) % 3 == 0 else 0.0


@pytest.mark.parametrize("scheme", ["balanced", "bcc"])
def test_round_after_round_with_late_workers(scheme):
    code = make_code(scheme, 4, 4, 2, rng())
    with CodedAggregator(scaled, code, delay_s=sometimes_late) as aggregator:
        for number in range(6):
            found = aggregator.aggregate(REALS, {"factor": np.full(5, float(number))})
            assert found.total == pytest.approx(number * serial(reals, 4))
            assert set(found.states) <= {"used", "not needed", "not waited for"}


def noted(path, batch, arguments):
    """Notes the factor, and fails if an argument that the master keeps came again."""
    with (path / str(me())).open("a") as file:
        file.write(f"{arguments['factor'][0]:g} ")
    kept = vars(noted).setdefault("kept", arguments["kept"])
    if kept is not arguments["kept"]:
        raise BadInput("`kept` was sent again")
    return reals(batch) * arguments["factor"][:5]


def test_a_stopped_worker_delays_nobody_and_takes_the_newest_round_and_its_arguments(tmp_path):
    """Worker 1 is stopped before it has read the first arguments, which its pipe does not hold, and goes on four rounds later."""
    code = GradientCode("balanced", np.ones((2, 1)))
    with CodedAggregator(functools.partial(noted, tmp_path), code, timeout_s=60.0) as aggregator:
        os.kill(aggregator.pids[1], signal.SIGSTOP)
        kept = np.full(5, 9.0)
        for number in range(4):
            found = aggregator.aggregate(REALS, {"factor": np.full(1 << 20, float(number)), "kept": kept})
            assert found.states == ("used", "not waited for")
            assert found.total == pytest.approx(number * reals(0))
        os.kill(aggregator.pids[0], signal.SIGSTOP)
        os.kill(aggregator.pids[1], signal.SIGCONT)
        found = aggregator.aggregate(REALS, {"factor": np.full(1 << 20, 5.0), "kept": kept})
    assert found.states == ("not waited for", "used")
    assert found.total == pytest.approx(5 * reals(0))
    assert (tmp_path / "0").read_text().split() == ["0", "1", "2", "3"]
    assert {*(tmp_path / "1").read_text().split()} <= {"0", "3", "5"}, "the pipe held the first round; then the newest counts"


def large(batch, _arguments):
    return np.full(3 << 20, batch + 1, dtype=np.int64)


def test_results_larger_than_a_pipe_takes_at_once():
    found = coded_sum(large, 2, 2, 1, "balanced", like=np.zeros(3 << 20, dtype=np.int64), rng=rng())
    assert (found.total == 3).all()


@pytest.mark.parametrize(
    ("workers", "redundancy", "why"),
    [(0, 1, "`workers`: expected more than zero, found 0"), (4, 0, "`redundancy`: expected from 1 to the 4 workers, found 0")],
)
def test_refusals(workers, redundancy, why):
    with pytest.raises(BadInput, match=why):
        load_of(workers, 4, redundancy)
