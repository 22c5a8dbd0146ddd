"""Layers in threads come back in their sequence, and are counted."""

import pytest

from aurora.algorithms import layers_in_threads
from aurora.algorithms.layers_in_threads import map_layers


@pytest.mark.parametrize("cores", [1, 3])
def test_what_is_made_of_layers_is_in_their_sequence(monkeypatch, cores):
    monkeypatch.setattr(layers_in_threads, "_cores", lambda: cores)
    told = []
    assert map_layers(lambda layer: layer**2, 5, "squares", lambda *told_of: told.append(told_of)) == [0, 1, 4, 9, 16]
    assert told == [("squares", done, 5) for done in range(6)]


def test_the_first_layer_that_fails_is_told():
    with pytest.raises(ValueError, match=r"^layer 2$"):
        map_layers(lambda layer: fail(layer) if layer in (2, 4) else layer, 6, "layers")


def fail(layer):
    raise ValueError(f"layer {layer}")
