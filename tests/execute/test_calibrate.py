"""Which way is chosen at which size, and that every rank chooses alike."""

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.execute import calibrate as measuring
from aurora.execute.calibrate import Choice, calibrate
from aurora.plan.order import ORDER
from aurora.ranks.launcher import launch_threads
from aurora.ranks.memory import Memory, MemoryTransport
from aurora.types import RunOptions
from tests.conftest import cluster

ONES = (np.ones((2, 2), dtype=np.int64) - np.eye(2, dtype=np.int64), np.ones(2), np.ones(2), np.random.default_rng(0))
MADE = {name: ORDER[name](*ONES) for name in ("all-at-once", "paced", "birkhoff")}


def test_the_fastest_at_the_nearest_size():
    others = {name: MADE[name] for name in ("all-at-once", "paced")}
    seconds = np.array([[1.0, 3.0, 2.0], [3.0, 2.0, 2.5], [5.0, 5.0, 4.0]])
    choice = Choice(np.array([100, 1000, 10000]), (*others, "birkhoff"), seconds, others)
    for rank_bytes, way in ((0, "all-at-once"), (300, "all-at-once"), (330, "paced"), (3000, "paced"), (1e9, "birkhoff")):
        assert choice.way(rank_bytes) == way
        assert choice.order(MADE["birkhoff"], rank_bytes) is MADE[way]
    assert str(choice).startswith("0.0001 MB a rank: all-at-once (all-at-once 1e+03 ms, paced 3e+03 ms, birkhoff 2e+03 ms); ")


def choose(seat, memory, planned):
    return calibrate(MemoryTransport(memory, seat.rank, cluster(*[1e9] * seat.ranks)), cluster(*[1e9] * seat.ranks), planned)


@pytest.mark.parametrize(
    ("planned", "ways"), [("lanes", ("all-at-once", "paced", "lanes")), ("paced", ("all-at-once", "paced"))]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_comes_to_the_same_choice(planned, ways, ranks, monkeypatch):
    monkeypatch.setattr(measuring, "SIZES", (1 << 10, 1 << 14))
    first, *rest = launch_threads(choose, ranks, Memory(ranks, 10.0), planned)
    assert first.ways == ways
    assert first.seconds_CW.shape == (2, len(ways))
    assert all(np.array_equal(other.seconds_CW, first.seconds_CW) for other in rest)


def test_it_stops_where_exchanges_take_long(monkeypatch):
    monkeypatch.setattr(measuring, "LONG_S", 0.0)
    (choice,) = launch_threads(choose, 1, Memory(1, 10.0), "openshop")
    assert len(choice.sizes_C) == 1


def test_an_unknown_way_to_run_is_refused():
    with pytest.raises(BadInput, match="--order: expected one of plan, auto, found 'fastest'"):
        RunOptions(order="fastest")
