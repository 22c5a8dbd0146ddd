"""aurora export and aurora import: placements to and from the formats of serving engines."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, terminal

Form = Annotated[str, typer.Option("--format", help="sglang, eplb, vllm-ascend, trtllm")]
Dense = Annotated[int, typer.Option(help="dense layers before the MoE ones: the engine's file counts or leaves room for them")]


def export(
    plan: Annotated[Path, typer.Argument(help="a plan, or a placement as aurora place and aurora import write it")],
    form: Form,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default: print it")] = None,
    model: Annotated[str | None, typer.Option(help="of a plan for two: which model")] = None,
    dense_layers: Dense = 0,
) -> None:
    """Write a plan's placement as a serving engine reads it."""
    from aurora.store import write_text
    from aurora.store.engines import export_placement, off_by
    from aurora.store.placements import load_placement

    check_output(output, inputs=[plan])
    placement = load_placement(plan, model)
    text = export_placement(placement, form, dense_layers)
    if (off := off_by(placement, form)) > 1e-9:
        print(f"aurora: the engine divides tokens evenly over replicas: shares are off by up to {off:.0%}", file=sys.stderr)
    if output is None:
        print(text, end="")
        return
    write_text(output, text)
    terminal().print(f"wrote {output}", soft_wrap=True)


def import_(
    file: Annotated[Path, typer.Argument(help="a placement in an engine's format")],
    form: Form,
    output: Annotated[Path, typer.Option("--output", "-o", help="the placement to write")] = Path("placement.json"),
    gpus: Annotated[int | None, typer.Option(help="on how many GPUs its slots lie, where the file does not say")] = None,
    dense_layers: Dense = 0,
) -> None:
    """Read a serving engine's placement; replicas of an expert share its load evenly."""
    from aurora.store.engines import import_placement
    from aurora.store.placements import save_placement

    check_output(output, inputs=[file])
    placement = import_placement(file, form, gpus, dense_layers)
    save_placement(placement, f"imported from {form}", output)
    layers, slots = len(placement.slots_LG), sum(map(len, placement.slots_LG[0]))
    terminal().print(
        f"wrote {output}: {layers} layers, {placement.experts} experts in {slots} slots on {placement.gpus} GPUs",
        soft_wrap=True,
    )
