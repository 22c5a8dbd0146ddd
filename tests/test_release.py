"""The wheel, installed into a clean environment, works outside the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hatch_build

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--quiet", "--wheel", "--outdir", out, ROOT], check=True)
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_holds_code_types_and_profiles_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        about = Parser().parsestr(archive.read(metadata).decode())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"aurora", "aurora_vllm"}
    assert {"aurora/py.typed", "aurora_vllm/py.typed", "aurora/profiles/clusters/demo-4.toml"} <= set(names)
    assert {"aurora_vllm/grafana.json", "aurora_vllm/examples/compose.yaml", "aurora_vllm/vllm_internals/needed.toml"} <= set(
        names
    )
    compiled = {str(hatch_build.extension_of(core).relative_to(ROOT)) for core in hatch_build.cores()}
    assert {name for name in names if name.endswith(".so")} == compiled
    assert "aurora/algorithms/search/slots_core.abi3.so" in compiled
    assert "-cp311-abi3-" in wheel.name  # one wheel for every Python >= 3.11
    assert about["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.12"} <= set(about.get_all("Classifier"))


@pytest.mark.timeout(1800)
def test_the_wheel_plans_simulates_reports_and_serves_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "env")
    bin_, folder = tmp_path / "env" / "bin", tmp_path / "elsewhere"
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"

    def run(*command):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    versions = "--constraint", ROOT / "constraints.txt"
    pip = sys.executable, "-m", "pip", "--python", bin_ / "python"
    run(*pip, "install", "--quiet", "--disable-pip-version-check", "--no-compile", *versions, wheel)
    home = run(bin_ / "python", "-c", "import aurora, pathlib; print(pathlib.Path(aurora.__file__).parent)").strip()
    assert Path(home).is_relative_to(tmp_path)
    config = f"{home}/profiles/models/mixtral-topics/config.json"
    run("aurora", "synthetic", "zipf:0.8", config, "--sources", "4", "-o", "traffic.npz")
    run("aurora", "plan", "--cluster", "demo-4", "--profile", "traffic.npz", "-o", "plan.json")
    run("aurora", "simulate", "plan.json")
    run("aurora", "report", "plan.json", "plan.predicted.npz", "-o", "report.html")
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    # torch is large: the environment borrows it, and what it needs, from this one, which comes last on its path.
    here = Path(run(bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (here / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert "together, by the plan" in run("aurora", "demo", "-o", "demo")
    assert run(bin_ / "python", "-c", "import aurora, pathlib; print(pathlib.Path(aurora.__file__).parent)").strip() == home
