"""Output of subcommands: tables and sentences, or with `--json` one object, whose keys docs/json.md names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aurora.types import Cluster, ComputeCurves, Plan, Profile, ReplicaPlacement, ResilientPlacement, Schedule

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from aurora.planner.evaluate import Drift, Evaluation
    from aurora.planner.migrate import Migration
    from aurora.planner.placement.explain import LayerExplanation
    from aurora.reports.trace_times import Comparison, Summary
    from aurora.simulator.changing_traffic import FollowedTraffic
    from aurora.simulator.requests import RequestSimulation
    from aurora.types.arrays import FloatArray, IntArray

Found = dict[str, Any]

SCHEMA = 1  # of the JSON that subcommands print: docs/json.md


def terminal() -> Console:
    """Returns the console that tables are printed on, with markup off."""
    from rich.console import Console

    return Console(markup=False, highlight=False)


def show(as_json: bool, found: Mapping[str, Any], *parts: RenderableType | None) -> None:
    """Print a result.

    Args:
        as_json: print `found` as one JSON object with its schema, and nothing else; otherwise print `parts`.
        found: the result.
        parts: tables and sentences, printed in sequence; None is skipped.
    """
    if as_json:
        print(json.dumps(_plain({"schema": SCHEMA, **found}), allow_nan=False))
        return
    console = terminal()
    for part in parts:
        if part is not None:
            console.print(part, soft_wrap=isinstance(part, str))


def _plain(value: Any) -> Any:
    """Returns `value` in JSON's types: arrays as lists, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def profile_json(profile: Profile) -> Found:
    """Returns a profile's shape and each layer's load."""
    layers = [
        {"pairs": load_E.sum(), "skew": load_E.max() / load_E.mean() if load_E.any() else 0.0, "hottest": load_E.argmax()}
        for load_E in profile.load_LE
    ]
    head = {name: getattr(profile, name) for name in ("model", "windows", "sources", "experts", "top_k")}
    return {**head, "kinds": list(profile.curves), "layers": layers, "provenance": dict(profile.provenance)}


def plan_json(plan: Plan) -> Found:
    """Returns a plan's strategies, objective and bounds, and each layer's dispatch."""
    models = [
        {
            "model": model.model,
            "hierarchy": model.hierarchy
            and {
                "servers": model.hierarchy.server_G,
                "chunks": model.hierarchy.chunks,
                "level_from": model.hierarchy.level_from,
            },
            "layers": [
                {
                    "dispatch_s": model.dispatch_s_L[layer],
                    "fluid_bound_s": model.fluid_bound_s_L[layer],
                    "one_to_one_bound_s": model.one_to_one_bound_s_L[layer],
                    "cut_bound_s": model.cut_L[layer].bound_s if model.cut_L else None,
                }
                for layer in range(len(model.dispatch_s_L))
            ],
        }
        for model in plan.models
    ]
    times = ("objective_s", "between_s", "bound_s", "gap", "assignment_bound_s", "unseen_s", "slot_gain")
    head = {name: getattr(plan, name) for name in ("scenario", "epoch", "objective", *times)}
    return {**head, "strategies": dict(plan.strategies), "notes": list(plan.notes), "models": models}


def migration_json(moved: Migration | None) -> Found | None:
    """Returns a migration's layers, bytes and seconds, and the objective before and after; None without one."""
    if moved is None:
        return None
    times = {"takes_s": moved.schedule.makespan_s, "bound_s": moved.schedule.fluid_bound_s}
    objectives = {"before_s": moved.kept_s, "planned_s": moved.planned_s, "after_s": moved.moved_s}
    return {"layers": list(moved.layers), "bytes": int(moved.bytes_GG.sum()), **times, **objectives}


def explanation_json(layers: Sequence[LayerExplanation]) -> list[Found]:
    """Returns each layer's terms, the GPU that attains each, and how often the longest path holds it."""
    return [
        {
            "layer": each.layer,
            "seconds": each.value_s,
            "assignment_bound_s": each.assignment_bound_s,
            "bound_term": each.bound_term,
            "terms": [
                {"term": term, "seconds": seconds, "gpu": gpu, "times": times}
                for term, seconds, gpu, times in zip(
                    each.terms, each.seconds_X.tolist(), each.gpu_X.tolist(), each.times_X.tolist(), strict=True
                )
            ],
        }
        for each in layers
    ]


def evaluation_json(plan: Plan, found: Evaluation) -> Found:
    """Returns a plan's times on other traffic, beside the times of a plan made for that traffic."""
    models = [
        {
            "model": model.model,
            "layers": [
                {"dispatch_s": took_s, "own_dispatch_s": own_s}
                for took_s, own_s in zip(dispatch_s_L.tolist(), own.dispatch_s_L.tolist(), strict=True)
            ],
        }
        for model, own, dispatch_s_L in zip(plan.models, found.own.models, found.dispatch_s_ML, strict=True)
    ]
    served_s = float(found.served_s_L.sum())
    times = {
        "objective_s": served_s,
        "between_s": found.between_s,
        "own_objective_s": found.own.objective_s,
        "loss": found.loss,
        "loss_between": found.loss_between,
    }
    return {"objective": plan.objective, **times, "layers_s": found.served_s_L, "models": models}


def drift_json(found: Drift) -> Found:
    """Returns how much two profiles differ, by layer, and whether to plan again."""
    layers = zip(found.variation_L.tolist(), found.noise_L.tolist(), found.overlap_L.tolist(), strict=True)
    rows = [{"variation": a, "by_chance": b, "hot_overlap": c} for a, b, c in layers]
    head = {name: getattr(found, name) for name in ("replan", "reason", "loss", "loss_between", "threshold", "moved", "hot")}
    return {**head, "layers": rows}


