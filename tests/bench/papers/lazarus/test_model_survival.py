"""The survival of a model, against sets of experts for every set of nodes."""

from itertools import combinations

import pytest

from bench.papers.lazarus.model_survival import model_survival

pytestmark = pytest.mark.full


def test_a_model_survives_where_every_layer_does():
    slots_LN = [[(0, 1), (1, 2), (2, 0), (0, 1)], [(0, 1), (2,), (2, 1), (0,)]]
    for failures in range(5):
        kept = [
            all({each for node in left for each in slots_N[node]} == {0, 1, 2} for slots_N in slots_LN)
            for left in combinations(range(4), 4 - failures)
        ]
        assert model_survival(slots_LN, failures) == sum(kept) / len(kept)
