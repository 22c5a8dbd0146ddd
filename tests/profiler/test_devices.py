"""Devices by NVML, from answers written down after its documentation: eight H100 on NVSwitch, four L40S, A100 beside T4, MIG."""

import sys
from types import SimpleNamespace

import pytest

from aurora.errors import BadInput, MissingDependency
from aurora.profiler.devices import clocks_and_power, find_devices, visible_devices
from aurora.runtime.transports.nvlink import open_nvml
from aurora.types import Cluster
from tests.profiler.nvml import NVMLError, Replay


def numbers(found):
    return [int(gpu.name.rpartition("-")[2]) for gpu in found]


def test_eight_h100_have_nvlinks_ports():
    found = visible_devices(Replay("h100-sxm-8"))
    assert numbers(found) == list(range(8))
    assert {gpu.kind for gpu in found} == {"NVIDIA H100 80GB HBM3"}
    made = Cluster("host", found)
    assert made.equal
    assert made.out_Bps_G.tolist() == [450e9] * 8


def test_without_nvlink_pcie_is_the_port():
    found = visible_devices(Replay("l40s-4"))
    assert [gpu.in_Bps for gpu in found] == pytest.approx([31.5e9] * 4, rel=0.01)
    assert [gpu.memory_bytes for gpu in found] == [48305799168] * 4


def test_speeds_are_the_datasheets(monkeypatch):
    """A kind without a datasheet, and all GPUs beside one, have speed 1."""
    assert [gpu.speed for gpu in visible_devices(Replay("a100-t4"))] == [1.0, pytest.approx(65 / 312)]
    monkeypatch.setattr("aurora.profiler.devices.load_gpus", dict)
    assert [gpu.speed for gpu in visible_devices(Replay("a100-t4"))] == [1.0, 1.0]


def test_mig_is_refused_in_a_sentence():
    with pytest.raises(
        BadInput,
        match=r"GPU 1 \(NVIDIA A100-SXM4-80GB\): expected a whole GPU, or its MIG instances by UUID in .* found a GPU that is split by MIG",
    ):
        visible_devices(Replay("a100-mig"))


def edited(**answers):
    replay = Replay("l40s-4")
    replay._answers |= answers
    return replay


def test_what_is_no_machine_to_plan_for():
    with pytest.raises(BadInput, match="expected at least one GPU, found none"):
        visible_devices(edited(nvmlDeviceGetCount={"": 0}))
    with pytest.raises(BadInput, match="expected every GPU to answer, found: Gpu is lost"):
        visible_devices(edited(nvmlDeviceGetMemoryInfo={"*": "NVML_ERROR_GPU_IS_LOST"}))
    with pytest.raises(BadInput, match="NVML tells neither"):
        visible_devices(edited(nvmlDeviceGetMaxPcieLinkWidth={"*": "NVML_ERROR_NOT_SUPPORTED"}))


def test_a_machine_without_nvml_says_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingDependency, match=r'pip install "aurora-moe\[gpu\]"'), open_nvml():
        pass
    shut = []

    def no_driver():
        raise NVMLError("NVML_ERROR_NOT_SUPPORTED")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=no_driver))
    with pytest.raises(MissingDependency, match="expected an NVIDIA driver on this machine"), open_nvml():
        pass
    here = SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: shut.append(True))
    monkeypatch.setitem(sys.modules, "pynvml", here)
    with open_nvml() as nvml:
        assert nvml is here
        assert not shut
    assert shut


def test_this_machines_devices_are_a_cluster_with_remarks(monkeypatch):
    replay = Replay("h100-sxm-8")
    replay.nvmlInit = replay.nvmlShutdown = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", replay)
    found = find_devices()
    assert len(found.cluster) == 8
    first, kind = found.remarks
    assert "driver 580.65.06" in first
    assert kind.startswith("NVIDIA H100 80GB HBM3: figures from ")
    monkeypatch.setattr("aurora.profiler.devices.load_gpus", dict)
    assert "not among the known kinds" in find_devices().remarks[1]


@pytest.mark.parametrize(("named", "indices"), [("2,0", [2, 0]), (" 1 , 2", [1, 2]), ("GPU-1a-uuid,3", [1, 3])])
def test_only_the_visible_gpus_count_in_cudas_sequence(monkeypatch, named, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    found = visible_devices(edited(nvmlDeviceGetHandleByUUID={"GPU-1a-uuid": 1}))
    assert numbers(found) == indices


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("-1", "found none of CUDA_VISIBLE_DEVICES=-1"),
        ("0,7", "CUDA_VISIBLE_DEVICES=0,7: expected numbers or whole UUIDs of GPUs, found: Invalid argument"),
        ("GPU-", "CUDA_VISIBLE_DEVICES=GPU-: expected"),
    ],
)
def test_where_no_gpu_is_visible_the_variable_is_named(monkeypatch, named, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with pytest.raises(BadInput, match=said):
        visible_devices(Replay("l40s-4"))


def test_a_mig_instance_that_is_named_is_a_device(monkeypatch):
    """Its link is that of its GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7-uuid")
    replay = Replay("a100-mig")
    replay._answers["nvmlDeviceGetMemoryInfo"]["70"] = {"total": 20 << 30, "used": 1 << 30}
    (device,) = visible_devices(replay)
    assert (device.name.rpartition("-")[2], device.memory_bytes) == ("1", 20 << 30)
    assert device.out_Bps == pytest.approx(16 * 1.97e9, rel=0.01), "of PCIe 4 with 16 lanes"


def test_clock_and_power_limit_are_said_where_nvml_tells_them(monkeypatch):
    replay = Replay("h100-sxm-8")
    replay.nvmlInit = replay.nvmlShutdown = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", replay)
    uuid = replay.nvmlDeviceGetUUID(3)
    assert clocks_and_power(uuid) == "SM clock 1755 of 1980 MHz, power limit 650 W, 700 W by default"
    assert clocks_and_power(uuid.removeprefix("GPU-")) == clocks_and_power(uuid)
    replay._answers["nvmlDeviceGetPowerManagementLimit"] = {"*": "NVML_ERROR_NOT_SUPPORTED"}
    assert clocks_and_power(uuid) == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks_and_power(uuid) == ""
