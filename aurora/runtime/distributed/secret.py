"""Shared secret: members of a run prove by HMAC that they know it. The secret itself never travels."""

import hashlib
import hmac
import os
import secrets

from aurora.errors import BadInput

SECRET = "AURORA_SECRET"  # environment variable that tells members the secret, where no process starts them all
LEAST = 16  # bytes of a secret


def new_secret() -> bytes:
    """Returns a new random secret, for members that are told it by the process that starts them."""
    return secrets.token_bytes(32)


def secret_from_environment() -> bytes | None:
    """Returns the secret in the environment variable AURORA_SECRET, None if it is not set.

    Raises:
        BadInput: if it is shorter than 16 bytes.
    """
    found = os.fsencode(os.environ.get(SECRET, ""))
    if found and len(found) < LEAST:
        raise BadInput(f"{SECRET}: expected at least {LEAST} bytes, found {len(found)}")
    return found or None


def secret_of_hosts(name: str) -> bytes:
    """Returns the secret in the environment variable AURORA_SECRET, for a run over several hosts.

    Args:
        name: the parameter that asks for such a run, for the error message.

    Raises:
        BadInput: if it is not set, or shorter than 16 bytes.
    """
    if (secret := secret_from_environment()) is None:
        raise BadInput(f"`{name}`: expected a secret that all hosts share in {SECRET}, found none")
    return secret


def proof(secret: bytes, *parts: str | bytes) -> str:
    """Returns the proof that whoever sends `parts` knows the secret, as hexadecimal digits.

    Args:
        secret: the shared secret.
        parts: what is proved to come from a member; the same bytes cut at other places give another proof.
    """
    code = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        code.update(len(content).to_bytes(8, "big") + content)
    return code.hexdigest()


def proves(secret: bytes, found: str | bytes, *parts: str | bytes) -> bool:
    """Returns whether `found` is the proof of `parts`, in a time that tells nothing of the secret."""
    return hmac.compare_digest(found.encode() if isinstance(found, str) else found, proof(secret, *parts).encode())
