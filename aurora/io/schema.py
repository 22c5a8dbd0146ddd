"""Converts the tables of files (JSON, TOML, YAML, headers of npz) to typed values and back, by msgspec.

A format is a class: `Struct` of msgspec, whose fields are the file's keys. Its reader, its writer, its table in
docs/reference/files.md and its JSON schema are made from the class.
"""

import re
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from aurora.errors import BadInput, shown

Kind = TypeVar("Kind")
WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "none",
}  # fmt: skip


class FileTable(msgspec.Struct, omit_defaults=True):
    """A table of a file. Keys that it does not name are skipped; those with a default value are not written."""


class StrictTable(FileTable, forbid_unknown_fields=True):
    """A table that people write: keys that it does not name are refused."""


@cache
def table_of(kind: Any, leave: tuple[str, ...] = (), **more: Any) -> Any:
    """Returns a StrictTable with the fields of a dataclass.

    Args:
        kind: the dataclass.
        leave: its fields that the table lacks.
        more: further fields of the table: their types, each a pair with a default if it has one.
    """
    hints = get_type_hints(kind, include_extras=True)
    entries = []
    for field in fields(kind):
        if field.name not in leave:
            default = (
                field.default if field.default_factory is MISSING else msgspec.field(default_factory=field.default_factory)
            )
            entries.append((field.name, hints[field.name], *(() if default is MISSING else (default,))))
    entries += [(name, *(entry if isinstance(entry, tuple) else (entry,))) for name, entry in more.items()]
    return msgspec.defstruct(kind.__name__, entries, bases=(StrictTable,), namespace={"__doc__": kind.__doc__}, kw_only=True)


def converted(value: Any, kind: type[Kind], where: str = "", strict: bool = True) -> Kind:
    """Converts nested dicts and lists, as JSON has them, to a type.

    Args:
        value: the value.
        kind: the type, such as a FileTable or list[int].
        where: name of the value in messages, before the path inside it; empty: the path alone.
        strict: False: numbers and dates may be texts, as those of a CSV are.

    Raises:
        BadInput: with the path inside the value, what was expected there and what was found.
    """
    try:
        return msgspec.convert(value, kind, strict=strict, str_keys=True)  # type: ignore[arg-type, unused-ignore]
    except msgspec.ValidationError as error:
        raise BadInput(_said(str(error), value, where, kind)) from None


def shared(value: Any, kind: Any, *leave: str) -> dict[str, Any]:
    """Returns the fields of a FileTable or a dataclass, by name, that `kind`, another one, has too, but those to `leave`."""
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [field.name for field in fields(kind)]
    return {name: getattr(value, name) for name in names if name not in leave and hasattr(value, name)}


def plain(value: Any) -> Any:
    """Converts a FileTable to nested dicts and lists, as JSON and TOML have them; `converted` is its inverse.

    Arrays become lists, NumPy's numbers Python's, and types beside those of JSON text.
    """
    return msgspec.to_builtins(value, str_keys=True, enc_hook=lambda of: of.tolist() if hasattr(of, "tolist") else str(of))


def _said(message: str, value: Any, where: str, kind: Any) -> str:
    """Returns msgspec's message, such as "Expected `int`, got `str` - at `$.models[0].top_k`", with what was found."""
    name = shown(message.partition("`")[2].partition("`")[0])[1:-1]
    what, _, at = message.replace("`", "").partition(" - at ")
    path = at.removeprefix("key in ").removeprefix("$").removeprefix(".")
    types: list[Any] = [inspect.type_info(kind)]
    for index, key in re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", path):
        types = [inner for of in types for known, inner in _inside(of) if known in (key, "...")]
        try:
            value = value[int(index)] if index else value[key]
        except (LookupError, TypeError, ValueError):
            value = ...
    expected, _, found = what.partition(", got ")
    known = [(key, of) for each in types for key, of in _inside(each)]
    match expected.split():
        case ["Object", "missing", *_]:
            choices = [shown(value) for key, of in known if key == name for value in getattr(of, "values", ())]
            what = f"'{name}' is missing" + (f", expected one of {', '.join(choices)}" if choices else "")
        case ["Object", "contains", *_]:
            what = f"unknown {name}; expected {', '.join(sorted({key for key, _ in known}))}"
        case ["Invalid", *_]:
            what = f"expected one of {', '.join(key for key, of in known if of is None)}, found {shown(value)}"
        case _:
            expected = re.sub(r"\w+", lambda word: WORDS.get(word[0], word[0]), expected).replace(" | ", " or ")
            found = WORDS.get(found, found) if value is ... or at.startswith("key in ") else shown(value)
            what = expected[0].lower() + expected[1:] + (f", found {found}" if found else "")
    if at.startswith("key in "):
        path, where = f"a key of {where or path}", ""
    path = where + path if path.startswith("[") else ": ".join(filter(None, (where, path)))
    return f"{path}: {what}" if path else what


def _inside(of: Any) -> list[tuple[str, Any]]:
    """Names and types of what values of a type hold, "..." for the entries of a list or dict; values listed in the type."""
    match of:
        case inspect.UnionType():
            return [member for each in of.types for member in _inside(each)]
        case inspect.LiteralType(values=values):
            return [(shown(value), None) for value in values]
        case inspect.StructType(fields=entries, tag_field=tag_field, tag=tag):
            tagged = [(tag_field, inspect.LiteralType((tag,)))] if tag_field is not None and tag is not None else []
            return [*tagged, *((entry.encode_name, entry.type) for entry in entries)]
        case inspect.DataclassType(fields=entries):
            return [(entry.encode_name, entry.type) for entry in entries]
        case inspect.ListType() | inspect.VarTupleType():
            return [("...", of.item_type)]
        case inspect.DictType():
            return [("...", of.value_type)]
    return []
