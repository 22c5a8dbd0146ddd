"""Orders that are made for stages."""

import numpy as np
import pytest
from hypothesis import given

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.port_bounds import one_to_one_bound
from aurora.algorithms.network.switch import timed
from aurora.types import Network
from tests.strategies import traffics_on_ports

TRAFFIC = {
    "uniform": lambda n, rng: rng.integers(1, 10**6, (n, n)),
    "zipf": lambda n, rng: (1e6 * np.stack([rng.permutation(1 / (1.0 + np.arange(n))) for _ in range(n)])).astype(np.int64),
    "popular": lambda n, rng: (rng.integers(5 * 10**5, 10**6, (n, n)) * np.linspace(0.3, 1.5, n)).astype(np.int64),
}


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_matchings_are_close_to_the_bound_in_stages(traffic, ranks):
    """Stages cut from an open shop take up to twice the bound."""
    network = Network.equal(ranks, 1e9)
    over = {"matchings": [], "openshop": []}
    for seed in range(3):
        bytes_GG = TRAFFIC[traffic](ranks, np.random.default_rng(seed))
        np.fill_diagonal(bytes_GG, 0)
        for method, found in over.items():
            order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
            found.append(timed(order, bytes_GG, network, staged=True).makespan_s / one_to_one_bound(bytes_GG, network))
    assert np.mean(over["matchings"]) <= 1.2
    assert np.mean(over["matchings"]) < np.mean(over["openshop"])


@given(traffics_on_ports(min_ranks=2, startups=(0.0, 0.3)))
def test_a_round_is_a_stage(case):
    """Where all pairs have traffic, a rank sends and receives in every round, and there is a round for each partner."""
    bytes_GG, network = case
    bytes_GG = bytes_GG + 1 - np.eye(len(bytes_GG), dtype=np.int64)
    order = ORDER["matchings"](bytes_GG, network, rng=np.random.default_rng(0))
    for rank in range(len(bytes_GG)):
        for sending in (True, False):
            stages = order.stage_X[order.rows_of(rank, sending)[0]]
            assert (np.diff(stages) > 0).all()
    assert order.stage_X.max() <= 2 * len(bytes_GG)
