"""Results as JSON objects, which subcommands print with `--json`; docs/json.md documents the keys.

KEYS names, for a type of result, the keys of its object and the attributes that they hold: `key`, `key=attribute.of.attribute`,
`attribute.*` for all keys of an attribute's own object, `key=attribute%` for percentiles, `key=attribute#` for a length. Other
dataclasses have a key for each field.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

from aurora.advisor.recommend import Recommendation
from aurora.algorithms.placement.explain import LayerExplanation
from aurora.io.clusters import servers_json
from aurora.io.plans import by_failures, layers_json
from aurora.planner.evaluate import Drift, Evaluation
from aurora.reports.plan_tables import drift_table
from aurora.reports.trace_tables import percentiles
from aurora.types import Cluster, ComputeCurves, Plan, Profile, ReplicaPlacement, ResilientPlacement, Schedule
from aurora.types.requests import RequestSimulation

JsonObject = dict[str, Any]
KEYS = {
    "Profile": "model windows sources experts top_k provenance",
    "Curve": "tokens=tokens_X seconds=seconds_X",
    "Plan": "scenario objective strategies notes objective_s estimated bound_s gap assignment_bound_s unseen_s slot_gain "
    "models",
    "ModelPlan": "model hierarchy",
    "Hierarchy": "servers=server_G chunks level_from",
    "LayerExplanation": "seconds=value_s layer assignment_bound_s bound_term",
    "Drift": "replan reason slowdown estimated slowdown_of_joint threshold moved hot",
    "Summary": "kind seconds phases utilisation exchange_gap layers",
    "LayerSummary": "model layer seconds dispatch_s combine_s waiting_s bound_s gap",
    "ModelSummary": "model seconds steps=step_s_T# step_s=step_s_T% tpot_s=between_s_X%",
    "Comparison": "predicted_s measured_s phases network compute unmatched error",
    "Schedule": "method makespan_s fluid_bound_s one_to_one_bound_s gap",
    "Cluster": "name incast gpus",
    "ServedRequests": "seconds tokens_per_s queue_grows steps busiest busiest_p99 cached_tokens "
    "ttft_s=ttft_s_Q% tpot_s=tpot_s_X%",
    "Recommendation": "engine version drawn exchange=default.exchange gpus=cluster.gpus.kind served simulated requests "
    "disaggregation recorded",
    "SimulatedPlans": "default_s tokens share candidates",
    "Candidate": "name seconds gain low high",
    "Disaggregation": "gain low high worth rates.* pools",
    "PoolRates": "prefill_per_s transfer_per_s decode_per_s limit requests kv_bytes transfer_s service.*",
    "RecordedRange": "models gpus parts ratios",
    "BalanceOfRequests": "requests drawn ranks load expert_way best worth default experts both even flags",
    "WaysOfServing": "load step_tokens default ceiling others left_out layers error borrowed eplb memory",
    "ComparedWay": "name method gain low high share memory_bytes moved_bytes worst starts service.* way",
    "ImbalanceSplit": "whole stable drifting per_step by_slots step_tokens windows",
    "MemoryFit": "* total=parts.total",
    "EplbAnswer": "* life_s experts_life_s",
}


def json_of(value: Any) -> Any:
    """Returns a result as JSON objects: dataclasses by KEYS, in mappings and sequences too; other values as they are."""
    if isinstance(value, Mapping):
        return {key: json_of(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return [json_of(part) for part in value]
    name = type(value).__name__
    return fields_json(value, KEYS.get(name, "*")) if is_dataclass(value) or name in KEYS else value


def fields_json(value: Any, names: str) -> JsonObject:
    """Returns the attributes of `value` as JSON, by names in the language of KEYS, separated by spaces."""
    found: JsonObject = {}
    for name in names.split():
        key, _, path = name.partition("=")
        if name == "*":
            found |= {field.name: json_of(getattr(value, field.name)) for field in fields(value)}
        elif name.endswith(".*"):
            found |= json_of(getattr(value, name[:-2]))
        else:
            held = _held(value, (path or key).rstrip("%#"))
            found[key] = percentiles(held) if path.endswith("%") else len(held) if path.endswith("#") else json_of(held)
    return found


def _held(value: Any, path: str) -> Any:
    """An attribute of an attribute and so on; of each item of a sequence."""
    for name in path.split("."):
        value = [getattr(item, name) for item in value] if type(value) in (list, tuple) else getattr(value, name)
    return value


def rows_json(**columns: Iterable[Any]) -> list[JsonObject]:
    """Returns named columns as a list of dicts, one per row; None where a column is shorter."""
    return [dict(zip(columns, row, strict=True)) for row in zip_longest(*columns.values())]


def plan_json(plan: Plan) -> JsonObject:
    """Returns a plan's strategies, objective and bounds, and each layer's dispatch."""
    found: JsonObject = json_of(plan)
    for model, shown in zip(plan.models, found["models"], strict=True):
        bounds = {"fluid_bound_s": model.fluid_bound_s_L, "one_to_one_bound_s": model.one_to_one_bound_s_L}
        shown["layers"] = rows_json(dispatch_s=model.dispatch_s_L, **bounds, cut_bound_s=[cut.bound_s for cut in model.cut_L])
    return found


def explanation_json(layers: Sequence[LayerExplanation]) -> list[JsonObject]:
    """Returns each layer's terms, the slowest GPU of each term, and how often the longest path has the term."""
    columns = [
        {"term": layer.terms, "seconds": layer.seconds_X, "gpu": layer.gpu_X, "times": layer.times_X} for layer in layers
    ]
    return [{**json_of(layer), "terms": rows_json(**terms)} for layer, terms in zip(layers, columns, strict=True)]


