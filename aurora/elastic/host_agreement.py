"""Agreement of hosts: properties that have to be the same on all hosts of a run."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any


def this_version() -> dict[str, str]:
    """Returns this host's version of aurora, by what it is in words: what hosts say to each other depends on it."""
    return {"aurora's version": version("aurora-moe")}


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Returns in a sentence what a host has other than the leader, None if it has the same.

    Args:
        expected, found: the leader's values and the host's, by what they are in words.
    """
    for what in [*expected, *(found.keys() - expected.keys())]:
        leaders, its = expected.get(what), found.get(what)
        if leaders != its:
            return f"expected {what} {leaders} as the leader has, found {its}"
    return None
