"""Fabric: links of limited capacity between GPUs and switches, and the cuts through them."""

from collections.abc import Sequence
from dataclasses import dataclass

from aurora.errors import BadInput

Vertex = int | str  # a GPU by its rank, a switch by its name


def named(vertex: Vertex) -> str:
    """Returns a vertex as errors and reports name it."""
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
        gpus: number of GPUs; vertices 0..gpus-1 are GPUs, and all named vertices are switches.
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
        for gpu in range(self.gpus):
            if lost := sorted(set(range(self.gpus)) - {gpu} - self._reached(gpu)):
                raise BadInput(f"fabric: expected a way from each GPU to every other, found none from {gpu} to {lost[0]}")

    @property
    def switches(self) -> tuple[str, ...]:
        """Names of the switches, in the order in which the links first mention them."""
        return tuple(dict.fromkeys(end for link in self.links for end in (link.src, link.dst) if isinstance(end, str)))

    def _reached(self, gpu: int) -> set[int]:
        """The GPUs that this one reaches."""
        seen: set[Vertex] = {gpu}
        edge: list[Vertex] = [gpu]
        while edge:
            here = set(edge)
            edge = list({link.dst for link in self.links if link.src in here} - seen)
            seen.update(edge)
            edge = [vertex for vertex in edge if isinstance(vertex, str)]
        return {vertex for vertex in seen if isinstance(vertex, int)}


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
    """Returns a fabric of servers. GPUs reach GPUs of their server at their ports' rates, and others by NICs.

    The NICs are linked to a switch that never blocks.

    Args:
        node_G: (G,), the server of each GPU; servers are numbered anew from zero, in this sequence.
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
    """Ports and links that some traffic must cross.

    Attributes:
        bound_s: seconds that the traffic takes at least.
        load_bytes: bytes that must cross them.
        links: names of the ports and links.
    """

    bound_s: float
    load_bytes: int
    links: tuple[str, ...]
