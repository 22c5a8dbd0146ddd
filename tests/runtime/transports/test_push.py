"""Ordered push between processes in Triton's interpreter: every byte, every sum, slow writers, and lost flags."""

import os
import tempfile

import numpy as np
import pytest

from aurora.errors import BadInput, BrokenPlan
from aurora.runtime.distributed.launcher import launch
from aurora.types import Order
from aurora.types.schedule import rotated_pairs
from tests.runtime.transports import drawn_pushes

pytest.importorskip("triton", reason="the kernels' interpreter needs triton")


@pytest.fixture
def shared(tmp_path_factory):
    """A folder in memory, for the buffers."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("shm")
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield folder


DRAWN = {2: 14, 3: 12, 4: 10, 6: 8, 8: 6}  # exchanges by number of processes


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=() if n in (2, 4) else pytest.mark.full) for n in DRAWN])
def test_drawn_exchanges_carry_every_byte(ranks, shared):
    """All dtypes, skewed and empty."""
    count = DRAWN[ranks]
    found = launch(drawn_pushes.exchanges, ranks, shared, range(100 * ranks, 100 * ranks + count))
    assert sum(rows for of_rank in found for rows, _ in of_rank) > 10 * count
    assert [differing for of_rank in found for _, differing in of_rank] == [0] * (ranks * count)


def test_flags_that_come_before_slow_rows_are_not_believed(shared):
    found = launch(drawn_pushes.exchanges, 2, shared, range(6), True)
    assert [differing for of_rank in found for _, differing in of_rank] == [0] * 12


@pytest.mark.parametrize("one_half", [False, True])
def test_slow_readers_keep_their_rows(one_half, shared):
    """A rank that reads late is overtaken by a peer's next exchange, which would overwrite a single half."""
    found = launch(drawn_pushes.late_readers, 2, shared, one_half)
    assert (sum(map(sum, found)) > 0) == one_half


def test_a_lost_flag_ends_by_a_time_out_that_names_the_peer(shared):
    for said in launch(drawn_pushes.lose_a_flag, 3, shared)[1:]:
        assert "lost rank 0: no flag within 0.002 s" in said


def table_of(order, rank):
    from aurora.runtime.transports.push import stage_table

    return stage_table(order, rank, 2, 4).tolist()


def test_a_table_has_the_order_of_its_rank():
    """Own rows are written in a stage without a partner, or else by each lane in another stage."""
    order = Order("by hand", np.array([[0, 2], [1, 0], [0, 1], [2, 1], [1, 2], [2, 0]]))
    whole, none = 1 << 20, [-1, 0, 0, 0, 0]

    def to(peer, sets):
        return [peer, 0, whole, 1, sets]

    assert table_of(order, 0) == [[to(2, 1), to(1, 1), to(0, 2), none]] * 2
    assert table_of(order, 2) == [[to(2, 1), to(1, 1), to(0, 2), none]] * 2
    assert table_of(Order("rounds", rotated_pairs(3)), 0) == [
        [to(0, 1), to(1, 1), to(2, 2), none],
        [to(1, 1), to(0, 1), to(2, 2), none],
    ]
    assert table_of(Order.all_at_once(3), 0) == [[to(0, 0), to(1, 0), to(2, 2), none], [to(2, 0), to(0, 0), to(1, 2), none]]
    with pytest.raises(BadInput, match="order all-at-once: expected at most 4 stages on a rank, found 5"):
        table_of(Order.all_at_once(5), 0)


def test_an_order_that_leaves_out_a_pair_is_refused():
    """Its flag would be waited for, and a healthy rank named as lost."""
    from aurora.runtime.transports.push import OrderedPush
    from bench.local_layer import local_memory

    push = OrderedPush(local_memory(3)[0], 3, 4, 64, lanes=1)
    with pytest.raises(BrokenPlan, match="order short: expected each of 6 ordered pairs once, found 5"):
        push.set_order(0, Order("short", rotated_pairs(3)[1:]))


def test_more_tokens_than_there_is_space_for_are_refused(shared):
    """Nothing is dropped; smaller buffers take a fixed number of rounds."""
    ((said, parts),) = launch(drawn_pushes.too_many, 1, shared)
    assert said == "ordered push: expected at most 3 rows for a rank, of at most 416 bytes, found up to 4 of 416"
    assert parts == [(0, 3, 1), (3, 6, 1), (6, 7, 1)]
