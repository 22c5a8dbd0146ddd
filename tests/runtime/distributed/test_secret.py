"""Proofs that a member knows the secret: of these parts, cut like this, with this secret, and no other."""

import pytest

from aurora.errors import BadInput
from aurora.runtime.distributed.secret import LEAST, SECRET, new_secret, proof, proves, secret_from_environment


def test_a_proof_is_of_its_parts_and_its_secret():
    secret, parts = new_secret(), ("rank 1", b"\x00payload")
    assert proves(secret, proof(secret, *parts), *parts)
    assert proves(secret, proof(secret, *parts).encode(), *parts)
    assert proof(secret, "ab", "c") != proof(secret, "a", "bc")
    for found, *claimed in ((proof(secret, *parts), "rank 2", parts[1]), (proof(new_secret(), *parts), *parts), ("é", *parts)):
        assert not proves(secret, found, *claimed)


def test_the_secret_in_the_environment(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert secret_from_environment() is None
    monkeypatch.setenv(SECRET, "x" * LEAST)
    assert secret_from_environment() == b"x" * LEAST
    monkeypatch.setenv(SECRET, "\udcff" * LEAST)  # bytes that are no UTF-8
    assert secret_from_environment() == b"\xff" * LEAST
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(BadInput, match=r"AURORA_SECRET: expected at least 16 bytes, found 5"):
        secret_from_environment()
