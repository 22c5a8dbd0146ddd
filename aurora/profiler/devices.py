"""Describes this machine's GPUs, by NVML and datasheets."""

import datetime
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from aurora.errors import BadInput, MissingDependency
from aurora.io import load_gpus
from aurora.runtime.transports.nvlink import Nvml, if_supported, open_nvml
from aurora.types import Cluster, Gpu
from aurora.types.cluster import PCIE_LANE_Bps


def visible_gpus(nvml: Nvml) -> list[Any]:
    """Returns NVML's handles of the GPUs and MIG instances that CUDA_VISIBLE_DEVICES leaves to this process, in its sequence.

    Numbers in CUDA_VISIBLE_DEVICES are taken as NVML's numbers. With several kinds of GPUs CUDA's numbers differ from these,
    unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    try:
        return [
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in map(str.strip, named.split(","))
            if name not in ("", "-1")
        ]
    except nvml.NVMLError as error:
        raise BadInput(f"CUDA_VISIBLE_DEVICES={named}: expected numbers or whole UUIDs of GPUs, found: {error}") from None


def visible_devices(nvml: Nvml) -> tuple[Gpu, ...]:
    """Returns the GPUs and MIG instances that this process may use, in CUDA's sequence, with datasheets' rates and speeds."""
    try:
        devices = [_device(nvml, handle) for handle in visible_gpus(nvml)]
    except nvml.NVMLError as error:
        raise BadInput(f"NVML: expected every GPU to answer, found: {error}") from None
    if not devices:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        of = "" if named is None else f" of CUDA_VISIBLE_DEVICES={named}"
        raise BadInput(f"NVML: expected at least one GPU, found none{of}")
    speeds = relative_speeds([gpu.kind for gpu in devices])
    return tuple(replace(gpu, speed=speed) for gpu, speed in zip(devices, speeds, strict=True))


def _device(nvml: Nvml, handle: Any) -> Gpu:
    """One GPU, or a MIG instance. Its port has NVLink's rate if NVLink is up and the GPU's kind is known, else PCIe's."""
    whole = if_supported(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
    board = handle if whole is None else whole
    kind, index = str(nvml.nvmlDeviceGetName(handle)), int(nvml.nvmlDeviceGetIndex(board))
    mig = if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle) if whole is None else None
    if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        raise BadInput(
            f"GPU {index} ({kind}): expected a whole GPU, or its MIG instances by UUID in CUDA_VISIBLE_DEVICES "
            "(`nvidia-smi -L` shows them), found a GPU that is split by MIG"
        )
    known, generation = load_gpus().get(kind), if_supported(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, board)
    lanes = if_supported(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, board) or 0
    links = (if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    rate_Bps = lanes * PCIE_LANE_Bps.get(generation, 0.0)
    if known is not None and known.link_Bps is not None and nvml.NVML_FEATURE_ENABLED in links:
        rate_Bps = known.link_Bps
    if not rate_Bps:
        raise BadInput(f"GPU {index} ({kind}): expected NVLink or PCIe rates, NVML tells neither")
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(f"{socket.gethostname()}-{index}", kind, 0, rate_Bps, rate_Bps, memory)


def relative_speeds(kinds: Sequence[str]) -> list[float]:
    """Returns each GPU's peak at half precision over that of the first GPU, by datasheets; 1 for kinds without.

    Args:
        kinds: the kind of each GPU.
    """
    known = load_gpus()
    first = known.get(kinds[0])
    return [known[kind].half_flops / first.half_flops if first is not None and kind in known else 1.0 for kind in kinds]


@dataclass(frozen=True)
class DeviceCluster:
    """Result of `find_devices`: this machine's GPUs as a Cluster."""

    cluster: Cluster  # one rank for each GPU
    remarks: tuple[str, ...]  # sentences for its file on the sources of its figures


def find_devices() -> DeviceCluster:
    """Describes this machine's GPUs as a Cluster, at datasheet rates and speeds; nothing is measured.

    Example:
        >>> find_devices().cluster.gpus[0].kind  # doctest: +SKIP
        'NVIDIA H100 80GB HBM3'
    """
    with open_nvml() as nvml:
        devices, driver = visible_devices(nvml), nvml.nvmlSystemGetDriverVersion()
    kinds, today = load_gpus(), datetime.datetime.now(datetime.UTC).date().isoformat()
    remarks = [f"This machine's GPUs, driver {driver}, {today}. Rates and speeds are datasheets', not measured."]
    for kind in dict.fromkeys(device.kind for device in devices):
        unknown = "not among the known kinds: rates of its PCIe, speed 1"
        remarks.append(f"{kind}: {f'figures from {kinds[kind].source}' if kind in kinds else unknown}.")
    return DeviceCluster(Cluster(socket.gethostname(), devices), tuple(remarks))


def clocks_and_power(uuid: str) -> str:
    """Returns a text with a GPU's current SM clock and power limit; "" if NVML does not report them.

    Args:
        uuid: the GPU's UUID, as in CUDA's properties of a device.
    """
    with suppress(MissingDependency), open_nvml() as nvml, suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        clock, most = (ask(handle, nvml.NVML_CLOCK_SM) for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo))
        limit, usual = nvml.nvmlDeviceGetPowerManagementLimit(handle), nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
        return f"SM clock {clock} of {most} MHz, power limit {limit / 1000:.0f} W, {usual / 1000:.0f} W by default"
    return ""
