"""Users' methods, in the dicts of our own."""

import re
from collections.abc import Callable
from typing import Any

from aurora.errors import BadInput
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.placement.grouping import PLACE
from aurora.planner.resolve_options import choices
from aurora.types import PlanOptions

_KINDS: dict[str, dict[str, Any]] = {"order": ORDER, "place": PLACE}
_OURS = {kind: {"auto", "given", *choices(PlanOptions(), models=1)[kind]} for kind in _KINDS}


def add(kind: str, name: str, method: Callable[..., Any]) -> str:
    """Adds a method; see `aurora.register`."""
    if kind not in _KINDS:
        raise BadInput(f"`kind`: expected one of {', '.join(_KINDS)}, found {kind!r}")
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name) or name in _OURS[kind]:
        raise BadInput(f"`name`: expected lower-case letters, digits and dashes, and none of aurora's, found {name!r}")
    if not callable(method):
        raise BadInput(f"`method`: expected a function, found {type(method).__name__}")
    _KINDS[kind][name] = method
    return name
