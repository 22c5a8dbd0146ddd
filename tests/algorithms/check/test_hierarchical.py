"""The replay of a token's rows, and the checker of schedules of several steps, find every kind of lie."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_steps
from aurora.algorithms.network.switch import timed_steps
from aurora.errors import BrokenPlan
from aurora.types import Hierarchy, Network, Servers
from tests.algorithms.check.replayed_moves import check_moves

SERVERS = Hierarchy(np.array([0, 0, 1, 1]), 2)
RANKS, SOURCES = np.array([[2, 3], [3, 1], [0, 2], [1, 1]]), np.array([0, 0, 3, 1])


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


def stepped(shared_nic=False):
    """(schedule, bytes, network) of two servers of two ranks with NICs of 1 B/s, inside 10 B/s."""
    ports = [10.0] * 4
    network = Network(ports, ports, servers=Servers.of([0, 0, 1, 1], 1.0, shared_nic))
    bytes_SGG = step_rows(hierarchical_rows(RANKS, SOURCES, SERVERS), SERVERS) * 8
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
