"""The machines: one Gpu a rank, behind a switch that never blocks (Aurora §2.4: the big switch) or a fabric of links."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray
from aurora.types.fabric import Fabric
from aurora.types.network import Network
from aurora.types.value import Value

SMALLEST, LARGEST = 1e-6, 1e24  # rates, speeds and sizes beyond these are typing errors


@dataclass(frozen=True)
class Gpu:
    """One GPU and its network port.

    out_Bps, in_Bps: what the port sends and receives at once, bytes per second. memory_bytes: what experts and the rest
    of the model may fill. speed: compute speed against the reference GPU (1.0). startup_s: fixed cost of one message.
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
    """Rank r is the r-th GPU. fabric, incast: as in Network, which `network` gives for what times or orders transfers."""

    name: str
    gpus: tuple[Gpu, ...]
    fabric: Fabric | None = None
    incast: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", tuple(self.gpus))
        if not self.gpus:
            raise BadInput(f"cluster {self.name!r}: expected at least one [[gpu]], found none")
        if not 0 <= self.incast <= 1:
            raise BadInput(f"cluster {self.name!r}: incast must lie between 0 and 1, found {self.incast}")
        if self.fabric is not None and self.fabric.gpus != len(self.gpus):
            raise BadInput(
                f"cluster {self.name!r}: expected a fabric of {len(self.gpus)} GPUs, found one of {self.fabric.gpus}"
            )

    def __len__(self) -> int:
        return len(self.gpus)

    @cached_property
    def network(self) -> Network:
        """Everything that an all-to-all between these GPUs depends on."""
        out_Bps_G, in_Bps_G, startup_s_G = np.array([(gpu.out_Bps, gpu.in_Bps, gpu.startup_s) for gpu in self.gpus]).T
        return Network(out_Bps_G, in_Bps_G, startup_s_G, self.fabric, self.incast)

    @property
    def out_Bps_G(self) -> FloatArray:
        return self.network.out_Bps_G

    @property
    def in_Bps_G(self) -> FloatArray:
        return self.network.in_Bps_G

    @property
    def startup_s_G(self) -> FloatArray:
        return self.network.startup_s_G

    @property
    def equal(self) -> bool:
        """Whether all GPUs are alike in everything that planning looks at."""
        return len({(g.kind, g.out_Bps, g.in_Bps, g.memory_bytes, g.speed, g.startup_s) for g in self.gpus}) == 1
