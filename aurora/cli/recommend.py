"""aurora recommend: a model, GPUs and an engine -> the plan to serve by, its gain, and the command that starts the engine."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aurora
from aurora.cli.choices import completed
from aurora.cli.inputs import check_folder, make_folder
from aurora.cli.options import Json, refuse_given
from aurora.cli.output import show
from aurora.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from aurora.advisor.recommend import Recommendation


OUTPUT = Path("recommended")


def recommend(
    engine: Annotated[
        str, typer.Option(help="the serving engine: {recommended_engine}", autocompletion=completed("recommended_engine"))
    ],
    model: Annotated[
        str | None, typer.Option(help="the model's config.json or folder, or a shipped model's name; needed without --profile")
    ] = None,
    gpus: Annotated[
        list[str] | None, typer.Option(help="kinds and numbers, such as h20:8,a100:8, or one by one; or give --cluster")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="cluster TOML, or a shipped cluster's name")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="the model's traffic, one source rank per GPU; default: synthetic traffic")
    ] = None,
    nic_Bps: Annotated[
        float, typer.Option("--nic-bps", help="with --gpus: a GPU's NIC to other servers, bytes per second")
    ] = 50e9,
    per_server: Annotated[int, typer.Option(help="with --gpus: GPUs of a server")] = 8,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the plan and the engine's file")] = OUTPUT,
    as_json: Json = False,
) -> None:
    """Say what to do with a model on given GPUs: plan, gain over the engine's default, and launch command; or nothing."""
    from aurora.advisor.recommend import SERVING_ENGINES, launch
    from aurora.advisor.sharing import sharing_advice
    from aurora.io import load_cluster, load_profile, save, write_text

    if (not gpus) == (cluster is None):
        raise BadInput("recommend: expected either --gpus or --cluster")
    if not gpus:
        refuse_given(("nic_Bps", "per_server"), "with `gpus`")
    check_folder(output, "cluster.toml", "profile.npz", "plan.json", *{use.file for use in SERVING_ENGINES.values()})
    machines = load_cluster(cluster) if cluster else ",".join(gpus or [])
    traffic = load_profile(profile) if profile else None
    found = aurora.recommend(machines, engine, model=model, profile=traffic, nic_Bps=nic_Bps, per_server=per_server)
    command = None
    if found.best is not None:
        plan = found.best.plan
        command, placement = launch(found, output, model or "MODEL")
        make_folder(output)
        save(found.cluster, output / "cluster.toml")
        save(found.profile, output / "profile.npz")
        save(replace(plan, models=(replace(plan.models[0], profile_path="profile.npz"),)), output / "plan.json")
        if placement is not None:
            write_text(output / SERVING_ENGINES[engine].file, placement)
    show(
        as_json,
        {
            "engine": engine,
            "measured": profile is not None,
            "gpus": [gpu.kind for gpu in found.cluster.gpus],
            "default_s": found.default_s,
            "tokens": found.tokens,
            "candidates": [
                {
                    "name": candidate.name,
                    "seconds": candidate.seconds,
                    "gain": candidate.gain,
                    "low": candidate.low,
                    "high": candidate.high,
                }
                for candidate in found.candidates
            ],
            "best": found.best and found.best.name,
            "sharing": {"batch": found.sharing.batch, "gains": found.sharing.gains, "advice": sharing_advice(found.sharing)},
            "output": output if found.best else None,
            "launch": command,
        },
        _table(found),
        *_answer(found, measured=profile is not None),
        sharing_advice(found.sharing),
        *([f"wrote {output}", f"start the engine with: {command}"] if command else []),
    )


def _table(found: "Recommendation") -> "Table":
    """The candidates beside the engine's default."""
    from rich.table import Table

    from aurora.advisor.recommend import CONFIDENCE
    from aurora.reports.formatting import seconds

    kinds = [gpu.kind for gpu in found.cluster.gpus]
    title = f"{found.profile.model} on " + " and ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    table = Table("plan", "step", "tokens/s", "gain", f"{CONFIDENCE:.0%} interval", title=title)
    table.add_row(f"{found.engine}'s default", seconds(found.default_s), f"{found.tokens / found.default_s:,.0f}", "1.00x", "")
    for candidate in found.candidates:
        between = "" if candidate.low is None else f"{candidate.low:.2f}x to {candidate.high:.2f}x"
        table.add_row(
            candidate.name,
            seconds(candidate.seconds),
            f"{found.tokens / candidate.seconds:,.0f}",
            f"{candidate.gain:.2f}x",
            between,
        )
    return table


def _answer(found: "Recommendation", measured: bool) -> list[str]:
    """Returns the recommendation in sentences."""
    from aurora.advisor.recommend import WORTH

    said = []
    if found.best is None:
        said.append(f"Nothing is worth doing: no plan is surely faster than {found.engine}'s default by {WORTH - 1:.0%}.")
    elif found.best.low is None:
        said.append(f"Serve by the plan: {found.best.name}, {found.best.gain:.2f}x on the traffic that it was made for.")
    else:
        said.append(
            f"Serve by the plan: {found.best.name}, {found.best.gain:.2f}x on traffic that it was not made for "
            f"({found.best.low:.2f}x to {found.best.high:.2f}x)."
        )
        said.append("It holds while traffic stays as in the profile: aurora evaluate --before compares later traffic with it.")
    if not measured:
        said.append("The traffic is synthetic: it tells what skew costs, not which of your experts are hot. Give --profile.")
    if found.best is not None and len({gpu.node for gpu in found.cluster.gpus}) > 1:
        said.append("The command is for one server: add the engine's options for several.")
    said.append("Steps are MoE layers with the attention between them, simulated.")
    return said
