"""aurora export and aurora import: placements to and from formats of serving engines, and routing recorded by engines."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from aurora.cli.inputs import check_output, loads_of
from aurora.cli.options import refuse_given, verb
from aurora.cli.output import show, working
from aurora.cli.profile import shown_profile
from aurora.errors import BadInput
from aurora.io import load_json, load_model_config, save, write_text
from aurora.io.engine_placements import PLACEMENT_FORMATS, export_placement, import_placement
from aurora.io.plans import PLAN_FORMAT, load_placement, load_plan, save_placement
from aurora.io.routing_dumps import ROUTING_FORMATS
from aurora.types.arrays import MOST_LAYERS
from aurora.types.options import Limits

RECORD = "vllm-record"
OF_PLACEMENT, OF_ROUTING = ("gpus", "loads"), ("sources",)  # options of each


@verb(form=Parameter(choices=tuple(PLACEMENT_FORMATS)))
def export(
    plan: Path,
    /,
    *,
    form: str,
    output: Path | None = None,
    dense_layers: Annotated[int | None, Limits(least=0, most=MOST_LAYERS - 1)] = None,
    as_json: bool = False,
) -> None:
    """Write a plan's placement in the format of a serving engine. Print its cost and how to start the engine with it.

    Args:
        plan: a plan of one model, or a placement as aurora place and aurora import write it.
        form: the engine's format.
        output: default: print it.
        dense_layers: number of the model's first layers without experts; the engine counts them too; default: the plan's.
    """
    from aurora.advisor.engines import command_with
    from aurora.reports.plan_tables import padding_line

    check_output(output=output)
    if not PLACEMENT_FORMATS[form].by_decoder:
        refuse_given(("dense_layers",), f"none with `form` {form}, which has no numbers of layers without experts")
    layers, path = None if dense_layers is None else range(dense_layers), output and output.resolve()
    expert_bytes = None
    if load_json(plan).get("format") == PLAN_FORMAT:
        whole = load_plan(plan)
        if whole.colocated:
            raise BadInput(f"{plan}: expected a plan of one model, as engines serve it, found one of {len(whole.models)}")
        planned = whole.models[0]
        expert_bytes = planned.expert_bytes
        placement = planned.placement
        numbers = planned.dense_layers if layers is None else layers
        exported = export_placement(placement, form, numbers, planned.load_LE, whole.cluster.equal, path)
    else:
        placement = load_placement(plan)
        exported = export_placement(placement, form, layers or (), path=path)
    if exported.off_by > 1e-9:
        off = f"{exported.off_by:.0%}"
        print(f"aurora: the engine divides tokens evenly over replicas: shares are off by up to {off}", file=sys.stderr)
    if output is not None:
        write_text(output, exported.text)
    launch = command_with(form, path or Path("FILE"), placement.gpus, placement.experts, exported.redundant)
    least, slots = -placement.experts % placement.gpus, -(-placement.experts // placement.gpus)
    fewer = f"the least is {least}, {slots} slots on each GPU: aurora plan --slots-per-gpu {slots}"
    added_bytes_G = None if expert_bytes is None else exported.added_LG.sum(axis=0) * expert_bytes
    summary = {
        "output": output,
        "format": form,
        "redundant_experts": exported.redundant,
        "least_redundant_experts": least,
        "added_experts": exported.added_LG.sum(axis=1),
        "added_bytes": added_bytes_G,
        "shares_off": exported.off_by,
        "launch": launch,
        "left_out": exported.left_out,
        "text": None if output else exported.text,
    }
    notes = [padding_line(exported, added_bytes_G), *[fewer] * (exported.redundant > least), exported.left_out]
    notes.append(f"to use it: {launch}")
    if output is None and not as_json:
        print(*notes, sep="\n", file=sys.stderr)
    show(as_json, summary, *((f"wrote {output}", *notes) if output else (exported.text.removesuffix("\n"),)))


@verb(form=Parameter(choices=(*PLACEMENT_FORMATS, *ROUTING_FORMATS, RECORD)))
def import_(
    file: list[Path],
    /,
    *,
    form: str,
    output: Path | None = None,
    shape: Path | None = None,
    gpus: int | None = None,
    loads: Path | None = None,
    sources: int | None = None,
    as_json: bool = False,
) -> None:
    """Read a serving engine's placement, in which replicas share an expert's load evenly, or routing that an engine recorded.

    Args:
        file: an engine's placement; or recorded routing (of vllm-record a folder), each file a traffic domain.
        form: the engine's format.
        output: default: placement.json; for recorded routing profile.npz.
        shape: the model's config.json or folder.
        gpus: for a placement: number of GPUs, if the file does not say.
        loads: for a placement: traffic on which it is compared with none: as of aurora place, or a profile.
        sources: for recorded routing: source ranks, over which it is divided evenly; default: those of the files, or 4.
    """
    from aurora.profiler.import_routing import import_profile
    from aurora.profiler.merge_records import load_records

    placement = form in PLACEMENT_FORMATS
    refuse_given(OF_ROUTING if placement else OF_PLACEMENT, f"for {'recorded routing' if placement else 'a placement'} only")
    if (placement or form == RECORD) and len(file) != 1:
        raise BadInput(f"import --format {form}: expected one {'file' if placement else 'folder'}, found {len(file)}")
    target = output or Path("placement.json" if placement else "profile.npz")
    check_output(output=target)
    if placement:
        _import_placement(file[0], form, target, gpus, loads, shape, as_json)
        return
    if form == RECORD:
        profile = load_records(file[0])
    elif shape is None:
        raise BadInput(f"import --format {form}: expected --shape CONFIG.json, the model's sizes, which the file does not hold")
    else:
        with working("reading routing"):
            profile = import_profile(file, form, load_model_config(shape), sources)
    save(profile, target)
    shown_profile(profile, target, as_json)


def _import_placement(
    file: Path, form: str, output: Path, gpus: int | None, loads: Path | None, shape: Path | None, as_json: bool
) -> None:
    """Writes the placement in an engine's file, and shows its sizes."""
    from aurora.algorithms.placement.map_balance import map_balance
    from aurora.algorithms.workload.model_config import Shape

    model = Shape.of(load_model_config(shape)) if shape else None
    imported = import_placement(file, form, gpus, model.dense_layers if model else (), model)
    placement, remarks = imported.placement, [*imported.remarks, *(model.remarks if model else ())]
    balance = None if loads is None else map_balance(placement, loads_of(loads), imported.slots_LP)
    save_placement(placement, f"imported from {form}", output)
    layers, slots = len(placement.slots_LG), sum(map(len, placement.slots_LG[0]))
    slots = slots if imported.slots_LP is None else imported.slots_LP.shape[1]
    sizes = {"layers": layers, "experts": placement.experts, "slots": slots, "gpus": placement.gpus}
    where = f"{layers} layers, {placement.experts} experts in {slots} slots on {placement.gpus} GPUs"
    summary = {"output": output, "format": form, **sizes, "remarks": remarks, "balance": balance and balance.as_json}
    show(as_json, summary, *remarks, None if balance is None else str(balance), f"wrote {output}: {where}")
