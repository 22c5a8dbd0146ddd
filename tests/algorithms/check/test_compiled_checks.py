"""The compiled checks say yes and no where plain loops do: of right orders and schedules, and of those with one fault."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_order, check_steps
from aurora.algorithms.network.switch import timed_steps
from aurora.errors import BrokenPlan
from aurora.types import Order
from tests.algorithms.check.plain_checks import order_is_right, schedule_is_right
from tests.strategies import traffics_on_ports, traffics_on_servers

CASES = st.one_of(traffics_on_ports(min_ranks=2, max_ranks=4, startups=(0.0, 0.3)), traffics_on_servers())
COLUMNS = ("src_X", "dst_X", "bytes_X", "start_s_X", "end_s_X", "rate_Bps_X", "tier_X", "step_X")


def passes(check, *arguments):
    try:
        check(*arguments)
    except BrokenPlan:
        return False
    return True


def edited(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


def with_rows(value, names, row_X):
    """The rows row_X of a value, in all of its columns."""
    return replace(value, **{name: each[row_X] for name in names if (each := getattr(value, name)) is not None})


ORDER_FAULTS = {
    "none": lambda order, row, ranks: order,
    "a row less": lambda order, row, ranks: with_rows(
        order, ("pairs_X2", "share_X2", "tier_X"), np.arange(len(order.pairs_X2)) != row
    ),
    "a row twice": lambda order, row, ranks: with_rows(
        order, ("pairs_X2", "share_X2", "tier_X"), np.append(np.arange(len(order.pairs_X2)), row)
    ),
    "backwards": lambda order, row, ranks: replace(order, pairs_X2=edited(order.pairs_X2, row, order.pairs_X2[row, ::-1])),
    "to itself": lambda order, row, ranks: replace(order, pairs_X2=edited(order.pairs_X2, (row, 1), order.pairs_X2[row, 0])),
    "to nobody": lambda order, row, ranks: replace(order, pairs_X2=edited(order.pairs_X2, (row, 1), ranks)),
    "to its end": lambda order, row, ranks: replace(order, share_X2=edited(shares(order), (row, 0), 0.5)),
    "from its begin": lambda order, row, ranks: replace(order, share_X2=edited(shares(order), (row, 1), 0.5)),
    "a tier of its own": lambda order, row, ranks: replace(
        order, tier_X=edited(np.zeros(len(order.pairs_X2), np.int64), row, 1)
    ),
}


def shares(order):
    return np.tile([0.0, 1.0], (len(order.pairs_X2), 1)) if order.share_X2 is None else order.share_X2


@given(CASES, st.sampled_from([*ORDER]), st.sampled_from([*ORDER_FAULTS]), st.data())
def test_orders_are_judged_as_by_plain_loops(case, method, fault, data):
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    assume(len(order.pairs_X2))
    spoiled = ORDER_FAULTS[fault](order, data.draw(st.integers(0, len(order.pairs_X2) - 1)), len(bytes_GG))
    assert passes(check_order, spoiled, len(bytes_GG)) == order_is_right(spoiled, len(bytes_GG))
    assert passes(check_order, order, len(bytes_GG))


@given(st.integers(2, 3), st.data())
def test_any_rows_are_judged_as_by_plain_loops(ranks, data):
    """Pairs in a few parts, with now and then one part that is wrong."""
    rows = []
    for src in range(ranks):
        for dst in range(ranks):
            ends = sorted({0.0, 1.0, *data.draw(st.lists(st.sampled_from((0.25, 0.5)), max_size=2))})
            rows += [(src, dst, *part) for part in pairwise(ends) if src != dst]
    rows = data.draw(st.permutations(rows))
    if data.draw(st.booleans()):
        row = data.draw(st.integers(0, len(rows) - 1))
        rows[row] = (*rows[row][:2], *data.draw(st.sampled_from(((0.0, 0.5), (0.5, 1.0), (0.25, 0.25), (1.0, 0.0)))))
    tiers = data.draw(st.none() | st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    order = Order("x", [row[:2] for row in rows], share_X2=[row[2:] for row in rows], tier_X=tiers)
    assert passes(check_order, order, ranks) == order_is_right(order, ranks)


def slower(network, part):
    """The network with ports, or with NICs if it has any, at a part of their rates."""
    if network.servers is not None:
        return replace(network, servers=replace(network.servers, nic_Bps=network.servers.nic_Bps * part))
    return replace(network, out_Bps_G=network.out_Bps_G * part)


def moved(made, row, seconds):
    start_s_X, end_s_X = made.start_s_X, made.end_s_X
    return replace(
        made,
        start_s_X=edited(start_s_X, row, max(start_s_X[row] + seconds, 0)),
        end_s_X=edited(end_s_X, row, end_s_X[row] + seconds),
    )


def faster(made, row):
    middle_s = (made.start_s_X[row] + made.end_s_X[row]) / 2
    rate_Bps_X = edited(made.rate_Bps_X, row, 2 * made.rate_Bps_X[row])
    return replace(made, rate_Bps_X=rate_Bps_X, end_s_X=edited(made.end_s_X, row, middle_s))


SCHEDULE_FAULTS = {
    "none": lambda made, row: made,
    "other rows first": lambda made, row: with_rows(made, COLUMNS, np.roll(np.arange(len(made.src_X)), row)),
    "a row less": lambda made, row: with_rows(made, COLUMNS, np.arange(len(made.src_X)) != row),
    "a row twice": lambda made, row: with_rows(made, COLUMNS, np.append(np.arange(len(made.src_X)), row)),
    "a byte less": lambda made, row: replace(made, bytes_X=edited(made.bytes_X, row, made.bytes_X[row] - 1)),
    "from nobody": lambda made, row: replace(made, src_X=edited(made.src_X, row, 9)),
    "another way": lambda made, row: replace(
        made, src_X=edited(made.src_X, row, made.dst_X[row]), dst_X=edited(made.dst_X, row, made.src_X[row])
    ),
    "before zero": lambda made, row: replace(made, start_s_X=edited(made.start_s_X, row, -1.0)),
    "ends first": lambda made, row: replace(made, end_s_X=edited(made.end_s_X, row, made.start_s_X[row] / 2 - 1)),
    "too short": lambda made, row: replace(made, end_s_X=edited(made.end_s_X, row, made.start_s_X[row])),
    "too fast": faster,
    "early": lambda made, row: moved(made, row, -0.4),
    "late": lambda made, row: moved(made, row, 0.4),
    "one partner at a time": lambda made, row: replace(made, one_to_one=True),
    "in tiers": lambda made, row: replace(made, one_to_one=True, tier_X=np.arange(len(made.src_X)) % 2),
    "in another step": lambda made, row: made if made.step_X is None else replace(made, step_X=np.roll(made.step_X, row)),
}


@settings(max_examples=60)
@given(CASES, st.sampled_from([*ORDER]), st.integers(1, 2), st.data())
def test_schedules_are_judged_as_by_plain_loops(case, method, steps, data):
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    bytes_SGG = np.stack([bytes_GG, bytes_GG.T])[:steps]
    made = timed_steps(order, bytes_SGG, network)
    assert passes(check_steps, made, bytes_SGG, network)
    assume(len(made.src_X))
    for fault, spoil in SCHEDULE_FAULTS.items():
        spoiled = spoil(made, data.draw(st.integers(0, len(made.src_X) - 1)))
        backwards = with_rows(spoiled, COLUMNS, np.arange(len(spoiled.src_X))[::-1])
        for each in (network, slower(network, 0.95)):
            right = schedule_is_right(spoiled, bytes_SGG, each)
            assert [passes(check_steps, rows, bytes_SGG, each) for rows in (spoiled, backwards)] == [right] * 2, fault
