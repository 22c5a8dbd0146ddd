"""Experts that compute while rows of other groups travel, simulated: by hand, beside a bound, and against all sequences."""

import sys
from dataclasses import replace
from itertools import permutations, product
from unittest import mock

import numpy as np
import pytest

from aurora.algorithms.alltoall import expert_groups as grouping
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Curve, PlanOptions
from tests.conftest import cluster
from tests.simulator.test_interpreter import KEEP, profile, rows

before = sys.path[:]
from bench.overlap import bound_s  # noqa: E402

sys.path[:] = before  # bench has a vllm.py, which is not vLLM


def test_two_ranks_with_two_experts_by_hand():
    """Each rank sends 2 bytes to each expert of the other one, at 2 B/s; an expert takes 1 s, and answers as many bytes.

    Whole: dispatch 0..2, experts 2..4, combine 4..6. In two stages: dispatches 0..1 and 1..2, experts 1..2 and 2..3, combines
    2..3 and 3..4: the port is never idle.
    """
    p = profile([[[[0, 0, 2, 2], [2, 2, 0, 0]]]], expert=1)
    plan = make_plan(cluster(2.0, 2.0), [p], KEEP)
    trace = simulate_plan(plan, p, overlap=2)
    assert simulate_plan(plan, p).seconds == pytest.approx(6)
    assert bound_s(plan, p) == trace.seconds == pytest.approx(4)
    assert sorted(set(rows(trace, "dispatch"))) == [(rank, at, at + 1) for rank in (0, 1) for at in (0, 1)]
    assert rows(trace, "expert") == [(rank, at, at + 1) for rank in (0, 1) for at in (1, 2)]
    assert sorted(set(rows(trace, "combine"))) == [(rank, at, at + 1) for rank in (0, 1) for at in (2, 3)]


def test_no_sequence_of_groups_beats_the_bound_and_the_products_is_near_the_best():
    """Two ranks with three experts each, a group for each expert: all 36 sequences."""
    rng, gaps = np.random.default_rng(0), []
    linear = Curve(np.array([0.0, 1.0]), np.array([0.0, 0.4]))
    for _ in range(12):
        p = profile(rng.integers(1, 12, (1, 1, 2, 6)).tolist(), combine_bytes=2)
        p = replace(p, curves={"reference": {**p.curves["reference"], "expert": linear}})
        plan, found = make_plan(cluster(4.0, 4.0), [p], KEEP), []
        for ours in product(permutations(range(3)), repeat=2):
            with mock.patch.object(grouping, "expert_groups", lambda *_, ours=ours: np.array(ours).ravel()):
                found.append(simulate_plan(plan, p, overlap=3).seconds)
        assert bound_s(plan, p) <= min(found) + 1e-9
        gaps.append(simulate_plan(plan, p, overlap=3).seconds / min(found))
    assert max(gaps) < 1.25
    assert np.mean(gaps) < 1.1


def test_what_cannot_overlap_is_refused():
    p = profile([[[[0, 2], [2, 0]]]])
    plan, pair = make_plan(cluster(2.0, 2.0), [p], KEEP), make_plan(cluster(2.0, 2.0), [p, p], KEEP)
    halves = make_plan(cluster(2.0, 2.0), [p], PlanOptions(micro_batches=2))
    for served, profiles, how, sentence in (
        (pair, [p, p], {}, "expected a plan of one model, without micro-batches, .*found 2 models"),
        (halves, p, {}, "expected a plan of one model, without micro-batches, .*found 2 micro-batches"),
        (plan, p, {"orders": "batch"}, "found batch and gpu"),
        (plan, p, {"barriers": "global"}, "found plan and global"),
    ):
        with pytest.raises(BadInput, match=f"`overlap`: .*{sentence}"):
            simulate_plan(served, profiles, overlap=2, **how)
    with pytest.raises(BadInput, match="`overlap`: expected more than zero, found 0"):
        simulate_plan(plan, p, overlap=0)
