"""Devices by NVML, from answers written down after its documentation: eight H100 on NVSwitch, four L40S, A100 beside T4, MIG."""

import sys
from types import SimpleNamespace

import pytest

from aurora.errors import BadInput, MissingDependency
from aurora.io import load_cluster, load_gpus, save
from aurora.profiler.devices import clocks_and_power, cluster_of_devices, find_devices, inventory, open_nvml
from tests.profiler.nvml import NVMLError, Replay


def test_eight_h100_are_a_shipped_cluster(tmp_path):
    found = inventory(Replay("h100-sxm-8"))
    assert found.driver == "580.65.06"
    assert [device.index for device in found.devices] == list(range(8))
    assert {(d.kind, d.pcie, d.lanes, d.nvlinks) for d in found.devices} == {("NVIDIA H100 80GB HBM3", 5, 16, 18)}
    assert {way for row in found.connections_GG for way in row} == {"NVLink", ""}
    made = cluster_of_devices(found, load_gpus(), "host")
    assert made.equal
    assert made.out_Bps_G.tolist() == [450e9] * 8
    save(made, tmp_path / "made.toml")
    assert load_cluster(tmp_path / "made.toml") == made


def test_without_nvlink_pcie_is_the_port():
    found = inventory(Replay("l40s-4"))
    assert found.devices[0].nvlinks == 0
    assert found.connections_GG[0] == ("", "PCIe switches", "between sockets", "between sockets")
    assert found.connections_GG[2] == ("between sockets", "between sockets", "", "PCIe switches")
    made = cluster_of_devices(found, load_gpus(), "host")
    assert made.in_Bps_G == pytest.approx([31.5e9] * 4, rel=0.01)
    assert [gpu.memory_bytes for gpu in made.gpus] == [48305799168] * 4


def test_speeds_are_the_datasheets():
    found = inventory(Replay("a100-t4"))
    made = cluster_of_devices(found, load_gpus(), "host")
    assert [gpu.speed for gpu in made.gpus] == [1.0, pytest.approx(65 / 312)]
    assert [gpu.name for gpu in made.gpus] == ["host-0", "host-1"]
    unknown = cluster_of_devices(found, {}, "host")
    assert [gpu.speed for gpu in unknown.gpus] == [1.0, 1.0]


def test_mig_is_refused_in_a_sentence():
    with pytest.raises(
        BadInput,
        match=r"GPU 1 \(NVIDIA A100-SXM4-80GB\): expected a whole GPU, or its MIG instances by UUID in .* found a GPU that is split by MIG",
    ):
        inventory(Replay("a100-mig"))


def edited(**answers):
    replay = Replay("l40s-4")
    replay._answers |= answers
    return replay


def test_what_is_no_machine_to_plan_for():
    with pytest.raises(BadInput, match="expected at least one GPU, found none"):
        inventory(edited(nvmlDeviceGetCount={"": 0}))
    with pytest.raises(BadInput, match="expected every GPU to answer, found: Gpu is lost"):
        inventory(edited(nvmlDeviceGetMemoryInfo={"*": "NVML_ERROR_GPU_IS_LOST"}))
    silent = inventory(edited(nvmlDeviceGetMaxPcieLinkWidth={"*": "NVML_ERROR_NOT_SUPPORTED"}))
    with pytest.raises(BadInput, match="NVML tells neither"):
        cluster_of_devices(silent, load_gpus(), "host")


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
    assert len(found.cluster) == len(found.inventory.devices) == 8
    first, kind, connections = found.remarks
    assert "driver 580.65.06" in first
    assert kind.startswith("NVIDIA H100 80GB HBM3: figures from ")
    assert connections == "Between GPUs: NVLink."
    monkeypatch.setattr("aurora.profiler.devices.load_gpus", dict)
    assert "not among the known kinds" in find_devices().remarks[1]


@pytest.mark.parametrize(
    ("named", "indices"), [("2,0", [2, 0]), ("GPU-1a,3", [1, 3]), ("0,7,1", [0]), ("0,GPU-,1", [0]), (" 1 , 2", [1, 2])]
)
def test_only_the_visible_gpus_count_in_cudas_sequence(monkeypatch, named, indices):
    """A name of no GPU, or of several, hides what follows it, as in CUDA."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    found = inventory(Replay("l40s-4"))
    assert [device.index for device in found.devices] == indices
    if indices == [2, 0]:
        assert found.connections_GG == (("", "between sockets"), ("between sockets", ""))


def test_without_a_visible_gpu_the_variable_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(BadInput, match="found none of CUDA_VISIBLE_DEVICES=-1"):
        inventory(Replay("l40s-4"))


def test_a_mig_instance_that_is_named_is_a_device(monkeypatch):
    """Its link is that of its GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7-uuid")
    replay = Replay("a100-mig")
    replay._answers["nvmlDeviceGetMemoryInfo"]["70"] = {"total": 20 << 30, "used": 1 << 30}
    (device,) = inventory(replay).devices
    assert (device.index, device.memory_bytes, device.pcie, device.lanes) == (1, 20 << 30, 4, 16)


def test_clock_and_power_limit_are_said_where_nvml_tells_them(monkeypatch):
    replay = Replay("h100-sxm-8")
    replay.nvmlInit = replay.nvmlShutdown = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", replay)
    uuid = replay.nvmlDeviceGetUUID(3)
    assert clocks_and_power(uuid) == "SM clock 1755 of 1980 MHz, power limit 650 W, 700 W by default"
    assert clocks_and_power(uuid.removeprefix("GPU-")) == clocks_and_power(uuid)
    replay._answers["nvmlDeviceGetPowerManagementLimit"] = {"*": "NVML_ERROR_NOT_SUPPORTED"}
    assert clocks_and_power(uuid) == "SM clock 1755 of 1980 MHz"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks_and_power(uuid) == ""
