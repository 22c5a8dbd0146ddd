"""Files that mkdocs makes from the code: the command line, a JSON schema of options; and texts from elsewhere here."""

import json
import posixpath
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from functools import reduce
from inspect import getdoc
from operator import getitem
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from aurora_vllm.settings import PREFIX, Settings
from docstring_parser import parse
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from msgspec import inspect

import aurora.types
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import ServingEngine
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.algorithms.gradient_codes import SCHEMES
from aurora.algorithms.requests.dispatch import DISPATCH
from aurora.cli.main import VERBS, app
from aurora.io.clusters import ClusterTable, GpuKindsTable
from aurora.io.plans import PlacementTable, PlanTable
from aurora.io.plugin_records import ARRAYS, EngineRecord, RecordHeader
from aurora.io.profiles import CurvesHeader, ProfileHeader
from aurora.io.prompts import Prompt
from aurora.io.traces import TraceHeader
from aurora.planner.options import strategies
from aurora.types.options import Limits, limits_of

ROOT = Path(__file__).parents[1]
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
NAMES = {("PlanOptions", name): names for name, names in strategies().items()} | {
    ("TrainOptions", "scheme"): SCHEMES,
    ("RequestOptions", "dispatch"): DISPATCH,
}
LIMITS = {"above": "exclusiveMinimum", "least": "minimum", "most": "maximum"}
ELSEWHERE = {"how-to/vllm.md": "integrations/README.md", "changelog.md": "CHANGELOG.md"}
LINKED = {"integrations/README.md": "how-to/vllm.md", "aurora/advisor/engines": "reference/engines.md"}  # pages of the site

ENGINES = """# Serving engines

What engines do with Mixture-of-Experts models by default and with each flag that matters, as `aurora recommend` takes it. It
comes from the engines' sources, named beside it; newer versions may differ.

Data-parallel ranks need an exchange of tokens, and what moving experts can bring depends on it. An allgather carries every
token to every GPU, wherever experts are: a placement then balances compute alone. An all-to-all carries other bytes too."""

FILES_PAGE = ROOT / "docs/reference/files.md"  # its end is made from the classes of the formats
MADE = "<!-- From here on made from the code by `make docs`. -->"
FORMATS: dict[
    str, tuple[Any, Any, tuple[str, ...]]
] = {  # the class of a file's table, or of an npz file's header with its arrays
    "Cluster (TOML, schema 1)": (ClusterTable, None, ()),
    "Datasheets of GPUs (TOML, schema 1)": (GpuKindsTable, None, ()),
    "Plan (JSON, schema 5)": (PlanTable, None, ()),
    "Placement (JSON, schema 1)": (PlacementTable, None, ()),
    "Profile (npz, schema 2)": (ProfileHeader, aurora.types.Profile, ("tokens_TLSE",)),
    "Compute curves (npz, schema 1)": (CurvesHeader, None, ()),
    "Trace (npz, schema 1)": (TraceHeader, aurora.types.Trace, aurora.types.Trace.COLUMNS),
    "Record of a rank (npz, schema 2)": (RecordHeader, EngineRecord, ARRAYS),
    "Prompts (JSON lines)": (Prompt, None, ()),
}
SPOKEN = {"IntType": "whole number", "FloatType": "number", "StrType": "text", "BoolType": "true or false", "NoneType": "none"}

VLLM_SETTINGS = ROOT / "docs/reference/vllm-settings.md"  # is kept in the repository: the plugin's page points to it
SETTINGS = f"""# vLLM: settings

Made from the plugin's settings by `make docs`. Write them under `"aurora"` in `--additional-config '{{"aurora": {{...}}}}'`
(in Python: `LLM(additional_config=...)`). Environment variables (`{PREFIX}PLAN` and so on) supply those that are not there.

Settings are checked before anything is loaded. `vllm serve` ends at once with one sentence if a name is unknown, a value is out
of range, a plan is no plan, or a folder cannot be written. A variable whose name is close to that of a setting is reported. If
no rank sends 8 KiB or more to another one, all messages of an all-to-all are sent at once, in every order."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site; called by mkdocs."""
    pages = {
        page: (ROOT / source).read_text().replace("](docs/", "](").replace("](../docs/", "](../")
        for page, source in ELSEWHERE.items()
    }
    schema = json.dumps(options_schema(), indent=1) + "\n"
    made = {"reference/cli.md": command_line(), "reference/engines.md": engines(), "reference/options.schema.json": schema}
    made["reference/files.schema.json"] = json.dumps(files_schema(), indent=1) + "\n"
    for page, text in (pages | made).items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns a page whose links to files of the repository go to the site's pages of them; called by mkdocs."""
    for file, site_page in LINKED.items():
        to = posixpath.relpath(site_page, posixpath.dirname(page.file.src_uri))
        markdown = re.sub(rf"\]\((\.\./)+{re.escape(file)}", f"]({to}", markdown)
    return markdown


