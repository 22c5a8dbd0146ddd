"""Errors of ratios of two ways of serving."""

from dataclasses import replace

import pytest

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import Layout
from aurora.advisor.ratio_errors import differences, ratio_error
from aurora.io.clusters import load_gpus

DEFAULT = SERVING_ENGINES["vllm"].default(8, 8, 64)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, set()),
        ({"layout": Layout(8), "exchange": "all-reduce"}, {"experts", "attention"}),
        ({"layout": Layout(8, expert=8), "exchange": "all-reduce"}, {"attention"}),
        ({"exchange": "deepep-ht"}, {"exchange"}),
        ({"overlap": True}, {"exchange"}),
        ({"batched_tokens": 1024}, {"steps"}),
        ({"layout": Layout(data=4, expert=4)}, {"gpus"}),
    ],
)
def test_what_differs(changed, found):
    first = replace(DEFAULT, layout=Layout(data=8, expert=8), exchange="allgather")
    assert differences(replace(first, **changed), first) == found


def test_errors_of_several_differences_add_up_as_squares():
    """ln 1.1 = 0.0953 and ln 1.3 = 0.2624: exp(0.2791) = 1.322; an L4's shares are another kind's: exp(0.3121) = 1.366."""
    h200, l4 = load_gpus()["NVIDIA H200"], load_gpus()["NVIDIA L4"]
    assert ratio_error(h200, frozenset()) == 1
    assert ratio_error(h200, frozenset({"experts"})) == pytest.approx(1.1)
    assert ratio_error(h200, frozenset({"experts", "attention"})) == pytest.approx(1.322, abs=1e-3)
    assert ratio_error(l4, frozenset({"experts", "attention"})) == pytest.approx(1.366, abs=1e-3)
