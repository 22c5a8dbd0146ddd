"""aurora order: one all-to-all -> its schedule, bounds and gap."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import check_output, terminal
from aurora.errors import BadInput

if TYPE_CHECKING:
    from aurora.types import Schedule
    from aurora.types.arrays import FloatArray, IntArray


def order(
    traffic: Annotated[Path, typer.Argument(help="bytes from row to column: .csv (no header), .npy, or a profile and --layer")],
    cluster: Annotated[Path | None, typer.Option(help="cluster TOML; without one every port has 12.5e9 Bps")] = None,
    method: Annotated[str, typer.Option(help="an order by name, or all to compare them")] = "openshop",
    startup: Annotated[float | None, typer.Option(help="seconds that a message costs; default: the cluster's")] = None,
    layer: Annotated[int | None, typer.Option(help="of a profile: this MoE layer, experts placed contiguously")] = None,
    seed: Annotated[int, typer.Option(help="for random orders and drawn priorities")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the schedule as JSON")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the JSON to a file")] = None,
) -> None:
    """Order one all-to-all and say how good the order is; `gap` is against the larger of the fluid and the cut bound."""
    from aurora.io import load_cluster, write_text
    from aurora.planner.alltoall.registry import ORDER
    from aurora.planner.alltoall.schedule import TWO_TIER
    from aurora.planner.alltoall.schedule import order as schedule
    from aurora.reports.tables import gantt, order_table

    check_output(output, inputs=[traffic, *([cluster] if cluster else [])])
    ports = load_cluster(cluster) if cluster else None
    bytes_GG = _bytes(traffic, layer)
    if method == "all":
        if as_json or output:
            raise BadInput("order: --method all prints a table; --json and -o take one method")
        servers = ports is not None and ports.fabric is not None and ports.fabric.nic_Bps is not None
        made = [schedule(bytes_GG, ports, name, seed, startup) for name in (*ORDER, *([TWO_TIER] if servers else []))]
        terminal().print(order_table(made))
        _print_cut(made[0])
        return
    one = schedule(bytes_GG, ports, method, seed, startup)
    if output is not None:
        write_text(output, json.dumps(_as_json(one, len(bytes_GG))) + "\n")
    if as_json:
        print(json.dumps(_as_json(one, len(bytes_GG))))
        return
    console = terminal()
    console.print(order_table([one]))
    _print_cut(one)
    if console.is_terminal:
        console.print(gantt(one, len(bytes_GG), console.width), soft_wrap=True)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _bytes(traffic: Path, layer: int | None) -> "IntArray":
    from aurora.io import load_matrix, load_profile
    from aurora.planner.make_plan import contiguous_bytes

    if traffic.suffix != ".npz":
        if layer is not None:
            raise BadInput(f"{traffic}: --layer is for a profile (.npz)")
        return load_matrix(traffic)
    profile = load_profile(traffic)
    if layer is None or not 0 <= layer < profile.layers:
        raise BadInput(f"{traffic}: expected --layer from 0 to {profile.layers - 1}, found {layer}")
    return contiguous_bytes(profile, layer)


def _print_cut(schedule: "Schedule") -> None:
    from aurora.reports.tables import cut_line

    if schedule.cut is not None:
        terminal().print(cut_line(schedule.cut), soft_wrap=True)


def _as_json(schedule: "Schedule", ranks: int) -> dict[str, object]:
    columns: tuple[IntArray | FloatArray, ...] = (
        schedule.src_X, schedule.dst_X, schedule.bytes_X, schedule.start_s_X, schedule.end_s_X, schedule.rate_Bps_X
    )  # fmt: skip
    names: tuple[str, ...] = ("src", "dst", "bytes", "start_s", "end_s", "rate_Bps")
    if schedule.hop_X2 is not None:
        columns, names = (*columns, *schedule.hop_X2.T), (*names, "from", "to")
    return {
        "schema": 1,
        "method": schedule.method,
        "n": ranks,
        "makespan_s": schedule.makespan_s,
        "fluid_bound_s": schedule.fluid_bound_s,
        "one_to_one_bound_s": schedule.one_to_one_bound_s,
        **({} if schedule.cut is None else {"cut_bound_s": schedule.cut.bound_s, "cut_links": list(schedule.cut.links)}),
        "gap": schedule.gap,
        "transfers": [dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in columns), strict=True)],
    }
