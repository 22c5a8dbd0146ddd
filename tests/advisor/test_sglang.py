"""Commands for SGLang, read by its own ServerArgs and settled by its own rules, from its wheel without CUDA."""

import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.sglang import BACKENDS

WHEEL = "sglang==0.5.23"
SCRIPT = Path(__file__).with_name("sglang_arguments.py")


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """A folder with SGLang's Python files."""
    pytest.importorskip("torch")
    pytest.importorskip("msgspec")
    folder = tmp_path_factory.mktemp("sglang")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", WHEEL, "-d", folder]
    fetched = subprocess.run(pip, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"no {WHEEL}: {(fetched.stderr.splitlines() or ['pip failed'])[-1]}")
    with zipfile.ZipFile(*folder.glob("*.whl")) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
    return folder


@pytest.mark.full
def test_sglang_reads_the_settings_that_the_way_has(sglang):
    engine = SERVING_ENGINES["sglang"]
    ways = [way for gpus in (4, 16) for way in engine.ways(gpus, 8, 128)]
    lines, of = [], []
    for way in ways:
        for line in engine.command(way, "org/model", Path("a folder", engine.file)).splitlines():
            if not line.startswith("#"):
                words = shlex.split(line)
                lines.append(json.dumps(words[words.index("sglang.launch_server") + 1 :]))
                of.append(way)
    script = [sys.executable, SCRIPT, sglang]
    run = subprocess.run(script, input="\n".join(lines), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    for way, text in zip(of, run.stdout.splitlines(), strict=True):
        found, layout = json.loads(text), way.layout
        assert "error" not in found, (way, found)
        assert (found["tp_size"], found["attn_dp_size"], found["dp_size"]) == (layout.stage_gpus, layout.data, 1)
        assert found["pp_size"] == layout.pipeline
        assert found["ep_size"] == layout.expert, way
        backend = shlex.split(BACKENDS[way.exchange])
        assert found["moe_a2a_backend"] == (backend[1] if backend else "none"), way
        assert found["ep_num_redundant_experts"] == way.redundant
        assert (found["init_expert_location"] != "trivial") == (way.placement == "plan")
        assert found["enable_eplb"] == bool(way.eplb)
        if way.eplb:
            steps = (found["expert_distribution_recorder_buffer_size"], found["eplb_rebalance_num_iterations"])
            assert steps == (way.eplb.window, way.eplb.interval)
        assert (found["ep_dispatch_algorithm"] == "lp") == (way.balance == "lplb")
        assert not found["enable_waterfill"]
        assert found["enable_two_batch_overlap"] == way.overlap
        assert found["nnodes"] == way.hosts
