"""Lists this machine's GPUs and the connections between them, by NVML."""

import datetime
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from aurora.errors import BadInput, MissingDependency, need
from aurora.io import load_gpus
from aurora.types import Cluster, Gpu, GpuKind
from aurora.types.cluster import PCIE_LANE_Bps

Nvml = Any  # the module pynvml, or a stand-in
NOT_SUPPORTED = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_INVALID_ARGUMENT")  # for features that the GPU does not have
# by NVML's level / 10
CONNECTIONS = ("same board", "PCIe switch", "PCIe switches", "PCIe host bridge", "NUMA node", "between sockets")


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG instance of a GPU, as NVML reports it."""

    index: int  # its number in NVML, or that of the GPU of which it is a MIG instance
    kind: str  # its name in NVML
    memory_bytes: int  # its memory
    pcie: int  # the highest generation of its PCIe link, 0 if NVML does not know
    lanes: int  # the highest width of its PCIe link, 0 if NVML does not know
    nvlinks: int  # how many of its NVLinks are up


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this machine that this process may use, and the connections between them."""

    driver: str  # the driver's version
    devices: tuple[Device, ...]  # the GPUs, in CUDA's sequence
    connections_GG: tuple[tuple[str, ...], ...]  # "NVLink", one of CONNECTIONS, or "unknown"; empty on the diagonal


@contextmanager
def open_nvml() -> Iterator[Nvml]:
    """Context manager that yields the module pynvml, initialised; it is shut down at the end of the block."""
    need("pynvml", extra="gpu")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MissingDependency(f"NVML: expected an NVIDIA driver on this machine, found none: {error}") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(nvml: Nvml) -> list[Any]:
    """Returns NVML's handles of the GPUs and MIG instances that CUDA_VISIBLE_DEVICES leaves to this process, in its sequence.

    Numbers in CUDA_VISIBLE_DEVICES are taken as NVML's numbers. With several kinds of GPUs CUDA's numbers differ from these,
    unless CUDA_DEVICE_ORDER is PCI_BUS_ID. UUIDs, which may be abbreviated, are the same in both.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return handles
    by_name = {str(index): handle for index, handle in enumerate(handles)}
    by_uuid = {str(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    visible: list[Any] = []
    for name in map(str.strip, named.split(",")):
        if name.startswith("MIG-"):
            visible.append(nvml.nvmlDeviceGetHandleByUUID(name))
            continue
        of = [by_name[name]] if name in by_name else [gpu for uuid, gpu in by_uuid.items() if name and uuid.startswith(name)]
        if len(of) != 1:
            break  # as for CUDA: what follows a name of no GPU is not seen
        visible += of
    return visible


def inventory(nvml: Nvml) -> Inventory:
    """Reads, by NVML, the GPUs of this machine that CUDA_VISIBLE_DEVICES leaves to this process, and returns the Inventory."""
    try:
        handles = visible_gpus(nvml)
        devices = tuple(_device(nvml, handle) for handle in handles)
        connections_GG = tuple(tuple("" if a is b else _connection(nvml, a, b) for b in handles) for a in handles)
        driver = str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        raise BadInput(f"NVML: expected every GPU to answer, found: {error}") from None
    if not devices:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise BadInput(
            f"NVML: expected at least one GPU, found none{'' if named is None else f' of CUDA_VISIBLE_DEVICES={named}'}"
        )
    return Inventory(driver, devices, connections_GG)


def _device(nvml: Nvml, handle: Any) -> Device:
    """Reads one GPU, or a MIG instance, from NVML."""
    whole = _if_supported(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
    board = handle if whole is None else whole
    kind, index = str(nvml.nvmlDeviceGetName(handle)), int(nvml.nvmlDeviceGetIndex(board))
    mig = _if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle) if whole is None else None
    if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        raise BadInput(
            f"GPU {index} ({kind}): expected a whole GPU, or its MIG instances by UUID in CUDA_VISIBLE_DEVICES "
            "(`nvidia-smi -L` shows them), found a GPU that is split by MIG"
        )
    links = (_if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    return Device(
        index,
        kind,
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        _if_supported(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, board) or 0,
        _if_supported(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, board) or 0,
        sum(state == nvml.NVML_FEATURE_ENABLED for state in links),
    )


def _connection(nvml: Nvml, gpu: Any, other: Any) -> str:
    """Returns the connection of two GPUs, as in Inventory."""
    status = _if_supported(nvml, nvml.nvmlDeviceGetP2PStatus, gpu, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == nvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    level = _if_supported(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, gpu, other)
    return CONNECTIONS[min(level // 10, len(CONNECTIONS) - 1)] if level is not None else "unknown"


def _if_supported(nvml: Nvml, ask: Any, *about: Any) -> Any:
    """NVML's answer, or None for a feature that the GPU does not have."""
    try:
        return ask(*about)
    except nvml.NVMLError as error:
        if error.value in [getattr(nvml, name) for name in NOT_SUPPORTED]:
            return None
        raise