def summary_json(summary: Summary) -> Found:
    """Returns a trace's times, utilisation and gaps."""
    layers = [{**asdict(layer), "gap": layer.gap} for layer in summary.layers]
    head = {name: getattr(summary, name) for name in ("kind", "seconds", "phases", "utilisation", "exchange_gap")}
    return {**head, "layers": layers}


def models_json(summary: Summary) -> list[Found]:
    """Returns the seconds, the steps and the time per output token of each model or micro-batch of a trace."""
    from aurora.reports.trace_tables import percentiles

    return [
        {
            "model": each.model,
            "steps": len(each.step_s_T),
            "seconds": each.seconds,
            "step_s": percentiles(each.step_s_T),
            "tpot_s": percentiles(each.between_s_X),
        }
        for each in summary.models
    ]


def comparison_json(found: Comparison | None) -> Found | None:
    """Returns predicted and measured seconds by phase; None without a comparison."""
    return None if found is None else {**asdict(found), "error": found.error}


def placement_json(made: ReplicaPlacement) -> Found:
    """Returns a placement by loads, in the format that `aurora export` reads."""
    from aurora.io.plans import layers_json

    loads = zip(made.max_load_L.tolist(), made.mean_load_L.tolist(), made.bound_L.tolist(), strict=True)
    layers = [
        {**placed, "max_load": most, "mean_load": mean, "bound": bound}
        for placed, (most, mean, bound) in zip(layers_json(made.placement), loads, strict=True)
    ]
    return {"method": made.method, "layers": layers, "seconds": made.seconds}


def survival_json(made: ResilientPlacement) -> Found:
    """Returns a placement for failures, with the probability that every expert is still held."""
    from aurora.io.plans import by_failures

    layers = [
        {"slots": [list(held) for held in slots_N], "survival": by_failures(survival.p_K)}
        for slots_N, survival in zip(made.slots_LN, made.survival_L, strict=True)
    ]
    return {"method": made.method, "layers": layers}


def schedule_json(schedule: Schedule, ranks: int) -> Found:
    """Returns a schedule with its bounds and every transfer."""
    columns: tuple[IntArray | FloatArray, ...] = (
        schedule.src_X, schedule.dst_X, schedule.bytes_X, schedule.start_s_X, schedule.end_s_X, schedule.rate_Bps_X
    )  # fmt: skip
    names: tuple[str, ...] = ("src", "dst", "bytes", "start_s", "end_s", "rate_Bps")
    return {
        "method": schedule.method,
        "n": ranks,
        "makespan_s": schedule.makespan_s,
        "fluid_bound_s": schedule.fluid_bound_s,
        "one_to_one_bound_s": schedule.one_to_one_bound_s,
        **({} if schedule.cut is None else {"cut_bound_s": schedule.cut.bound_s, "cut_links": list(schedule.cut.links)}),
        "gap": schedule.gap,
        "transfers": [dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in columns), strict=True)],
    }


def cluster_json(cluster: Cluster) -> Found:
    """Returns a cluster's fabric and link curves, and its GPUs by rank."""
    from aurora.io.clusters import fabric_json, link_curves_json

    fabric = None if cluster.fabric is None else fabric_json(cluster.fabric, cluster.gpus)
    return {
        "name": cluster.name,
        "incast": cluster.incast,
        "fabric": fabric,
        "link_curves": link_curves_json(cluster.link_curves),
        "gpus": [asdict(gpu) for gpu in cluster.gpus],
    }


def curves_json(made: Profile | ComputeCurves) -> Found:
    """Returns compute curves: seconds at token counts, by GPU kind and phase."""
    kinds: Mapping[str, Any] = made.curves if isinstance(made, Profile) else made.kinds
    table = {
        kind: {phase: {"tokens": curve.tokens_X, "seconds": curve.seconds_X} for phase, curve in phases.items()}
        for kind, phases in kinds.items()
    }
    return {"model": made.model, "kinds": table, "provenance": dict(made.provenance)}


def followed_json(followed: FollowedTraffic) -> Found:
    """Returns what each way to follow changing traffic reached."""
    ways = [
        {
            "name": each.name,
            "slowest": each.slowest_W[followed.counted_W].mean(),
            "slowest_all": each.slowest_W.mean(),
            "worst": each.worst(),
            "bytes": each.bytes_W.sum(),
            "changes": each.changes,
            "stall_s": each.stall_s,
            "lengthened_s": each.lengthened_s,
        }
        for each in followed.ways
    ]
    return {
        "change": followed.change,
        "windows": len(followed.counted_W),
        "ways": ways,
    }


def requests_json(found: RequestSimulation) -> Found:
    """Returns how requests were served, and how far interpolated steps are from simulated ones."""
    from aurora.reports.trace_tables import percentiles

    served, off_C = found.served, abs(found.off_C)
    return {
        "seconds": served.seconds,
        "tokens_per_s": served.tokens_per_s,
        "ttft_s": percentiles(served.ttft_s_Q),
        "tpot_s": percentiles(served.tpot_s_X),
        "queue_grows": served.queue_grows,
        "steps": served.steps,
        "simulated_steps": found.points,
        "error": {"steps": len(off_C), "most": off_C.max(initial=0.0), "mean": found.off_C.mean() if len(off_C) else 0.0},
    }
