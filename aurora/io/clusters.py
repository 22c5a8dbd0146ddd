"""Cluster TOML files, with the servers of a cluster, given or derived from links; datasheet figures of kinds of GPU (TOML)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aurora.algorithms.network.servers_of_links import Link, servers_of_links
from aurora.errors import BadInput
from aurora.io.files import check_schema, load_toml, naming, read_text, shipped, write_text
from aurora.io.nvidia_smi_topology import links_of_topology
from aurora.io.schema import StrictTable, converted, plain, table_of
from aurora.types import Cluster, Gpu, GpuKind, Servers

MOST_GPUS = 4096  # of a cluster; traffic matrices have the square of it
GpuTable: Any = table_of(Gpu, count=(Annotated[int, Meta(ge=1, le=MOST_GPUS)], 1))
GpuKindTable: Any = table_of(GpuKind)


class LinkTable(StrictTable):
    """A link from one GPU or switch to another.

    Attributes:
        src: name or rank of a GPU, or the name of a switch.
        dst: the other end.
        rate_Bps: bytes per second.
        both: true: there is a link back of the same rate.
        nvlink: true: its ends are in one NVLink domain.
    """

    src: int | str = msgspec.field(name="from")
    dst: int | str = msgspec.field(name="to")
    rate_Bps: float = msgspec.field(name="Bps")
    both: bool = False
    nvlink: bool = False


class ServersFabric(StrictTable, tag_field="kind", tag="servers"):
    """Servers and their NICs; a port's rate is that inside a server.

    Attributes:
        nic_Bps: bytes per second of a NIC, each way.
        shared_nic: true: the GPUs of a server share one NIC.
        nic_of_gpu: the NIC of each GPU, if GPUs share several.
        server_of_gpu: the server of each GPU; none: one for each node.
        narrowest_cut: the links that nic_Bps was derived from.
    """

    nic_Bps: float
    shared_nic: bool = False
    nic_of_gpu: tuple[int, ...] = ()
    server_of_gpu: tuple[int, ...] = ()
    narrowest_cut: str = ""

    def servers(self, gpus: Sequence[Gpu], folder: Path) -> Servers:
        """Returns the servers that `server_of_gpu` names by rank, else one for each node."""
        if self.shared_nic and self.nic_of_gpu:
            raise BadInput("fabric: expected shared_nic or nic_of_gpu, found both")
        server_G = self.server_of_gpu or [gpu.node for gpu in gpus]
        return replace(Servers.of(server_G, self.nic_Bps, self.shared_nic, self.nic_of_gpu), narrowest_cut=self.narrowest_cut)


class NvidiaSmiFabric(StrictTable, tag_field="kind", tag="nvidia-smi"):
    """Servers that all have one topology, as `nvidia-smi topo -m` prints it.

    Attributes:
        topology: file beside this one with the output of `nvidia-smi topo -m`.
        nic_Bps: bytes per second of a NIC, each way.
    """

    topology: str
    nic_Bps: float

    def servers(self, gpus: Sequence[Gpu], folder: Path) -> Servers | None:
        """Returns the servers of hosts that have the topology."""
        file = folder / self.topology
        return servers_of_links(links_of_topology(str(file), read_text(file), gpus, self.nic_Bps), len(gpus))


class GraphFabric(StrictTable, tag_field="kind", tag="graph"):
    """Links between GPUs and switches, which are reduced to servers and NICs.

    Attributes:
        links: the links.
    """

    links: list[LinkTable]

    def servers(self, gpus: Sequence[Gpu], folder: Path) -> Servers | None:
        """Returns the servers that the links join."""
        ranks: dict[int | str, list[int]] = {}
        for rank, gpu in enumerate(gpus):
            ranks.setdefault(gpu.name, []).append(rank)
        for name in (end for row in self.links for end in (row.src, row.dst)):
            if len(ranks.get(name, ())) > 1:
                raise BadInput(f"fabric.links: expected one GPU named {name!r}, found {len(ranks[name])}; give its rank")
        links = []
        for row in self.links:
            src, dst = (ranks.get(end, [end])[0] for end in (row.src, row.dst))
            links += [Link(*ends, row.rate_Bps, row.nvlink) for ends in ((src, dst), (dst, src))[: 1 + row.both]]
        return servers_of_links(links, len(gpus))


class LeafSpineFabric(StrictTable, tag_field="kind", tag="leaf-spine"):
    """Leaf switches, one for each rack, or for each node if no GPU has a rack; GPUs share their leaf's uplinks as a NIC.

    Attributes:
        spines: number of spine switches.
        uplink_Bps: bytes per second from a leaf to a spine, each way.
    """

    spines: Annotated[int, Meta(ge=1)]
    uplink_Bps: float

    def servers(self, gpus: Sequence[Gpu], folder: Path) -> Servers:
        """Returns the leaves as servers, each with one NIC."""
        racked = [gpu.rack is not None for gpu in gpus]
        if any(racked) and not all(racked):
            named = gpus[racked.index(False)].name
            raise BadInput(f"fabric: expected a rack for each GPU or for none, found none for {named!r}")
        leaves = [(gpu.rack, gpu.node if gpu.rack is None else 0) for gpu in gpus]
        number_of = {leaf: number for number, leaf in enumerate(dict.fromkeys(leaves))}
        return Servers.of([number_of[leaf] for leaf in leaves], self.spines * self.uplink_Bps, shared_nic=True)


class ClusterTable(StrictTable, kw_only=True):
    """A cluster.

    Attributes:
        schema: 1.
        name: the cluster's name; none: the file's.
        gpu: the GPUs, by rank.
        fabric: the servers; none: only the GPUs' ports limit transfers.
        incast: part of a port's rate lost for each further sender, where it was measured.
    """

    schema: int = 0
    name: str | None = None
    gpu: Annotated[list[GpuTable], Meta(min_length=1)]
    fabric: ServersFabric | NvidiaSmiFabric | GraphFabric | LeafSpineFabric | None = None
    incast: float = 0.0


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster from a file.

    Args:
        path: a cluster TOML (schema 1), or the name of a shipped cluster.

    Raises:
        BadInput: if the file is missing or wrong; the message names the key.
    """
    path = _found(Path(path))
    try:
        table = load_toml(path)
    except BadInput:
        if re.search(r"GPU0\s+GPU1", read_text(path)):
            fabric = '{kind = "nvidia-smi", topology = "' + path.name + '", nic_Bps = 50e9}'
            raise BadInput(
                f"{path}: expected a cluster, found nvidia-smi's topology, for a cluster file's fabric = {fabric}"
            ) from None
        raise
    check_schema(path, table)
    with naming(path):
        return cluster_of(converted(table, ClusterTable), path)


