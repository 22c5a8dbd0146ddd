"""Cluster: the GPUs of a deployment, one per rank, and the servers that they are in; datasheet figures of GPU kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, Value, check_name
from aurora.types.network import Network, Servers, check_servers

PCIE_LANE_Bps = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}  # each way, after coding; by generation


SHARES = ("dense_share", "grouped_share", "grouped_fp8_share", "attention_share")  # of GpuKind


@dataclass(frozen=True)
class GpuKind:
    """Datasheet figures of one kind of GPU.

    Attributes:
        kind: name of the kind, as NVML and torch report it.
        memory_bytes: size of the GPU's memory.
        memory_Bps: bandwidth of the memory, bytes per second.
        half_flops: peak operations per second at half precision, without sparsity.
        pcie: PCIe generation.
        source: the datasheet.
        fp8_flops: peak operations per second at fp8; None if the GPU has no fp8.
        link_Bps: bytes per second to the other GPUs of the server (NVLink), each way; None if only PCIe connects them.
        dense_share: operations per second that large matrix products reached on such a GPU / the peak of their number format;
            None: no measurement is known.
        grouped_share, grouped_fp8_share: the same for grouped matrix products of experts, at half precision and at fp8.
        fused_fp8_share: the same at fp8 for Triton's fused kernels; None: as `grouped_fp8_share`.
        attention_share: the same for attention over prompts of 4,096 tokens and more.
        shares_source: where the shares were measured; empty without shares.
        host_gpus: GPUs of a host, such as 4 of a GB200's tray; None: as the user says.
        domain_gpus: GPUs of an NVLink domain of several hosts, such as 72; None: each host is one.
    """

    kind: str
    memory_bytes: int
    memory_Bps: float
    half_flops: float
    pcie: int
    source: str
    fp8_flops: float | None = None
    link_Bps: float | None = None
    dense_share: float | None = None
    grouped_share: float | None = None
    grouped_fp8_share: float | None = None
    fused_fp8_share: float | None = None
    attention_share: float | None = None
    shares_source: str = ""
    host_gpus: int | None = None
    domain_gpus: int | None = None

    def __post_init__(self) -> None:
        for field in (*SHARES, "fused_fp8_share"):
            if (share := getattr(self, field)) is not None and not (0 < share <= 1 and self.shares_source):
                expected = "a number above 0 and up to 1, with `shares_source`"
                raise BadInput(f"gpu kind {self.kind!r}: {field}: expected {expected}, found {share}")
        for field in ("memory_bytes", "memory_Bps", "half_flops", "fp8_flops", "link_Bps", "host_gpus", "domain_gpus"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(f"gpu kind {self.kind!r}: {field} must be a number above zero, found {value}")
        if self.pcie not in PCIE_LANE_Bps:
            raise BadInput(f"gpu kind {self.kind!r}: expected PCIe of generation 1 to {max(PCIE_LANE_Bps)}, found {self.pcie}")
        if not self.source:
            raise BadInput(f"gpu kind {self.kind!r}: expected the source of its figures, found none")

    @property
    def port_Bps(self) -> float:
        """Bytes per second to the other GPUs of the server, each way: `link_Bps`, or the rate of 16 PCIe lanes if None."""
        return self.link_Bps or 16 * PCIE_LANE_Bps[self.pcie]


SMALLEST, LARGEST = 1e-6, 1e24  # rates, speeds and sizes beyond these are typing errors


@dataclass(frozen=True)
class Gpu:
    """One GPU and its network port.

    Args:
        name: the GPU's name.
        kind: the GPU's model; a Profile has compute curves by this name.
        node: number of the node (host or tray) that the GPU is in, whose GPUs fail together.
        out_Bps: bytes per second that the port sends.
        in_Bps: bytes per second that the port receives, at the same time.
        memory_bytes: memory for weights, of experts and of the rest of the model.
        speed: compute speed relative to the reference GPU (1.0).
        startup_s: fixed seconds of one message.
        rack: the name of the GPU's rack, whose GPUs have a leaf switch of their own in a leaf/spine network; None if none has.
        failure_rate: failures per unit of time; only the ratios between GPUs count. A node fails at the sum of its GPUs' rates.
            None if unknown.

    Raises:
        BadInput: if a number is out of range, or a name has control characters.
    """

    name: str
    kind: str
    node: int
    out_Bps: float
    in_Bps: float
    memory_bytes: int
    speed: float = 1.0
    startup_s: float = 0.0
    rack: str | None = None
    failure_rate: float | None = None

    def __post_init__(self) -> None:
        for name in (self.name, self.kind, self.rack or ""):
            check_name(f"gpu {self.name!r}: name, kind and rack", name)
        if type(self.node) is not int or not 0 <= self.node < 1 << 31:
            raise BadInput(f"gpu {self.name!r}: node must be a whole number from zero on, found {self.node!r}")
        for field in ("out_Bps", "in_Bps", "speed", "memory_bytes"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise BadInput(f"gpu {self.name!r}: {field} must be a number above zero, found {value}")
            if not SMALLEST <= value <= LARGEST:
                raise BadInput(f"gpu {self.name!r}: {field} must lie between {SMALLEST:g} and {LARGEST:g}, found {value}")
        for field in ("startup_s", "failure_rate"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= LARGEST:
                raise BadInput(f"gpu {self.name!r}: {field} must lie between zero and {LARGEST:g}, found {value}")


@dataclass(frozen=True, eq=False, repr=False)
class Cluster(Value):
    """The GPUs of a deployment; rank r is the r-th GPU.

    Args:
        name: the cluster's name.
        gpus: the G GPUs.
        servers: the servers and their NICs; None: a big switch, where only the GPUs' ports limit transfers.
        incast: as in Network.

    Raises:
        BadInput: if there is no GPU, the servers have another number of GPUs, or incast lies outside 0 to 1.

    Source (big switch): Aurora §2.4.
    """

    name: str
    gpus: tuple[Gpu, ...]
    servers: Servers | None = None
    incast: float = 0.0

    def __post_init__(self) -> None:
        check_name(f"cluster {self.name!r}: name", self.name)
        object.__setattr__(self, "gpus", tuple(self.gpus))
        if not self.gpus:
            raise BadInput(f"cluster {self.name!r}: expected at least one [[gpu]], found none")
        check_servers(f"cluster {self.name!r}", len(self.gpus), self.servers, self.incast)

    def __len__(self) -> int:
        return len(self.gpus)

    @cached_property
    def network(self) -> Network:
        """The ports, start-ups, servers and incast of these GPUs as one Network."""
        out_Bps_G, in_Bps_G, startup_s_G = np.array([(gpu.out_Bps, gpu.in_Bps, gpu.startup_s) for gpu in self.gpus]).T
        return Network(out_Bps_G, in_Bps_G, startup_s_G, self.servers, self.incast)

    @property
    def out_Bps_G(self) -> FloatArray:
        """(G,) float64: bytes per second that each port sends."""
        return self.network.out_Bps_G

    @property
    def in_Bps_G(self) -> FloatArray:
        """(G,) float64: bytes per second that each port receives."""
        return self.network.in_Bps_G

    @property
    def startup_s_G(self) -> FloatArray:
        """(G,) float64: fixed seconds of one message of each GPU."""
        return self.network.startup_s_G

    @cached_property
    def equal(self) -> bool:
        """True if all GPUs have the same kind, speed, memory, start-up and port rates."""
        return len({(g.kind, g.out_Bps, g.in_Bps, g.memory_bytes, g.speed, g.startup_s) for g in self.gpus}) == 1

    def at_ranks(self, ranks: Sequence[int]) -> Self:
        """Returns the cluster of the GPUs with the numbers `ranks`, in that sequence; each stays on its server.

        Args:
            ranks: numbers of GPUs, one or more.
        """
        servers = self.servers
        if servers is not None:
            server_G, nic_G = ([number_G[rank] for rank in ranks] for number_G in (servers.server_G, servers.nic_G))
            servers = Servers.of(server_G, servers.nic_Bps, nic_G=nic_G) if len(set(server_G)) > 1 else None
        return replace(self, gpus=tuple(self.gpus[rank] for rank in ranks), servers=servers)
