"""aurora profile --shape: a model's config.json and a GPU system -> compute curves and a cluster, both as measured there."""

from pathlib import Path

from aurora.cli.common import check_output
from aurora.cli.subcommand import show


def profile_system(shape: Path, system: str, engine: str, gpus: int | None, output: Path, as_json: bool) -> None:
    """Write and print a model's compute curves on a system of aiconfigurator-core, and the link curves of its all-to-alls.

    Args:
        shape: the model's config.json or folder, or the name of a shipped model.
        system, engine: whose measurements.
        gpus: GPUs of a node that share the experts; None: all.
        output: the curves to write; the cluster goes beside them, as OUTPUT.toml.
        as_json: print one JSON object.
    """
    from aurora.cli.as_json import cluster_json, curves_json
    from aurora.io import load_model_config, save, save_cluster
    from aurora.io.silicon_systems import system_cluster, system_curves
    from aurora.reports.plan_tables import curves_table, link_curves_table
    from aurora.types import PHASES

    beside = output.with_suffix(".toml")
    check_output(output=output, cluster=beside)
    cluster = system_cluster(system, gpus)
    curves = system_curves(load_model_config(shape), system, engine, len(cluster))
    save(curves, output)
    save_cluster(cluster, beside, [f"Link curves: nccl on {system}, from aiconfigurator-core (Apache-2.0)."])
    links = cluster_json(cluster)["link_curves"]
    tables = {kind: [phases[phase] for phase in PHASES] for kind, phases in curves.kinds.items()}
    show(
        as_json,
        {"output": output, "cluster": beside, **curves_json(curves), "link_curves": links},
        curves_table(curves.model, tables),
        link_curves_table(cluster),
        *(f"{what}: {said}" for what, said in curves.provenance.items()),
        f"wrote {output} and {beside}",
    )
