"""Prompts that arrive while a run serves."""

import pytest

from aurora.errors import BadInput
from aurora.io.prompts import load_arriving, load_prompts


def test_lines_say_when_a_prompt_arrives(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "at_s": 1.5}\n\n{"prompt": "b"}\n{"prompt": "c", "at_s": 2}\n')
    assert load_arriving(path) == [("a", 1.5), ("b", 0.0), ("c", 2.0)]
    assert load_prompts(path) == ["a", "b", "c"]


@pytest.mark.parametrize("at_s", ["-1", '"soon"', "true", "null", "1e9", "NaN"])
def test_other_times_are_refused(tmp_path, at_s):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a", "at_s": {at_s}}}\n')
    with pytest.raises(BadInput, match="line 1: expected at_s from 0 to 1e\\+06 seconds, found"):
        load_arriving(path)


@pytest.mark.parametrize("key", ["at", "at_S", "arrival_s", "id"])
def test_a_misspelt_key_is_refused(tmp_path, key):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a", "{key}": 1}}\n')
    with pytest.raises(BadInput, match=rf"line 1: a prompt: unknown {key}; expected at_s, prompt"):
        load_arriving(path)
