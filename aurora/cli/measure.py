"""aurora measure and doctor: measure links between ranks and compute curves, list GPUs, and check this installation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from aurora.cli.inputs import check_model, check_output
from aurora.cli.options import verb
from aurora.cli.output import need_models, progress_bars, show, working
from aurora.errors import BadInput, need
from aurora.io import load, load_curves, save, save_cluster
from aurora.types import Cluster, ComputeCurves, Profile, ProfileOptions
from aurora.types.options import MOST_PROCESSES, Limits, Tokens

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb()
def links(
    *,
    output: Path = Path("cluster.toml"),
    ranks: Annotated[int | None, Limits(least=2, most=MOST_PROCESSES)] = None,
    as_json: bool = False,
) -> None:
    """Measure the links between ranks, one pair at a time and several at once, and write a cluster file.

    Messages go over NCCL if every rank has a GPU, else over gloo.

    Args:
        output: the cluster TOML to write.
        ranks: number of local ranks; under torchrun its ranks.
    """
    check_output(output=output)
    need("torch")
    from aurora.profiler.link_timing import measure_links
    from aurora.reports.plan_tables import links_table

    with working("measuring links"):
        measured = measure_links(ranks)
    if measured is None:
        return  # under torchrun rank 0 speaks
    rate_Bps_GG, startup_s_GG = measured.links.rate_Bps_GG, measured.links.startup_s_GG
    pairs = {"rate_Bps": rate_Bps_GG, "startup_s": startup_s_GG}
    _write(as_json, measured.cluster, output, measured.remarks, pairs, links_table(rate_Bps_GG, startup_s_GG))


@verb()
def compute(
    model: str | None = None,
    /,
    *,
    batch: Tokens = ProfileOptions.batch,
    output: Path = Path("curves.npz"),
    add: list[Path] | None = None,
    as_json: bool = False,
) -> None:
    """Measure the times of a model's router, experts and weighted sum on this machine, for profiles counted elsewhere.

    Args:
        model: folder of a transformers MoE model; not needed with --add.
        batch: curves reach to the tokens of twice as many prompts.
        output: the profile or curves file to add this GPU kind to; created if missing.
        add: a curves file to add, which this command wrote on another machine.
    """
    from aurora.algorithms.workload.timing_doubts import timing_doubts
    from aurora.reports.json_objects import curves_json
    from aurora.reports.plan_tables import curves_table

    joined = add or []
    if model is None and not joined:
        raise BadInput("measure compute: expected a model folder, or --add")
    check_output(output=output)
    if model is not None:
        check_model(model)
    loaded, merged = [load_curves(path) for path in joined], load(output) if output.exists() else None
    if merged is not None and not isinstance(merged, Profile | ComputeCurves):
        raise BadInput(f"{output}: expected a profile or curves to add to, found a {type(merged).__name__.lower()}")
    added = [*([] if model is None else [_measured(model, batch)]), *loaded]
    for curves in added:
        merged = curves if merged is None else curves.into(merged)
    assert merged is not None
    save(merged, output)
    table = curves_table(merged.model, merged.curves if isinstance(merged, Profile) else merged.kinds)
    said = [f"{key}: {text}" for curves in added for key, text in curves.provenance.items()]
    said += [doubt for curves in added for doubt in timing_doubts(curves.provenance)]
    show(as_json, {"output": output, **curves_json(merged)}, table, *said, f"wrote {output}")


@verb()
def devices(*, output: Path = Path("cluster.toml"), as_json: bool = False) -> None:
    """Write a cluster file of this machine's GPUs, as NVML names them, with datasheet rates.

    Args:
        output: the cluster TOML to write.
    """
    from aurora.profiler.devices import find_devices

    check_output(output=output)
    machine = find_devices()
    _write(as_json, machine.cluster, output, machine.remarks, {})


def _measured(model: str, batch: int) -> ComputeCurves:
    need_models()
    from aurora.profiler.compute_timing import measure_curves

    tokens = ProfileOptions.prompt_tokens
    with working("measuring compute times"):
        return measure_curves(model, max_tokens=2 * batch * tokens, sequence_tokens=tokens, processes=ProfileOptions.share)


def _write(
    as_json: bool, cluster: Cluster, output: Path, remarks: Sequence[str], more: Mapping[str, object], *tables: "RenderableType"
) -> None:
    """Write a cluster file with remarks on top, and print both."""
    from aurora.reports.json_objects import cluster_json
    from aurora.reports.plan_tables import cluster_table

    save_cluster(cluster, output, remarks)
    summary = {"output": output, **cluster_json(cluster), "remarks": list(remarks), **more}
    show(as_json, summary, cluster_table(cluster), *remarks, f"wrote {output}", *tables)


@verb()
def doctor(*, vllm: str | None = None, as_json: bool = False) -> int:
    """Check what planning, models, ranks and GPUs need here, and say what mends it; exit code 0 if planning works, else 1.

    Args:
        vllm: address of a vLLM server with the plugin, http://HOST:PORT, to check instead: whether a rank is stuck, and why.
    """
    from aurora.profiler.doctor import PLANNING, WORKS, examine, examine_server
    from aurora.reports.tables import Table, text

    with progress_bars() as progress:
        findings = examine(progress) if vllm is None else examine_server(vllm)
    works = all(finding.state == WORKS for finding in findings if vllm or finding.name == PLANNING)
    rows = [(finding.name, finding.state, finding.found, finding.mend) for finding in findings]
    table = Table(dict.fromkeys(("part", "state", "found", "what to do"), text), rows)
    said = f"{'the server' if vllm else 'planning'} {'works' if works else 'does not work'}"
    show(as_json, {"works": works, "findings": [asdict(finding) for finding in findings]}, table, said)
    return 0 if works else 1
