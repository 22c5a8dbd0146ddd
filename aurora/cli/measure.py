"""What `aurora profile` measures beside routing: compute curves, links and devices."""

from collections.abc import Sequence
from pathlib import Path

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

        tokens, each = 2 * options.batch * options.prompt_tokens, options.prompt_tokens
        found.insert(0, measure_curves(model, max_tokens=tokens, sequence_tokens=each, processes=options.share))
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
    from aurora.io import save_cluster
    from aurora.profiler.link_timing import measure_links
    from aurora.reports.tables import links_table

    measured = measure_links(ranks, transport)
    if measured is None:
        return  # under torchrun rank 0 speaks
    save_cluster(measured.cluster, output, measured.remarks)
    _shown(measured.cluster, output, *measured.remarks)
    terminal().print(links_table(measured.links.rate_Bps_GG, measured.links.startup_s_GG))


def devices(output: Path) -> None:
    """This machine's GPUs as a cluster file."""
    from aurora.io import save_cluster
    from aurora.profiler.devices import find_devices

    found = find_devices()
    save_cluster(found.cluster, output, found.remarks)
    _shown(found.cluster, output, *found.remarks)


def _shown(made: Cluster, output: Path, *remarks: str) -> None:
    from aurora.reports.tables import cluster_table

    console = terminal()
    console.print(cluster_table(made))
    for remark in remarks:
        console.print(remark, soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)
