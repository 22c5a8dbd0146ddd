"""Changes of vLLM that would end needs of the plugin: each applies to the vLLM that is installed, in a copy, and does what it says."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.test_vllm import PROMPTS, alone, check_same, checkpoints, eplb, nothing_goes_on  # noqa: F401
from tests.integrations.test_vllm import pytestmark as needs_vllm

PATCHES = sorted((Path(__file__).parents[2] / "integrations/upstream").glob("*.patch"))
pytestmark = [*needs_vllm, pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")]


@pytest.fixture(scope="module", params=["each", "all"])
def patched(request, tmp_path_factory):
    """Returns, for a patch's first digit, a folder with a copy of vLLM to which it, or all of them, are applied."""
    (installed,) = importlib.util.find_spec("vllm").submodule_search_locations
    made = {}

    def folder(digit):
        key = digit if request.param == "each" else ""
        if key not in made:
            made[key] = tmp_path_factory.mktemp("patched")
            shutil.copytree(
                installed, made[key] / "vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
            )
            for patch in (each for each in PATCHES if each.name.startswith(key)):
                for name in re.findall(r"^--- a/(.*)$", patch.read_text(), re.MULTILINE):
                    file = made[key] / name
                    text = file.read_text()
                    file.unlink()
                    file.write_text(text)
                subprocess.run(["patch", "-p1", "--fuzz=0", "-i", patch], cwd=made[key], check=True, stdout=subprocess.DEVNULL)
        return made[key]

    return folder


def run(folder, program):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ["PYTHONPATH"])), "VLLM_PLUGINS": ""}
    found = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, cwd=folder)
    assert found.returncode == 0, found.stderr[-3000:]


LEAST = """
import torch, pytest
from vllm.config.parallel import EPLBConfig, ParallelConfig
from vllm.distributed.eplb.eplb_state import check_expert_weights
assert ParallelConfig().eplb_config.num_redundant_experts == 0
for experts, ranks, given, least in ((8, 3, None, 1), (256, 48, None, 32), (8, 2, None, 0), (8, 3, 4, 4), (8, 3, 0, 0)):
    config = ParallelConfig(data_parallel_size=ranks)
    config.eplb_config.num_redundant_experts = given
    config.resolve_redundant_experts(experts)
    assert config.eplb_config.num_redundant_experts == least, (experts, ranks, given)
layer = [torch.zeros(4, 6), torch.zeros(4, 2)]
check_expert_weights([layer, [torch.ones(4, 6), torch.ones(4, 2)]])
for other in ([torch.zeros(4, 7), layer[1]], layer[:1], [layer[0], layer[1].half()]):
    with pytest.raises(ValueError, match="one buffer: expected weights .* as in MoE layer 0, found .* in MoE layer 1"):
        check_expert_weights([layer, other])
"""
DEADLINE = """
import logging
from prometheus_client import CollectorRegistry
from vllm.config.parallel import EPLBConfig
from vllm.distributed.eplb import eplb_progress
said, registry = [], CollectorRegistry()
eplb_progress.logger.error = lambda text, *given: said.append(text % given)
progress = eplb_progress.EplbProgress(3, "m", registry)
other = eplb_progress.EplbProgress(EPLBConfig().async_deadline_steps, "draft", registry)
shown = lambda name: registry.get_sample_value(f"vllm:eplb_{name}", {"model_name": "m"})
for rebalancing, moved, waited in (
    (False, False, 0), (True, False, 1), (True, False, 2), (True, True, 0), (True, False, 1), (True, False, 2), (True, False, 3),
    (True, False, 4), (True, True, 0), (False, False, 0),
):
    progress.step(rebalancing, moved, 1)
    assert (shown("rebalancing"), shown("steps_without_progress")) == (rebalancing, waited)
assert len(said) == 1 and said[0].startswith("EPLB rank 1: no layer's experts have arrived for 3 steps"), said
"""
FROM_A_FILE = """
import json, pytest
from vllm.distributed.eplb.expert_map_file import read_expert_map
def read(text):
    open("map.json", "w").write(text)
    return read_expert_map("map.json", 2, 6, 4).tolist()
assert read("[0, 1, 2, 3, 0, 1]") == [[0, 1, 2, 3, 0, 1]] * 2
assert read("[[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]") == [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]
for text, sentence in (
    ("[0, 1", "expected a JSON file"), ('{"a": 1}', "found dict"), ("[[0, 1, 2, 3, 0, 1]]", "each of the 2 MoE layers, found 1"),
    ("[0, 1, 2, 3]", "expected 6 physical experts in MoE layer 0, found 4"), ("[0, 1, 2, 4, 0, 1]", "experts 0 to 3 in MoE layer 0, found 4"),
    ("[0, 1, 2, true, 0, 1]", "found True"), ("[0, 1, 2, -1, 0, 1]", "found -1"),
    ("[[0, 1, 2, 3, 0, 1], [0, 1, 1, 3, 0, 1]]", r"expected every expert in MoE layer 1, found no \\[2\\]"), ("[]", "found 0"),
):
    with pytest.raises(ValueError, match="initial_expert_map_path map.json: .*" + sentence):
        read(text)
"""


INTERRUPTED = """
import signal, zmq, pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path, zmq_socket_ctx
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)
with pytest.raises(KeyboardInterrupt), zmq_socket_ctx(get_open_zmq_ipc_path(), zmq.ROUTER, bind=True) as handshake:
    handshake.poll(60_000)
"""


@pytest.mark.parametrize(
    ("digit", "program"),
    [("1", LEAST), ("2", DEADLINE), ("3", FROM_A_FILE), ("4", INTERRUPTED)],
    ids=["least", "deadline", "file", "interrupt"],
)
def test_each_patch_does_what_it_says(digit, program, patched):
    run(patched(digit), program)


SERVES = """
import json, sys
from tests.integrations import engine
engine.main(__import__("pathlib").Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_patched_vllm_serves_by_a_file_with_experts_that_nobody_counted(patched, tmp_path, checkpoints, alone):  # noqa: F811
    """vLLM alone, without the plugin: of three ranks each has three experts, one of them twice."""
    from tests.integrations.test_vllm import CACHE_BYTES, ENVIRON, NEW, free_port

    folder, ranks = patched("1"), 3
    options = eplb(None, use_async=True)
    del options["eplb_config"]["num_redundant_experts"]
    if (folder / "vllm/distributed/eplb/expert_map_file.py").exists():
        (tmp_path / "map.json").write_text(json.dumps([7, 0, 1, 2, 3, 4, 5, 6, 7]))
        options["eplb_config"]["initial_expert_map_path"] = str(tmp_path / "map.json")
    job = {"model": str(checkpoints("qwen3moe")), "prompts": PROMPTS, "new_tokens": NEW, "dp": ranks}
    job["llm"] = {"kv_cache_memory_bytes": CACHE_BYTES, **options}
    (tmp_path / "job.json").write_text(json.dumps(job))
    path = os.pathsep.join((str(folder), os.environ["PYTHONPATH"], str(Path(__file__).parents[2])))
    meet = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    environ = {**os.environ, **ENVIRON, **meet, "PYTHONPATH": path, "VLLM_PLUGINS": "aurora-on-cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SERVES, tmp_path / "job.json"], env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    assert [process.wait(1200) for process in started] == [0] * ranks
    found = {}
    for rank in range(ranks):
        found |= json.loads((tmp_path / f"answers-{rank}.json").read_text())["answers"]
    check_same(found, alone("qwen3moe"))
