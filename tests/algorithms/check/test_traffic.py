"""Traffic that a plan cannot serve is refused, with or without fingerprints."""

from dataclasses import replace

import pytest

from aurora.algorithms.check.fit import check_traffic, without_proof
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.types import SyntheticOptions
from tests.conftest import cluster

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}
DRAWN = SyntheticOptions(sources=2, window_tokens=64)


@pytest.fixture(scope="module")
def served():
    return draw_profile("zipf:1", CONFIG, DRAWN)


@pytest.fixture(scope="module")
def plan(served):
    return make_plan(cluster(1e6, 1e6), [served])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"num_local_experts": 4}, "expected .* 2 MoE layers of 8 experts, found 2 of 4"),
        ({"num_hidden_layers": 3}, "expected .* 2 MoE layers of 8 experts, found 3 of 8"),
        ({"num_experts_per_tok": 1}, "expected top-2, .*, found top-1, .*because a fingerprint is missing"),
        ({"intermediate_size": 16}, "experts of 384 bytes, found top-2, 16 and 768; sizes are compared because"),
        ({"hidden_size": 24}, "rows of 16 and .*, found top-2, 48"),
    ],
)
def test_another_model_without_fingerprints(plan, other, why):
    with pytest.raises(BadInput, match=why):
        check_traffic(plan, [draw_profile("zipf:1", CONFIG | other, DRAWN)])


def test_the_same_model(plan, served):
    wide = {name: getattr(served, name) * 2 for name in ("dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes")}
    for known in (served, replace(served, **wide), replace(served, fingerprint="known")):  # any precision
        check_traffic(plan, [known])
    assert without_proof(plan, [served]) == ""  # the very profile
    assert without_proof(plan, [replace(served, fingerprint="known")]).endswith("the model is known by its sizes alone")


def test_other_routers_and_no_tokens(plan, served):
    known = make_plan(cluster(1e6, 1e6), [replace(served, fingerprint="one")])
    with pytest.raises(BadInput, match="and other router weights"):
        check_traffic(known, [replace(served, fingerprint="two")])
    with pytest.raises(BadInput, match="expected tokens, found none"):
        check_traffic(plan, [replace(served, tokens_TLSE=served.tokens_TLSE * 0)])
    with pytest.raises(BadInput, match="expected 1 profiles as in the plan, found 2"):
        check_traffic(plan, [served, served])
    with pytest.raises(BadInput, match="come from 4 source ranks, but cluster 'test' has 2"):
        check_traffic(plan, [draw_profile("zipf:1", CONFIG, replace(DRAWN, sources=4))])
