"""NVLink domains of GPUs, as far as NVML tells them: pairs of one machine, and fabrics of several machines (GB200 NVL72)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any

from aurora.errors import MissingDependency, need

Nvml = Any  # the module pynvml, or a stand-in
NOT_SUPPORTED = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_INVALID_ARGUMENT")  # for features that the GPU does not have


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


def connected(nvml: Nvml, gpu: Any, other: Any) -> bool:
    """Returns whether NVLink connects two GPUs of this machine, given by NVML's handles."""
    status = if_supported(nvml, nvml.nvmlDeviceGetP2PStatus, gpu, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def if_supported(nvml: Nvml, ask: Any, *about: Any) -> Any:
    """Returns NVML's answer, or None for a feature that the GPU does not have."""
    try:
        return ask(*about)
    except nvml.NVMLError as error:
        if error.value in [getattr(nvml, name) for name in NOT_SUPPORTED]:
            return None
        raise


def linked_by_nvlink(uuids: Sequence[str]) -> bool | None:
    """Returns whether NVLink connects every pair of the GPUs with these NVML UUIDs, all on this machine; None if unknown."""
    with suppress(MissingDependency), open_nvml() as nvml, suppress(nvml.NVMLError):
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return all(connected(nvml, gpu, other) for gpu, other in combinations(handles, 2))
    return None


def fabric_of(uuid: str) -> str:
    """Returns the name of a GPU's NVLink fabric, the same for all GPUs of it on any machine; "" if none or unknown."""
    with suppress(MissingDependency), open_nvml() as nvml, suppress(nvml.NVMLError, AttributeError):
        told = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(nvml.nvmlDeviceGetHandleByUUID(uuid), told)
        cluster = bytes(told.clusterUuid)
        if told.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster):
            return f"{cluster.hex()}-{told.cliqueId}"
    return ""
