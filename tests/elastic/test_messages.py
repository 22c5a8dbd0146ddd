"""What travels between hosts arrives as it was sent, and nothing else becomes a value."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from aurora.elastic.host_connection import Refused, WireFormat
from aurora.errors import BadInput


@dataclass(frozen=True)
class Pair:
    one: object
    other: object = None
    made: int = field(default=0, init=False)

    def __post_init__(self):
        if self.other == "wrong":
            raise BadInput("no such pair")


@dataclass(frozen=True)
class Said:
    number: int
    share: float
    text: str


WIRE = WireFormat(Pair, Said, BadInput)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, float("inf"), "ü", (), (1, (2,)), [1, [2]], {3, 4}, {}, {1: "a", ("x", 2): [None]}, Pair({1: (2,)}, [Pair(1)]),
     Said(1, 1, "a")],
)  # fmt: skip
def test_values_arrive_as_they_were(value):
    found = WIRE.unpack(WIRE.pack(value))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "float64", "uint8"])
def test_arrays_arrive_as_they_were(dtype):
    sent = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    (found,) = WIRE.unpack(WIRE.pack((sent,)))
    assert (found.dtype, found.shape) == (sent.dtype, (3, 2))
    assert (found == sent).all()
    assert WIRE.unpack(WIRE.pack(sent[0, 1])) == sent[0, 1]


def test_errors_arrive_with_their_sentence():
    found = WIRE.unpack(WIRE.pack(BadInput("`node`: not there")))
    assert type(found) is BadInput
    assert str(found) == "`node`: not there"


@pytest.mark.parametrize(
    "plain",
    [
        {"a": 1}, ["nobody", 1], ["Pair"], ["Pair", 1, 2, 3], ["Pair", 1, "wrong"], ["Said", "1", 1, "a"],
        ["Said", 1, None, "a"], ["Said", ["list"], 1, "a"], ["Said", 1, 1.5, 2], ["array", "|O", [1], b"12345678"], ["array", "<i8", [3], b""],
        ["array", "<i8", [1], "12345678"], b"1", ["dict", 1], ["dict", [["list"], 1]], [], [["list"]], ["set", ["list"]],
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(plain):
    with pytest.raises(Refused):
        WIRE.unpack(msgspec.msgpack.encode(plain))


def test_no_message_pack_is_refused():
    for packed in (b"", b"\xff\xff", b"\x91" * 100_000):
        with pytest.raises(Refused):
            WIRE.unpack(packed)


def test_what_the_receiver_does_not_know_is_not_sent():
    with pytest.raises(AssertionError, match="object does not travel"):
        WIRE.pack([object()])
