"""Arrays of any size through torch.distributed's store, whose own messages are small."""

import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 4 << 20  # a TCPStore refuses values of 8 MiB


def put(store: Any, key: str, head: dict[str, Any], array: NDArray[Any] | None) -> bytes:
    """What `taken` makes `head` and `array` of again; a large array's pieces are left under `key` first."""
    body = io.BytesIO()
    if array is not None:
        np.save(body, array, allow_pickle=False)
    sent = body.getbuffer()
    pieces = -(-len(sent) // PIECE_BYTES) if len(sent) > PIECE_BYTES else 0
    for piece in range(pieces):
        store.set(f"{key}/{piece}", bytes(sent[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]))
    line = json.dumps({**head, "key": key, "pieces": pieces, "empty": array is None})
    return line.encode() + b"\n" + (b"" if pieces else bytes(sent))


def taken(store: Any, message: bytes, delete: bool) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """(head, array) of a message; delete: and its pieces are gone. ValueError where it holds neither."""
    line, _, body = message.partition(b"\n")
    head = json.loads(line)
    keys = [f"{head['key']}/{piece}" for piece in range(head["pieces"])]
    if keys:
        body = b"".join(store.get(key) for key in keys)
        for key in keys if delete else ():
            store.delete_key(key)
    return head, None if head["empty"] else np.load(io.BytesIO(body), allow_pickle=False)
