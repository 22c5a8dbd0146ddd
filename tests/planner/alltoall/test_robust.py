"""Orders for many matrices against orders for one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.errors import BadInput
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.alltoall.robust import order_for_many, priced
from aurora.planner.check.plans import check_order
from aurora.planner.network.lower_bounds import fluid
from aurora.planner.network.schedule_time import timed
from aurora.planner.placement.scenarios import AIMS, tail_mean

SETS = st.tuples(st.integers(2, 4), st.integers(1, 3)).flatmap(
    lambda shape: st.lists(
        arrays(np.int64, (shape[0], shape[0]), elements=st.integers(1, 30)).map(lambda m: m * (1 - np.eye(len(m), dtype=int))),
        min_size=shape[1], max_size=shape[1],
    )
)  # fmt: skip


@given(SETS, st.sampled_from(sorted(AIMS)))
def test_never_worse_than_the_order_of_any_one_matrix(matrices, aim):
    ones = np.ones(len(matrices[0]))

    def score(order):
        bounds = np.array([fluid(m, ones, ones) for m in matrices])
        return tail_mean(priced(order, matrices, ones, ones) / bounds, AIMS[aim](len(matrices)))

    found = order_for_many(matrices, ones, ones, np.random.default_rng(0), aim=aim, method="spread-out")
    check_order(found, len(ones))
    found = order_for_many(matrices, ones, ones, np.random.default_rng(0), aim=aim, method="sjf")
    for matrix in matrices:
        assert score(found) <= score(ORDER["sjf"](matrix, ones, ones, np.random.default_rng(0))) + 1e-9


def test_a_price_is_the_switchs_time():
    ones = np.ones(3)
    matrices = [np.array([[0, 3, 1], [2, 0, 5], [4, 1, 0]]), np.array([[0, 1, 9], [1, 0, 1], [1, 1, 0]])]
    order = ORDER["openshop"](matrices[0], ones, ones, np.random.default_rng(0))
    assert priced(order, matrices, ones, ones).tolist() == [timed(order, m, ones, ones).makespan_s for m in matrices]


@pytest.mark.parametrize("change", [{"matrices": []}, {"aim": "best"}, {"method": "magic"}])
def test_bad_questions(change):
    given = {"matrices": [np.zeros((2, 2), dtype=int)], **change}
    with pytest.raises(BadInput, match="order_for_many: expected matrices"):
        order_for_many(given.pop("matrices"), np.ones(2), np.ones(2), np.random.default_rng(0), **given)


def test_an_order_serves_its_own_traffic_best():
    """Order reuse: planned on one matrix, serving another costs more than re-ordering, and is never below its bound."""
    rng = np.random.default_rng(1)
    ones = np.ones(8)
    first, second = (rng.integers(1, 100, (8, 8)) * (1 - np.eye(8, dtype=int)) for _ in range(2))
    orders = [ORDER["openshop-best"](m, ones, ones, np.random.default_rng(0)) for m in (first, second)]
    own, foreign = (priced(order, [second], ones, ones)[0] for order in orders[::-1])
    assert fluid(second, ones, ones) <= own + 1e-9
    assert own <= foreign