def command_line() -> str:
    """Returns the reference of all subcommands as Markdown, made by cyclopts."""
    for name in VERBS:
        reduce(getitem, name.split(), app).help = None  # that of its docstring
    return str(app.generate_docs(output_format="markdown"))


def engines() -> str:
    """Returns the reference of serving engines as Markdown: their exchanges side by side, then the settings of each."""
    parts = [ENGINES]
    names = ["exchange", "what it does", "bytes follow the placement", "a token goes once to each", "CUDA graphs in decode"]
    rows = [[*names, "NVLink", "needs", *SERVING_ENGINES, "source", "published times"]]
    for name, exchange in EXCHANGES.items():
        flags = [f"`{found}`" if (found := engine.exchanges.get(name)) else found for engine in SERVING_ENGINES.values()]
        once_per = "of all servers" if exchange.once_per == "servers" else exchange.once_per
        once_per += f"; in decode as `{exchange.decode}`" if exchange.decode else ""
        row = [f"`{name}`", exchange.about, exchange.follows_placement, once_per, exchange.graphs, exchange.nvlink]
        paces = "; ".join(" ".join(map(str, pace)) for pace in dict.fromkeys(exchange.paces))
        told = f"{exchange.measured}: {paces} of computed" if exchange.measured else "none: not recommended"
        rows.append([*row, exchange.needs, *("no flag" if flag == "" else flag or "" for flag in flags), exchange.source, told])
    parts.append(_table(rows))
    for name, engine in SERVING_ENGINES.items():
        parts += [f"## {name}", f"Read in the sources of {name} {engine.versions}."]
        default = f"By default, on 8 GPUs of a server and on 16 of two: {_exchanges(engine, 8)}, {_exchanges(engine, 16)}."
        parts += [default, f"Two halves of a batch overlap with: {', '.join(engine.overlaps) or 'nothing'}."]
        parts.append(_table([["setting", "default", "what it does", "source"], *settings(engine)]))
    return "\n\n".join(parts) + "\n"


def vllm_settings() -> str:
    """Returns the reference of the vLLM plugin's settings as Markdown, from their dataclass."""
    told = documented(Settings)
    shown = {None: "none", True: "true", False: "false"}
    rows = [[f"`{each.name}`", told[each.name], shown.get(each.default, each.default)] for each in fields(Settings)]
    return f"{SETTINGS}\n\n{_table([['name', 'meaning', 'default'], *rows])}\n"


def files_page() -> str:
    """Returns the reference of files as Markdown: the text of its page, and a table of each format from its class."""
    parts, seen = [FILES_PAGE.read_text().partition(MADE)[0].rstrip(), MADE], set[str]()
    for title, (kind, value, arrays) in FORMATS.items():
        parts += [f"## {title}", *_described_tables(kind, seen)]
        if arrays:
            told = _told(value)
            parts.append(_table([["array", "meaning"], *([f"`{name}`", told.get(name, "")] for name in arrays)]))
    return "\n\n".join(parts) + "\n"


def files_schema() -> dict[str, Any]:
    """Returns a JSON schema of the tables of files and of the headers of npz files, each under $defs by its name."""
    _, components = msgspec.json.schema_components([kind for kind, _, _ in FORMATS.values()])
    return {"$schema": SCHEMA, "title": "Files", "$defs": components}


def _described_tables(kind: Any, seen: set[str]) -> list[str]:
    """Returns paragraphs on a class of a format and on those in it, except for those that are in `seen`, to which they go."""
    told, info = _told(kind), inspect.type_info(kind)
    named: list[Any] = []
    rows = [["key", "value", "meaning"]]
    for entry in info.fields:  # type: ignore[attr-defined]
        optional = "" if entry.required else ", optional"
        rows.append([f"`{entry.encode_name}`", _spoken(entry.type, named) + optional, told.get(entry.name, "")])
    parts = [_table(rows)]
    for other in named:
        if other.__name__ not in seen:
            seen.add(other.__name__)
            tag = getattr(getattr(other, "__struct_config__", None), "tag", None)
            about = (other.__doc__ or "").split("\n")[0].rstrip(".") + (f' (`kind = "{tag}"`)' if tag else "")
            parts += [f"`{other.__name__}`: {about}.", *_described_tables(other, seen)]
    return parts


