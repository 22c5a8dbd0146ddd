"""Rounds into windows, padding; profiles that are interrupted and go on."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.models.loading import load_model
from aurora.models.prompts import Corpus
from aurora.profiler import profile_model as profiling
from aurora.profiler.profile_model import ForwardPass, RoutingCounts, count_choices, profile_model, record_choices, route_round
from aurora.types import PHASES, ComputeCurves, Curve, ProfileOptions
from tests.models.architectures import SERVED, build

RATHER = ProfileOptions(sources=2, prompt_tokens=20, batch=2, max_new_tokens=2, token_level=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Timing is another test's matter."""
    curve = Curve(np.array([1.0]), np.array([1.0]))
    curves = ComputeCurves("m", "", 1, 1, 1, {"cpu": dict.fromkeys(PHASES, curve)})
    monkeypatch.setattr(profiling, "measure_curves", lambda *_, **__: curves)


def passes(*sizes):
    """One source, two layers, top-2 of three experts: `sizes` tokens in each pass, a prefill first."""
    return [ForwardPass(0, step, np.array([[size, size, 0]] * 2), None, np.arange(size)) for step, size in enumerate(sizes)]


def test_windows_close_when_they_are_full_and_keep_stages_apart():
    state = RoutingCounts()
    for _ in range(5):
        state = state.add(passes(4, 1, 1), [[[0]]], ProfileOptions(window=8), 2)
    assert state.stages == ("prefill", "decode", "prefill", "prefill", "decode")
    assert [int(each[0].sum()) // 2 for each in state.windows] == [8, 8, 8, 4, 2]
    assert state.rounds == 3
    assert state.prompts == 5


def test_without_a_window_every_pass_is_one():
    state = RoutingCounts().add(passes(4, 1, 1), [[[0]]], ProfileOptions(), 2)
    assert state.stages == ("prefill", "decode", "decode")
    assert state.routing is None


@pytest.mark.parametrize("name", SERVED)
def test_padding_is_not_counted(name, tmp_path):
    """Prompts of unlike lengths together choose what each chooses alone."""
    model = load_model(build(name, tmp_path / name))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 259, size).tolist() for size in (3, 11, 7)]
    together = route_round(model, [prompts], new_tokens=1, keep=True)[0]
    alone = np.zeros_like(together.counts_LE)
    for number, prompt in enumerate(prompts):
        with torch.inference_mode(), record_choices(model) as chosen_L:
            model.model(input_ids=torch.tensor([prompt]))
        chosen_ULK, (counts_LE,) = count_choices([chosen_L], model.experts)
        alone += counts_LE
        found = together.experts_ULK[together.prompt_U == number]
        assert np.sort(found, axis=2).tolist() == np.sort(chosen_ULK.numpy(), axis=2).tolist()
    assert together.counts_LE.tolist() == alone.tolist()


def test_a_profile_of_chats_counts_every_token_once(mixtral, tmp_path):
    texts = ["a short one", "one that is cut because it is long", "x"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    made = profile_model(mixtral, [tmp_path / "c.jsonl"], RATHER)
    assert (made.load_LE.sum(axis=1) == made.top_k * (11 + 20 + 1 + 3)).all()
    assert made.routing.lengths_Q.tolist() == [12, 21, 2]
    assert made.stage_T == ("prefill", "decode")
    loaded = roundtrip(made, tmp_path)
    assert loaded.routing.sequence_U.tolist() == made.routing.sequence_U.tolist()
    assert (loaded.stage_T, loaded.digest) == (made.stage_T, made.digest)


def roundtrip(profile, folder):
    save(profile, folder / "roundtrip.npz")
    return load_profile(folder / "roundtrip.npz")


@pytest.mark.parametrize("window", [None, 100])
def test_interrupted_and_gone_on_with(mixtral, text, tmp_path, window):
    """Interrupted twice, within a round; the parts give exactly what one go gives."""
    options = replace(RATHER, window=window, limit=18)
    whole, first = profile_model(mixtral, [text], options), profile_model(mixtral, [text], replace(options, limit=8))
    made, served = None, []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(profiling, "route_round", interrupted_after(2))
            made = roundtrip(profile_model(mixtral, [text], options, begun=made), tmp_path)
        served.append(made.provenance["interrupted"])
        assert made.digest == first.digest or len(served) > 1
    assert served == ["after 8 prompts", "after 16 prompts"]
    made = profile_model(mixtral, [text], options, begun=made)
    assert made.digest == whole.digest
    assert made.stage_T == whole.stage_T
    assert np.array_equal(made.routing.sequence_U, whole.routing.sequence_U)
    assert not {"interrupted", "job"} & set(made.provenance)


def test_an_interrupted_profile_of_something_else(mixtral, text, monkeypatch):
    monkeypatch.setattr(profiling, "route_round", interrupted_after(1))
    begun = profile_model(mixtral, [text], RATHER)
    with pytest.raises(BadInput, match="of this model, text and options, found those of others; remove the file"):
        profile_model(mixtral, [text], replace(RATHER, batch=3), begun=begun)


def interrupted_after(rounds):
    left = iter(range(rounds))

    def route(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return route_round(*args)

    return route


def test_interrupted_before_anything_is_counted(mixtral, text, monkeypatch):
    monkeypatch.setattr(profiling, "route_round", interrupted_after(0))
    with pytest.raises(KeyboardInterrupt):
        profile_model(mixtral, [text], RATHER)


def test_it_stops_when_the_bottleneck_is_known(mixtral, text):
    options = ProfileOptions(sources=2, prompt_tokens=20, batch=2, precision=0.5)
    made = profile_model(mixtral, [text], options)
    available = len(list(Corpus(load_model(mixtral).tokenizer, 259, [text], 20)))
    assert made.windows == 10 < available / 4
    assert "ranks is known within" in made.provenance["precision"]
    assert "wants more text" not in made.provenance["precision"]
    short = profile_model(mixtral, [text], replace(options, precision=1e-6, limit=44))
    assert short.windows == 11
    assert "after 880 tokens; 0.00% wants more text" in short.provenance["precision"]
