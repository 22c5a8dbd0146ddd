"""Network: the ports, start-ups, servers and incast that an all-to-all runs on, as one value."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, Value, check_arrays, locked


@dataclass(frozen=True)
class Servers:
    """The servers of a cluster: GPUs that reach each other at their ports' rates, and all others through NICs.

    The network between the NICs never blocks.

    Args:
        server_G: (G,) the server of each GPU: its NVLink domain, which may span several hosts (`Gpu.node`). Numbered from zero.
        nic_Bps: bytes per second of each NIC, each way.
        nic_G: (G,) the NIC of each GPU: GPUs of one server with the same number share it. Empty: each GPU has its own. They are
            renumbered from zero, by first GPU.
        narrowest_cut: the links that limit traffic between GPUs most and what they carry, in words, if the servers were derived
            from links; empty otherwise.

    Raises:
        BadInput: if the rate is not above zero, lengths differ, or GPUs of two servers share a NIC.

    >>> Servers.of([7, 7, 9, 9], 50e9, shared_nic=True)
    Servers(server_G=(0, 0, 1, 1), nic_Bps=50000000000.0, nic_G=(0, 0, 1, 1), narrowest_cut='')
    """

    server_G: tuple[int, ...]
    nic_Bps: float
    nic_G: tuple[int, ...] = ()
    narrowest_cut: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "server_G", tuple(self.server_G))
        nics = {nic: number for number, nic in enumerate(dict.fromkeys(self.nic_G or range(self.gpus)))}
        object.__setattr__(self, "nic_G", tuple(nics[nic] for nic in self.nic_G or range(self.gpus)))
        if not 0 < self.nic_Bps < float("inf"):
            raise BadInput(f"servers: nic_Bps must be a number above zero, found {self.nic_Bps}")
        if len(self.nic_G) != self.gpus:
            raise BadInput(f"servers: expected a NIC for each of {self.gpus} GPUs, found {len(self.nic_G)}")
        if len(set(zip(self.nic_G, self.server_G, strict=True))) > len(set(self.nic_G)):
            raise BadInput("servers: expected each NIC in one server, found one in several")

    @classmethod
    def of(cls, server_G: Sequence[int], nic_Bps: float, shared_nic: bool = False, nic_G: Sequence[int] = ()) -> "Servers":
        """Returns servers from any numbers of servers, such as nodes; they are renumbered from zero, by rising number.

        Args:
            server_G: (G,) the server of each GPU.
            nic_Bps: bytes per second of each NIC, each way.
            shared_nic: whether a server has one NIC for all of its GPUs, instead of one for each.
            nic_G: (G,) the NIC of each GPU, if neither holds.
        """
        numbers = {number: at for at, number in enumerate(sorted(set(server_G)))}
        return cls(tuple(numbers[number] for number in server_G), nic_Bps, tuple(server_G if shared_nic else nic_G))

    @property
    def gpus(self) -> int:
        """Number of GPUs, G."""
        return len(self.server_G)

    @property
    def shared(self) -> bool:
        """True if some GPUs share a NIC."""
        return len(set(self.nic_G)) < self.gpus


@dataclass(frozen=True)
class Cut:
    """Ports or NICs that part of the traffic must cross, which gives a lower bound on the time.

    Attributes:
        bound_s: seconds that the traffic takes at least: load_bytes / summed rate of the ports or NICs.
        load_bytes: bytes that must cross them.
        links: their names.
    """

    bound_s: float
    load_bytes: int
    links: tuple[str, ...]


def check_servers(what: str, gpus: int, servers: Servers | None, incast: float) -> None:
    """Checks that servers and incast fit a network.

    Args:
        what: name of the cluster or network in error messages.
        gpus: number of GPUs.
        servers: the servers; None: a big switch.
        incast: as in Network.

    Raises:
        BadInput: if the servers have another number of GPUs, or incast lies outside 0 to 1.
    """
    if servers is not None and servers.gpus != gpus:
        raise BadInput(f"{what}: expected servers of {gpus} GPUs, found {servers.gpus}")
    if not 0 <= incast <= 1:
        raise BadInput(f"{what}: incast must lie between 0 and 1, found {incast}")


@dataclass(frozen=True, eq=False, repr=False)
class Network(Value):
    """The ports of G GPUs, and the servers that they are in.

    Args:
        out_Bps_G: (G,) float64, bytes per second that each port sends.
        in_Bps_G: (G,) float64, bytes per second that each port receives.
        startup_s_G: (G,) float64, fixed seconds of one message; a transfer takes the larger of its two ends'. Zero by default.
        servers: the servers and their NICs; None: a big switch, where only ports limit transfers (Aurora §2.4).
        incast: part of its rate, 0 to 1, that a receiving port loses for each concurrent sender beyond the first, down
            to a tenth of the rate; 0: no loss. Bounds leave incast out; timed schedules and simulations include it. It is the
            simplest model of the measured throughput collapse: goodput falls with the number of senders, at worst by an order
            of magnitude.

    Raises:
        BadInput: if a rate is not above zero, a start-up is below zero, columns differ in length, the servers have another
            number of GPUs, or incast lies outside 0 to 1.

    Source (incast): Phanishayee et al., FAST 2008; Chen et al., WREN 2009.

    >>> Network.equal(8, Bps=50e9, startup_s=1e-5)
    Network(out_Bps_G=float64[8], in_Bps_G=float64[8], startup_s_G=float64[8], servers=None, incast=0.0)
    """

    out_Bps_G: FloatArray
    in_Bps_G: FloatArray
    startup_s_G: FloatArray = field(default_factory=lambda: np.zeros(0))  # empty: zeros
    servers: Servers | None = None
    incast: float = 0.0

    def __post_init__(self) -> None:
        if np.size(self.startup_s_G) == 0:
            object.__setattr__(self, "startup_s_G", np.zeros(len(self.out_Bps_G)))
        check_arrays(self, "network: ")
        for name in ("out_Bps_G", "in_Bps_G", "startup_s_G"):
            column_G = getattr(self, name)
            least = 0.0 if name == "startup_s_G" else np.nextafter(0.0, 1.0)
            if column_G.size and column_G.min() < least:
                expected = "seconds of zero or more" if name == "startup_s_G" else "rates above zero"
                raise BadInput(f"network: {name}: expected {expected}, found {column_G.min()}")
        check_servers("network", self.gpus, self.servers, self.incast)

    @classmethod
    def equal(cls, gpus: int, Bps: float = 1.0, startup_s: float = 0.0) -> "Network":
        """Returns a big switch (no servers) with equal ports, which send and receive `Bps` bytes per second each."""
        return cls(np.full(gpus, float(Bps)), np.full(gpus, float(Bps)), np.full(gpus, float(startup_s)))

    @property
    def gpus(self) -> int:
        """Number of GPUs, G."""
        return len(self.out_Bps_G)

    @property
    def equal_ports(self) -> bool:
        """True if every port sends and receives at the same rate."""
        return len(np.unique(np.concatenate([self.out_Bps_G, self.in_Bps_G]))) <= 1

    @cached_property
    def without_startup(self) -> "Network":
        """The same network without start-ups."""
        return replace(self, startup_s_G=np.zeros(self.gpus)) if self.startup_s_G.any() else self

    @cached_property
    def pair_Bps_GG(self) -> FloatArray:
        """(G, G) float64: bytes per second of each transfer if it shares its two ports with no other."""
        return locked(np.minimum(self.out_Bps_G[:, None], self.in_Bps_G[None, :]))

    @cached_property
    def pair_startup_s_GG(self) -> FloatArray:
        """(G, G) float64: start-up seconds of each transfer, the larger start-up of its two ends."""
        return locked(np.maximum(self.startup_s_G[:, None], self.startup_s_G[None, :]))