def cluster_of(table: ClusterTable, path: Path) -> Cluster:
    """Returns the Cluster that a table describes; its name, if it has none, is the file's, and its folder has a topology.

    Raises:
        BadInput: if a value is out of range.
    """
    if (count := sum(row.count for row in table.gpu)) > MOST_GPUS:
        raise BadInput(f"expected at most {MOST_GPUS} GPUs, found {count}")
    gpus: list[Gpu] = []
    for row in table.gpu:
        values = msgspec.structs.asdict(row)
        for number in range(values.pop("count")):
            gpus.append(Gpu(**values | {"name": row.name if row.count == 1 else f"{row.name}-{number}"}))
    servers = table.fabric.servers(gpus, path.parent) if table.fabric is not None else None
    return Cluster(path.stem if table.name is None else table.name, tuple(gpus), servers, table.incast)


def cluster_table(cluster: Cluster) -> ClusterTable:
    """Returns the table of a Cluster, from which `cluster_of` makes the same cluster."""
    gpus = [
        GpuTable(**{name: value for name, value in vars(gpu).items() if value != getattr(Gpu, name, ...)})
        for gpu in cluster.gpus
    ]
    fabric = None if cluster.servers is None else _servers_table(cluster.servers, cluster.gpus)
    return ClusterTable(name=cluster.name, gpu=gpus, fabric=fabric, incast=cluster.incast)


