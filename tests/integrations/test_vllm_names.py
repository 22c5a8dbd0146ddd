"""Names and attributes of vLLM that the plugin uses: all are checked at start, and those that it replaces are on a page."""

import ast
import builtins
import importlib
import inspect
import queue
import re
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aurora_vllm.vllm_internals import api_checks
from aurora_vllm.vllm_internals.api_checks import groups, needed
from aurora_vllm.vllm_internals.replaced import replace, replaced, restore, table

from aurora.errors import BadInput
from aurora.types import Placement, Plan

FOLDER = Path(api_checks.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/reference/vllm-limits.md"
BEGIN, END = "<!-- vllm-replaced -->\n", "<!-- vllm-replaced ends -->\n"
MOST = 20  # names that are replaced
PLACE = re.compile(r"(vllm|torch)[\w.]*:[\w.]*")
FINDERS = {"find", "replace", "original", "restore", "replaced"}
LIBRARY = (
    object, type, int, str, list, tuple, dict, set, property, slice, Path, re.Match, re.Pattern, socket.socket, threading.Event, threading.Thread,
    queue.Queue, inspect.Signature, inspect.BoundArguments, inspect.Parameter, ast.Attribute, ast.ImportFrom, ast.Constant, types.FunctionType,
    types.FrameType, types.CodeType, np.ndarray, torch.Tensor, torch.nn.Module, torch.dtype, torch.cuda, dist, dist.Work, dist.ProcessGroup,
    dist.distributed_c10d, dist.distributed_c10d._World, Placement, Plan,
)  # fmt: skip
OTHERS = {  # of objects that are not vLLM's, or that not every vLLM has: the plugin looks before it reads them
    "FakeStore": "torch.testing", "MAX": "torch's ReduceOp", "num_hidden_layers": "transformers", "stop": "range",
    "enable_migration_batching": "0.32", "get_expert_weights": "MegaMoE", "hidden_size": "MegaMoE", "value": "an enum", "attr": "ast",
    "readline": "a text file",
}  # fmt: skip
MODULES = [
    (importlib.import_module(f"{api_checks.__package__}.{path.stem}"), ast.parse(path.read_text()))
    for path in sorted(FOLDER.glob("*.py"))
]


def place_of(module, node):
    """The "module:name" that a call finds or replaces; None if a node is another, or its place is a parameter."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FINDERS and node.args):
        return None
    try:
        place = eval(compile(ast.Expression(node.args[0]), "", "eval"), vars(module))
    except (NameError, SyntaxError):
        return None
    return place if isinstance(place, str) and PLACE.fullmatch(place) else None


def used_names(module, tree):
    """The places that a module looks up, with the attributes that it then reads of them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = zip(*(getattr(each, "elts", [each]) for each in (node.targets[0], node.value)), strict=False)
            found |= {target.id: place_of(module, value) for target, value in pairs if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        yield place_of(module, node)
        names, root = [], node
        while isinstance(root, ast.Attribute):
            names, root = [root.attr, *names], root.value
        start = found.get(root.id) if isinstance(root, ast.Name) else place_of(module, root)
        if names and start:
            yield f"{start}{'' if start.endswith(':') else '.'}{'.'.join(names)}"


def test_every_name_of_vllm_that_is_looked_up_is_checked_at_start():
    """Those of a class or a table count where one of its members is checked."""
    used = {place for module, tree in MODULES for place in used_names(module, tree) if place and not place.endswith(":")}
    checked = {check.where for check in needed(*groups())}
    covered = {
        name for place in checked for name in (place, place.rpartition(".")[0] if "." in place.partition(":")[2] else place)
    }
    missing = {place for place in used - covered if place.rpartition(".")[0] not in covered and "__" not in place}
    assert not missing
    assert len(used) > 60


def test_every_attribute_of_vllms_objects_is_checked_at_start():
    """By their names: an attribute that is read, and neither ours nor the library's, is one of those in needed.toml."""
    known = {name for kind in LIBRARY for name in dir(kind)} | set(dir(builtins)) | set(OTHERS)
    for module, _ in MODULES:
        for value in vars(module).values():
            known |= set(dir(value)) if isinstance(value, types.ModuleType | type) else set()
    for path in FOLDER.parent.rglob("*.py"):  # our own functions, attributes and fields
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                known.add(ast.unparse(node.target).removeprefix("self."))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                known.add(node.attr)
    known |= set(re.findall(r"\w+", (FOLDER / "needed.toml").read_text()))
    read = {node.attr for _, tree in MODULES for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {name for name in read - known if not name.startswith("_aurora")}


def test_what_is_replaced_is_in_the_table_and_the_table_on_the_page():
    """Few names, each with its reason; nothing of vLLM's is replaced in another way."""
    calls = {
        place_of(module, node)
        for module, tree in MODULES
        for node in ast.walk(tree)
        if getattr(getattr(node, "func", None), "id", "") == "replace"
    }
    through = {where for module, _ in MODULES for where in getattr(module, "STEPS", ())}
    assert (calls - {None}) | through == set(table())
    assert len(table()) <= MOST
    assert not [path.name for path in FOLDER.glob("*.py") if path.name != "replaced.py" and "setattr(" in path.read_text()]
    rows = ["| name of vLLM or torch | for | why | would end it |", "|---|---|---|---|"]
    rows += [f"| `{where}` | {row['feature']} | {row['why']} | {row['thread']} |" for where, row in table().items()]
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == "\n".join(rows)


def test_a_replacement_that_a_caller_does_not_see_is_refused_and_taken_back(monkeypatch):
    """As where vLLM moves a module, and leaves a shim that has the old name."""
    module, shim = types.ModuleType("vllm_moved"), types.ModuleType("vllm_shim")
    exec("def made(): return 'theirs'\ndef caller(): return made()", vars(module))
    shim.made = module.made
    for each in (module, shim):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(inspect, "getsource", lambda _: "def caller(): return made()")
    for where in ("vllm_moved:made", "vllm_shim:made"):
        monkeypatch.setitem(table(), where, {"callers": ["vllm_moved:caller", "vllm_moved:gone"]})
    with pytest.raises(BadInput, match=r"vLLM's vllm_moved:caller does not take vllm_shim:made where the plugin replaces it"):
        replace("vllm_shim:made", lambda _: lambda: "ours")
    assert (shim.made(), module.caller(), replaced("vllm_shim:made")) == ("theirs", "theirs", False)
    replace("vllm_moved:made", lambda theirs: lambda: f"ours, not {theirs()}")
    assert module.caller() == "ours, not theirs"
    restore("vllm_moved:made")
    assert (module.caller(), replaced("vllm_moved:made")) == ("theirs", False)


WITHOUT_SETTINGS = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from aurora_vllm.vllm_internals import replaced
sys.argv = ["vllm", "serve", "model"]
load_general_plugins()
assert "aurora_vllm.vllm_internals.hooks" in sys.modules
assert not replaced._originals
import aurora_vllm.vllm_internals.hooks as hooks
from aurora_vllm.vllm_internals.api_checks import find
for where in replaced.table():
    kept = []
    theirs = replaced.original(where)
    replaced.replace(where, lambda now: kept.append(now) or (type(now.__name__, (now,), {}) if isinstance(now, type) else lambda *a, **n: now(*a, **n)))
    assert replaced.replaced(where) and kept == [theirs]
    replaced.restore(where)
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm installs it")
def test_in_vllm_nothing_is_replaced_without_settings_and_all_callers_see_what_is_replaced():
    """In the vLLM that is installed."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_SETTINGS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
