"""The README's commands and Python run as they stand there, in order, in one folder."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aurora.io import load_cluster

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)
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
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=200
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
