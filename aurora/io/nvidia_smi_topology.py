"""Links of the GPUs of a host, as `nvidia-smi topo -m` prints them."""

import re
from collections.abc import Sequence

from aurora.algorithms.network.servers_of_links import Link
from aurora.errors import BadInput
from aurora.types import Gpu

NEAREST = ("PIX", "PXB", "PHB", "NODE", "SYS")  # between a GPU and a NIC: fewer bridges first
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|mlx\d+_\w+")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # the head of the table is underlined


def links_of_topology(where: str, text: str, gpus: Sequence[Gpu], nic_Bps: float) -> list[Link]:
    """Returns the links of a cluster whose hosts all have the same topology; its NICs meet in a switch that never blocks.

    A GPU uses the NICs that are nearest to it. The GPUs of a host are one domain, by NVLink or, if it has none, by PCIe.

    Args:
        where: the file's name, for messages.
        text: the output of `nvidia-smi topo -m` on one of the hosts.
        gpus: the cluster's GPUs, by rank; those of a node are GPU0, GPU1, ... of a host.
        nic_Bps: bytes per second of each NIC, each way.

    Raises:
        BadInput: if the text is no such output, nodes have another number of GPUs, or NVLink connects some of
            a host's GPUs only.
    """
    import networkx  # which clusters without a topology need not

    relation = _table(where, text)
    names = [name for name in relation if name.startswith("GPU")]
    bonds = networkx.Graph((name, peer) for name in names for peer, at in relation[name].items() if at.startswith("NV"))
    if bonds and (len(bonds) < len(names) or not networkx.is_connected(bonds)):
        parts = " and ".join(", ".join(sorted(part)) for part in networkx.connected_components(bonds))
        raise BadInput(f"{where}: expected NVLink between all {len(names)} GPUs or none, found it between {parts} alone")
    links = list[Link]()
    for node in dict.fromkeys(gpu.node for gpu in gpus):
        ranks = [rank for rank, gpu in enumerate(gpus) if gpu.node == node]
        if len(ranks) != len(names):
            raise BadInput(f"{where}: expected {len(ranks)} GPUs, as in node {node}, found {len(names)}")
        used: dict[str, None] = {}
        for name, rank in zip(names, ranks, strict=True):
            nics = {nic: NEAREST.index(at) for nic, at in relation[name].items() if not nic.startswith("GPU")}
            near = [f"{nic} of node {node}" for nic in nics if nics[nic] == min(nics.values())]
            links += _both(*((rank, nic, gpus[rank].out_Bps) for nic in near))
            links += _both((rank, f"inside of node {node}", gpus[rank].out_Bps), nvlink=True)
            used |= dict.fromkeys(near)
        links += _both(*((nic, "network", nic_Bps) for nic in used))
    return links


def _both(*ends: tuple[int | str, str, float], nvlink: bool = False) -> list[Link]:
    """Links in both directions."""
    return [link for src, dst, Bps in ends for link in (Link(src, dst, Bps, nvlink), Link(dst, src, Bps, nvlink))]


def _table(where: str, text: str) -> dict[str, dict[str, str]]:
    """What is between each device and each other, such as NV18 or PIX, by their names."""
    lines = [line for line in _STYLE.sub("", text).splitlines() if line.strip()]
    columns = _DEVICE.findall(lines[0]) if lines else []
    if "GPU0" not in columns:
        raise BadInput(f"{where}: expected the output of `nvidia-smi topo -m`, whose first line names GPU0")
    found = dict[str, dict[str, str]]()
    for name, *cells in (line.split() for line in lines[1:]):
        if name in columns and name not in found:
            between = dict(zip(columns, cells, strict=False))
            between.pop(name, None)
            for other, cell in between.items():
                if cell not in NEAREST and not re.fullmatch(r"NV\d+", cell):
                    expected = f"NV and a number, or one of {', '.join(NEAREST)}"
                    raise BadInput(f"{where}: {name} to {other}: expected {expected}, found {cell!r}")
            found[name] = between
    if lacking := [name for name in columns if len(found.get(name, ())) < len(columns) - 1]:
        raise BadInput(f"{where}: {lacking[0]}: expected a row of {len(columns)} columns, found less")
    return {name: found[name] for name in columns}
