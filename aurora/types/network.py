"""Network: the ports, start-ups, fabric and incast that an all-to-all runs on, as one value."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, locked, numbers
from aurora.types.fabric import Fabric
from aurora.types.transfer_curve import TransferCurve, by_partners, check_curves
from aurora.types.value import Value


@dataclass(frozen=True, eq=False, repr=False)
class Network(Value):
    """The ports of G GPUs and the switch or fabric between them.

    Args:
        out_Bps_G: (G,) float64, bytes per second that each port sends.
        in_Bps_G: (G,) float64, bytes per second that each port receives.
        startup_s_G: (G,) float64, fixed seconds of one message; a transfer takes that of its slower end. Zeros by default.
        fabric: the links between the GPUs; None is a big switch, where only ports limit (Aurora §2.4).
        incast: part of its rate, 0 to 1, that a receiving port loses for each concurrent sender beyond the first, down
            to a tenth of the rate; zero loses nothing. Bounds leave incast out; timed schedules and simulations include it. It
            is the simplest model of the measured throughput collapse: goodput falls with the number of senders, at worst by an
            order of magnitude.
        curves: measured exchanges by bytes, one for each number of partners. Where there are some, a transfer's start-up is
            what they take beyond their bytes at the ports' rates, and startup_s_G says what orders are made for.

    Raises:
        BadInput: if a rate is not above zero, a start-up is below zero, columns differ in length, the fabric has another number
            of GPUs, incast lies outside 0 to 1, or there are curves of one number of partners twice,
            or beside a fabric or incast.

    Source (incast): Phanishayee et al., FAST 2008; Chen et al., WREN 2009.

    >>> Network.equal(8, Bps=50e9, startup_s=1e-5)
    Network(out_Bps_G=float64[8], in_Bps_G=float64[8], startup_s_G=float64[8], fabric=None, incast=0.0, curves=())
    """

    out_Bps_G: FloatArray
    in_Bps_G: FloatArray
    startup_s_G: FloatArray = field(default_factory=lambda: np.zeros(0))  # empty: zeros
    fabric: Fabric | None = None
    incast: float = 0.0
    curves: tuple[TransferCurve, ...] = ()

    def __post_init__(self) -> None:
        if np.size(self.startup_s_G) == 0:
            object.__setattr__(self, "startup_s_G", np.zeros(len(self.out_Bps_G)))
        for name in ("out_Bps_G", "in_Bps_G", "startup_s_G"):
            column_G = numbers(f"network: {name}", getattr(self, name))
            if len(column_G) != len(self.out_Bps_G):
                raise BadInput(f"network: {name}: expected {len(self.out_Bps_G)} GPUs as in out_Bps_G, found {len(column_G)}")
            least = 0.0 if name == "startup_s_G" else np.nextafter(0.0, 1.0)
            if column_G.size and column_G.min() < least:
                expected = "seconds of zero or more" if name == "startup_s_G" else "rates above zero"
                raise BadInput(f"network: {name}: expected {expected}, found {column_G.min()}")
            object.__setattr__(self, name, column_G)
        if self.fabric is not None and self.fabric.gpus != self.gpus:
            raise BadInput(f"network: fabric: expected {self.gpus} GPUs as in out_Bps_G, found {self.fabric.gpus}")
        if not 0 <= self.incast <= 1:
            raise BadInput(f"network: incast: expected a number between 0 and 1, found {self.incast}")
        object.__setattr__(self, "curves", by_partners("network", self.curves))
        check_curves("network", self.curves, self.fabric is not None, self.incast)

    @classmethod
    def equal(cls, gpus: int, Bps: float = 1.0, startup_s: float = 0.0) -> "Network":
        """Returns a big switch whose ports all send and receive at one rate."""
        return cls(np.full(gpus, float(Bps)), np.full(gpus, float(Bps)), np.full(gpus, float(startup_s)))

    @property
    def gpus(self) -> int:
        """How many GPUs there are, G."""
        return len(self.out_Bps_G)

    @property
    def equal_ports(self) -> bool:
        """Whether every port sends and receives at the same rate."""
        return len(np.unique(np.concatenate([self.out_Bps_G, self.in_Bps_G]))) <= 1

    @cached_property
    def without_startup(self) -> "Network":
        """The same network without start-ups and curves."""
        if not self.startup_s_G.any() and not self.curves:
            return self
        return replace(self, startup_s_G=np.zeros(self.gpus), curves=())

    @cached_property
    def pair_Bps_GG(self) -> FloatArray:
        """(G, G) float64: bytes per second of each transfer that has both of its ports to itself."""
        return locked(np.minimum(self.out_Bps_G[:, None], self.in_Bps_G[None, :]))

    @cached_property
    def pair_startup_s_GG(self) -> FloatArray:
        """(G, G) float64: start-up seconds of each transfer, those of its slower end."""
        return locked(np.maximum(self.startup_s_G[:, None], self.startup_s_G[None, :]))
