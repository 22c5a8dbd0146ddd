"""Each script of docs/examples runs, and prints what it promises."""

import re
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
PRINTED = {
    "plan_a_cluster.py": r"simulated: 1\.[1-9]\d times as fast",
    "replicas_of_hot_experts.py": r"aurora: fullest GPU over the mean, by layer: \[1\.0",
    "two_models_share_gpus.py": r"\n1\.\d\d times as fast",
    "order_of_your_own.py": r"openshop-best: .* 1\.000 of the bound",
    "ordered_all_to_all.py": r"rank 1 received rows of ranks \[0, 0, 0, 1, 1, 1, 1\]",
}


SPAWNS = "ordered_all_to_all.py"  # processes that import torch anew


@pytest.mark.parametrize("name", [name if name != SPAWNS else pytest.param(name, marks=pytest.mark.full) for name in PRINTED])
def test_an_example_runs(name, tmp_path, warm):
    done = subprocess.run([warm / "python", EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout), done.stdout


def test_every_example_is_run_and_listed():
    scripts = {script.name for script in EXAMPLES.glob("*.py")}
    assert scripts == set(PRINTED)
    assert all(f"`{name}`" in (EXAMPLES / "README.md").read_text() for name in scripts)
