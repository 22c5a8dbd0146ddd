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
    text = "arrival_s,input_tokens,output_tokens,more\n1,20,3,\n2.5,30,4,x\n"
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


def loaded(tmp_path, rows):
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    return load_requests(tmp_path / "trace")


def test_bailians_seconds_are_not_mooncakes_milliseconds(tmp_path):
    rows = [
        {"chat_id": 159, "parent_chat_id": -1, "timestamp": at, "input_length": 5, "output_length": 6, "hash_ids": [1]}
        for at in (0.5, 90.5)
    ]
    found = loaded(tmp_path, rows)
    assert (found.arrival_s_Q.tolist(), found.source) == ([0, 90], "bailian: times in seconds")
    del rows[0]["chat_id"]
    found = loaded(tmp_path, rows)
    assert (found.arrival_s_Q.tolist(), found.source) == ([0, pytest.approx(0.09)], "mooncake: times in milliseconds")


def test_burstgpts_failed_requests_are_counted_and_left_out(tmp_path):
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    (tmp_path / "trace").write_text(text + "45,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n")
    found = load_requests(tmp_path / "trace")
    assert (found.arrival_s_Q.tolist(), found.input_tokens_Q.tolist()) == ([0, 113], [472, 417])
    assert found.output_tokens_Q.tolist() == [18, 276]
    assert found.source == "burstgpt: times in seconds; failed and left out: 1"
    (tmp_path / "trace").write_text(text.splitlines()[0] + "\n45,ChatGPT,1087,0,1087,API log\n")
    with pytest.raises(BadInput, match="expected requests, found 1 that failed"):
        load_requests(tmp_path / "trace")


def test_benchmarks_results(tmp_path):
    """vLLM saves one object, over several lines if a person formats it; SGLang appends one a run."""
    result = {"duration": 9.5, "start_times": [100.5, 100.25, 101], "input_lens": [7, 8, 9], "output_lens": [2, 3, 0]}
    result |= {"ttfts": []}
    for text in (json.dumps(result), json.dumps(result, indent=1)):
        assert read(tmp_path, text) == ([0, 0.25], [8, 7], [3, 2])
    for wrong in (result | {"start_times": [1.0]}, {"input_lens": [1], "output_lens": [1]}):
        with pytest.raises(BadInput, match="lists start_times, input_lens, output_lens of one length, as of a benchmark"):
            loaded(tmp_path, [wrong])


def test_prefixes_and_the_size_of_their_blocks(tmp_path):
    """A prompt of 1025 tokens in three blocks, one of 1024 in two: blocks of 512. Names may be numbers or texts."""
    rows = [{"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [5, 6, "a"]}]
    rows += [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [5, 7]}]
    rows += [{"timestamp": 1, "input_length": 3, "output_length": 1}]
    found = loaded(tmp_path, rows)
    assert (found.blocks_Q, found.block_tokens) == (((0, 1, 2), (0, 3), ()), 512)
    with pytest.raises(BadInput, match="line 1: hash_ids: expected a list or none, found 7"):
        loaded(tmp_path, [rows[0] | {"hash_ids": 7}])


def test_later_turns(tmp_path):
    """A turn with a delay waits for the one before; its delay has the unit of the times. One with a time does not wait."""
    size = {"input_length": 5, "output_length": 6}
    turns = {"timestamp": 1000}, {"delay": 2500}, {"timestamp": 4000, "session_id": None}, {"timestamp": 9000}
    rows = [size | {"session_id": "a"} | turn for turn in turns]
    found = loaded(tmp_path, rows)
    assert found.arrival_s_Q.tolist() == [0, 0, 3, 8]
    assert found.delay_s_Q.tolist() == [0, 2.5, 0, 0]
    assert [len(set(found.session_Q[:2])), len(set(found.session_Q))] == [1, 3]
    assert found.source == "mooncake: times in milliseconds; later turns, each sent when the one before is answered: 1"
    with pytest.raises(BadInput, match="line 2: 'timestamp' is missing"):
        loaded(tmp_path, [rows[0], rows[1] | {"session_id": "b"}])


OURS = "arrival_s,input_tokens,output_tokens"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{OURS}\n2,1,1\n1,1,1\n", "line 3: expected times that never fall, found 1 after a later one"),
        ("", "expected requests, found none"),
        ("a,b\n1,2\n", "line 2: expected the columns arrival_s,input_tokens,output_tokens or TIMESTAMP,.*, found 'a,b'"),
        (f"{OURS}\n1,2\n", "line 2: expected 3 fields, found 2"),
        (f"{OURS}\n1,0,3\n", "line 2: input_tokens: expected a whole number >= 1, found '0'"),
        ("arrival_s,input_tokens,output_tokens\n1,1_0,3\n", "line 2: input_tokens: expected a whole number, found '1_0'"),
        (
            '{"arrival_s": 1, "input_tokens": true, "output_tokens": 3}\n',
            "line 1: input_tokens: expected a whole number, found True",
        ),
        ('{"timestamp": -5, "input_length": 2, "output_length": 3}\n', "line 1: timestamp: expected a number >= 0.0, found -5"),
        (
            "arrival_s,input_tokens,output_tokens\n1,2,99999999999\n",
            "line 2: output_tokens: expected a whole number <= 1073741824, found",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "line 2: TIMESTAMP: .*, found 'yesterday'"),
    ],
)
def test_refusals(tmp_path, text, said):
    with pytest.raises(BadInput, match=said):
        read(tmp_path, text)
    with pytest.raises(BadInput, match="no such file"):
        load_requests(tmp_path / "none")
