"""Generates command-line options from options dataclasses and function signatures, and names options in error messages.

Names that options accept are read from the registries only when help or shell completion needs them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from aurora.errors import AuroraError, BadInput
from aurora.types import TIME_SLICES, PlanOptions
from aurora.types.options import ALL_TO_ALLS, OptionField, check_value
from aurora.types.read_numbers import finite_number, whole_number

WORST = 3  # layers that tables show without --layers
ALL = "--help-all"
FLAGS = {"output": "--output -o", "as_json": "--json"}  # of parameters that many subcommands have
COMMON = {  # and their help
    "as_json": "print one JSON object, see docs/json.md, and nothing else",
    "layers": f"show every layer instead of the {WORST} worst",
}

RUNNING: ContextVar[typer.Context] = ContextVar("RUNNING")  # the context of the subcommand that runs


@dataclass(frozen=True)
class Only:
    """Annotation that selects which fields of an options dataclass a subcommand offers as options.

    Attributes:
        names: names of the fields.
        panel: heading of their options in the help; None: the panel of each field.
        instead: text for the default in the help, such as "the plan's", if the value used without the option is not the
            field's default; None: it is.
    """

    names: tuple[str, ...]
    panel: str | None = None
    instead: str | None = None


class Subcommand(TyperCommand):
    """Typer command: `--help` shows only options without a panel, `--help-all` shows all; error messages name options."""

    everything = False  # whether all options are asked for

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.everything = ALL in args
        return super().parse_args(ctx, ["--help" if argument == ALL else argument for argument in args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        further: list[Any] = [param for param in self.params if is_further(param)]
        for param in self.params:
            if text := getattr(param, "help", None):
                param.help = filled(text)  # type: ignore[attr-defined]
        for param in further:
            param.hidden = not self.everything
        shows_more = further and not self.everything
        self.epilog = f"{ctx.command_path} {ALL} shows {len(further)} more options." if shows_more else None
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        running = RUNNING.set(ctx)
        try:
            return super().invoke(ctx)
        except AuroraError as error:
            error.args = (as_options(str(error)),)
            raise
        finally:
            RUNNING.reset(running)


def is_further(param: Any) -> bool:
    """Returns True if a click parameter is an option with a panel, which only `--help-all` shows."""
    return str(param.opts[0]).startswith("-") and getattr(param, "rich_help_panel", None) is not None


def as_options(message: str) -> str:
    """Returns `message` with `parameter` names in backticks replaced by the running subcommand's options and arguments."""
    spoken: dict[str, str] = {}
    for param in RUNNING.get().command.params:
        flag = param.opts[0] if param.opts[0].startswith("-") else str(param.name).upper()
        spoken |= {str(param.name): flag, flag.lstrip("-").replace("-", "_"): flag}
    return re.sub(r"`([A-Za-z_]+)`", lambda match: spoken.get(match[1]) or match[0], message)


def refuse_given(names: Iterable[str], expected: str) -> None:
    """Raises BadInput if the user gave any of these parameters on the command line; `expected` ends the message."""
    for name in names:
        if is_given(name):
            raise BadInput(f"`{name}`: expected {expected}")


def is_given(name: str) -> bool:
    """Returns True if the user gave this parameter on the command line."""
    source = RUNNING.get().get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator for subcommands: returns a wrapper with one parameter per command-line argument and option.

    Args:
        function: the subcommand. Its positional parameters become arguments, its keyword-only parameters options, described by
            `OptionField` annotations. A parameter annotated with an options dataclass receives an instance, built from one
            option per field; one annotated with Callable[..., dataclass] receives a function that builds the instance from
            these and further fields. `Only` selects fields. Help texts are taken from Args in the docstring, or from COMMON.
    """
    hints = get_type_hints(function, include_extras=True)
    texts, parameters = COMMON | documented(function), dict[str, inspect.Parameter]()
    options: dict[str, OptionField] = {}
    kinds: dict[str, tuple[Any, bool, list[Field[Any]]]] = {}
    for name, declared in inspect.signature(function).parameters.items():
        kind, how = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name], None)
        later = get_origin(kind) is Callable
        kind = get_args(kind)[-1] if later else kind
        if not is_dataclass(kind):
            options[name] = how or OptionField()
            argument = declared.kind is not declared.KEYWORD_ONLY
            parameters[name] = _parameter(name, kind, declared.default, options[name], texts[name], argument=argument)
            continue
        only = how or Only(())
        offered = [field for field in fields(kind) if "option" in field.metadata and field.name in (only.names or [field.name])]
        kinds[name] = kind, later, offered
        for field in offered:
            parameters.setdefault(field.name, _field_parameter(kind, field, only))

    def call(**arguments: Any) -> None:
        for name, how in options.items():
            check_value(name, arguments[name], how)
        values = {name: arguments[name] for name in options}
        for name, (kind, later, offered) in kinds.items():
            build = partial(kind, **{field.name: _read(field, arguments[field.name]) for field in offered})
            values[name] = build if later else build()
        function(**values)

    call.__doc__ = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0]
    call.__name__, call.__module__ = function.__name__, function.__module__
    call.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return call


def _field_parameter(kind: Any, field: Field[Any], only: Only) -> inspect.Parameter:
    """Returns the parameter of a field of an options dataclass, made by `aurora.types.options.option`."""
    how: OptionField = field.metadata["option"]
    name, hint, default = field.name, get_type_hints(kind)[field.name], field.default
    if get_origin(hint) is tuple:
        hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
    elif how.read is not None:
        hint, default = str, str(default or "auto")
    if only.instead is not None or default is MISSING:
        hint, default = hint | None, None
    instead = f"; default: {only.instead}" if only.instead is not None else ""
    return _parameter(name, hint, default, replace(how, panel=only.panel or how.panel), documented(kind)[name], instead)


def _parameter(
    name: str, hint: Any, default: Any, how: OptionField, text: str, instead: str = "", argument: bool = False
) -> inspect.Parameter:
    """Returns a parameter of a subcommand for an option, or an argument, with `text` and the names that it accepts as help."""
    names = how.names
    if names is None and "{" not in text and not (how.one_of and all(re.search(rf"\b{word}\b", text) for word in how.one_of)):
        names = f": {', '.join(how.one_of)}" if how.one_of else f": {{{how.choices.split()[0]}}}" if how.choices else ""
    spoken = re.sub(r"\b(0|None), (?=\w+:)", "", text)  # what Python has for the word that users type
    spoken = spoken.replace("; None:", "; default:") if default is None else re.sub(r"; None:[^;]*", "", spoken)
    help_ = spoken + (names or "") + instead
    complete, metavar = completed(*how.choices.split(), one_of=how.one_of), how.metavar or None
    kind = next((known for known in READ if known in (hint, *get_args(hint), *map(_element, get_args(hint)))), None)
    parser = None if kind is None else READ[kind]
    if argument:
        option = typer.Argument(help=help_, metavar=metavar, autocompletion=complete, parser=parser)
    else:
        flags = (how.flag or FLAGS.get(name, "")).split() or ([f"--{name.replace('_', '-')}"] if hint is bool else [])
        option = typer.Option(
            *flags, help=help_, metavar=metavar, rich_help_panel=how.panel, autocompletion=complete, parser=parser
        )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[hint, option], default=default)


def _element(hint: Any) -> Any:
    """The type of a list's elements."""
    return next(iter(get_args(hint)), None)


