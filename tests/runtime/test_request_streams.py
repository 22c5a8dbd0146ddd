"""Requests dealt to streams: each once, batches as asked, and alike in tokens."""

from hypothesis import given
from hypothesis import strategies as st

from aurora.runtime.serving_rank import deal_to_streams, stream_batches


def test_longest_first_to_the_lightest_stream_with_a_place():
    assert deal_to_streams([5, 1, 4, 3], 4, 2) == [[0, 1], [2, 3]]
    assert deal_to_streams([9, 1, 1, 1], 4, 2) == [[0, 3], [1, 2]]  # the second stream takes two
    assert deal_to_streams([1, 2, 3, 4, 5], 3, 2) == [[2, 0, 4], [1, 3]]  # three together, then two


@given(st.lists(st.integers(1, 99), max_size=20), st.integers(1, 9), st.integers(1, 4))
def test_every_request_is_dealt_once_and_streams_of_what_is_served_together_differ_by_one_request_at_most(
    tokens, batch, streams
):
    streams = min(streams, batch)
    dealt, batches = deal_to_streams(tokens, batch, streams), stream_batches(batch, streams)
    assert sorted(request for stream in dealt for request in stream) == list(range(len(tokens)))
    assert sum(batches) == batch
    assert max(batches) - min(batches) <= 1
    for first in range(0, len(tokens), batch):
        parts = [[request for request in part if first <= request < first + batch] for part in dealt]
        if len(tokens) - first >= batch:
            assert [len(part) for part in parts] == batches
        sums = [sum(tokens[request] for request in part) for part in parts]
        free = [s for s, part, room in zip(sums, parts, batches, strict=True) if len(part) < room]
        assert all(max(sums) - each <= max(tokens) for each in free)  # a stream with room lacks no more than one request
