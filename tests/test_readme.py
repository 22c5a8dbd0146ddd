"""The README's commands and Python run as they stand there, in order, in one folder."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aurora.cli.choices import names
from aurora.io import load_cluster

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(1800)  # fifty commands, each a process of its own
def test_every_example_runs(tmp_path):
    for name in ("profiles", "aurora", "LICENSE", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = {}
    for language, text in BLOCKS:
        if language == "toml":
            continue
        command = ["bash", "-euc", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed[text] = done.stdout
    assert sum("verified: same greedy tokens" in out for out in printed.values()) == 2
    (api,) = (out for text, out in printed.items() if "aurora.plan(" in text)
    assert api.startswith("colocated, equal GPUs gap ")
    assert "1.00 of the bound" in api
    (single,) = (out for text, out in printed.items() if "all_to_all(" in text)
    assert single == "tensor([0., 1., 2., 3.])\n"


def test_the_cluster_example_is_a_cluster(tmp_path):
    (text,) = (text for language, text in BLOCKS if language == "toml")
    (tmp_path / "c.toml").write_text(text)
    assert len(load_cluster(tmp_path / "c.toml")) == 8
    assert tomllib.loads(text)["name"] == "two-kinds"


@pytest.mark.parametrize("kind", ["place", "survive", "assign", "colocate", "order", "objective", "aim", "transport", "scheme"])
def test_every_name_that_is_registered_is_in_the_readme(kind):
    text = (ROOT / "README.md").read_text()
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
