"""Plans and a profile that commit a7287736 wrote, in tests/older_files: each is read as it was."""

import json
from pathlib import Path

import pytest

import aurora
from aurora.simulator.interpreter import simulate_plan

OLDER = Path(__file__).parents[1] / "older_files"


@pytest.mark.parametrize("name", ["servers", "leaf-spine", "two-models"])
def test_a_plan_is_read_and_simulated(name):
    plan = aurora.load(OLDER / f"{name}.json", aurora.Plan)
    profile = aurora.load(OLDER / "profile.npz", aurora.Profile)
    written = json.loads((OLDER / f"{name}.json").read_text())
    assert (plan.objective_s, plan.bound_s) == (written["objective_s"], written["bound_s"])
    placements = [[list(held) for held in model.placement.slots_LG[0]] for model in plan.models]
    assert placements == [model["layers"][0]["slots"] for model in written["models"]]
    assert simulate_plan(plan, [profile] * len(plan.models)).seconds > 0


def test_a_profile_is_read():
    profile = aurora.load(OLDER / "profile.npz", aurora.Profile)
    assert profile.tokens_TLSE.shape == (2, 2, 4, 8)
    assert profile.routing is not None
    assert profile.tokens_TLSE.sum() == profile.routing.experts_ULK.size == 2048
