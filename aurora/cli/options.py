"""Annotates subcommands so that cyclopts makes options of their parameters and options dataclasses; options in messages."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import App, Argument, Parameter

from aurora.errors import BadInput
from aurora.types.options import Limits, limits_in
from aurora.types.read_numbers import finite_number, whole_number

Verb = TypeVar("Verb", bound=Callable[..., Any])
READ = {int: whole_number, float: finite_number}
COMMON = {  # parameters that several subcommands have
    "as_json": Parameter(name="--json", help="print one JSON object, see docs/json.md, and nothing else"),
    "form": Parameter(name="--format"),
    "output": Parameter(name=("--output", "-o")),
    "priorities": Parameter(name="--priority"),
}


class Running(NamedTuple):
    """The subcommand that runs, and the arguments that the user gave to it, by parameter."""

    app: App
    given: dict[str, Any]


RUNNING: ContextVar[Running] = ContextVar("RUNNING")


def verb(**how: Parameter | None) -> Callable[[Verb], Verb]:
    """Decorator for subcommands: annotates their parameters, and the fields of options dataclasses, for cyclopts.

    Positional-only parameters become arguments, keyword-only ones options. Help is from Args in docstrings; numbers are read as
    in files; limits and names are those of `aurora.types.options.Limits`.

    Args:
        how: by name of a parameter or field: what to change; None: the field is no option and keeps its default.
    """

    def annotated(function: Verb) -> Verb:
        function.__annotations__ = _annotated(function, how)
        return function

    return annotated


def _annotated(described: Any, how: dict[str, Parameter | None]) -> dict[str, Any]:
    """Returns the type hints of a function or dataclass, with the Parameter of each."""
    hints = get_type_hints(described, include_extras=True)
    return {name: _hint(name, hint, how) for name, hint in hints.items() if name != "return"}


def _hint(name: str, hint: Any, how: dict[str, Parameter | None]) -> Any:
    """Returns a type hint with its Parameter; that of an options dataclass with those of its fields."""
    for kind in [each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)]:
        made = {"__annotations__": _annotated(kind, how), "__new__": lambda _, kind=kind, **values: kind(**values)}
        made["__doc__"] = kind.__doc__
        return Annotated[type(kind.__name__, (kind,), made) | None, Parameter(name="*")]
    if how.get(name, COMMON) is None:
        return Annotated[hint, Parameter(parse=False)]
    kinds, limits, found = _kinds(hint), limits_in(hint), [COMMON.get(name)]
    if kinds & {int, float}:
        found.append(Parameter(converter=_read))
    if limits is not None:
        found.append(Parameter(validator=lambda _, value: limits.check(name, value), choices=tuple(limits.one_of) or None))
    if kinds & {bool, tuple}:
        found.append(Parameter(show_default=False))
    return Annotated[hint, Parameter.combine(*found, how.get(name))]


def _kinds(hint: Any) -> set[Any]:
    """Returns the types in a type hint."""
    parts = [each for each in get_args(hint) if not isinstance(each, Limits)]
    return {get_origin(hint)}.union(*map(_kinds, parts)) if parts else {hint}


def _read(hint: Any, tokens: Sequence[Any]) -> Any:
    """Returns what reads numbers of the command line as those of files."""
    kinds = _kinds(hint)
    try:
        values = tuple(READ[int if int in kinds else float](token.value) for token in tokens)
    except BadInput as error:
        raise ValueError(str(error)) from None
    return values if tuple in kinds else values[0]


def options_of(app: App) -> list[Argument]:
    """Returns the options and arguments of a subcommand."""
    return [each for each in app.assemble_argument_collection() if each.parse and each.name != "*"]


def as_options(message: str) -> str:
    """Returns `message` with `parameter` names in backticks replaced by the running subcommand's options and arguments."""
    if (running := RUNNING.get(None)) is None:  # a subcommand that could not be imported
        return message
    spoken = {each.field_info.name: each.name for each in options_of(running.app)}
    return re.sub(r"`([A-Za-z_]+)`", lambda match: spoken.get(match[1]) or match[0], message)


def refuse_given(names: Iterable[str], expected: str) -> None:
    """Raises BadInput if the user gave one of these parameters; `expected` ends the message."""
    for name in names:
        if RUNNING.get().given.get(name) is not None:
            raise BadInput(f"`{name}`: expected {expected}")