def _told(kind: Any) -> dict[str, str]:
    """Returns {name: description} of a class's fields, from Args or Attributes in its docstring."""
    told = {"count": "number of such GPUs, from 1 to 4096; names get -0, -1, ...", "kinds": "the GPU kinds of `curve_N_PHASE`"}
    for each in reversed(kind.__mro__):
        text = re.split(r"\n *(?:Args|Attributes):\n", each.__doc__ or "", maxsplit=1)[-1].split("\n\n")[0]
        lines = re.findall(r"^ {8}(\w+(?:, \w+)*): (.+(?:\n {12}.+)*)\.$", text, re.MULTILINE)
        told |= {name: " ".join(about.split()) for names, about in lines for name in names.split(", ")}
    return told


def _spoken(of: Any, named: list[Any]) -> str:
    """Returns a type in words; classes in it are added to `named`."""
    match of:
        case inspect.UnionType():
            return " or ".join(_spoken(each, named) for each in of.types if not isinstance(each, inspect.NoneType))
        case inspect.StructType() | inspect.DataclassType():
            named.append(of.cls)
            return f"`{of.cls.__name__}`"
        case inspect.ListType() | inspect.VarTupleType():
            return f"list of {_spoken(of.item_type, named)}"
        case inspect.TupleType():
            return f"[{', '.join(_spoken(each, named) for each in of.item_types)}]"
        case inspect.DictType():
            return f"{_spoken(of.value_type, named)} by {_spoken(of.key_type, named)}"
        case inspect.LiteralType():
            return " or ".join(f'`"{value}"`' for value in of.values)
    return SPOKEN[type(of).__name__]


def settings(engine: ServingEngine) -> list[list[str]]:
    """Returns the settings in the docstring of an engine's module: flag, default, effect, source; indented lines go on."""
    table = (sys.modules[engine.launch.__module__].__doc__ or "").split("\n\n", 2)[2]
    return [" ".join(row.split()).split(" | ") for row in re.split(r"\n(?=\S)", table.strip())]


def _exchanges(engine: ServingEngine, gpus: int) -> str:
    """Returns the engine's exchange on so many GPUs."""
    return f"`{engine.default(gpus, 8).exchange}`"


def _table(rows: list[list[Any]]) -> str:
    """Returns rows, of which the first has the titles, as a table."""
    spoken = {True: "yes", False: "no"}
    cells = [
        [str(spoken.get(cell, cell) if isinstance(cell, bool) else cell).replace("|", "\\|") for cell in row] for row in rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def documented(kind: Any) -> dict[str, str]:
    """Returns {name: description} of a dataclass's fields, from its docstring."""
    found = parse(getdoc(kind) or "").params
    return {each.arg_name: " ".join((each.description or "").rstrip(".").split()) for each in found}


def options_schema() -> dict[str, Any]:
    """Returns a JSON schema of the options dataclasses, each under $defs by its name: types, defaults, limits and meanings."""
    kinds = [getattr(aurora.types, name) for name in aurora.types.__all__ if name.endswith("Options")]
    return {"$schema": SCHEMA, "title": "Options", "$defs": {kind.__name__: _object(kind) for kind in kinds}}


def _object(kind: Any) -> dict[str, Any]:
    """Returns the schema of one options dataclass."""
    hints, told = get_type_hints(kind), documented(kind)
    properties = {}
    for field in fields(kind):
        how = limits_of(kind).get(field.name, Limits())
        found = {"description": told[field.name], **_type(hints[field.name])}
        found |= {} if field.default is MISSING else {"default": field.default}
        found |= {word: value for name, word in LIMITS.items() if (value := getattr(how, name)) is not None}
        if how.one_of:
            found.get("items", found)["enum"] = [*how.one_of]
        if known := NAMES.get((kind.__name__, field.name)):
            found["examples"] = [*known]  # users' own methods are accepted too
        properties[field.name] = found
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _type(hint: Any) -> dict[str, Any]:
    """Returns the schema of a field's type: one of TYPES, a tuple of one of them, an options dataclass, or any of these."""
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _type(get_args(hint)[0])}
    if is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if hint in TYPES:
        return {"type": TYPES[hint]}
    parts = [_type(each) for each in get_args(hint)]
    return {"type": [part["type"] for part in parts]} if all("type" in part for part in parts) else {"anyOf": parts}


if __name__ == "__main__":
    VLLM_SETTINGS.write_text(vllm_settings())
    FILES_PAGE.write_text(files_page())
