"""`aurora profile` beside routing: curves that travel between machines, links and devices as cluster files."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from aurora.io import load_cluster, load_curves, load_profile, save
from aurora.types import PHASES, ComputeCurves, Curve
from tests.cli.refusal import refused
from tests.cli.test_subcommands import documented_keys
from tests.profiler.nvml import NVMLError, Replay

CONFIG = '{"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}'


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def curves(kind, slope=1e-6, **changed):
    """Measured on the synthetic model of CONFIG."""
    line = Curve(np.array([1.0, 64.0]), np.array([1e-5, 1e-5 + 63 * slope]))
    about = {"model": "m", "fingerprint": "", "top_k": 2, "row_bytes": 16, "expert_bytes": 2 * 3 * 8 * 8} | changed
    return ComputeCurves(**about, kinds={kind: dict.fromkeys(PHASES, line)}, provenance={f"curves of {kind}": f"slope {slope}"})


def test_two_kinds_of_gpu_measure_each_their_own(aurora, here):
    """A profile from somewhere, curves from two machines: one profile of both kinds, which a second measurement replaces."""
    code, _, _ = aurora("synthetic", "zipf:1", "config.json", "-o", "p.npz")
    assert code == 0
    save(curves("fast"), "fast.npz")
    save(curves("slow", 1e-5), "slow.npz")
    code, out, _ = aurora("measure", "compute", "--add", "fast.npz", "--add", "slow.npz", "-o", "p.npz")
    assert code == 0
    assert "wrote p.npz" in out
    made = load_profile("p.npz")
    assert list(made.curves) == ["reference", "fast", "slow"]
    assert made.provenance["curves of slow"] == "slope 1e-05"
    assert made.tokens_TLSE.sum() > 0
    save(curves("fast", 2e-6), "again.npz")
    assert aurora("measure", "compute", "--add", "again.npz", "-o", "p.npz")[0] == 0
    assert list(load_profile("p.npz").curves) == ["reference", "fast", "slow"]
    assert float(load_profile("p.npz").curves["fast"]["expert"](64)) == pytest.approx(1e-5 + 63 * 2e-6)
    assert aurora("measure", "compute", "--add", "fast.npz", "--add", "slow.npz", "-o", "both.npz")[0] == 0
    assert list(load_curves("both.npz").kinds) == ["fast", "slow"]  # nothing to add to: curves alone


def test_a_wrong_configuration_is_named(aurora, here):
    (here / "odd.json").write_text(CONFIG.replace('"hidden_size": 8', '"hidden_size": "a"'))
    refused(aurora("synthetic", "zipf:1", "odd.json"), r"odd\.json: config: expected .* under hidden_size.*, found 'a'")


def test_a_synthetic_profile_may_have_kinds_by_their_datasheets(aurora, here):
    synthetic = ("synthetic", "zipf:1", "config.json", "-o", "p.npz")
    assert aurora(*synthetic, "--gpu-kind", "H200", "--gpu-kind", "NVIDIA L4")[0] == 0
    assert list(load_profile("p.npz").curves) == ["reference", "NVIDIA H200", "NVIDIA L4"]
    kind = {"kind": "mine", "memory_bytes": 10**10, "memory_Bps": 1e12, "half_flops": 1e14, "pcie": 5, "source": "me"}
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in kind.items()]
    (here / "mine.toml").write_text("schema = 1\n[[gpu]]\n" + "\n".join(lines))
    assert aurora(*synthetic, "--gpu-kind", "mine.toml")[0] == 0
    assert list(load_profile("p.npz").curves) == ["reference", "mine"]
    refused(
        aurora(*synthetic, "--gpu-kind", "H2OO"),
        "--gpu-kind: expected words of a GPU such as NVIDIA H20.*, NVIDIA H200.*, found 'H2OO'",
    )


def test_curves_of_a_model_are_measured_into_a_file(aurora, here, mixtral):
    save(curves("gpu", top_k=2, row_bytes=256, expert_bytes=43008), "p.npz")
    code, out, _ = aurora("measure", "compute", mixtral, "--batch", 1, "-o", "p.npz")
    assert code == 0
    found = load_curves("p.npz")
    assert list(found.kinds) == ["gpu", "cpu"]
    assert found.kinds["cpu"]["gate"].tokens_X[-1] == 256
    assert "float32, hidden size 64" in found.provenance["curves of cpu"]
    assert "fit, median / worst: gate" in out


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"row_bytes": 32}, "rows of 16 and experts of 384 bytes.*another model or another precision"), ({"top_k": 1}, "top-2")],
)
def test_curves_of_another_model_are_refused(aurora, here, changed, says):
    save(curves("fast"), "p.npz")
    save(curves("slow", **changed), "slow.npz")
    refused(aurora("measure", "compute", "--add", "slow.npz", "-o", "p.npz"), says)
    assert list(load_curves("p.npz").kinds) == ["fast"]
    save(curves("slow", fingerprint="a"), "a.npz")
    save(curves("slow", fingerprint="b"), "b.npz")
    refused(aurora("measure", "compute", "--add", "a.npz", "-o", "b.npz"), "other router weights")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("compute",), "expected a model folder, or --add"),
        (("compute", "--add", "config.json"), "expected aurora curves"),
        (("links",), "--ranks: expected two or more, found none"),
        (("devices", "-o", "nowhere/c.toml"), "no such folder"),
    ],
)
def test_what_cannot_be_measured(aurora, here, options, says):
    refused(aurora("measure", *options), says)


def test_devices_become_a_cluster(aurora, here, monkeypatch):
    nvml = Replay("h100-sxm-8")
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert set(json.loads(aurora("measure", "devices", "--json")[1])) == documented_keys()["measure devices"]
    code, out, _ = aurora("measure", "devices", "-o", "c.toml")
    assert code == 0
    assert "NVIDIA H100 datasheet" in out
    assert load_cluster("c.toml").out_Bps_G.tolist() == [450e9] * 8
    assert (here / "c.toml").read_text().startswith("# This machine's GPUs, driver 580.65.06")


@pytest.mark.full
def test_a_network_becomes_a_cluster(aurora, here):
    code, out, _ = aurora("measure", "links", "--ranks", 2, "--json")
    assert code == 0
    found = json.loads(out)
    assert set(found) == documented_keys()["measure links"]
    assert found["output"] == "cluster.toml"
    made = load_cluster("cluster.toml")
    assert [gpu.kind for gpu in made.gpus] == ["cpu", "cpu"]
    assert "# Measured over gloo, 2 ranks" in (here / "cluster.toml").read_text()


def test_without_a_driver_no_devices_are_measured(aurora, here, monkeypatch):
    def no_driver():
        raise NVMLError("NVML_ERROR_NOT_SUPPORTED")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=no_driver))
    refused(aurora("measure", "devices"), "expected an NVIDIA driver")
