"""How far traffic has drifted from what the plan was made for."""

import numpy as np
import pytest

pytest.importorskip("prometheus_client")
from aurora_vllm.metrics import drift


def test_drift_is_the_part_of_the_traffic_at_other_experts():
    one = np.array([[2, 0], [1, 1]])
    assert drift(one, 5 * one) == 0
    assert drift(one, np.array([[0, 2], [1, 1]])) == pytest.approx(0.5)
    assert drift(np.array([[1, 0]]), np.array([[0, 9]])) == 1
