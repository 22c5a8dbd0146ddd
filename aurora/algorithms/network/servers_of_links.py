"""Derives servers from links: NVLink domains, the NICs that their GPUs use, and the narrowest cut of the network."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aurora.errors import BadInput
from aurora.types import Servers

SLACK = 1e-6  # relative, within which cuts are equal
NAMED = 4  # links of a cut that are named


class Link(NamedTuple):
    """One direction of a cable.

    Attributes:
        src: the GPU, by its rank, or the switch or NIC, by its name, where it begins.
        dst: where it ends.
        Bps: bytes per second that it carries at most.
        nvlink: whether it connects GPUs of one NVLink domain.
    """

    src: int | str
    dst: int | str
    Bps: float
    nvlink: bool = False

    def __str__(self) -> str:
        return " -> ".join(end if isinstance(end, str) else f"rank {end}" for end in (self.src, self.dst))


def servers_of_links(links: Sequence[Link], gpus: int) -> Servers | None:
    """Returns the servers of a graph of links; None if all GPUs are in one, so that only ports limit them.

    1. Servers are the connected components of NVLink; if no link is marked as such, those of every GPU's fastest links.
    2. GPUs of a server share a NIC if less can leave them together than each alone (minimum cut to all other servers).
    3. The narrowest cut is the one that all-to-alls of equal parts take longest to cross, of the minimum cuts between each
       server, or all GPUs within some hops of a switch, and the others. It is named, and limits nothing.

    Switches forward, GPUs do not.

    Args:
        links: the links.
        gpus: number of GPUs.

    Raises:
        BadInput: if a link occurs twice, carries nothing or names an unknown GPU, a GPU cannot reach another, or NICs differ.
    """
    graph = _graph(links, gpus)
    domains = _domains(links, gpus)
    if len(domains) == 1:
        return None
    nics, rates_Bps = list[list[int]](), list[float]()
    for domain in domains:
        others = [gpu for gpu in range(gpus) if gpu not in domain]
        for group in _sharing(graph, domain, others):
            nics.append(group)
            rates_Bps.append(_cut_Bps(graph, group, others))
    if max(rates_Bps) > min(rates_Bps) * (1 + SLACK):
        raise BadInput(f"fabric: expected NICs of one rate, found {min(rates_Bps):g} to {max(rates_Bps):g} bytes per second")
    server_G, nic_G = (
        tuple(number for rank in range(gpus) for number, part in enumerate(parts) if rank in part) for parts in (domains, nics)
    )
    return Servers(server_G, rates_Bps[0], nic_G, _narrowest_cut(graph, domains, gpus))


def _graph(links: Sequence[Link], gpus: int) -> Any:
    """The links between switches and GPUs, each of which has a side that sends and one that receives."""
    import networkx  # which clusters without links need not

    graph = networkx.DiGraph()
    graph.add_nodes_from((side, gpu) for side in ("out", "in") for gpu in range(gpus))
    for link in links:
        if beyond := [end for end in link[:2] if isinstance(end, int) and not 0 <= end < gpus]:
            raise BadInput(f"fabric: link {link}: expected ranks 0 to {gpus - 1}, found {beyond[0]}")
        if not 0 < link.Bps < float("inf") or link.src == link.dst:
            raise BadInput(f"fabric: link {link}: expected two ends, and Bps above zero, found {link.Bps}")
        src, dst = (("out", link.src), ("in", link.dst))
        ends = src if isinstance(link.src, int) else link.src, dst if isinstance(link.dst, int) else link.dst
        if graph.has_edge(*ends):
            raise BadInput(f"fabric: expected link {link} once with its whole Bps, found it twice")
        graph.add_edge(*ends, capacity=link.Bps, name=str(link))
    for gpu in range(gpus):
        reached = networkx.descendants(graph, ("out", gpu))
        if lost := [other for other in range(gpus) if other != gpu and ("in", other) not in reached]:
            raise BadInput(f"fabric: expected a way from each GPU to every other, found none from {gpu} to {lost[0]}")
    return graph


def _domains(links: Sequence[Link], gpus: int) -> list[list[int]]:
    """The GPUs of each NVLink domain, by their first ranks."""
    import networkx

    marked = any(link.nvlink for link in links)
    fastest_Bps_G = [max((link.Bps for link in links if gpu in link[:2]), default=0.0) for gpu in range(gpus)]
    near = networkx.Graph()
    near.add_nodes_from(range(gpus))
    for link in links:
        ends = [end for end in link[:2] if isinstance(end, int)]
        if link.nvlink if marked else any(link.Bps >= fastest_Bps_G[gpu] * (1 - SLACK) for gpu in ends):
            near.add_edge(*link[:2])
    found = [sorted(end for end in part if isinstance(end, int)) for part in networkx.connected_components(near)]
    return sorted(part for part in found if part)


def _sharing(graph: Any, domain: Sequence[int], others: Sequence[int]) -> list[list[int]]:
    """The GPUs of a domain in groups that share a NIC."""
    groups = [[gpu] for gpu in domain]
    whole_Bps = _cut_Bps(graph, domain, others)
    if whole_Bps >= sum(_cut_Bps(graph, group, others) for group in groups) * (1 - SLACK):
        return groups
    groups = []
    for gpu in domain:
        alone_Bps = _cut_Bps(graph, [gpu], others)
        for group in groups:
            apart_Bps = _cut_Bps(graph, group, others) + alone_Bps
            if _cut_Bps(graph, [*group, gpu], others) < apart_Bps * (1 - SLACK):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    if whole_Bps < sum(_cut_Bps(graph, group, others) for group in groups) * (1 - SLACK):
        return [list(domain)]
    return groups


def _cut_Bps(graph: Any, inside: Iterable[int], others: Iterable[int]) -> float:
    """Bytes per second that some GPUs can send to others at most."""
    return _cut(graph, inside, others)[0]


def _cut(graph: Any, inside: Iterable[int], others: Iterable[int]) -> tuple[float, list[str]]:
    """Bytes per second of the minimum cut between some GPUs and others, and the names of its links."""
    import networkx

    ends = ("from", -1), ("to", -1)
    graph.add_edges_from((ends[0], ("out", gpu)) for gpu in inside)  # without capacity: no limit
    graph.add_edges_from((("in", gpu), ends[1]) for gpu in others)
    total_Bps, (_, near) = networkx.minimum_cut(graph.reverse(copy=False), *ends[::-1])  # of equal cuts the nearest
    graph.remove_nodes_from(ends)
    crossing = [name for src, dst, name in graph.edges(data="name") if src in near and dst not in near]
    return float(total_Bps), crossing


def _narrowest_cut(graph: Any, domains: Sequence[Sequence[int]], gpus: int) -> str:
    """The links of the narrowest cut, in words."""
    import networkx

    sets = {frozenset(domain) for domain in domains}
    for switch in (vertex for vertex in graph if isinstance(vertex, str)):
        hops = networkx.single_source_shortest_path_length(graph, switch)
        sides = {gpu: hops[side, gpu] for side, gpu in ((v[0], v[1]) for v in hops if isinstance(v, tuple)) if side == "in"}
        sets |= {frozenset(gpu for gpu in sides if sides[gpu] <= most) for most in set(sides.values())}
    longest, names, size = 0.0, list[str](), 0
    for inside in sorted((part for part in sets if len(part) < gpus), key=sorted):
        Bps, links = _cut(graph, inside, set(range(gpus)) - inside)
        if (share := len(inside) * (gpus - len(inside)) / Bps) > longest * (1 + SLACK):
            longest, names, size = share, links, len(inside)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}, for {size} of {gpus} GPUs"
