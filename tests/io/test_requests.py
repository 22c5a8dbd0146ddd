"""Request traces: three kinds of columns, as CSV and as JSON lines, and what is refused."""

import json

import pytest

from aurora.errors import BadInput
from aurora.io import load_requests


def read(tmp_path, text):
    (tmp_path / "trace").write_text(text)
    found = load_requests(tmp_path / "trace")
    return found.arrival_s_Q.tolist(), found.input_tokens_Q.tolist(), found.output_tokens_Q.tolist()


def test_our_columns(tmp_path):
    text = "arrival_s,input_tokens,output_tokens,more\n2.5,30,4,x\n1,20,3,\n"
    assert read(tmp_path, text) == ([0.0, 1.5], [20, 30], [3, 4])
    lines = [{"arrival_s": 7, "input_tokens": 5, "output_tokens": 6}, {"arrival_s": 7.5, "input_tokens": 1, "output_tokens": 2}]
    assert read(tmp_path, "\n".join(map(json.dumps, lines))) == ([0.0, 0.5], [5, 1], [6, 2])


def test_azures_columns(tmp_path):
    """Times have seven digits after the point in 2023, and a zone in 2024."""
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"]
    at_s, inputs, outputs = read(tmp_path, "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert at_s == pytest.approx([0, 0.052])
    assert (inputs, outputs) == ([4808, 3180], [10, 8])
    zoned = ["2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:01:00.017335+00:00,2399,6"]
    assert read(tmp_path, "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *zoned]))[0] == pytest.approx([0, 60.007405])


def test_mooncakes_lines(tmp_path):
    lines = [{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}]
    lines.append({"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]})
    at_s, inputs, outputs = read(tmp_path, "\n".join(map(json.dumps, lines)) + "\n")
    assert at_s == pytest.approx([0, 3.053])
    assert (inputs, outputs) == ([6955, 6472], [52, 26])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected requests, found none"),
        ("arrival_s,input_tokens,output_tokens\n", "expected requests, found none"),
        ("a,b\n1,2\n", "line 2: expected the columns arrival_s,input_tokens,output_tokens or TIMESTAMP,.*, found 'a,b'"),
        (
            "arrival_s,input_tokens,output_tokens\n1,2\n",
            "line 2: expected a time from zero on and two numbers of tokens above zero",
        ),
        ("arrival_s,input_tokens,output_tokens\nnan,2,3\n", "line 2: expected a time"),
        ("arrival_s,input_tokens,output_tokens\n1,0,3\n", "line 2: expected a time"),
        ("arrival_s,input_tokens,output_tokens\n-1,2,3\n", "line 2: expected a time"),
        ("arrival_s,input_tokens,output_tokens\n1,1_0,3\n", "line 2: expected a time"),
        ("arrival_s,input_tokens,output_tokens\n１,2,3\n", "line 2: expected a time"),
        ('{"arrival_s": true, "input_tokens": 2, "output_tokens": 3}\n', "line 1: expected a time"),
        ('{"arrival_s": 1, "input_tokens": true, "output_tokens": 3}\n', "line 1: expected a time"),
        ('{"timestamp": -5, "input_length": 2, "output_length": 3}\n', "line 1: expected a time"),
        ("arrival_s,input_tokens,output_tokens\n1,2,99999999999\n", "line 2: expected a time"),
        ('{"arrival_s": 1, "input_tokens": 2.5, "output_tokens": 3}\n', "line 1: expected a time"),
        ('{"arrival_s": 1, "input_tokens": [2], "output_tokens": 3}\n', "line 1: expected a time"),
        ('{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n[1]\n', "line 2: expected a JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "line 2: expected a time"),
        ('arrival_s,input_tokens,output_tokens\n"1,2,3\n', "line 1: not CSV"),
    ],
)
def test_refusals(tmp_path, text, said):
    with pytest.raises(BadInput, match=said):
        read(tmp_path, text)
    with pytest.raises(BadInput, match="no such file"):
        load_requests(tmp_path / "none")
