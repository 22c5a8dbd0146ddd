"""Requests of a rank in several streams, its micro-batches, which take equally long."""

from collections.abc import Sequence


def stream_batches(batch: int, streams: int) -> list[int]:
    """Returns how many requests each stream decodes together, where all of them decode `batch`."""
    return [batch // streams + (stream < batch % streams) for stream in range(streams)]


def deal_to_streams(tokens: Sequence[int], batch: int, streams: int) -> list[list[int]]:
    """Deals requests to streams that are served side by side, so that what is served together is alike in tokens.

    Each `batch` requests in sequence are dealt, longest first, to the stream that has the fewest tokens of them and has a place
    (see `stream_batches`). So every stream's batches are its parts of the rank's batches.

    Args:
        tokens: tokens of each request, those of its prompt and those of its answer.
        batch: requests that the rank decodes together.
        streams: how many streams there are, at most `batch`.

    Returns:
        For each stream, indices into `tokens`, in the sequence in which they are served.
    """
    dealt: list[list[int]] = [[] for _ in range(streams)]
    for first in range(0, len(tokens), batch):
        free, sums = stream_batches(batch, streams), [0] * streams
        together = range(first, min(first + batch, len(tokens)))
        for request in sorted(together, key=lambda each: -tokens[each]):
            stream = min((each for each in range(streams) if free[each]), key=sums.__getitem__)
            dealt[stream].append(request)
            free[stream] -= 1
            sums[stream] += tokens[request]
    return dealt
