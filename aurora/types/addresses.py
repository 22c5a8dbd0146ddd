"""Addresses of hosts that lead a run, as users write them."""

import ipaddress
from contextlib import suppress

from aurora.errors import BadInput

LABEL = 63  # characters of a part of a host's name between dots


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Returns host and port of an address like 10.0.0.1:29600, node1:29600 or [fd00::1]:29600.

    Args:
        name: the parameter that has the address, for the error message.
        text: the address.

    Raises:
        BadInput: if it is no such address, or stands for all addresses of a host.
    """
    bracketed, _, number = text.rpartition(":")
    host = bracketed.removeprefix("[").removesuffix("]")
    labels = host.removesuffix(".").split(".")
    written = bracketed == (f"[{host}]" if ":" in host else host) and host.isascii() and host.isprintable() and " " not in host
    named = ":" in host or all(0 < len(label) <= LABEL for label in labels)
    if not (written and named and number.isascii() and number.isdigit() and 0 < int(number[:6]) < 65536 and len(number) <= 5):
        raise BadInput(f"`{name}`: expected ADDRESS:PORT such as 10.0.0.1:29600, found {text!r}")
    with suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            raise BadInput(f"`{name}`: expected one address by which the other hosts reach this one, found {host}")
    return host, int(number)


def check_lead_and_join(lead: str | None, join: str | None) -> None:
    """Raises BadInput unless at most one of the parameters `lead` and `join` is given, as an address."""
    for name, text in (("lead", lead), ("join", join)):
        if text is not None:
            parse_address(name, text)
    if lead and join:
        raise BadInput(f"`join`: expected none on the host that leads, found {join}")


def address_text(address: tuple[str, int]) -> str:
    """Returns host and port as `parse_address` takes them."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