def _reader(read: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Returns what reads a number of the command line as files' are read."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except BadInput as error:
            raise typer.BadParameter(str(error)) from None

    return parse


READ: dict[Any, Callable[[str], Any]] = {int: _reader(whole_number), float: _reader(finite_number)}


def _read(field: Field[Any], value: Any) -> Any:
    """Returns the field's value from the command line's: the default if there is none; a list becomes a tuple."""
    if value is None or value == []:
        return None if field.default is MISSING else field.default
    if field.metadata["option"].read is not None:
        return field.metadata["option"].read(value)
    return tuple(value) if isinstance(value, list) else value


@cache
def documented(described: Any) -> dict[str, str]:
    """Returns {name: description} of a function's parameters or a dataclass's fields, from Args in its docstring."""
    _, _, args = (inspect.getdoc(described) or "").partition("Args:\n")
    lines = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)\.$", args.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


def names(kind: str) -> tuple[str, ...]:
    """Returns the currently registered names of a kind (a key of CHOICES)."""
    known = CHOICES[kind]
    source = _at(known) if isinstance(known, str) else known
    return tuple(source() if callable(source) else source)


def filled(text: str) -> str:
    """Returns `text` with each placeholder {kind}, for a key of CHOICES, replaced by the names of that kind."""
    return re.sub(r"\{(\w+)\}", lambda match: ", ".join(names(match[1])) if match[1] in CHOICES else match[0], text)


def completed(*kinds: str, one_of: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """Returns a shell completion function for the names in `one_of` and of the given kinds; None if there are none."""
    if not kinds and not one_of:
        return None

    def complete(incomplete: str) -> list[str]:
        known = (*one_of, *(name for kind in kinds for name in names(kind)))
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _at(path: str) -> Any:
    """Returns the value at a path of module and name; the module is imported."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _planned(field: str, models: int = 1, min_replicas: int | None = None) -> tuple[str, ...]:
    from aurora.planner.options import choices

    return choices(PlanOptions(min_replicas=min_replicas), models)[field]


CHOICES: dict[str, str | Callable[[], Iterable[str]]] = {  # by kind: where the names are, or a function that returns them
    "place": lambda: _planned("place"),
    "colocated_place": lambda: _planned("place", models=2),
    "survive": lambda: _planned("place", min_replicas=2),
    "assign": lambda: (*_planned("assign"), "auto"),
    "colocate": lambda: (*_planned("colocate"), "auto"),
    "order": lambda: (*_planned("order"), "auto"),
    "objective": lambda: (*_planned("objective", models=2), *_planned("objective", models=3), "auto"),
    "aim": lambda: (*_planned("aim"), "auto"),
    "replicas": "aurora.algorithms.replicas.registry.REPLICAS",
    "train_scheme": "aurora.algorithms.gradient_codes.SCHEMES",
    "engine": "aurora.algorithms.check.fit.ENGINES",
    "recommended_engine": "aurora.advisor.engines.SERVING_ENGINES",
    "placement_format": "aurora.io.engine_placements.PLACEMENT_FORMATS",
    "routing_format": "aurora.io.routing_dumps.ROUTING_FORMATS",
    "routing_files": lambda: (
        f"{name} ({form.files})" for name, form in _at("aurora.io.routing_dumps.ROUTING_FORMATS").items()
    ),
    "report_format": "aurora.reports.inputs.FORMS",
    "gpu_kind": "aurora.io.load_gpus",
    "trace_format": "aurora.io.requests.TRACE_FORMATS",
    "dispatch": "aurora.algorithms.requests.dispatch.DISPATCH",
    "time_slice": lambda: TIME_SLICES,
    "all_to_all": lambda: (*ALL_TO_ALLS, "auto"),
}
