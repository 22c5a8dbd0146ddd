"""The checker of hierarchical all-to-alls passes what is right, and finds every kind of lie."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical import carriers, hierarchical_rows, step_rows
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_steps
from aurora.algorithms.network.switch import timed_steps
from aurora.errors import BrokenPlan
from aurora.types import Hierarchy, Network, Servers
from tests.algorithms.alltoall.test_hierarchical import token_tables
from tests.algorithms.check.hierarchical_rows import check_hierarchical, hierarchical_moves
from tests.algorithms.check.replayed_moves import check_moves

SERVERS = Hierarchy(np.array([0, 0, 1, 1]), 2)
RANKS, SOURCES = np.array([[2, 3], [3, 1], [0, 2], [1, 1]]), np.array([0, 0, 3, 1])


def rows_of(rank_UK, source_U, hierarchy):
    there_SGG = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)
    return there_SGG, there_SGG[::-1].transpose(0, 2, 1)


def carriers_of(rank_UK, source_U, hierarchy):
    """What the planner claims: the rank whose NIC carries each piece."""
    return carriers(hierarchical_rows(rank_UK, source_U, hierarchy).sent_GN, hierarchy)


@given(token_tables())
def test_the_planners_rows_are_what_tokens_need(tokens):
    rank_UK, source_U, hierarchy = tokens
    check_hierarchical(
        *rows_of(rank_UK, source_U, hierarchy), rank_UK, source_U, hierarchy, carriers_of(rank_UK, source_U, hierarchy)
    )
    check_moves(moves_of(rank_UK, source_U, hierarchy), rank_UK, source_U, hierarchy.server_G)


def moves_of(rank_UK, source_U, hierarchy):
    return hierarchical_moves(rank_UK, source_U, hierarchy, carriers_of(rank_UK, source_U, hierarchy))


@given(token_tables(), st.sampled_from(("dispatch", "combine")), st.data())
def test_a_row_too_many_or_too_few_is_found(tokens, phase, data):
    rank_UK, source_U, hierarchy = tokens
    ways = dict(zip(("dispatch", "combine"), rows_of(rank_UK, source_U, hierarchy), strict=True))
    broken = ways[phase].copy()
    at = tuple(data.draw(st.integers(0, size - 1)) for size in broken.shape)
    broken[at] += data.draw(st.sampled_from((-1, 1, 2)))
    with pytest.raises(BrokenPlan, match=f"hierarchical {phase}, step {at[0]}: {at[1]} -> {at[2]} carries"):
        check_hierarchical(
            *{**ways, phase: broken}.values(), rank_UK, source_U, hierarchy, carriers_of(rank_UK, source_U, hierarchy)
        )


@given(token_tables(), st.data())
def test_a_row_in_another_step_is_found(tokens, data):
    """A gateway that passes rows on in the step in which they come would send what it does not have."""
    rank_UK, source_U, hierarchy = tokens
    there_SGG, back_SGG = rows_of(rank_UK, source_U, hierarchy)
    moving = np.argwhere(there_SGG)
    assume(len(moving))
    step, src, dst = moving[data.draw(st.integers(0, len(moving) - 1))]
    other = data.draw(st.integers(0, hierarchy.steps - 1).filter(lambda each: each != step))
    broken = there_SGG.copy()
    broken[step, src, dst] -= 1
    broken[other, src, dst] += 1
    with pytest.raises(BrokenPlan, match="hierarchical dispatch, step"):
        check_hierarchical(broken, back_SGG, rank_UK, source_U, hierarchy, carriers_of(rank_UK, source_U, hierarchy))


class Astray(Hierarchy):
    """Rank 0 sends what is for server 1 to a rank of its own server."""

    @property
    def gateway_GN(self):
        gateway_GN = super().gateway_GN.copy()
        gateway_GN[0, 1] = 1
        return gateway_GN


class Forgetful(Hierarchy):
    """The last row of a pair is in no chunk."""

    def piece_starts(self, rows):
        return np.minimum(super().piece_starts(rows), np.maximum(rows[..., None] - 1, 0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Astray, "token 0: server 1 gets it more than once"), (Forgetful, "token 0: rank 2 needs it and does not get it")],
)
def test_a_hierarchy_that_loses_its_way_is_found_though_its_rows_add_up(kind, message):
    hierarchy = kind(SERVERS.server_G, SERVERS.chunks)
    rank_UK, source_U = np.array([[2, 3]]), np.array([0])
    with pytest.raises(BrokenPlan, match=message):
        check_moves(moves_of(rank_UK, source_U, hierarchy), rank_UK, source_U, hierarchy.server_G)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([[0, 0, 2, 0, 1], [0, 2, 3, 0, 1]], "rank 2 sends it before it has it"),
        ([[0, 0, 2, 0, 1], [1, 2, 3, 0, 1], [2, 2, 3, 0, 1]], "rank 3 gets it more than once"),
        ([[0, 0, 2, 0, 1], [0, 0, 3, 0, 1]], "server 1 gets it more than once"),
        ([[0, 0, 2, 0, 1]], "rank 3 needs it and does not get it"),
        ([[0, 0, 2, 0, 1], [1, 2, 3, 0, 1], [0, 0, 1, 0, 1]], "rank 1 gets it for nothing"),
        ([[0, 0, 2, 0, 1], [1, 2, 3, 0, 1], [0, 0, 1, 0, 0]], "rank 1 gets it for nothing"),
        ([[0, 0, 1, 0, 1], [0, 1, 2, 0, 1], [1, 2, 3, 0, 1]], "rank 1 sends it before it has it"),
        ([[0, 0, 2, 0, 1], [1, 2, 0, 0, 1]], "rank 0 gets it more than once"),
        ([[0, 1, 3, 0, 1], [1, 3, 2, 0, 1]], "rank 1 sends it before it has it"),
    ],
)
def test_every_lie_about_a_token_is_found(moves, message):
    """A token of rank 0 for ranks 2 and 3, which are on the other server."""
    rank_UK, source_U = np.array([[2, 3]]), np.array([0])
    check_moves(np.array([[0, 0, 2, 0, 1], [1, 2, 3, 0, 1]]), rank_UK, source_U, SERVERS.server_G)
    check_moves(np.array([[0, 0, 1, 0, 1], [1, 1, 3, 0, 1], [2, 3, 2, 0, 1]]), rank_UK, source_U, SERVERS.server_G)
    with pytest.raises(BrokenPlan, match=f"token 0: {message}"):
        check_moves(np.array(moves), rank_UK, source_U, SERVERS.server_G)


@given(token_tables(), st.data())
def test_no_row_can_be_left_out_or_sent_twice(tokens, data):
    rank_UK, source_U, hierarchy = tokens
    moves_X5 = moves_of(rank_UK, source_U, hierarchy)
    assume(len(moves_X5))
    row = data.draw(st.integers(0, len(moves_X5) - 1))
    for broken in (np.delete(moves_X5, row, axis=0), np.concatenate([moves_X5, moves_X5[row : row + 1]])):
        with pytest.raises(BrokenPlan, match=f"token {moves_X5[row, 3]}"):
            check_moves(broken, rank_UK, source_U, hierarchy.server_G)


@pytest.mark.parametrize(
    ("carrier", "message"),
    [
        (np.full((4, 2, 4), 2), "rank 2 of another server carries rows of rank 0"),
        (np.array([0, 0, 2, 3]).repeat(8).reshape(4, 2, 4), "server 0 to 1: a NIC carries 20 rows, 10 without"),
        (np.zeros((4, 2, 1), dtype=np.int64), r"expected carriers of \(4, 2, 4\)"),
    ],
)
def test_carriers_that_level_nothing_are_found(carrier, message):
    rank_UK, source_U, hierarchy = np.full((20, 1), 3), np.arange(20) % 2, replace(SERVERS, level_from=1)
    with pytest.raises(BrokenPlan, match=message):
        check_hierarchical(*rows_of(rank_UK, source_U, hierarchy), rank_UK, source_U, hierarchy, carrier)


def stepped(shared_nic=False):
    """(schedule, bytes, network) of two servers of two ranks with NICs of 1 B/s, inside 10 B/s."""
    ports = [10.0] * 4
    network = Network(ports, ports, servers=Servers.of([0, 0, 1, 1], 1.0, shared_nic))
    bytes_SGG = rows_of(RANKS, SOURCES, SERVERS)[0] * 8
    order = ORDER["all-at-once"](bytes_SGG.sum(axis=0), network, rng=np.random.default_rng(0))
    return timed_steps(order, bytes_SGG, network), bytes_SGG, network


@pytest.mark.parametrize("shared_nic", [False, True])
def test_a_schedule_of_steps_is_checked(shared_nic):
    made, bytes_SGG, network = stepped(shared_nic)
    check_steps(made, bytes_SGG, network)
    with pytest.raises(BrokenPlan, match="expected the step of each transfer, of 3 steps"):
        check_steps(replace(made, step_X=None), bytes_SGG, network)
    with pytest.raises(BrokenPlan, match="bytes, expected"):
        check_steps(replace(made, step_X=np.zeros_like(made.step_X)), bytes_SGG, network)
    slow = Network(network.out_Bps_G, network.in_Bps_G, servers=Servers.of([0, 0, 1, 1], 0.5, shared_nic))
    with pytest.raises(BrokenPlan, match=r"it carries 0\.5"):
        check_steps(made, bytes_SGG, slow)


def test_a_step_that_begins_too_early_is_found():
    """Two transfers inside the servers, each by itself possible: rank 1 sends step 1 while step 0 still comes in."""
    network = Network.equal(3, 1.0)
    bytes_SGG = np.zeros((2, 3, 3), dtype=np.int64)
    bytes_SGG[0, 0, 1], bytes_SGG[1, 1, 2] = 4, 4
    order = ORDER["all-at-once"](bytes_SGG.sum(axis=0), network, rng=np.random.default_rng(0))
    made = timed_steps(order, bytes_SGG, network)
    check_steps(made, bytes_SGG, network)
    early = replace(made, start_s_X=made.start_s_X - made.step_X, end_s_X=made.end_s_X - made.step_X)
    with pytest.raises(BrokenPlan, match="rank 1 begins step 1 before its transfers of earlier steps have ended"):
        check_steps(early, bytes_SGG, network)
