"""The rank that others wait for, from states as they come, and from states that are drawn."""

from dataclasses import replace

import pytest
from aurora_vllm.stuck_rank import (
    BALANCER_S,
    COMBINE,
    COMPUTE,
    DISPATCH,
    ENDED,
    GONE,
    IDLE,
    MOVES,
    PHASES,
    PLANS,
    READY,
    RESTS,
    STEP,
    STOPPED,
    UNEXPLAINED_S,
    WAIT_S,
    WAITS,
    Pass,
    RankState,
    stuck_rank,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

WAITING = RankState(phase=DISPATCH, since_s=WAIT_S, exchanges=7, layer=5)


def others(state, ranks=4, **of_rank_2):
    """States of all ranks, of which rank 2's differs."""
    return {rank: replace(state, **(of_rank_2 if rank == 2 else {})) for rank in range(ranks)}


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (others(WAITING, process=GONE), "rank 2 is gone: its process has ended; ranks 0, 1, 3 wait in the dispatch of MoE"),
        (others(RankState(), process=STOPPED), "rank 2 is stopped: its process is stopped"),
        (others(RankState(), silent_s=9.0), "rank 2 is stopped: its process gives no sign of life"),
        (others(WAITING, phase=COMPUTE, exchanges=6), "rank 2 is slow: it still computes; ranks 0, 1, 3 wait in the dispatch of"),
        (others(WAITING, phase=IDLE, exchanges=6), "rank 2 is late: its engine has begun no forward pass; ranks 0, 1, 3 wait in"),
        (others(replace(WAITING, unacknowledged=frozenset({2}))), "rank 2 does not exchange bytes with the others: look at its"),
        (others(WAITING, unacknowledged=frozenset({0})), "rank 0 waits for bytes that do not come: look at the link between ranks"),
        (others(WAITING, exchanges=6), "rank 2 does not exchange bytes with the others: look at its link"),
        (others(replace(WAITING, since_s=UNEXPLAINED_S)), "a rank waits for bytes that do not come: look at the link; ranks 0, 1, 2"),
        (others(RankState(), balancer=ENDED), "rank 2 has no balancer: EPLB's background thread has ended"),
    ],
)  # fmt: skip
def test_a_stuck_rank_is_named(states, named):
    assert str(stuck_rank(states)).startswith(named)


def test_nobody_is_named_while_ranks_go_on():
    assert stuck_rank({}) is None
    assert stuck_rank(others(RankState())) is None, "idle"
    assert stuck_rank(others(replace(WAITING, since_s=1.0), phase=COMPUTE, exchanges=6)) is None, "not for long"
    assert stuck_rank(others(WAITING, since_s=0.1)) is None, "bytes come"
    assert stuck_rank(others(WAITING)) is None, "a long first exchange, as no link shows lost bytes"
    assert stuck_rank(others(WAITING, phase=COMPUTE, exchanges=7, since_s=0.1)) is None, "its bytes came first"


def test_of_several_late_ranks_the_last_is_named():
    states = others(WAITING, phase=COMPUTE, exchanges=6)
    assert stuck_rank(states | {3: replace(WAITING, phase=COMPUTE, exchanges=4)}).rank == 3
    assert stuck_rank(states | {3: replace(WAITING, phase=COMPUTE, exchanges=6, since_s=9.0)}).rank == 3


def test_a_rank_of_another_host_may_be_the_one():
    verdict = stuck_rank(others(WAITING), complete=False)
    assert (verdict.rank, verdict.cause) == (None, "late")
    assert str(verdict).startswith("a rank of another host has not arrived; ranks 0, 1, 2, 3 wait")


def passes(compute_s, size=3, count=8):
    return {9 * number: Pass(size, compute_s, 0.04) for number in range(count)}


@pytest.mark.parametrize(
    ("states", "rank"),
    [
        (others(RankState(passes=passes(0.01)), passes=passes(0.03)), 2),
        (others(RankState(passes=passes(0.01)), ranks=3, passes=passes(0.03)), 2),
        (others(RankState(passes=passes(0.01)), passes=passes(0.019)), None),
        (others(RankState(passes=passes(0.01)), passes=passes(0.03, size=6)), None),  # it has more tokens
        (others(RankState(passes=passes(0.01)), passes=passes(0.03, count=3)), None),  # too few
        (others(RankState(passes=passes(0.0001)), passes=passes(0.0003)), None),  # nothing waits for so little
    ],
)
def test_slow_ranks_are_compared_by_passes_of_as_many_tokens(states, rank):
    assert getattr(stuck_rank(states), "rank", None) == rank


