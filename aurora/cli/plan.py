"""aurora plan and evaluate: a cluster and a profile per model -> a plan; a plan and other traffic -> slowdown or drift."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cyclopts import Parameter, Token

import aurora
from aurora.algorithms.check.fit import ENGINES, check_engine, without_proof
from aurora.cli.inputs import check_output, loads_of, traffic_of
from aurora.cli.options import as_options, verb
from aurora.cli.output import WORST, progress_bars, show, working
from aurora.errors import BadInput
from aurora.io import load_cluster, load_json, load_plan, load_profile, save
from aurora.io.plans import PLACEMENT_FORMAT, load_placement
from aurora.planner.options import strategies
from aurora.reports.formatting import seconds
from aurora.types import PlanOptions
from aurora.types.options import AUTO_SLOTS
from aurora.types.read_numbers import whole_number

SLOTS = {"auto": AUTO_SLOTS, "memory": None}


def _slots(_: object, tokens: Sequence[Token]) -> int | None:
    """Returns slots per GPU from auto, memory or a number."""
    text = tokens[0].value
    if text in SLOTS:
        return SLOTS[text]
    with suppress(BadInput):
        if (slots := whole_number(text)) > 0:
            return slots
    raise ValueError(f"expected auto, memory or a whole number above zero, found {text!r}")


def _step_tokens(_: object, tokens: Sequence[Token]) -> tuple[int, int]:
    """Returns the (fewest, most) tokens of a step from N or LO:HI."""
    least, _, most = tokens[0].value.partition(":")
    try:
        return whole_number(least), whole_number(most or least)
    except BadInput:
        raise ValueError(f"expected whole numbers as N or LO:HI, found {tokens[0].value!r}") from None


@verb(
    **{name: Parameter(choices=names) for name, names in strategies().items()} | {"colocate": None},
    slots_per_gpu=Parameter(converter=_slots, metavar="N|auto|memory", show_default=lambda _: "auto"),
    tokens_per_step=Parameter(converter=_step_tokens, n_tokens=1, metavar="N|LO:HI"),
    engine=Parameter(choices=tuple(ENGINES)), preemption_s=None, seed=None,
)  # fmt: skip
def plan(
    *,
    profile: list[Path],
    cluster: Path,
    output: Path = Path("plan.json"),
    domain: list[Path] | None = None,
    engine: str | None = None,
    explain: bool = False,
    options: PlanOptions = PlanOptions(),
    as_json: bool = False,
) -> None:
    """Decide which GPU holds which experts and in which order tokens travel; every schedule is checked.

    Args:
        profile: profile of a model; give two or more to share the GPUs between models.
        cluster: cluster TOML, or the name of a shipped cluster.
        output: the plan to write.
        domain: another profile of the same model, which the plan must serve too; may be repeated.
        engine: refuse plans that this serving engine cannot serve.
        explain: show the bounds of each layer, further bounds of the plan, and the terms of each layer's time.
    """
    from aurora.algorithms.placement.explain import explain as explained
    from aurora.algorithms.placement.explain import unexplained
    from aurora.reports.json_objects import explanation_json, plan_json
    from aurora.reports.plan_tables import bound_lines, expectation_lines, explain_tables, gap_line, plan_table

    machines = load_cluster(cluster)
    check_output(output=output)
    profiles, further = (traffic_of(files, len(machines)) for files in (profile, domain or []))
    paths = [os.path.relpath(path.resolve(), output.resolve().parent) for path in profile]
    began = time.perf_counter()
    with progress_bars() as progress:
        planned = aurora.plan(machines, profiles, options, domains=further, profile_paths=paths, progress=progress)
    if engine is not None:
        check_engine(planned, engine)
    took_s = time.perf_counter() - began
    no_progress = unexplained(planned) or ("expected no `domain`" if further else None)
    why = explained(planned, profiles) if explain and no_progress is None else []
    save(planned, output)
    summary = {"output": output, "seconds": took_s, **plan_json(planned)}
    show(
        as_json,
        {**summary, "explanation": explanation_json(why)},
        plan_table(planned, WORST, explain),
        *explain_tables(planned, why),
        gap_line(planned),
        *(bound_lines(planned) if explain else ()),
        f"no terms of layers: {as_options(no_progress)}" if explain and no_progress else None,
        *expectation_lines(planned),
        *(as_options(note) for note in planned.notes),
        f"planned in {seconds(took_s)}",
        f"wrote {output}",
    )


@verb()
def evaluate(
    plan: Path | None = None,
    /,
    *,
    profile: list[Path],
    before: Path | None = None,
    as_json: bool = False,
) -> None:
    """Evaluate a plan on other traffic, and compare it with a plan made for that traffic. With --before, show instead how far
    the traffic of each layer has changed, how much the plan loses by it, and whether to plan again.

    Args:
        plan: plan JSON; or a placement, whose balance is compared with experts in sequence; optional with --before; default:
            experts balanced for that traffic.
        profile: the traffic, one profile per model.
        before: show the drift since this profile, from which the plan was made.
    """
    from aurora.algorithms.placement.map_balance import map_balance
    from aurora.reports.json_objects import drift_json, evaluation_json
    from aurora.reports.plan_tables import drift_table, evaluation_table

    if plan is not None and before is None and load_json(plan).get("format") == PLACEMENT_FORMAT:
        if len(profile) != 1:
            raise BadInput(f"`profile`: expected one with a placement, found {len(profile)}")
        balance = map_balance(load_placement(plan), loads_of(profile[0]))
        show(as_json, {"balance": balance.as_json}, str(balance))
        return
    served = None if plan is None else load_plan(plan)
    if before is not None:
        if len(profile) != 1:
            raise BadInput(f"`profile`: expected one with `before`, of the same model, found {len(profile)}")
        gpus = load_profile(before).sources if served is None else len(served.cluster)
        first, later = traffic_of((before, profile[0]), gpus)
        with working("comparing traffic"):
            drifted = aurora.drift(first, later, served)
        of = "of a plan balanced for the earlier traffic: " if served is None else ""
        show(as_json, drift_json(drifted), drift_table(drifted, WORST), of + drifted.reason)
        return
    if served is None:
        raise BadInput("`plan`: expected a file, or `before`, found neither")
    traffic = traffic_of(profile, len(served.cluster))
    with working("planning anew for this traffic"):
        times = aurora.evaluate(served, traffic)
    table, doubt = evaluation_table(served, times, WORST), without_proof(served, traffic) or None
    show(as_json, evaluation_json(served, times), table, doubt)
