"""Corpora as prompts: every kind of file, in blocks as at once, and files that lie."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io import shipped
from aurora.models import prompts as prompts_module
from aurora.models.loading import load_tokenizer
from aurora.models.prompts import Corpus

TOKENIZER = load_tokenizer(shipped("models/mixtral-topics"))
VOCABULARY = 259


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def prompts(*files, length=8):
    return list(Corpus(TOKENIZER, VOCABULARY, files, length))


@pytest.mark.full
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=60), st.integers(1, 9), st.integers(1, 12))
def test_text_in_blocks_is_text_at_once(tmp_path_factory, text, block, length):
    """The shipped tokenizer has a token a byte, so that no block divides one."""
    file = tmp_path_factory.mktemp("text") / "t.txt"
    file.write_text(text, encoding="utf-8")
    ids = ids_of(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts_module, "BLOCK_CHARS", block)
        found = prompts(file, length=length)
    assert found == [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]


def test_rows_of_every_kind(tmp_path):
    rows = [{"prompt": "ab"}, {"text": "c"}, {"tokens": [5, 6, 7]}, {"text": ""}, {"prompt": "longer than that", "id": 3}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert prompts(file) == [ids_of("ab"), ids_of("c"), [5, 6, 7], ids_of("longer t")]


def test_chats_by_the_template_and_without_one(tmp_path):
    class Templated:
        chat_template = "yes"

        def __call__(self, text, add_special_tokens):
            return TOKENIZER(text, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, messages, tokenize):
            if messages[0]["role"] == "judge":
                raise ValueError("roles must alternate")
            return "".join(f"<{each['role']}>{each['content']}" for each in messages)

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}))
    assert prompts(file, length=99) == [ids_of("user: hi\nassistant: ho\n")]
    assert list(Corpus(Templated(), VOCABULARY, [file], 99)) == [ids_of("<user>hi<assistant>ho")]
    file.write_text(json.dumps({"messages": [{"role": "judge", "content": "?"}]}))
    with pytest.raises(BadInput, match=r"line 1: the tokenizer's chat template does not take it: roles must alternate"):
        list(Corpus(Templated(), VOCABULARY, [file], 99))


def test_token_ids(tmp_path):
    np.save(tmp_path / "one.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "two.npy", np.arange(10, dtype=np.int32).reshape(2, 5))
    assert prompts(tmp_path / "one.npy", length=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert prompts(tmp_path / "two.npy", length=4) == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert prompts(tmp_path / "two.npy", length=9) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_how_far_it_got(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 20)
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n' * 3)
    found = Corpus(TOKENIZER, VOCABULARY, [tmp_path / "a.txt", tmp_path / "b.jsonl"], 8)
    seen = [found.read_bytes for _ in found]
    assert seen == sorted(seen)
    assert found.read_bytes == found.size_bytes == 20 + 48


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"caf\xe9", r"t\.txt: expected UTF-8 text"),
        ("t.jsonl", b'{"text": "caf\xe9"}', r"t\.jsonl: expected UTF-8 text"),
        ("t.jsonl", b'{"text": "a"}\n[3]\n', r't\.jsonl: line 2: expected {"messages".*, found .\[3\]'),
        ("t.jsonl", b"{", "line 1: expected"),
        ("t.jsonl", b'{"text": 3}', "line 1: expected"),
        ("t.jsonl", b'{"messages": [{"role": "user"}]}', "line 1: expected"),
        ("t.jsonl", b'{"tokens": [1, true]}', "line 1: expected"),
        ("t.jsonl", b'{"tokens": [1, 259]}', "line 1: expected token ids from 0 to 258, found 1 to 259"),
        ("t.jsonl", b'{"tokens": [-1, 99999999999999999999]}', "line 1: expected token ids from 0 to 258"),
        ("t.npy", b"no array", r"t\.npy: expected an .npy array of numbers"),
    ],
)
def test_files_that_lie(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as found:
        prompts(tmp_path / name)
    assert "\n" not in str(found.value)


def test_lines_and_arrays_out_of_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts_module, "MAX_LINE_CHARS", 10)
    (tmp_path / "t.jsonl").write_text('{"text": "abc"}')
    with pytest.raises(BadInput, match="line 1: expected at most 10 characters in a line"):
        prompts(tmp_path / "t.jsonl")
    np.save(tmp_path / "f.npy", np.zeros(3))
    with pytest.raises(BadInput, match=r"expected token ids with one axis or two, found float64 of shape \(3,\)"):
        prompts(tmp_path / "f.npy")
    np.save(tmp_path / "i.npy", np.full(9, 300))
    with pytest.raises(BadInput, match=r"i\.npy: expected token ids from 0 to 258, found 300 to 300"):
        prompts(tmp_path / "i.npy")
    with pytest.raises(BadInput, match="none: no such file"):
        prompts(tmp_path / "none")
    with pytest.raises(BadInput, match="not a regular file"):
        prompts(tmp_path)
