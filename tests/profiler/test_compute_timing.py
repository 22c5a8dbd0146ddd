"""Compute timing holds the dense weights and one group of experts, by which all layers compute."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import aurora
from aurora.cli.inputs import load_traffic
from aurora.io import save
from aurora.models.loading import load_model
from aurora.models.own_weights import load_without_experts
from aurora.profiler import compute_timing
from aurora.profiler.compute_timing import _ExpertGroup, _Stopwatch
from aurora.runtime.distributed.launcher import RankInfo


@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_a_group_computes_as_the_first_experts_do(request, name):
    """Choices of other experts count as those with the same number modulo the group's size."""
    path = request.getfixturevalue(name)
    whole = load_model(path)
    group = _ExpertGroup(load_without_experts(path).layers[0].experts, 4, _Stopwatch("cpu"))
    rows, weights = torch.randn(6, whole.hidden), torch.rand(6, 2)
    index = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2], [1, 3]])
    wanted = whole.layers[0].experts(rows, index, weights)
    torch.testing.assert_close(group(rows, index, weights), wanted)
    torch.testing.assert_close(group(rows, index + 4, weights), wanted)


def test_experts_of_one_group_are_in_memory(request, monkeypatch):
    path, kept = request.getfixturevalue("qwen"), []
    load = compute_timing.load_without_experts
    monkeypatch.setattr(compute_timing, "load_without_experts", lambda *given: kept.append(load(*given)) or kept[-1])
    info = RankInfo(0, 1, "", 0, 60.0, 0, 1, launched=True)
    monkeypatch.setattr(compute_timing, "launch", lambda measure, _processes, *given: [measure(info, *given)])
    monkeypatch.setattr(compute_timing, "default_process_group", lambda _info: nullcontext())
    monkeypatch.setattr(compute_timing.dist, "barrier", lambda: None)
    curves = compute_timing.measure_curves(path, max_tokens=2, sequence_tokens=2)
    assert curves.provenance["spread of repeats on cpu"].endswith("%")
    assert set(curves.kinds["cpu"]) == {"overhead", "gate", "expert", "aggregate"}
    (model,) = kept
    assert len({id(layer.experts) for layer in model.layers}) == 1
    assert len(model.layers) > 1
    assert model.layers[0].experts.num_experts == min(compute_timing.HELD, load_model(path).experts)


def test_the_spread_of_repeats_is_the_distance_of_their_quartiles_over_the_median(monkeypatch):
    """Of 1 to 7 s: quartiles 2.5 and 5.5 s, and a median of 4 s."""
    monkeypatch.setattr(compute_timing.dist, "barrier", lambda: None)
    watch, seconds = _Stopwatch("cpu"), iter([9.0, 9.0, 4.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0])
    assert watch.median(lambda: next(seconds)) == 4.0
    assert watch.spreads == [0.75]


@pytest.mark.parametrize(("spread", "told"), [("20%", False), ("21%", True), ("469%", True), ("nan", False)])
def test_a_profile_that_was_timed_on_a_busy_machine_is_told_when_it_is_used(tmp_path, capsys, spread, told):
    profile = aurora.synthetic_profile("uniform", "profiles/models/mixtral-topics")
    save(replace(profile, provenance={**profile.provenance, "spread of repeats on cpu": spread}), tmp_path / "busy.npz")
    load_traffic(tmp_path / "busy.npz")
    assert (f"compute times of cpu: repeats are {spread} apart" in capsys.readouterr().err) is told
