"""Cluster TOML files, with the servers of a cluster, given or derived from links; datasheet figures of kinds of GPU (TOML)."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from aurora.algorithms.network.servers_of_links import Link, servers_of_links
from aurora.errors import BadInput, shown
from aurora.io.files import check_keys, check_schema, load_toml, naming, read_text, shipped, typed, write_text
from aurora.io.nvidia_smi_topology import links_of_topology
from aurora.types import Cluster, Gpu, GpuKind, Servers

MOST_GPUS = 4096  # of a cluster; traffic matrices have the square of it


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a file.

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
    return cluster_from_table(str(path), table, path.stem)


def cluster_from_table(path: str, table: Mapping[str, Any], name: str) -> Cluster:
    """Returns the Cluster that a table describes, in the form of cluster files and of `cluster_table`.

    Args:
        path: the file's name, for messages.
        table: the table; its schema must have been checked.
        name: the cluster's name if the table has none.

    Raises:
        BadInput: if a key is unknown, missing or has a wrong value.
    """
    check_keys(path, "the file", table, {"schema", "name", "gpu", "fabric", "incast"})
    gpus: list[Gpu] = []
    for _, row in _gpu_rows(path, table):
        gpus.extend(_gpus(path, row, len(gpus)))
        if len(gpus) > MOST_GPUS:
            raise BadInput(f"{path}: expected at most {MOST_GPUS} GPUs, found {len(gpus)} or more")
    servers = _fabric(path, table["fabric"], gpus) if "fabric" in table else None
    incast = typed(path, "the file", table, "incast", float, 0.0)
    with naming(path):
        return Cluster(str(table.get("name", name)), tuple(gpus), servers, incast)


def cluster_table(cluster: Cluster) -> dict[str, Any]:
    """Converts a Cluster to a table (dict), which `cluster_from_table` reads back as the same cluster."""
    return {
        "name": cluster.name,
        "gpu": [{key: value for key, value in vars(gpu).items() if value is not None} for gpu in cluster.gpus],
        **({} if cluster.servers is None else {"fabric": servers_json(cluster.servers, cluster.gpus)}),
        **({"incast": cluster.incast} if cluster.incast else {}),
    }


def _rows(path: Path | str, what: str, rows: Any) -> list[tuple[str, dict[str, Any]]]:
    """The tables of an array of tables, each with its name in messages; `what` names the array."""
    if not isinstance(rows, list):
        raise BadInput(f"{path}: expected {what} tables, found {shown(rows)}")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadInput(f"{path}: {what} {index}: expected a table, found {row!r}")
    return [(f"{what} {index}", row) for index, row in enumerate(rows)]


def _gpu_rows(path: Path | str, table: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The [[gpu]] tables of a file, one at least."""
    if not table.get("gpu"):
        raise BadInput(f"{path}: expected one [[gpu]] table or more, found none")
    return _rows(path, "[[gpu]]", table["gpu"])


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
    """Write a cluster as TOML with one table per GPU, which `load_cluster` reads back as the same cluster.

    Args:
        cluster: the cluster.
        path: exact path of the file.
        remarks: comments for the top of the file, one per line.
    """
    import tomli_w  # which reading need not

    table, defaults = cluster_table(cluster), {field.name: field.default for field in fields(Gpu)}
    table["gpu"] = [
        {key: np.asarray(value).item() for key, value in gpu.items() if value != defaults[key]} for gpu in table["gpu"]
    ]
    remarks = [" ".join("".join(c if c.isprintable() else " " for c in remark).split()) for remark in remarks]
    write_text(path, "".join(f"# {remark}\n" for remark in remarks) + tomli_w.dumps({"schema": 1, **table}))


def _gpus(path: str, row: dict[str, Any], index: int) -> list[Gpu]:
    """Returns the GPUs of one [[gpu]] table, repeated `count` times.

    Args:
        path: the file's name, for messages.
        row: the table.
        index: the rank of the table's first GPU, for messages.

    Raises:
        BadInput: if a key is unknown, missing or has a wrong value.
    """
    where = f"[[gpu]] {row.get('name', index)!r}"
    count = typed(path, where, row, "count", int, 1)
    if not 1 <= count <= MOST_GPUS:
        raise BadInput(f"{path}: {where}: count must be a whole number from 1 to {MOST_GPUS}, found {count!r}")
    values = _read_fields(path, where, {key: value for key, value in row.items() if key != "count"}, Gpu, {"count"})
    name = values.pop("name")
    names = [name] if count == 1 else [f"{name}-{i}" for i in range(count)]
    with naming(path):
        return [Gpu(name=name, **values) for name in names]


