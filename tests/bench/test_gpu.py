"""The scripts of bench/gpu without a GPU: their steps on twins, their limits, and the calls of CUDA that only a GPU would run."""

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "bench" / "gpu"
SCRIPTS = {"first.sh": 590 / 60, "run.sh": 25, "run8.sh": 45}  # minutes


def bash(*arguments, **environ):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", *map(str, arguments)], capture_output=True, text=True, env=os.environ | {"PATH": path} | environ
    )


def chains(path):
    """Dotted names of a file that begin with torch.cuda, torch.profiler or torch.autograd."""
    names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    begins = ("torch.cuda.", "torch.profiler.", "torch.autograd.DeviceType")
    return {name for name in names if name.startswith(begins) and "(" not in name}


def test_every_cuda_call_is_in_the_installed_torch():
    """They are in one file, so that its twin is all that differs on a CPU."""
    named = {path.name: chains(path) for path in GPU.glob("*.py")}
    assert {name for name, found in named.items() if any("cuda" in each for each in found)} == {"device.py"}
    assert {"torch.cuda.graph", "torch.cuda.set_sync_debug_mode", "torch.profiler.profile"} <= named["device.py"]
    for name in named["device.py"]:
        found = torch
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_events_of_the_profiler_have_what_launches_are_counted_by():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.ones(3).sum()
    assert {(each.device_type.name, each.is_user_annotation) for each in seen.events()} == {("CPU", False)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_limits_of_all_steps_fit_into_the_time(script):
    listed = bash(GPU / script, "--list")
    limits = dict(line.split() for line in listed.stdout.splitlines())
    assert len(limits) > 7
    assert sum(map(int, limits.values())) <= 60 * SCRIPTS[script]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cpu_build_of_torch_is_refused(script, tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("this is a CUDA build")
    refused = bash(GPU / script, "-o", tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "bench/gpu: expected a CUDA build of torch and a GPU, found a CPU build; --dry needs neither\n"
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("wrong", ["--fast", "kernel", "-o"])
def test_bad_arguments_end_with_one_sentence(wrong):
    refused = bash(GPU / "run.sh", wrong)
    assert refused.returncode == 2
    assert refused.stderr.startswith("run.sh: expected --dry, --list, -o FOLDER or names of steps (kernels ")
    assert refused.stderr.count("\n") == 1


HARNESS = """
minutes=1 least=1 dry_ranks=2
source {steps}
step good 30
step_good() {{ echo '{{"figure": 2}}' >"$FIGURES"; echo "said \\"so\\" by $ranks over $transport"; }}
step left_out 30
step_left_out() {{ skip "needs a moon"; }}
step bad 30
step_bad() {{ false; }}
step hangs 1
step_hangs() {{ sleep 60 & wait; }}
main "$@"
"""


def test_steps_pass_fail_are_left_out_and_end_in_time(tmp_path):
    script = tmp_path / "bench" / "gpu" / "own.sh"
    script.parent.mkdir(parents=True)
    script.write_text(HARNESS.format(steps=GPU / "steps.sh"))
    done = bash(script, "--dry", "-o", tmp_path / "out", PYTHONPATH=f"{GPU.parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 1, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    good, left_out, bad, hangs = results["steps"]
    assert (good["result"], good["said"], good["figures"]) == ("PASS", 'said "so" by 2 over gloo', {"figure": 2})
    assert (left_out["result"], left_out["said"]) == ("SKIP", "needs a moon")
    assert (bad["result"], hangs["result"], hangs["said"]) == ("FAIL", "FAIL", "ended after 20 s")
    assert [line[:4] for line in done.stdout.splitlines()[1:]] == ["PASS", "SKIP", "FAIL", "FAIL"]
    assert results["dry"]
    assert results["machine"]["torch"] == torch.__version__


ON_A_GPU = """#!/usr/bin/env bash
printf '%q ' "$(basename "$0")" "$@" >>"$CALLED"
echo >>"$CALLED"
case "$*" in *bench.gpu.device) printf '8\\n{}\\n' ;; *) echo "rank 1 died" ;; esac
"""


def check_command(words):
    """Parses a command of aurora as its command line does."""
    from aurora.cli.main import app

    app.parse_args(list(words))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_on_a_gpu_parses(script, tmp_path):
    """With programs in place of Python and of MPS that only note how they are called, all of a script's shell runs as on GPUs."""
    for name in ("python3", "nvidia-cuda-mps-control"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(ON_A_GPU)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_intranode.py").touch()
    environ = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLED": str(tmp_path / "called")}
    environ["DEEPEP"] = str(tmp_path)
    command = ["bash", GPU / script, "-o", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stdout
    assert {line[:4] for line in done.stdout.splitlines()[1:]} == {"PASS"}
    called = [shlex.split(line) for line in (tmp_path / "called").read_text().splitlines()]
    commands = [words[len(words) - words[::-1].index("aurora") :] for words in called if "aurora" in words]
    assert len(commands) > (5 if script == "first.sh" else 12)
    for words in commands:
        check_command(words)
    modules = {words[2] for words in called if words[:2] == ["python3", "-m"] and words[2].startswith("bench.")}
    assert all((GPU.parents[1] / f"{name.replace('.', '/')}.py").exists() for name in modules)
    with pytest.raises(Exception, match="Unknown option: --no-such-option"):
        check_command([*commands[0], "--no-such-option"])


QUICK = {
    "first.sh": ["rates", "inputs", "answers"],
    "run.sh": ["kernels", "push", "layer", "nccl", "experts", "two_models", "vllm"],
    "run8.sh": ["stages", "push"],
}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", QUICK)
def test_steps_run_on_twins(script, tmp_path):
    """Each that measures has figures; what a GPU says instead, nobody knows."""
    pytest.importorskip("triton", reason="the kernels' interpreter needs triton")
    done = bash(GPU / script, "--dry", "-o", tmp_path, *QUICK[script])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [step["step"] for step in results["steps"]] == QUICK[script]
    assert [step for step in results["steps"] if step["result"] != "PASS"] == [], done.stdout
    assert all(step["figures"] for step in results["steps"] if step["step"] not in ("inputs", "answers"))
