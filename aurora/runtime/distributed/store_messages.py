"""Messages with an array of any size through torch.distributed's store, which limits the size of its values."""

import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 4 << 20  # a TCPStore refuses values of 8 MiB


def pack_message(store: Any, key: str, head: dict[str, Any], array: NDArray[Any] | None) -> bytes:
    """Makes a message that travels through the store as one value.

    An array above PIECE_BYTES is left in the store in pieces, under `key`; the message then names them.

    Args:
        store: a torch.distributed Store.
        key: prefix of the pieces' keys.
        head: sent as JSON.
        array: sent as npy; None: no array.
    """
    body = io.BytesIO()
    if array is not None:
        np.save(body, array, allow_pickle=False)
    sent = body.getbuffer()
    pieces = -(-len(sent) // PIECE_BYTES) if len(sent) > PIECE_BYTES else 0
    for piece in range(pieces):
        store.set(f"{key}/{piece}", bytes(sent[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]))
    line = json.dumps({**head, "key": key, "pieces": pieces, "empty": array is None})
    return line.encode() + b"\n" + (b"" if pieces else bytes(sent))


def unpack_message(store: Any, message: bytes, delete: bool) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """Returns (head, array) of a message that `pack_message` made. Nothing is unpickled.

    Args:
        store: the store that holds the array's pieces.
        message: the message's bytes.
        delete: whether to remove the array's pieces from the store.

    Raises:
        ValueError: if `pack_message` did not make these bytes.
    """
    line, _, body = message.partition(b"\n")
    head = json.loads(line)
    keys = [f"{head['key']}/{piece}" for piece in range(head["pieces"])]
    if keys:
        body = b"".join(store.get(key) for key in keys)
        for key in keys if delete else ():
            store.delete_key(key)
    return head, None if head["empty"] else np.load(io.BytesIO(body), allow_pickle=False)