def servers_json(servers: Servers, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Converts servers to the table `fabric` of a cluster file.

    Args:
        servers: the servers.
        gpus: the cluster's GPUs, by rank. If servers differ from the GPUs' nodes, the server of each GPU is written too.
    """
    return dict(plain(_servers_table(servers, gpus)))


def _servers_table(servers: Servers, gpus: Sequence[Gpu]) -> ServersFabric:
    one_each = servers.shared and len(set(servers.nic_G)) == len(set(servers.server_G))
    by_node = servers.server_G == Servers.of([gpu.node for gpu in gpus], 1.0).server_G
    return ServersFabric(
        nic_Bps=servers.nic_Bps,
        shared_nic=one_each,
        nic_of_gpu=servers.nic_G if servers.shared and not one_each else (),
        server_of_gpu=() if by_node else servers.server_G,
        narrowest_cut=servers.narrowest_cut,
    )


def _found(path: Path) -> Path:
    """The file itself, or the shipped cluster of that name."""
    if path.suffix or path.exists():
        return path
    folder = shipped("clusters")
    names = sorted(file.stem for file in folder.glob("*.toml"))
    if str(path) not in names:
        raise BadInput(f"{path}: expected a file or one of the clusters {', '.join(names)}, found neither")
    return folder / f"{path}.toml"


def save_cluster(cluster: Cluster, path: Path, remarks: Sequence[str] = ()) -> None:
    """Writes a cluster as TOML with one table per GPU, which `load_cluster` reads back as the same cluster.

    Args:
        cluster: the cluster.
        path: exact path of the file.
        remarks: comments for the top of the file, one per line.
    """
    import tomli_w  # which reading need not

    remarks = [" ".join("".join(c if c.isprintable() else " " for c in remark).split()) for remark in remarks]
    table = tomli_w.dumps({"schema": 1, **plain(cluster_table(cluster))})
    write_text(path, "".join(f"# {remark}\n" for remark in remarks) + table)


class GpuKindsTable(StrictTable, kw_only=True):
    """Datasheet figures of kinds of GPU.

    Attributes:
        schema: 1.
        gpu: the kinds.
    """

    schema: int = 0
    gpu: Annotated[list[GpuKindTable], Meta(min_length=1)]


def load_gpus(path: str | Path | None = None) -> dict[str, GpuKind]:
    """Reads datasheets of GPUs from a TOML file; returns a dict from the kind's name to its GpuKind.

    Args:
        path: the TOML file; None: the shipped one.

    Raises:
        BadInput: if the file cannot be read, or a key is unknown, missing or has a wrong value.
    """
    path = shipped("gpus.toml") if path is None else Path(path)
    table = load_toml(path)
    check_schema(path, table)
    kinds: dict[str, GpuKind] = {}
    with naming(path):
        for row in converted(table, GpuKindsTable).gpu:
            if row.kind in kinds:
                raise BadInput(f"expected each kind once, found {row.kind!r} twice")
            kinds[row.kind] = GpuKind(**msgspec.structs.asdict(row))
    return kinds


def words_of(kind: str) -> set[str]:
    """Returns the words of a GPU's name, in small letters."""
    return set(re.split(r"[\s_-]+", kind.lower()))


def named_kind(option: str, name: str, kinds: Mapping[str, GpuKind]) -> GpuKind:
    """Returns the datasheet that a name or some of its words mean, such as "h100"; of several the one of the fastest ports.

    Raises:
        BadInput: if there is none; the message names the option.
    """
    fits = [kind for kind in kinds.values() if words_of(name) <= words_of(kind.kind)]
    if not fits:
        near = sorted(
            kinds, key=lambda kind: -max(SequenceMatcher(None, name.lower(), word).ratio() for word in words_of(kind))
        )
        raise BadInput(f"`{option}`: expected words of a GPU such as {', '.join(near[:3])}, found {name!r}")
    return kinds.get(name) or max(fits, key=lambda kind: (kind.port_Bps, kind.memory_bytes))
