"""What all subcommands share: options from dataclasses, error messages that name options, and output as tables or JSON."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from aurora.cli.choices import completed, filled
from aurora.errors import AuroraError, BadInput

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Chosen = TypeVar("Chosen")

SCHEMA = 1  # of the JSON that subcommands print: docs/json.md
WORST = 3  # layers that tables show without --layers

RUNNING: ContextVar[Mapping[str, Any]] = ContextVar("RUNNING")  # the parameters of the subcommand that runs, by name

Json = Annotated[bool, typer.Option("--json", help="print one JSON object, see docs/json.md, and nothing else")]
Priorities = Annotated[
    list[str] | None,
    typer.Option(
        "--priority",
        help="one per model, in place of the plan's: {priority}; interactive models go before batch models",
        autocompletion=completed("priority"),
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help=f"show every layer instead of the {WORST} worst")]


class Subcommand(TyperCommand):
    """A subcommand whose help lists the names registered now, and whose errors name options instead of parameters."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for param in self.params:
            if text := getattr(param, "help", None):
                param.help = filled(text)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        running = RUNNING.set(ctx.params)
        try:
            return super().invoke(ctx)
        except AuroraError as error:
            error.args = (as_options(str(error), self.params),)
            raise
        finally:
            RUNNING.reset(running)


def as_options(message: str, params: Iterable[Any]) -> str:
    """Returns `message` with each parameter that it names in backticks replaced by the option or argument that sets it.

    Args:
        message: an error message of the library.
        params: the subcommand's click parameters.
    """
    spoken: dict[str, str] = {}
    for param in params:
        flag = param.opts[0] if param.opts[0].startswith("-") else param.name.upper()
        spoken |= {param.name: flag, flag.lstrip("-").replace("-", "_"): flag}
    return re.sub(r"`([A-Za-z_]+)`", lambda found: spoken.get(found[1]) or found[0], message)


def option(kind: type, field: str, *flags: str, more: str = "", panel: str | None = None, choices: Iterable[str] = ()) -> Any:
    """Returns the typer option of a field of an options dataclass, with the help text from the class's docstring.

    Args:
        kind: the dataclass, with a line for each field under Args in its docstring.
        field: the field; the subcommand's parameter has the same name.
        flags: the option as typed; by default the field's name with dashes.
        more: text after the help; {kind}s of CHOICES in it become names.
        panel: the panel of the help page.
        choices: kinds of CHOICES that complete the option in a shell.
    """
    told = documented(kind)[field].replace("; None:", "; default:") + more
    return typer.Option(*flags, help=told, rich_help_panel=panel, autocompletion=completed(*choices))


@cache
def documented(kind: type) -> dict[str, str]:
    """Returns a dict from each field of the dataclass `kind` to its description under Args in the docstring."""
    lines = (re.match(r"    (\w+): (.+)\.$", line) for line in inspect.getdoc(kind).splitlines())  # type: ignore[union-attr]
    return {line[1]: line[2] for line in lines if line}


def chosen(kind: type[Chosen], context: typer.Context, **more: Any) -> Chosen:
    """Returns an instance of `kind` with the command line's parameters of the same names as fields; `more` overrides them."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in context.params.items() if name in known} | more)


def refuse_given(context: typer.Context, names: Iterable[str], expected: str) -> None:
    """Raises BadInput, which says what is `expected`, if the command line has an option of one of these parameters."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadInput(f"`{name}`: expected {expected}")


def terminal() -> Console:
    """Returns the console that tables are printed on, with markup off."""
    from rich.console import Console

    return Console(markup=False, highlight=False)


def show(as_json: bool, found: Mapping[str, Any], *parts: RenderableType | None) -> None:
    """Print a result.

    Args:
        as_json: print `found` as one JSON object with its schema, and nothing else; otherwise print `parts`.
        found: the result.
        parts: tables and sentences, printed in sequence; None is skipped.
    """
    if as_json:
        print(json.dumps(_plain({"schema": SCHEMA, **found}), allow_nan=False))
        return
    console = terminal()
    for part in parts:
        if part is not None:
            console.print(part, soft_wrap=isinstance(part, str))


def _plain(value: Any) -> Any:
    """Returns `value` in JSON's types: arrays as lists, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
