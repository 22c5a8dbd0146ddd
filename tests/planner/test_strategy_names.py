"""PlanOptions refuse names of strategies that nobody has defined, when they are made."""

import numpy as np
import pytest

import aurora
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.registry import REGISTERED
from aurora.io import load_plan
from aurora.types.options import STRATEGIES


def test_a_name_is_refused_when_options_are_made():
    for name in ("place", "assign", "colocate", "order", "aim", "time_slice", "all_to_all"):
        with pytest.raises(aurora.BadInput, match=f"`{name}`: expected one of auto, .*, found 'nope'"):
            aurora.PlanOptions(**{name: "nope"})


def test_names_of_users_and_of_plans_that_were_read_are_known(tmp_path, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "place", [*STRATEGIES["place"]])
    for registry in (PLACE, REGISTERED):
        monkeypatch.setitem(registry, "halves", None)  # and takes it away
    traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
    name = aurora.register("place", "halves", lambda load_E, slots_J, rng: np.arange(len(load_E)) * len(slots_J) // len(load_E))
    plan = aurora.plan(aurora.load("demo-4"), traffic, aurora.PlanOptions(place=name))
    aurora.save(plan, tmp_path / "plan.json")
    STRATEGIES["place"].remove("halves")  # as in a process that did not register it
    with pytest.raises(aurora.BadInput, match="found 'halves'"):
        aurora.PlanOptions(place="halves")
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_domain_may_have_another_number_format():
    """Twice the bytes of a row and of an expert are the same model in another number format: its counts alone are used."""
    from dataclasses import replace

    traffic, other = (
        aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(seed=seed)) for seed in (0, 1)
    )
    sizes = ("dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes")
    wide = replace(other, **{size: 2 * getattr(other, size) for size in sizes})
    cluster = aurora.load("demo-4")
    plans = [aurora.plan(cluster, traffic, domains=[domain]) for domain in (other, wide)]
    assert plans[0] == plans[1]
    odd = replace(other, dispatch_bytes=3 * other.dispatch_bytes)
    with pytest.raises(aurora.BadInput, match="`domain`: expected another profile of the one model"):
        aurora.plan(cluster, traffic, domains=[odd])


def test_a_function_places_experts():
    """Loads 3, 1, 2, 4 in index order on two GPUs of two slots: 4 and 6."""
    placed = aurora.place([3, 1, 2, 4], aurora.GpuSlots.equal(2, 2), method=lambda load_E, slots_G, rng: np.arange(4) // 2)
    assert placed.placement.slots_LG == (((0, 1), (2, 3)),)
    assert placed.max_load_L.tolist() == [6.0]
