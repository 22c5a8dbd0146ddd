"""Addresses of lighthouses."""

import pytest

from aurora.errors import BadInput
from aurora.types.run_options import address_text, parse_address


def test_addresses_and_names_have_a_host_and_a_port():
    assert parse_address("lighthouse", "10.0.0.1:29600") == ("10.0.0.1", 29600)
    assert parse_address("lighthouse", "[fd00::1]:1") == ("fd00::1", 1)
    assert parse_address("lighthouse", "node-1.cluster.example.:65535") == ("node-1.cluster.example.", 65535)
    for text in ("10.0.0.1:29600", "[fd00::1]:1", "node-1:2"):
        assert address_text(parse_address("lighthouse", text)) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "10.0.0.1", "10.0.0.1:", ":29600", "a:0", "a:65536", "a:-1", "a:1e3", "a:٣", "a b:1", "é:1", "fd00::1:7", "[a]:1",
     "a..b:1", "x" * 64 + ":1", "a:" + "1" * 5000],
)  # fmt: skip
def test_what_is_no_address_is_a_sentence(text):
    with pytest.raises(BadInput, match=r"`lighthouse`: expected ADDRESS:PORT such as 10.0.0.1:29600, found "):
        parse_address("lighthouse", text)


@pytest.mark.parametrize("text", ["0.0.0.0:29600", "[::]:29600"])
def test_all_addresses_of_a_host_are_none(text):
    with pytest.raises(BadInput, match="`lighthouse`: expected the address of one host, found "):
        parse_address("lighthouse", text)