def cluster_of_devices(found: Inventory, kinds: Mapping[str, GpuKind], host: str) -> Cluster:
    """Returns a Cluster with one rank for each GPU of an Inventory, at datasheet rates.

    Ports have NVLink's rate if NVLink is up and `kinds` has the GPU's kind, else PCIe's. A GPU's speed is its peak at half
    precision relative to the first GPU's, or 1 for a kind without a datasheet.
    """
    first = kinds.get(found.devices[0].kind)
    gpus = []
    for device in found.devices:
        known = kinds.get(device.kind)
        rate_Bps = device.lanes * PCIE_LANE_Bps.get(device.pcie, 0.0)
        if device.nvlinks and known is not None and known.link_Bps is not None:
            rate_Bps = known.link_Bps
        if not rate_Bps:
            raise BadInput(f"GPU {device.index} ({device.kind}): expected NVLink or PCIe rates, NVML tells neither")
        speed = known.half_flops / first.half_flops if known is not None and first is not None else 1.0
        gpus.append(Gpu(f"{host}-{device.index}", device.kind, 0, rate_Bps, rate_Bps, device.memory_bytes, speed))
    return Cluster(host, tuple(gpus))


@dataclass(frozen=True)
class DeviceCluster:
    """Result of `find_devices`: this machine's GPUs as a Cluster."""

    cluster: Cluster  # one rank for each GPU
    inventory: Inventory  # the GPUs that it was made from
    remarks: tuple[str, ...]  # sentences for its file on the sources of its figures


def find_devices() -> DeviceCluster:
    """Describes this machine's GPUs as a Cluster, at datasheet rates and speeds; nothing is measured.

    Example:
        >>> find_devices().cluster.gpus[0].kind  # doctest: +SKIP
        'NVIDIA H100 80GB HBM3'
    """
    with open_nvml() as nvml:
        machine = inventory(nvml)
    kinds, today = load_gpus(), datetime.datetime.now(datetime.UTC).date().isoformat()
    remarks = [f"This machine's GPUs, driver {machine.driver}, {today}. Rates and speeds are datasheets', not measured."]
    for kind in dict.fromkeys(device.kind for device in machine.devices):
        unknown = "not among the known kinds: rates of its PCIe, speed 1"
        remarks.append(f"{kind}: {f'figures from {kinds[kind].source}' if kind in kinds else unknown}.")
    connections = sorted({connection for row in machine.connections_GG for connection in row if connection})
    if connections:
        remarks.append(f"Between GPUs: {', '.join(connections)}.")
    return DeviceCluster(cluster_of_devices(machine, kinds, socket.gethostname()), machine, tuple(remarks))


def linked_by_nvlink(uuids: Sequence[str]) -> bool:
    """Returns whether NVLink connects every pair of the GPUs with these NVML UUIDs, all on this machine."""
    with suppress(BadInput, MissingDependency), open_nvml() as nvml, suppress(nvml.NVMLError):
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return all(_connection(nvml, gpu, other) == "NVLink" for gpu, other in combinations(handles, 2))
    return False


def clocks_and_power(uuid: str) -> str:
    """Returns a text with a GPU's current SM clock and power limit; "" if NVML does not report them.

    Args:
        uuid: the GPU's UUID, as in CUDA's properties of a device.
    """
    try:
        with open_nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            queries = (
                (nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
                (nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
                (nvml.nvmlDeviceGetPowerManagementLimit, handle),
                (nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
            )
            clock, most, limit, usual = (_if_supported(nvml, *query) for query in queries)
    except (BadInput, MissingDependency):
        return ""
    power = "" if None in (limit, usual) else f", power limit {limit / 1000:.0f} W, {usual / 1000:.0f} W by default"
    return "" if None in (clock, most) else f"SM clock {clock} of {most} MHz{power}"
