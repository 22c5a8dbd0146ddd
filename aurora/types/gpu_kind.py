"""A kind of GPU by its datasheet."""

from dataclasses import dataclass

from aurora.errors import BadInput

PCIE_LANE_Bps = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}  # each way, after coding; by generation


@dataclass(frozen=True)
class GpuKind:
    """What a vendor publishes of one kind of GPU.

    Attributes:
        kind: its name, as NVML and torch give it.
        memory_bytes: size of its memory.
        memory_Bps: bandwidth of its memory, bytes per second.
        half_flops: dense peak at half precision, operations per second.
        pcie: PCIe generation.
        source: the datasheet.
        fp8_flops: dense peak at fp8; None if it has none.
        link_Bps: bytes per second to the GPUs of its server, each way; None if only PCIe connects them.
    """

    kind: str
    memory_bytes: int
    memory_Bps: float
    half_flops: float
    pcie: int
    source: str
    fp8_flops: float | None = None
    link_Bps: float | None = None

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "memory_Bps", "half_flops", "fp8_flops", "link_Bps"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(f"gpu kind {self.kind!r}: {field} must be a number above zero, found {value}")
        if self.pcie not in PCIE_LANE_Bps:
            raise BadInput(f"gpu kind {self.kind!r}: expected PCIe of generation 1 to {max(PCIE_LANE_Bps)}, found {self.pcie}")
        if not self.source:
            raise BadInput(f"gpu kind {self.kind!r}: expected the source of its figures, found none")

    @property
    def port_Bps(self) -> float:
        """Bytes per second to the GPUs of its server, each way: `link_Bps`, or that of 16 PCIe lanes if it has no links."""
        return self.link_Bps or 16 * PCIE_LANE_Bps[self.pcie]
