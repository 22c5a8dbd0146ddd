"""The commands and Python of README and docs run as they stand there, page by page, each page in a folder of its own.

Their processes are forked from one that has imported torch and its like; those of the wheel's test start from nothing, as users' do.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import aurora.types
from aurora.cli.choices import names
from aurora.errors import BadInput
from aurora.io import load_cluster
from aurora.types.run_options import TRANSPORTS

ROOT = Path(__file__).parents[1]
PAGES = {
    str(file.relative_to(ROOT)): re.findall(r"^```(\w+)\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
EXPECTED = {  # what the last block of a page prints, or a part of it
    "docs/how-to/python.md": "tensor([0., 1., 2., 3.])\n",
    "README.md": "exclusive, equal GPUs gap ",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in EXPECTED else pytest.mark.full)
        for page, blocks in PAGES.items()
        if {"bash", "python"} & {kind for kind, _ in blocks}
    ],
)
def test_every_example_runs(page, tmp_path, warm):
    for name in ("profiles", "aurora", "bench", "LICENSE", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(warm), str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = []
    for language, text in PAGES[page]:
        if language not in ("bash", "python") or "pip install" in text:
            continue
        command = ["bash", "-euc", text] if language == "bash" else [warm / "python", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert ("--verify" in text) == ("verified: same greedy tokens" in done.stdout)
        printed.append(done.stdout)
    assert EXPECTED.get(page, "") in printed[-1]


@pytest.fixture(scope="module")
def generate():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schema_of_options_is_what_the_dataclasses_check(generate):
    schema = json.loads(json.dumps(generate.options_schema()))["$defs"]
    assert len(schema) == 8
    for name, found in schema.items():
        kind = getattr(aurora.types, name)
        assert list(found["properties"]) == [field.name for field in fields(kind)]
        for field, about in found["properties"].items():
            outside = [2 * about["maximum"]] if "maximum" in about else []
            outside += [about["minimum"] - 1] if "minimum" in about else [about.get("exclusiveMinimum")]
            for value in (each for each in outside if each is not None):
                with pytest.raises(BadInput, match=f"`{field}`: expected"):
                    kind(**{field: value})
        assert kind(**{name: each["default"] for name, each in found["properties"].items()}) == kind()


def test_the_reference_marks_options_that_only_help_all_shows(generate):
    plan = generate.command_line().split("## aurora plan\n")[1].split("## ")[0]
    marked = {flag: bool(mark) for flag, mark in re.findall(r"^\| `(--[\w-]+)`(?:, `-\w`)?( \\\*)? \|", plan, re.MULTILINE)}
    assert (marked["--order"], marked["--output"], marked["--seed"]) == (False, False, True)


def test_the_cluster_example_is_a_cluster(tmp_path):
    text, *_ = (text for language, text in PAGES["docs/how-to/cluster.md"] if language == "toml")
    (tmp_path / "c.toml").write_text(text)
    cluster = load_cluster(tmp_path / "c.toml")
    assert (cluster.name, len(cluster)) == ("two-kinds", 8)


@pytest.mark.parametrize("kind", ["place", "survive", "assign", "colocate", "order", "objective", "aim", "train_scheme"])
def test_every_name_that_is_registered_is_in_the_docs(kind):
    text = (ROOT / "docs" / "reference" / "strategies.md").read_text()
    assert [name for name in TRANSPORTS if f"`{name}`" not in (ROOT / "docs" / "how-to" / "run.md").read_text()] == []
    assert [name for name in names(kind) if f"`{name}`" not in text and name != "auto"] == []


def test_the_glossary_has_every_axis_letter_that_is_in_use():
    text = (ROOT / "docs" / "glossary.md").read_text()
    files = [*(ROOT / "aurora").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    used = {letter for file in files for axes in re.findall(r"\b[a-z_]+_([A-Z]{1,4})\b", file.read_text()) for letter in axes}
    assert sorted(used - set(re.findall(r"^\| ([A-Z]) \|", text, re.MULTILINE))) == []


def test_the_architecture_page_names_registries_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = re.findall(r"^\| `(?:aurora/|integrations/)([\w./]+)`", text.split("## Where to add")[0], re.MULTILINE)
    assert packages
    for package in packages:
        assert (ROOT / "aurora" / package).exists() or (ROOT / "integrations" / package).exists(), package
    for home in re.findall(r"`((?:aurora/)?(?:planner|io|reports|cli)/[\w./]+)`", text.split("## Where to add")[1]):
        assert (ROOT / "aurora" / home.removeprefix("aurora/")).exists(), home


def test_what_contributing_points_to_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("Ten things")[1].split("##")[0]
    homes = re.findall(r"\| `([\w./]+)` \|$", text, re.MULTILINE)
    assert len(homes) == 10
    assert [home for home in homes if not (ROOT / home).exists()] == []
