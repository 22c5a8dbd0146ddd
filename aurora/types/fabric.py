"""Networks that are no big switch: links of limited capacity between GPUs and switches, and the cuts through them."""

from collections.abc import Sequence
from dataclasses import dataclass

from aurora.errors import BadInput

Vertex = int | str  # a GPU by its rank, a switch by its name


def named(vertex: Vertex) -> str:
    """A vertex as people read it."""
    return vertex if isinstance(vertex, str) else f"rank {vertex}"


@dataclass(frozen=True)
class Link:
    """One direction of a cable: `Bps` bytes per second at most from src to dst."""

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
    """Directed links between `gpus` GPUs, 0..gpus-1, and switches, which are all other names.

    Switches forward, GPUs do not; every GPU must reach every other. The GPUs' own ports hold besides the links. nic_Bps: of
    `servers`, what each GPU's NIC carries either way.
    """

    gpus: int
    links: tuple[Link, ...]
    nic_Bps: float | None = None

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
        """Their names, as first mentioned."""
        return tuple(dict.fromkeys(end for link in self.links for end in (link.src, link.dst) if isinstance(end, str)))

    def _reached(self, gpu: int) -> set[int]:
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
    """Two tiers of switches: each GPU hangs on its leaf by links as fast as its port, each leaf on every spine.

    leaf_G: the leaf's name for each GPU; uplink_Bps: each leaf's link to each spine, and as much back. A leaf whose ports sum
    to more than spines * uplink_Bps is oversubscribed.
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


def servers(node_G: Sequence[int], out_Bps: Sequence[float], in_Bps: Sequence[float], nic_Bps: float) -> Fabric:
    """Servers whose GPUs reach each other at their ports' rates, and the GPUs of other servers by a NIC of nic_Bps each.

    node_G: the server of each GPU. NICs meet in a switch that never blocks.
    """
    links = []
    for gpu, (node, out, into) in enumerate(zip(node_G, out_Bps, in_Bps, strict=True)):
        inside, nic = f"server-{node}", f"nic-{gpu}"
        links += [Link(gpu, inside, float(out)), Link(inside, gpu, float(into))]
        links += [Link(gpu, nic, nic_Bps), Link(nic, gpu, nic_Bps), Link(nic, "core", nic_Bps), Link("core", nic, nic_Bps)]
    return Fabric(len(node_G), tuple(links), nic_Bps)


@dataclass(frozen=True)
class Cut:
    """load_bytes have no way but over `links`, which takes bound_s at least. Links and ports by name."""

    bound_s: float
    load_bytes: int
    links: tuple[str, ...]