def drift_json(drift: Drift) -> JsonObject:
    """Returns how much two profiles differ, by layer, and whether to plan again."""
    return {**json_of(drift), "layers": drift_table(drift).objects()}


def evaluation_json(plan: Plan, evaluation: Evaluation) -> JsonObject:
    """Returns a plan's times on other traffic, beside the times of a plan made for that traffic."""
    own = zip(plan.models, evaluation.replanned.models, evaluation.dispatch_s_ML, strict=True)
    times = "estimated slowdown own_objective_s=replanned.objective_s layers_s=served_s_L"
    return {
        "objective": plan.objective,
        "objective_s": evaluation.served_s_L.sum(),
        **fields_json(evaluation, times),
        "models": [
            {"model": model.model, "layers": rows_json(dispatch_s=dispatch_s_L, own_dispatch_s=replanned.dispatch_s_L)}
            for model, replanned, dispatch_s_L in own
        ],
    }


def placement_json(placement: ReplicaPlacement) -> JsonObject:
    """Returns a placement that was computed from loads, in the format that `aurora export` reads."""
    loads = rows_json(max_load=placement.max_load_L, mean_load=placement.mean_load_L, bound=placement.bound_L)
    layers = [{**placed, **load} for placed, load in zip(layers_json(placement.placement), loads, strict=True)]
    return {"method": placement.method, "layers": layers, "seconds": placement.seconds}


def survival_json(placement: ResilientPlacement) -> JsonObject:
    """Returns a placement for failures, with the probability that every expert is still held."""
    survival_L = [by_failures(survival.p_K) for survival in placement.survival_L]
    return {"method": placement.method, "layers": rows_json(slots=placement.slots_LN, survival=survival_L)}


def schedule_json(schedule: Schedule, ranks: int) -> JsonObject:
    """Returns a schedule with its bounds and every transfer."""
    cut = {} if schedule.cut is None else {"cut_bound_s": schedule.cut.bound_s, "cut_links": schedule.cut.links}
    columns = {name: getattr(schedule, f"{name}_X") for name in ("src", "dst", "bytes", "start_s", "end_s", "rate_Bps")}
    return {"method": schedule.method, "n": ranks, **json_of(schedule), **cut, "transfers": rows_json(**columns)}


def cluster_json(cluster: Cluster) -> JsonObject:
    """Returns a cluster's servers and its GPUs by rank."""
    return {**json_of(cluster), "fabric": None if cluster.servers is None else servers_json(cluster.servers, cluster.gpus)}


def curves_json(curves: Profile | ComputeCurves) -> JsonObject:
    """Returns compute curves: seconds at token counts, by GPU kind and phase."""
    kinds = curves.curves if isinstance(curves, Profile) else curves.kinds
    return {**fields_json(curves, "model provenance"), "kinds": json_of(kinds)}


def served_requests_json(simulations: Mapping[str, RequestSimulation], names: Sequence[str]) -> JsonObject:
    """Returns {name: results for the same requests} for each of `names`; None for a name that could not serve them."""
    first = next(iter(simulations.values()))
    requests = first.served.requests
    tokens = {"input_tokens": requests.input_tokens_Q.sum(), "output_tokens": requests.output_tokens_Q.sum()}
    head = {"requests": len(requests), "source": requests.source, **tokens, "arrivals_s": requests.arrival_s_Q[-1]}
    served: JsonObject = dict.fromkeys(names)
    for name, simulation in simulations.items():
        off_C = simulation.off_C
        error = {"steps": len(off_C), "most": abs(off_C).max(initial=0.0), "mean": off_C.mean() if len(off_C) else 0.0}
        served[name] = {**json_of(simulation.served), "simulated_steps": simulation.points, "error": error}
    return {**head, **served, "even": json_of(first.even), "assumptions": first.assumptions}


def recommendation_json(recommendation: Recommendation) -> JsonObject:
    """Returns a recommendation: the ways compared with the engine's default, and the best one."""
    best, way = recommendation.best, recommendation.way
    found: JsonObject = json_of(recommendation)
    if (served := recommendation.served) is not None:
        found["served"]["imbalance"] = dict(zip(("prompts", "answers"), json_of(served.splits), strict=True))
    return {**found, "recommendation": best and way and {"name": best.name, "way": json_of(way)}}
