"""Messages of a coded aggregation in a store: signed, and cut into pieces where they are large. Nothing is unpickled."""

import hashlib
import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.runtime.distributed.secret import proof, proves

Message = tuple[dict[str, Any], NDArray[Any] | None]  # head, and an array
RESULTS_KEY = "aggregation/results"  # the queue of the workers' messages
END = b"end"  # to a worker, instead of a round: there is none any more
PIECE_BYTES = 4 << 20  # a TCPStore refuses values of 8 MiB


def rounds_key(worker: int) -> str:
    """Returns the key of the queue of rounds that a worker is told of."""
    return f"aggregation/rounds/{worker}"


def argument_key(name: str, version: int) -> str:
    """Returns the key of a version of an argument. It is overwritten by the next version but one."""
    return f"aggregation/argument/{name}/{version % 2}"


def pack_message(store: Any, secret: bytes, key: str, head: dict[str, Any], array: NDArray[Any] | None) -> bytes:
    """Returns a value for the store: a proof, the head as JSON, and the array as npy.

    Args:
        store: where the pieces of a large array go; the message is then without it.
        secret: what the members of the run share.
        key: of the pieces; they lie under it.
        head: what is said beside the array.
        array: what is sent; None: nothing.
    """
    body = io.BytesIO()
    if array is not None:
        np.save(body, array, allow_pickle=False)
    sent = body.getbuffer()
    pieces = -(-len(sent) // PIECE_BYTES) if len(sent) > PIECE_BYTES else 0
    for piece in range(pieces):
        store.set(f"{key}/{piece}", bytes(sent[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]))
    digest = hashlib.sha256(sent).hexdigest()
    line = json.dumps({**head, "key": key, "pieces": pieces, "empty": array is None, "digest": digest}).encode()
    return proof(secret, line).encode() + b"\n" + line + b"\n" + (b"" if pieces else bytes(sent))


def unpack_message(store: Any, secret: bytes, message: bytes, delete: bool = False) -> Message:
    """Returns head and array of a message of `pack_message`.

    Args:
        store: where its pieces are.
        secret: what the members of the run share.
        message: the message.
        delete: whether its pieces are removed.

    Raises:
        BadInput: if the message is none of this run's members, or cannot be read (any more).
    """
    proved, _, rest = message.partition(b"\n")
    line, _, body = rest.partition(b"\n")
    if not proves(secret, proved, line):
        raise BadInput("comes from no member of the run")
    try:
        head = json.loads(line)
        keys = [f"{head['key']}/{piece}" for piece in range(head["pieces"])]
        if keys:
            if not store.check(keys):  # `get` would wait for them
                raise BadInput("was read before")
            body = b"".join(store.get(key) for key in keys)
            for key in keys if delete else ():
                store.delete_key(key)
        if hashlib.sha256(body).hexdigest() != head["digest"]:
            raise BadInput("was changed on its way")
        return head, None if head["empty"] else np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"cannot be read: {error}") from None
