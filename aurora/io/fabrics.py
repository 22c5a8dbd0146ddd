"""The [fabric] table of a cluster: leaf/spine or servers by a few figures, or any graph link by link."""

from collections.abc import Callable, Sequence
from typing import Any

from aurora.errors import BadInput
from aurora.io.files import check_keys
from aurora.types import Fabric, Gpu, Link, leaf_spine, servers
from aurora.types.network import Vertex


def read_fabric(path: str, table: Any, gpus: Sequence[Gpu]) -> Fabric:
    """Returns the fabric that a [fabric] table describes.

    Args:
        path: the file's name, for messages.
        table: the table.
        gpus: the cluster's GPUs, by rank.

    Raises:
        BadInput: if a key is unknown, missing or has a wrong value.
    """
    kind = table.get("kind") if isinstance(table, dict) else table
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadInput(f"{path}: [fabric]: expected kind = {' or '.join(map(repr, KINDS))}, found {kind!r}")
    try:
        return KINDS[kind](path, table, gpus)
    except BadInput as error:
        raise error if str(error).startswith(path) else BadInput(f"{path}: {error}") from None


def fabric_json(fabric: Fabric, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Returns a fabric as a table that `read_fabric` reads back as the same fabric; GPUs are ranks.

    Args:
        fabric: the fabric.
        gpus: the cluster's GPUs, by rank. Servers that are not their nodes are written GPU by GPU.
    """
    if fabric.nic_Bps is not None:
        nodes = sorted({gpu.node for gpu in gpus})
        of_nodes = fabric.server_G == tuple(nodes.index(gpu.node) for gpu in gpus)
        apart = {} if of_nodes else {"server_of_gpu": list(fabric.server_G)}
        shared = {"shared_nic": True} if fabric.shared_nic else {}
        return {"kind": "servers", "nic_Bps": fabric.nic_Bps, **shared, **apart}
    links = [{"from": link.src, "to": link.dst, "Bps": link.Bps} for link in fabric.links]
    return {"kind": "graph", "links": links}


def _leaf_spine(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Fabric:
    """A leaf switch for each rack, or for each node if no GPU names a rack."""
    where = "[fabric]"
    check_keys(path, where, table, {"kind", "spines", "uplink_Bps"})
    spines = table.get("spines")
    if not isinstance(spines, int) or isinstance(spines, bool):
        raise BadInput(f"{path}: {where}: spines must be a whole number, found {spines!r}")
    uplink_Bps = _rate(path, where, table, "uplink_Bps")
    racked = [gpu.rack is not None for gpu in gpus]
    if any(racked) and not all(racked):
        raise BadInput(
            f"{path}: {where}: expected a rack for each GPU or for none, found none for {gpus[racked.index(False)].name!r}"
        )
    leaf_G = [f"leaf-{gpu.node if gpu.rack is None else gpu.rack}" for gpu in gpus]
    return leaf_spine(leaf_G, [gpu.out_Bps for gpu in gpus], [gpu.in_Bps for gpu in gpus], spines, uplink_Bps)


def _servers(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Fabric:
    """The servers that `server_of_gpu` names by rank, else one for each node; port rates are those inside a server."""
    check_keys(path, "[fabric]", table, {"kind", "nic_Bps", "shared_nic", "server_of_gpu"})
    shared_nic = table.get("shared_nic", False)
    if not isinstance(shared_nic, bool):
        raise BadInput(f"{path}: [fabric]: shared_nic must be true or false, found {shared_nic!r}")
    server_G = table.get("server_of_gpu", [gpu.node for gpu in gpus])
    if not isinstance(server_G, list) or len(server_G) != len(gpus) or any(type(each) is not int for each in server_G):
        expected = f"a whole number for each of {len(gpus)} GPUs"
        raise BadInput(f"{path}: [fabric]: server_of_gpu must be {expected}, found {server_G!r}")
    ports = [gpu.out_Bps for gpu in gpus], [gpu.in_Bps for gpu in gpus]
    return servers(server_G, *ports, _rate(path, "[fabric]", table, "nic_Bps"), shared_nic)


def _graph(path: str, table: dict[str, Any], gpus: Sequence[Gpu]) -> Fabric:
    check_keys(path, "[fabric]", table, {"kind", "links"})
    rows = table.get("links")
    if not isinstance(rows, list):
        raise BadInput(f"{path}: [fabric]: expected links = [...], found {rows!r}")
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu.name, []).append(rank)
    links = []
    for number, row in enumerate(rows):
        where = f"[fabric] link {number}"
        if not isinstance(row, dict):
            raise BadInput(f"{path}: {where}: expected a table, found {row!r}")
        check_keys(path, where, row, {"from", "to", "Bps", "both"})
        src, dst = (_vertex(path, where, row, end, ranks) for end in ("from", "to"))
        rate_Bps, both = _rate(path, where, row, "Bps"), row.get("both", False)
        if not isinstance(both, bool):
            raise BadInput(f"{path}: {where}: both must be true or false, found {both!r}")
        links += [Link(src, dst, rate_Bps), *([Link(dst, src, rate_Bps)] if both else [])]
    return Fabric(len(gpus), tuple(links))


def _vertex(path: str, where: str, row: dict[str, Any], end: str, ranks: dict[str, list[int]]) -> Vertex:
    """A GPU by its name or rank; any other name is a switch."""
    name = row.get(end)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise BadInput(f"{path}: {where}: {end} must be the name of a GPU or a switch, found {name!r}")
    if isinstance(name, int) or name not in ranks:
        return name
    if len(ranks[name]) > 1:
        raise BadInput(f"{path}: {where}: expected one GPU named {name!r}, found {len(ranks[name])}; give its rank")
    return ranks[name][0]


def _rate(path: str, where: str, row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadInput(f"{path}: {where}: {key} must be a number, found {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise BadInput(f"{path}: {where}: {key} is too large") from None


KINDS: dict[str, Callable[[str, dict[str, Any], Sequence[Gpu]], Fabric]] = {
    "leaf-spine": _leaf_spine,
    "servers": _servers,
    "graph": _graph,
}
