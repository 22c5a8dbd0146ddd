"""Network: the ports, start-ups, fabric, incast and measured curves that an all-to-all runs on, as one value."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, Value, above_zero, check_arrays, locked

Vertex = int | str  # a GPU by its rank, a switch by its name


def named(vertex: Vertex) -> str:
    """Returns the name of a vertex for messages and reports: "rank 3" for GPU 3, its name for a switch."""
    return vertex if isinstance(vertex, str) else f"rank {vertex}"


@dataclass(frozen=True)
class Link:
    """One direction of a cable.

    Attributes:
        src: the GPU or switch where it begins.
        dst: the GPU or switch where it ends.
        Bps: bytes per second that it carries at most.
    """

    src: Vertex
    dst: Vertex
    Bps: float

    def __str__(self) -> str:
        return f"{named(self.src)} -> {named(self.dst)}"

    def __post_init__(self) -> None:
        if not 0 < self.Bps < float("inf"):
            raise BadInput(f"fabric: link {self}: Bps must be a number above zero, found {self.Bps}")
        if self.src == self.dst:
            raise BadInput(f"fabric: link {self}: expected two ends, found one")


@dataclass(frozen=True)
class Fabric:
    """Directed links between GPUs and switches.

    Switches forward, GPUs do not. The limits of the GPUs' own ports apply besides those of the links.

    Args:
        gpus: number of GPUs. In links, the numbers 0..gpus-1 are GPUs, and names are switches.
        links: the links; every GPU must reach every other.
        nic_Bps: bytes per second of each NIC each way, for fabrics made by `servers`; None otherwise.
        server_G: (G,) the server of each GPU, numbered from zero, for fabrics made by `servers`; empty otherwise.
        shared_nic: whether a server has one NIC for all of its GPUs, instead of one for each.

    Raises:
        BadInput: if a link names an unknown GPU or occurs twice, or a GPU cannot reach another.
    """

    gpus: int
    links: tuple[Link, ...]
    nic_Bps: float | None = None
    server_G: tuple[int, ...] = ()
    shared_nic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))
        seen: set[tuple[Vertex, Vertex]] = set()
        for link in self.links:
            for end in (link.src, link.dst):
                if isinstance(end, int) and not 0 <= end < self.gpus:
                    raise BadInput(f"fabric: link {link}: expected ranks 0 to {self.gpus - 1}, found {end}")
            if (link.src, link.dst) in seen:
                raise BadInput(f"fabric: expected link {link} once with its whole Bps, found it twice")
            seen.add((link.src, link.dst))
        for gpu, reached in enumerate(self._reached()):
            if lost := ~(reached | 1 << gpu) & ((1 << self.gpus) - 1):
                to = (lost & -lost).bit_length() - 1
                raise BadInput(f"fabric: expected a way from each GPU to every other, found none from {gpu} to {to}")

    def __hash__(self) -> int:  # without the thousands of links of a large cluster, whose routes are looked up often
        return hash((self.gpus, len(self.links), self.nic_Bps, self.server_G, self.shared_nic))

    @property
    def switches(self) -> tuple[str, ...]:
        """Names of the switches, in the order in which the links first mention them."""
        return tuple(dict.fromkeys(end for link in self.links for end in (link.src, link.dst) if isinstance(end, str)))

    def _reached(self) -> list[int]:
        """Returns the GPUs that each GPU reaches, as bits."""
        reached: dict[Vertex, int] = dict.fromkeys((*range(self.gpus), *self.switches), 0)
        more = True
        while more:
            more = False
            for link in reversed(self.links):
                to = 1 << link.dst if isinstance(link.dst, int) else reached[link.dst]
                if to & ~reached[link.src]:
                    reached[link.src] |= to
                    more = True
        return [reached[gpu] for gpu in range(self.gpus)]


def leaf_spine(
    leaf_G: Sequence[str], out_Bps: Sequence[float], in_Bps: Sequence[float], spines: int, uplink_Bps: float
) -> Fabric:
    """Returns a fabric of two tiers of switches: each GPU is linked to its leaf, and each leaf to every spine.

    A GPU's links are as fast as its port. A leaf whose ports sum to more than spines * uplink_Bps is oversubscribed.

    Args:
        leaf_G: (G,), the name of each GPU's leaf.
        out_Bps: (G,), bytes per second that each port sends.
        in_Bps: (G,), bytes per second that each port receives.
        spines: number of spines.
        uplink_Bps: bytes per second of each link from a leaf to a spine, and back.

    Raises:
        BadInput: if there is no spine.
    """
    if spines < 1:
        raise BadInput(f"fabric: expected one spine or more, found {spines}")
    links = []
    for gpu, (leaf, out, into) in enumerate(zip(leaf_G, out_Bps, in_Bps, strict=True)):
        links += [Link(gpu, leaf, float(out)), Link(leaf, gpu, float(into))]
    for leaf in dict.fromkeys(leaf_G):
        for spine in (f"spine-{number}" for number in range(spines)):
            links += [Link(leaf, spine, uplink_Bps), Link(spine, leaf, uplink_Bps)]
    return Fabric(len(leaf_G), tuple(links))


def servers(
    node_G: Sequence[int], out_Bps: Sequence[float], in_Bps: Sequence[float], nic_Bps: float, shared_nic: bool = False
) -> Fabric:
    """Returns a fabric of servers. GPUs reach GPUs of their server at their ports' rates, and other GPUs through NICs.

    The NICs are linked to a switch that never blocks.

    Args:
        node_G: (G,), the node of each GPU. Each node becomes a server; servers are numbered from zero by rising node.
        out_Bps: (G,), bytes per second that each port sends.
        in_Bps: (G,), bytes per second that each port receives.
        nic_Bps: bytes per second of a NIC, each way.
        shared_nic: whether a server has one NIC for all of its GPUs, instead of one for each.
    """
    numbers = {node: number for number, node in enumerate(sorted(set(node_G)))}
    server_G = tuple(numbers[node] for node in node_G)
    links = []
    for gpu, (server, out, into) in enumerate(zip(server_G, out_Bps, in_Bps, strict=True)):
        inside, nic = f"server-{server}", f"nic-{gpu}"
        links += [Link(gpu, inside, float(out)), Link(inside, gpu, float(into))]
        if not shared_nic:
            links += [Link(gpu, nic, nic_Bps), Link(nic, gpu, nic_Bps), Link(nic, "core", nic_Bps), Link("core", nic, nic_Bps)]
    for server in range(len(numbers)) if shared_nic else ():
        links += [Link(f"server-{server}", "core", nic_Bps), Link("core", f"server-{server}", nic_Bps)]
    return Fabric(len(server_G), tuple(links), nic_Bps, server_G, shared_nic)


@dataclass(frozen=True)
class Cut:
    """A set of ports and links that part of the traffic must cross, which gives a lower bound on the time.

    Attributes:
        bound_s: seconds that the traffic takes at least: load_bytes / summed rate of the ports and links.
        load_bytes: bytes that must cross the ports and links.
        links: names of the ports and links.
    """

    bound_s: float
    load_bytes: int
    links: tuple[str, ...]


MOST_PARTNERS = 4096  # as many as a cluster's GPUs


@dataclass(frozen=True, eq=False, repr=False)
class TransferCurve(Value):
    """Measured seconds of exchanges by size; each GPU sends equally many bytes to each partner, all posted at once.

    Args:
        partners: number of GPUs that each GPU sends to, and receives from.
        bytes_X: (X,) float64, bytes that one port sends to all partners together, rising, above zero.
        seconds_X: (X,) float64, seconds from the start to the last byte, above zero, never falling.

    Raises:
        BadInput: if lengths differ or are zero, or numbers are out of range.
    """

    partners: int
    bytes_X: FloatArray
    seconds_X: FloatArray

    def __post_init__(self) -> None:
        if type(self.partners) is not int or not 1 <= self.partners <= MOST_PARTNERS:
            raise BadInput(f"link curve: partners must be a whole number from 1 to {MOST_PARTNERS}, found {self.partners!r}")
        what = f"link curve of {self.partners} partners"
        columns = above_zero(what, ("bytes", "seconds"), self.bytes_X, self.seconds_X)
        for name, column in zip(("bytes_X", "seconds_X"), columns, strict=True):
            object.__setattr__(self, name, column)
        if (np.diff(self.bytes_X) <= 0).any() or (np.diff(self.seconds_X) < 0).any():
            raise BadInput(f"{what}: expected bytes that rise, and seconds that never fall")

    def at_rate(self, times: float) -> "TransferCurve":
        """Returns the curve for ports that are `times` as fast: seconds of bytes are divided by `times`, the start-up stays."""
        return TransferCurve(self.partners, self.bytes_X * times, self.seconds_X)


def checked_curves(
    what: str, gpus: int, fabric: Fabric | None, incast: float, curves: Sequence[TransferCurve]
) -> tuple[TransferCurve, ...]:
    """Checks that a fabric, incast and link curves fit each other, and returns the curves by rising number of partners.

    Args:
        what: name of the cluster or network in error messages.
        gpus: number of GPUs.
        fabric: the fabric; None: a big switch.
        incast: as in Network.
        curves: the link curves.

    Raises:
        BadInput: if the fabric has another number of GPUs, incast lies outside 0 to 1, two curves have the same number of
            partners, or curves are given together with a fabric or incast.
    """
    if fabric is not None and fabric.gpus != gpus:
        raise BadInput(f"{what}: expected a fabric of {gpus} GPUs, found one of {fabric.gpus}")
    if not 0 <= incast <= 1:
        raise BadInput(f"{what}: incast must lie between 0 and 1, found {incast}")
    rising = tuple(sorted(curves, key=lambda curve: curve.partners))
    for curve, other in pairwise(rising):
        if curve.partners == other.partners:
            raise BadInput(f"{what}: expected one link curve for each number of partners, found two of {curve.partners}")
    if rising and fabric is not None:
        raise BadInput(f"{what}: expected no fabric beside link curves, which hold for ports alone")
    if rising and incast:
        raise BadInput(f"{what}: expected no incast beside link curves, which include it, found {incast}")
    return rising


@dataclass(frozen=True, eq=False, repr=False)
class Network(Value):
    """The ports of G GPUs and the switch or fabric between them.

    Args:
        out_Bps_G: (G,) float64, bytes per second that each port sends.
        in_Bps_G: (G,) float64, bytes per second that each port receives.
        startup_s_G: (G,) float64, fixed seconds of one message; a transfer takes the larger of its two ends'. Zero by default.
        fabric: the links between the GPUs; None: a big switch, where only ports limit transfers (Aurora §2.4).
        incast: part of its rate, 0 to 1, that a receiving port loses for each concurrent sender beyond the first, down
            to a tenth of the rate; 0: no loss. Bounds leave incast out; timed schedules and simulations include it. It is the
            simplest model of the measured throughput collapse: goodput falls with the number of senders, at worst by an order
            of magnitude.
        curves: measured seconds of exchanges by bytes, one curve for each number of partners. If there are any, the start-up of
            a predicted transfer is the measured seconds minus bytes / port rate; startup_s_G then serves only to make orders.

    Raises:
        BadInput: if a rate is not above zero, a start-up is below zero, columns differ in length, the fabric has another number
            of GPUs, incast lies outside 0 to 1, two curves have the same number of partners, or curves are given together with
            a fabric or incast.

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
        check_arrays(self, "network: ")
        for name in ("out_Bps_G", "in_Bps_G", "startup_s_G"):
            column_G = getattr(self, name)
            least = 0.0 if name == "startup_s_G" else np.nextafter(0.0, 1.0)
            if column_G.size and column_G.min() < least:
                expected = "seconds of zero or more" if name == "startup_s_G" else "rates above zero"
                raise BadInput(f"network: {name}: expected {expected}, found {column_G.min()}")
        object.__setattr__(self, "curves", checked_curves("network", self.gpus, self.fabric, self.incast, self.curves))

    @classmethod
    def equal(cls, gpus: int, Bps: float = 1.0, startup_s: float = 0.0) -> "Network":
        """Returns a big switch (no fabric) with equal ports, which send and receive `Bps` bytes per second each."""
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
        """The same network without start-ups and curves."""
        if not self.startup_s_G.any() and not self.curves:
            return self
        return replace(self, startup_s_G=np.zeros(self.gpus), curves=())

    @cached_property
    def pair_Bps_GG(self) -> FloatArray:
        """(G, G) float64: bytes per second of each transfer if it shares its two ports with no other."""
        return locked(np.minimum(self.out_Bps_G[:, None], self.in_Bps_G[None, :]))

    @cached_property
    def pair_startup_s_GG(self) -> FloatArray:
        """(G, G) float64: start-up seconds of each transfer, the larger start-up of its two ends."""
        return locked(np.maximum(self.startup_s_G[:, None], self.startup_s_G[None, :]))
