"""What a run brings home."""

import numpy as np

from aurora.runtime.result import RunConditions
from aurora.types import Curve, Profile, TokenRouting
from aurora.types.coactivation import CoActivation
from tests.conftest import cluster


def test_a_runs_own_traffic_replaces_all_that_a_profile_says_of_its_own():
    """One prefill window of two tokens becomes three windows of one: what the profile knew of the two holds no longer."""
    routed = np.array([[[0, 1]], [[1, 2]]])
    nothing = Curve(np.array([1.0]), np.array([0.0]))
    routing = TokenRouting(routed, np.array([0, 1]), np.array([0, 0]))
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), nothing)}
    profile = Profile(
        "m",
        "",
        routing.tokens_TLSE(1, 2, 3),
        2,
        1,
        1,
        1,
        1,
        curves,
        stage_T=("prefill",),
        coactivation=CoActivation.of(routed, 3),
    )
    own = TokenRouting(np.array([[[2, 1]], [[0, 2]], [[0, 1]]]), np.array([1, 0, 1]), np.array([0, 1, 2]))
    (found,) = RunConditions((own,), cluster(1.0, 1.0)).traffic([profile])
    assert found.tokens_TLSE[:, 0].tolist() == [
        [[0, 0, 0], [0, 1, 1]],
        [[1, 0, 1], [0, 0, 0]],
        [[0, 0, 0], [1, 1, 0]],
    ]
    assert (found.stage_T, found.coactivation) == (None, None)
