"""aurora order: one all-to-all -> its schedule, bounds and gap."""

from pathlib import Path

from cyclopts import Parameter

import aurora
from aurora.algorithms.alltoall.registry import ORDER
from aurora.cli.inputs import check_output, load_traffic
from aurora.cli.options import verb
from aurora.cli.output import json_text, show, working
from aurora.errors import BadInput
from aurora.io import load_cluster, load_matrix, write_text
from aurora.types.arrays import IntArray

ALL = "all"


@verb(method=Parameter(choices=(*ORDER, "auto", ALL)))
def order(
    traffic: Path,
    /,
    *,
    cluster: Path | None = None,
    method: str = "openshop",
    layer: int | None = None,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Order one all-to-all. Show its time, its bounds, and the `gap` to the larger of the fluid and the cut bound.

    Args:
        traffic: bytes from row to column (.csv without header, or .npy); or a profile, with --layer.
        cluster: cluster TOML, or a shipped cluster's name; default: every port has 12.5e9 Bps.
        method: the order; all: compare them.
        layer: for a profile: the MoE layer, whose experts are placed contiguously.
        output: write the JSON to a file.
    """
    from aurora.reports.json_objects import schedule_json
    from aurora.reports.plan_tables import cut_line, order_table

    check_output(output=output)
    machines, bytes_GG = load_cluster(cluster) if cluster else None, _bytes(traffic, layer)
    with working("ordering"):
        schedules = [aurora.order(bytes_GG, machines, name) for name in (ORDER if method == ALL else [method])]
    objects = [schedule_json(schedule, len(bytes_GG)) for schedule in schedules]
    summary = {"schedules": objects} if method == ALL else objects[0]
    if output is not None:
        write_text(output, json_text(summary) + "\n")
    cut, wrote = schedules[0].cut, None if output is None else f"wrote {output}"
    show(as_json, summary, order_table(schedules), None if cut is None else cut_line(cut), wrote)


def _bytes(traffic: Path, layer: int | None) -> IntArray:
    from aurora.algorithms.workload.traffic import contiguous_bytes

    if traffic.suffix != ".npz":
        if layer is not None:
            raise BadInput(f"{traffic}: --layer is for a profile (.npz)")
        return load_matrix(traffic)
    profile = load_traffic(traffic)
    if layer is None or not 0 <= layer < profile.layers:
        raise BadInput(f"{traffic}: expected --layer from 0 to {profile.layers - 1}, found {layer}")
    return contiguous_bytes(profile, layer)