@pytest.mark.parametrize(
    ("layers", "of_rank_2", "rank"),
    [
        ((READY, 4), (MOVES, 4), 2),
        ((MOVES, 4), (PLANS, 4), 2),
        ((MOVES, 4), (WAITS, 3), 2),
        ((READY, 4), (READY, 4), None),
        ((RESTS, 4), (RESTS, 4), None),
        ((PLANS, 4), (PLANS, 4), None),
    ],
)
def test_a_balancer_that_stands_still_while_passes_go_on(layers, of_rank_2, rank):
    standing = RankState(balancer=layers[0], balancer_layers=layers[1], balancer_s=WAIT_S, balancer_passes=10)
    states = others(standing, balancer=of_rank_2[0], balancer_layers=of_rank_2[1])
    assert getattr(stuck_rank(states), "rank", None) == rank
    later = {each: replace(state, balancer_s=BALANCER_S) for each, state in states.items()}
    assert getattr(stuck_rank(later), "rank", None) == (0 if layers == of_rank_2 == (READY, 4) else rank)
    assert stuck_rank(others(replace(standing, balancer_passes=0))) is None, "nothing takes what is ready while no pass runs"


STATES = st.builds(
    RankState,
    process=st.just("runs"),
    phase=st.sampled_from(PHASES),
    since_s=st.floats(0, 20),
    exchanges=st.integers(0, 5),
    unacknowledged=st.frozensets(st.integers(0, 4), max_size=2),
)


@given(st.lists(STATES, min_size=2, max_size=5), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_named_rank_is_there_and_nobody_waits_for_nothing(drawn, complete):
    states = dict(enumerate(drawn))
    verdict = stuck_rank(states, complete)
    waiting = [state for state in drawn if state.waits]
    if verdict is None:
        busy = [state for state in drawn if not state.waits]
        last = max((state.exchanges for state in waiting), default=0)
        unexplained = not busy and min(state.since_s for state in waiting) < UNEXPLAINED_S
        arrived = any(state.phase in (STEP, DISPATCH, COMBINE) or state.exchanges >= last for state in busy)
        assert not waiting or arrived or (unexplained and {state.exchanges for state in waiting} == {last})
        return
    assert verdict.cause in ("gone", "stopped", "slow", "late", "link", "balancer")
    assert waiting
    if verdict.cause in ("slow", "late") and verdict.rank is not None:
        assert states[verdict.rank].exchanges < max(state.exchanges for state in waiting)
        assert not states[verdict.rank].waits


@given(st.integers(2, 8), st.data())
@settings(max_examples=100, deadline=None)
def test_in_lockstep_the_one_that_has_not_arrived_is_named(ranks, data):
    victim, exchange = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(1, 1000))
    waits = RankState(
        phase=data.draw(st.sampled_from((STEP, DISPATCH, COMBINE))), exchanges=exchange, since_s=data.draw(st.floats(3, 9))
    )
    late = RankState(
        phase=data.draw(st.sampled_from((IDLE, COMPUTE))), exchanges=exchange - 1, since_s=data.draw(st.floats(0, 9))
    )
    verdict = stuck_rank({rank: late if rank == victim else waits for rank in range(ranks)})
    assert verdict.rank == victim


@given(st.integers(3, 8), st.data())
@settings(max_examples=100, deadline=None)
def test_the_rank_at_the_end_of_most_dead_links_is_named(ranks, data):
    victim = data.draw(st.integers(0, ranks - 1))
    silent = data.draw(st.sets(st.sampled_from([rank for rank in range(ranks) if rank != victim]), min_size=2))
    waits = {rank: replace(WAITING, unacknowledged=frozenset({victim} if rank in silent else ())) for rank in range(ranks)}
    verdict = stuck_rank(waits)
    assert (verdict.rank, verdict.cause) == (victim, "link")
