"""Replaces names of vLLM, those of replaced.toml alone, and checks that vLLM's callers see the replacement."""

import ast
import functools
import importlib
import inspect
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

from aurora.errors import BadInput
from aurora_vllm.vllm_internals.api_checks import find

_originals: dict[str, Any] = {}


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Returns replaced.toml, {"module:name": {feature, why, thread, callers}}."""
    return tomllib.loads(resources.files(__package__).joinpath("replaced.toml").read_text())


def replace(where: str, make: Callable[[Any], Any]) -> None:
    """Replaces a name of vLLM.

    Args:
        where: "module:name" in replaced.toml.
        make: returns the replacement of what the name has now.

    Raises:
        BadInput: if a caller of vLLM's still sees what the name had.
    """
    owner, name = _owner(where)
    now = _get(owner, name)
    _originals.setdefault(where, now)
    _set(owner, name, make(now))
    for caller in unseen(where):
        _set(owner, name, _originals.pop(where))
        raise BadInput(f"vLLM's {caller} does not take {where} where the plugin replaces it")


def original(where: str) -> Any:
    """Returns what a name of vLLM had before this process replaced it."""
    owner, name = _owner(where)
    return _originals.get(where) or _get(owner, name)


def restore(where: str) -> None:
    """Gives a name of vLLM back what it had before this process replaced it."""
    if where in _originals:
        _set(*_owner(where), _originals.pop(where))


def replaced(where: str) -> bool:
    """Returns True if this process has replaced a name of vLLM."""
    return where in _originals


def unseen(where: str) -> Iterator[str]:
    """Yields the callers of a name in replaced.toml that look it up elsewhere; those that this vLLM lacks are left out."""
    owner, name = _owner(where)
    path = where.partition(":")[2].split(".")
    for caller in table()[where]["callers"]:
        try:
            function = find(caller)
        except (ImportError, AttributeError):
            continue  # needed.toml has those that must be there
        if function is owner:
            continue
        looked_up = _looked_up(function, path[0])
        if looked_up is not _MISSING and looked_up is not (owner if len(path) > 1 else _get(owner, name)):
            yield caller


_MISSING = object()


def _looked_up(function: Any, name: str) -> Any:
    """What a function gets by a name: of its module, or of a module that it imports the name from itself."""
    function = inspect.unwrap(function)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.ImportFrom) and name in (each.name for each in node.names):
            module = importlib.import_module("." * node.level + (node.module or ""), function.__globals__["__package__"])
            return getattr(module, name)
        if isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node.value) in ("torch.distributed", "dist"):
            return getattr(importlib.import_module("torch.distributed"), name)
    return function.__globals__.get(name, _MISSING)


def _owner(where: str) -> tuple[Any, str]:
    """The module, class or table that has a name, and the name in it."""
    module, _, path = where.partition(":")
    outer, _, name = path.rpartition(".")
    return find(f"{module}:{outer}"), name


def _get(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
