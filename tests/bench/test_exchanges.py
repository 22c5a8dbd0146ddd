"""Published times of exchanges: what the product has of them, and that it leaves none out."""

import sys
from pathlib import Path

import pytest

from aurora.advisor.engines.exchanges import AS_COMPUTED, EXCHANGES, UNKNOWN

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import exchanges

sys.path.pop()  # that folder has a vllm.py, which is not vLLM


def test_paces_are_those_of_published_times():
    found = exchanges.paces()
    for name, both in found.items():
        assert EXCHANGES[name].paces == tuple(tuple(round(ratio, 1) for ratio in part) for part in both), name
        assert EXCHANGES[name].measured
    every = [ratio for both in found.values() for part in both for ratio in part]
    assert (UNKNOWN[0], UNKNOWN[2]) == pytest.approx((min(every), max(every)), abs=0.05)
    for name in set(EXCHANGES) - set(found) - {"deepep"}:  # which is two others
        assert EXCHANGES[name].paces[0] == (AS_COMPUTED if EXCHANGES[name].measured else UNKNOWN), name