def _read_fields(path: Path | str, where: str, row: dict[str, Any], value: type, more: Collection[str] = ()) -> dict[str, Any]:
    """The keys of a table as fields of a dataclass of GPUs; `more`: further keys that the table may have."""
    known = {field.name: field for field in fields(value)}
    check_keys(path, where, row, {*known, *more})
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in row]:
        raise BadInput(f"{path}: {where}: lacks {', '.join(missing)}")
    return {name: typed(path, where, row, name, _FIELD_TYPES.get(name, float)) for name in row}


_FIELD_TYPES: dict[str, type] = {
    **dict.fromkeys(("name", "kind", "rack", "source", "shares_source"), str),
    **dict.fromkeys(("node", "memory_bytes", "pcie", "host_gpus", "domain_gpus"), int),
}  # of Gpu and GpuKind; others are numbers


def _fabric(path: str, table: Any, gpus: Sequence[Gpu]) -> Servers | None:
    """Returns the servers that a [fabric] table describes; None if only ports limit its GPUs.

    Args:
        path: the file's name, for messages.
        table: the table.
        gpus: the cluster's GPUs, by rank.

    Raises:
        BadInput: if a key is unknown, missing or has a wrong value.
    """
    kind = table.get("kind") if isinstance(table, dict) else table
    if not isinstance(kind, str) or kind not in FABRIC_KINDS:
        raise BadInput(f"{path}: [fabric]: expected kind = {' or '.join(map(repr, FABRIC_KINDS))}, found {shown(kind)}")
    with naming(path):
        return FABRIC_KINDS[kind](path, table, gpus)


