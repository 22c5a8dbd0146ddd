"""Prompts that arrive while a run serves."""

import pytest

from aurora.errors import BadInput
from aurora.io.prompts import load_arriving, load_prompts


def test_lines_say_when_a_prompt_arrives(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "at_s": 1.5}\n\n{"prompt": "b"}\n{"prompt": "c", "at_s": 2}\n')
    assert load_arriving(path) == [("a", 1.5), ("b", 0.0), ("c", 2.0)]
    assert load_prompts(path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "a", "at_s": -1}', "line 1: at_s: expected a number >= 0.0, found -1"),
        ('{"prompt": "a", "at_s": 1e9}', "line 1: at_s: expected a number <= 1000000.0, found 1000000000.0"),
        ('{"prompt": "a", "at": 1}', "line 1: unknown at; expected at_s, prompt"),
        (
            '{"prompt": "a", "' + "\\u001b[2J" * 9999 + '": 1}',
            r"line 1: unknown (\\x1b\[2J)+[^\x1b]{0,8}; expected at_s, prompt$",
        ),
    ],
)
def test_other_times_and_misspelt_keys_are_refused(tmp_path, row, said):
    (tmp_path / "prompts.jsonl").write_text(row)
    with pytest.raises(BadInput, match=said):
        load_arriving(tmp_path / "prompts.jsonl")
