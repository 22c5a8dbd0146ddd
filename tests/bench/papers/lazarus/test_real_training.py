"""Lazarus for real: ranks that are killed, the pauses and what goes on, beside the exact probability."""

import numpy as np
import pytest

from aurora.types import TrainOptions
from bench.papers.lazarus.membership_traces import MembershipEvent
from bench.papers.lazarus.real_training import RealRuns, _Killer, survival, train_for_real

pytestmark = pytest.mark.full


def test_processes_are_killed_and_training_goes_on():
    runs = RealRuns(ranks=3, lost=(1,), draws=1, steps=5, spot_steps=6, compressed=1e9)
    trace = [MembershipEvent(0.0, (), ("a", "b", "c")), MembershipEvent(60.0, ("a",), ())]
    told = []
    found = list(train_for_real(runs, trace, 0.9, lambda *said: told.append(said)))
    assert told[0] == ("trained", 0, 2)
    assert told[-1] == ("trained", 2, 2)
    numbers = {(one.case, one.way): one.ours.mean for one in found}
    assert {one.figure for one in found} == {"Real"}
    for way in ("trained", "simulated"):
        assert numbers["1 of 3 ranks killed: goes on from replicas", way] == 1.0
    assert numbers["1 of 3 ranks killed: seconds of the pause", "trained"] > 0
    assert numbers["1 of 3 ranks killed: experts moved", "trained"] > 0
    spot = "spot trace, 1e+09 times as fast, 1 ranks killed"
    assert 0 < numbers[f"{spot}: part of the time in steps", "trained"] < 1
    assert numbers[f"{spot}: part of the time in steps", "simulated"] == 0.9


@pytest.mark.parametrize(("ranks", "lost", "expected"), [(2, 1, 1.0), (4, 1, 1.0), (4, 4, 0.0), (3, 2, 0.0)])
def test_the_exact_probability_of_small_cases(ranks, lost, expected):
    options = TrainOptions(ranks=ranks, batch=ranks, elastic=True, min_replicas=2)
    assert survival(options, lost) == expected


def test_steps_that_are_taken_again_are_noticed():
    killer = _Killer(np.random.default_rng(0), lambda _step: 0)
    for step in (0, 1, 2):
        killer(step, {})
    assert not killer.went_back
    killer(0, {})
    assert killer.went_back
