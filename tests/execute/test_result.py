"""What a run brings home."""

import numpy as np

from aurora.execute.result import Conditions
from aurora.types import Choices, Curve, Profile
from aurora.types.pairs import Pairs
from tests.conftest import cluster


def test_a_runs_own_traffic_replaces_all_that_a_profile_says_of_its_own():
    """One prefill window of two tokens becomes three windows of one: what the profile knew of the two holds no longer."""
    routed = np.array([[[0, 1]], [[1, 2]]])
    nothing = Curve(np.array([1.0]), np.array([0.0]))
    choices = Choices(routed, np.array([0, 1]), np.array([0, 0]))
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), nothing)}
    profile = Profile(
        "m", "", choices.tokens_TLSE(1, 2, 3), 2, 1, 1, 1, 1, curves, stage_T=("prefill",), pairs=Pairs.of(routed, 3)
    )
    own = Choices(np.array([[[2, 1]], [[0, 2]], [[0, 1]]]), np.array([1, 0, 1]), np.array([0, 1, 2]))
    (found,) = Conditions((own,), cluster(1.0, 1.0)).traffic([profile])
    assert found.tokens_TLSE[:, 0].tolist() == [
        [[0, 0, 0], [0, 1, 1]],
        [[1, 0, 1], [0, 0, 0]],
        [[0, 0, 0], [1, 1, 0]],
    ]
    assert (found.stage_T, found.pairs) == (None, None)
