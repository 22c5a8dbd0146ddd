"""What every verb of the command line shares: its options from dataclasses, its refusals, and its two ways of printing."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from aurora.cli.choices import completed, filled
from aurora.errors import AuroraError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Chosen = TypeVar("Chosen")

SCHEMA = 1  # of the JSON that verbs print: docs/json.md
WORST = 3  # layers that tables show without --layers

Json = Annotated[bool, typer.Option("--json", help="print one JSON object, see docs/json.md, and nothing else")]
Layers = Annotated[bool, typer.Option("--layers", help=f"show every layer instead of the {WORST} worst")]


class Verb(TyperCommand):
    """A command whose help lists what is registered now, and whose refusals name options instead of parameters."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for param in self.params:
            if text := getattr(param, "help", None):
                param.help = filled(text)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AuroraError as error:
            error.args = (as_options(str(error), self.params),)
            raise


def as_options(message: str, params: Iterable[Any]) -> str:
    """`message` with every parameter that it names in backticks as the option or argument of `params` that sets it."""
    spoken: dict[str, str] = {}
    for param in params:
        flag = param.opts[0] if param.opts[0].startswith("-") else param.name.upper()
        spoken |= {param.name: flag, flag.lstrip("-").replace("-", "_"): flag}
    return re.sub(r"`([a-z_]+)`", lambda found: spoken.get(found[1]) or found[0], message)


def option(kind: type, field: str, *flags: str, more: str = "", panel: str | None = None, choices: Iterable[str] = ()) -> Any:
    """The typer option of a field of an options dataclass, with the help that its docstring gives.

    Args:
        kind: the dataclass, with a line for each field under Args in its docstring.
        field: the field; the verb's parameter has the same name.
        flags: the option as typed; by default the field with dashes.
        more: text after the help; {kind}s of CHOICES in it become names.
        panel: the panel of the help page.
        choices: kinds of CHOICES that complete the option in a shell.
    """
    told = documented(kind)[field].replace("; None:", "; default:") + more
    return typer.Option(*flags, help=told, rich_help_panel=panel, autocompletion=completed(*choices))


@cache
def documented(kind: type) -> dict[str, str]:
    """By field the line under Args in the docstring of `kind`."""
    lines = (re.match(r"    (\w+): (.+)\.$", line) for line in inspect.getdoc(kind).splitlines())  # type: ignore[union-attr]
    return {line[1]: line[2] for line in lines if line}


def chosen(kind: type[Chosen], context: typer.Context, **more: Any) -> Chosen:
    """The options of `kind` from the command line's parameters of the same names; `more` on top."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in context.params.items() if name in known} | more)


def terminal() -> Console:
    """Where tables go; what they hold is text, never markup."""
    from rich.console import Console

    return Console(markup=False, highlight=False)


def show(as_json: bool, found: Mapping[str, Any], *parts: RenderableType | None) -> None:
    """Print `found` as one JSON object with its schema, or otherwise `parts`, tables and sentences, one after the other."""
    if as_json:
        print(json.dumps(_plain({"schema": SCHEMA, **found}), allow_nan=False))
        return
    console = terminal()
    for part in parts:
        if part is not None:
            console.print(part, soft_wrap=isinstance(part, str))


def _plain(value: Any) -> Any:
    """`value` of JSON's own types: arrays as lists, and null for what is not a finite number."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
