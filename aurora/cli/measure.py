"""What `aurora profile` measures beside routing: compute curves, links and devices."""

import datetime
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aurora.cli.common import need, terminal
from aurora.errors import BadInput
from aurora.types import PHASES, Cluster, ComputeCurves, Profile, ProfileOptions


def compute(model: str | None, joined: Sequence[Path], output: Path, options: ProfileOptions) -> None:
    """Compute curves of `model` on this machine, and those of the files `joined`, into the profile or curves at `output`,
    which are made where there are none. No model: the files alone."""
    from aurora.io import load, load_curves, save
    from aurora.reports.tables import curves_table

    made = load(output) if output.exists() else None
    if made is not None and not isinstance(made, Profile | ComputeCurves):
        raise BadInput(f"{output}: expected a profile or curves to add to, found a {type(made).__name__.lower()}")
    found = [load_curves(file) for file in joined]
    if model is not None:
        need("torch", "transformers")
        from aurora.profiler.compute_timing import measure_curves

        tokens = 2 * options.batch * options.prompt_tokens
        found.insert(0, measure_curves(model, tokens=tokens, length=options.prompt_tokens, share=options.share))
    if not found:
        raise BadInput("profile --compute-only: expected a model folder")
    for one in found:
        made = one if made is None else one.into(made)
    assert made is not None
    save(made, output)
    console = terminal()
    kinds = made.curves if isinstance(made, Profile) else made.kinds
    console.print(curves_table(made.model, {kind: [phases[phase] for phase in PHASES] for kind, phases in kinds.items()}))
    for one in found:
        for what, said in one.provenance.items():
            console.print(f"{what}: {said}", soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def network(ranks: int | None, transport: str, output: Path) -> None:
    """The links between ranks as a cluster file; under torchrun rank 0 writes it."""
    need("torch")
    from aurora.io import load_gpus, save_cluster
    from aurora.profiler.link_model import cluster_of
    from aurora.profiler.link_timing import measure_links
    from aurora.reports.tables import links_table

    answer = measure_links(ranks, transport)
    if answer is None:
        return  # under torchrun rank 0 speaks
    links, seated, over = answer
    made = cluster_of(links, seated, {kind: known.half_flops for kind, known in load_gpus().items()})
    pairs = ~np.eye(len(made), dtype=bool)
    rates = links.rate_Bps_GG[pairs]
    curve = ", ".join(f"{k}: {goodput:.0%}" for k, goodput in zip(links.senders_K, links.goodput_K, strict=True))
    remarks = [
        f"Measured by aurora profile --network over {over}, {len(made)} ranks, {_today()}. Ports: to and from several at once.",
        f"Pairs alone: {rates.min():.4g} to {rates.max():.4g} bytes a second; a line through their message sizes is "
        f"{np.median(links.error_GG[pairs]):.1%} off (median), {links.error_GG[pairs].max():.1%} at worst.",
        f"Goodput of a receiver by how many send to it at once: {curve}.",
    ]
    save_cluster(made, output, remarks)
    _shown(made, output, *remarks)
    terminal().print(links_table(links.rate_Bps_GG, links.startup_s_GG))


def devices(output: Path) -> None:
    """This machine's GPUs as a cluster file."""
    from aurora.io import load_gpus, save_cluster
    from aurora.profiler.devices import cluster_of_devices, inventory, nvml_here

    with nvml_here() as nvml:
        found = inventory(nvml)
    kinds = load_gpus()
    made = cluster_of_devices(found, kinds, socket.gethostname())
    remarks = [
        f"By aurora profile --devices, driver {found.driver}, {_today()}. Rates and speeds are datasheets', not measured."
    ]
    for kind in dict.fromkeys(device.kind for device in found.devices):
        source = (
            f"figures from {kinds[kind].source}" if kind in kinds else "not among the known kinds: rates of its PCIe, speed 1"
        )
        remarks.append(f"{kind}: {source}.")
    ways = ", ".join(sorted({way for row in found.ways_GG for way in row if way}))
    if ways:
        remarks.append(f"Between GPUs: {ways}.")
    save_cluster(made, output, remarks)
    _shown(made, output, *remarks)


def _shown(made: Cluster, output: Path, *remarks: str) -> None:
    from aurora.reports.tables import cluster_table

    console = terminal()
    console.print(cluster_table(made))
    for remark in remarks:
        console.print(remark, soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
