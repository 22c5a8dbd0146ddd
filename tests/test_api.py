"""The public API: signatures, values, and every example of its docstrings."""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aurora
from aurora import errors, io, types
from aurora.errors import BadInput
from aurora.io import shipped
from aurora.planner import scenarios

ROOT = Path(__file__).parents[1]
FUNCTIONS = sorted(aurora.FUNCTIONS)

SCRIPT = """
import numpy as np

import aurora

cluster = aurora.load("demo-4", aurora.Cluster)
options = aurora.SyntheticOptions(sources=len(cluster))
traffic = aurora.synthetic_profile("zipf:0.8", CONFIG, options)
plan: aurora.Plan = aurora.plan(cluster, traffic, aurora.PlanOptions(order="openshop"))
assert aurora.plan(cluster, [traffic], aurora.PlanOptions(order="openshop")) == plan
later = aurora.synthetic_profile("zipf:0.8", CONFIG, aurora.SyntheticOptions(sources=4, seed=1))
evaluation = aurora.evaluate(plan, later)
print(f"{evaluation.slowdown:.1%} longer", plan.gap >= 0)
print(aurora.drift(traffic, later).replan)
trace = aurora.simulate(plan, traffic, orders="batch")
print(trace.seconds > 0, aurora.order(np.array([[0, 4], [5, 0]]), method="birkhoff").gap)
placed = aurora.place(traffic.load_LE, aurora.GpuSlots.equal(4, 3))
aurora.save(plan, "plan.json")
assert aurora.load("plan.json", aurora.Plan) == plan
print(hash(plan) == hash(aurora.load("plan.json")), len(repr(plan)) < 200, bool(placed.gap_L.max() >= 0))
"""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_run_as_they_stand(registries, name):
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(aurora, name), name, globs={})
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_name_every_argument(name):
    text = inspect.getdoc(getattr(aurora, name))
    for parameter in inspect.signature(getattr(aurora, name)).parameters:
        assert f"{parameter}:" in text or f"{parameter}," in text, f"{name} does not document {parameter}"


def test_type_checkers_see_the_functions_that_are_fetched():
    imported = {
        f"{node.module}.{name.name}"
        for node in ast.walk(ast.parse((ROOT / "aurora/__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert imported == {*aurora.FUNCTIONS.values(), "aurora.errors.*", "aurora.types.*", "typing.TYPE_CHECKING", "typing.Any"}


@pytest.mark.parametrize("package", [types, io, scenarios])
def test_names_that_are_fetched_are_those_that_type_checkers_see(package):
    text = Path(package.__file__).read_text()
    seen = {name for name, again in re.findall(r"^    from \S+ import (\w+) as (\w+)$", text, re.M) if name == again}
    whole = set(re.findall(r"^    from \S+\.(\w+) import \*$", text, re.M))  # modules of which they see all names
    assert seen == {name for module, names in package.NAMES.items() if module not in whole for name in names.split()}
    assert whole <= package.NAMES.keys()
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'planned'"):
        package.planned  # noqa: B018


def test_signatures_are_the_functions_own():
    names = ["cluster", "profiles", "options", "domains", "profile_paths", "progress"]
    assert list(inspect.signature(aurora.plan).parameters) == names
    assert all(inspect.isfunction(getattr(aurora, name)) for name in FUNCTIONS)
    assert {*FUNCTIONS, *errors.__all__, *types.__all__} <= set(dir(aurora))
    assert aurora.Plan is types.Plan
    assert set(aurora.__all__) == {*FUNCTIONS, *errors.__all__, *types.__all__}
    with pytest.raises(AttributeError, match="no attribute 'planned'"):
        aurora.planned  # noqa: B018


@pytest.mark.full
def test_a_users_script_passes_strict_type_checks(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.replace("CONFIG", repr(str(shipped("models/mixtral-topics/config.json")))))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)], capture_output=True, text=True, cwd=ROOT
    )  # in the repository, where the checks of the package have left their cache
    assert checked.returncode == 0, checked.stdout + checked.stderr
    file.write_text(file.read_text() + "print(aurora.planned)\n")
    checked = subprocess.run([sys.executable, "-m", "mypy", "--strict", str(file)], capture_output=True, text=True, cwd=ROOT)
    assert 'Module has no attribute "planned"' in checked.stdout


@pytest.mark.full
def test_the_same_script_runs(tmp_path, warm):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.replace("CONFIG", repr(str(shipped("models/mixtral-topics/config.json")))))
    done = subprocess.run([warm / "python", file], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True True True"


def test_importing_aurora_imports_nothing_slow():
    code = "import sys, aurora; print({'torch', 'numpy', 'scipy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_is_no_value_of_that_kind_is_refused():
    with pytest.raises(BadInput, match="demo-4: expected a Plan, found a Cluster"):
        aurora.load("demo-4", aurora.Plan)
    with pytest.raises(BadInput, match=r"expected a file or one of the clusters .*demo-4, .*, found neither"):
        aurora.load("demo-5")