def servers_json(servers: Servers, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Converts servers to the table `fabric` of a cluster file.

    Args:
        servers: the servers.
        gpus: the cluster's GPUs, by rank. If servers differ from the GPUs' nodes, the server of each GPU is written too.
    """
    table: dict[str, Any] = {"kind": "servers", "nic_Bps": servers.nic_Bps}
    if servers.shared:
        one_each = len(set(servers.nic_G)) == len(set(servers.server_G))
        table |= {"shared_nic": True} if one_each else {"nic_of_gpu": list(servers.nic_G)}
    if servers.server_G != Servers.of([gpu.node for gpu in gpus], 1.0).server_G:
        table["server_of_gpu"] = list(servers.server_G)
    return table | ({"narrowest_cut": servers.narrowest_cut} if servers.narrowest_cut else {})


def _leaf_spine(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Servers:
    """The GPUs of each rack, or of each node if no GPU has a rack: they share the uplinks of their leaf switch as a NIC."""
    where = "[fabric]"
    check_keys(path, where, table, {"kind", "spines", "uplink_Bps"})
    spines, uplink_Bps = typed(path, where, table, "spines", int), typed(path, where, table, "uplink_Bps", float)
    racked = [gpu.rack is not None for gpu in gpus]
    if any(racked) and not all(racked):
        raise BadInput(
            f"{path}: {where}: expected a rack for each GPU or for none, found none for {gpus[racked.index(False)].name!r}"
        )
    if spines < 1:
        raise BadInput(f"{where}: expected one spine or more, found {spines}")
    leaves = list(dict.fromkeys((gpu.rack, gpu.node if gpu.rack is None else 0) for gpu in gpus))
    leaf_G = [leaves.index((gpu.rack, gpu.node if gpu.rack is None else 0)) for gpu in gpus]
    return Servers.of(leaf_G, spines * uplink_Bps, shared_nic=True)


def _servers(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Servers:
    """The servers that `server_of_gpu` names by rank, else one for each node; port rates are those inside a server."""
    check_keys(path, "[fabric]", table, {"kind", "nic_Bps", "shared_nic", "nic_of_gpu", "server_of_gpu", "narrowest_cut"})
    shared_nic = typed(path, "[fabric]", table, "shared_nic", bool, False)
    server_G, nic_G = table.get("server_of_gpu", [gpu.node for gpu in gpus]), table.get("nic_of_gpu", [])
    for key, number_G in (("server_of_gpu", server_G), ("nic_of_gpu", nic_G or server_G)):
        if not isinstance(number_G, list) or len(number_G) != len(gpus) or any(type(number) is not int for number in number_G):
            expected = f"a whole number for each of {len(gpus)} GPUs"
            raise BadInput(f"{path}: [fabric]: {key} must be {expected}, found {number_G!r}")
    if shared_nic and nic_G:
        raise BadInput(f"{path}: [fabric]: expected shared_nic or nic_of_gpu, found both")
    servers = Servers.of(server_G, typed(path, "[fabric]", table, "nic_Bps", float), shared_nic, nic_G)
    return replace(servers, narrowest_cut=typed(path, "[fabric]", table, "narrowest_cut", str, ""))


def _nvidia_smi(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Servers | None:
    """The servers of hosts that have the topology in a file beside this one."""
    check_keys(path, "[fabric]", table, {"kind", "topology", "nic_Bps"})
    file = Path(path).parent / typed(path, "[fabric]", table, "topology", str)
    nic_Bps = typed(path, "[fabric]", table, "nic_Bps", float)
    return servers_of_links(links_of_topology(str(file), read_text(file), gpus, nic_Bps), len(gpus))


def _graph(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Servers | None:
    check_keys(path, "[fabric]", table, {"kind", "links"})
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu.name, []).append(rank)
    links = []
    for where, row in _rows(path, "[fabric] link", table.get("links")):
        check_keys(path, where, row, {"from", "to", "Bps", "both", "nvlink"})
        src, dst = (_vertex(path, where, row, end, ranks) for end in ("from", "to"))
        rate_Bps, both = typed(path, where, row, "Bps", float), typed(path, where, row, "both", bool, False)
        nvlink = typed(path, where, row, "nvlink", bool, False)
        links += [Link(src, dst, rate_Bps, nvlink), *([Link(dst, src, rate_Bps, nvlink)] if both else [])]
    return servers_of_links(links, len(gpus))


def _vertex(path: str, where: str, row: dict[str, Any], end: str, ranks: dict[str, list[int]]) -> int | str:
    """A GPU by its name or rank; any other name is a switch."""
    name = row.get(end)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise BadInput(f"{path}: {where}: {end} must be the name of a GPU or a switch, found {shown(name)}")
    if isinstance(name, int) or name not in ranks:
        return name
    if len(ranks[name]) > 1:
        raise BadInput(f"{path}: {where}: expected one GPU named {name!r}, found {len(ranks[name])}; give its rank")
    return ranks[name][0]


FABRIC_KINDS: dict[str, Callable[[str, dict[str, Any], Sequence[Gpu]], Servers | None]] = {
    "servers": _servers,
    "nvidia-smi": _nvidia_smi,
    "graph": _graph,
    "leaf-spine": _leaf_spine,
}


def load_gpus(path: str | Path | None = None) -> dict[str, GpuKind]:
    """Read datasheets of GPUs from a TOML file; returns a dict from the kind's name to its GpuKind.

    Args:
        path: the TOML file; None: the shipped one.

    Raises:
        BadInput: if the file cannot be read, or a key is unknown, missing or has a wrong value.
    """
    path = shipped("gpus.toml") if path is None else Path(path)
    table = load_toml(path)
    check_schema(path, table)
    check_keys(path, "the file", table, {"schema", "gpu"})
    kinds: dict[str, GpuKind] = {}
    for where, row in _gpu_rows(path, table):
        values = _read_fields(path, f"[[gpu]] {row['kind']!r}" if "kind" in row else where, row, GpuKind)
        with naming(path):
            kind = GpuKind(**values)
        if kind.kind in kinds:
            raise BadInput(f"{path}: expected each kind once, found {kind.kind!r} twice")
        kinds[kind.kind] = kind
    return kinds


def named_kind(option: str, name: str, kinds: Mapping[str, GpuKind]) -> GpuKind:
    """Returns the datasheet that a name or some of its words mean, such as "h100"; of several the one of the fastest ports.

    Raises:
        BadInput: if there is none; the message names the option.
    """
    words = set(re.split(r"[\s_-]+", name.lower()))
    fits = [kind for kind in kinds.values() if words <= set(re.split(r"[\s_-]+", kind.kind.lower()))]
    if not fits:
        raise BadInput(f"`{option}`: expected words of one of {', '.join(kinds)}, found {name!r}")
    return kinds.get(name) or max(fits, key=lambda kind: (kind.port_Bps, kind.memory_bytes))
