"""GPUs by their datasheets: a cluster that a text such as "h20:8,a100:8" describes, and compute curves for a profile."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.io.clusters import MOST_GPUS, named_kind
from aurora.types import Cluster, Gpu, GpuKind, Profile
from aurora.types.cluster import LARGEST, SMALLEST
from aurora.types.network import Servers


def cluster_of(gpus: str, kinds: dict[str, GpuKind], nic_Bps: float = 50e9, per_server: int | None = None) -> Cluster:
    """Returns the Cluster that a text like "h20:8,a100:8" describes.

    Args:
        gpus: kinds and numbers, such as "h20:8,a100:8". A kind is given by words of its datasheet's name; of several kinds with
            these words, the one with the fastest links, then with the most memory, is taken.
        kinds: datasheets by name.
        nic_Bps: bytes per second of a GPU's NIC to other servers, each way.
        per_server: GPUs of a server; None: as the kind has them (4 of GB200 and GB300), else 8.

    Returns:
        The cluster; with more than one server it has ports inside the servers and NICs between them. Servers of one NVLink
        domain, such as the 18 trays of a GB200 NVL72, are nodes (what fails together) without NICs between them.

    Raises:
        BadInput: if the text is not of that form, a kind is unknown or a number is out of range.
    """
    if not SMALLEST <= nic_Bps <= LARGEST:
        raise BadInput(f"`nic_Bps`: expected from {SMALLEST:g} to {LARGEST:g} bytes per second, found {nic_Bps}")
    if per_server is not None and not 1 <= per_server <= MOST_GPUS:
        raise BadInput(f"`per_server`: expected from 1 to {MOST_GPUS}, found {per_server}")
    members: list[Gpu] = []
    domain_G: list[int] = []
    node = 0
    for part in gpus.split(","):
        name, _, number = part.strip().partition(":")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,3}", number):
            raise BadInput(f"`gpus`: expected KIND:NUMBER,..., such as h20:8,a100:8, found {part!r}")
        kind = named_kind("gpus", name, kinds)
        size, domain = per_server or kind.host_gpus or 8, max(domain_G, default=-1) + 1
        for index in range(int(number)):
            at = node + index // size
            domain_G.append(domain + index // (kind.domain_gpus or size))
            members.append(Gpu(f"{name}-{len(members)}", kind.kind, at, kind.port_Bps, kind.port_Bps, kind.memory_bytes))
        node += -(-int(number) // size)
    if len(members) > MOST_GPUS:
        raise BadInput(f"`gpus`: expected at most {MOST_GPUS} GPUs, found {len(members)}")
    servers = Servers.of(domain_G, nic_Bps) if domain_G[-1] else None
    return Cluster(gpus.replace(":", "x").replace(",", "+"), tuple(members), servers)


def with_datasheet_curves(profile: Profile, config: Mapping[str, Any], kinds: Sequence[GpuKind]) -> Profile:
    """Adds compute curves computed from datasheets to a profile, for the GPU kinds that it has no curves for.

    Args:
        profile: the profile.
        config: the content of the model's config.json.
        kinds: GPU kinds.

    Raises:
        BadInput: if the config is of a model with other layers, experts or top-k.
    """
    shape = Shape.of(config)
    sizes, expected = (profile.layers, profile.experts, profile.top_k), (shape.layers, shape.experts, shape.top_k)
    if sizes != expected:
        raise BadInput(f"`model`: expected the profile's layers, experts and top-k {sizes}, found {expected}")
    missing = [kind for kind in kinds if kind.kind not in profile.curves]
    drawn = shape.profile(profile.tokens_TLSE[:1], {}, kinds=missing)
    added = {kind.kind: drawn.curves[kind.kind] for kind in missing}
    provenance = {key: text for key, text in drawn.provenance.items() if key.startswith("curves of")}
    return replace(profile, curves={**profile.curves, **added}, provenance={**profile.provenance, **provenance})
