"""Results as JSON objects, which subcommands print with `--json`; docs/json.md documents the keys."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from aurora.advisor.ceiling import ImbalanceSplit
from aurora.advisor.recommend import Recommendation
from aurora.advisor.served_ways import ComparedWay, WaysOfServing
from aurora.algorithms.placement.explain import LayerExplanation
from aurora.io.clusters import servers_json
from aurora.io.plans import by_failures, layers_json
from aurora.planner.evaluate import Drift, Evaluation
from aurora.reports.trace_tables import percentiles
from aurora.reports.trace_times import Comparison, Summary
from aurora.types import Cluster, ComputeCurves, Plan, Profile, ReplicaPlacement, ResilientPlacement, Schedule
from aurora.types.requests import RequestSimulation, ServedRequests

JsonObject = dict[str, Any]


def fields_json(value: Any, names: str) -> JsonObject:
    """Returns {name: value} of the attributes of `found` listed in `names`, a space-separated string."""
    return {name: getattr(value, name) for name in names.split()}


def rows_json(**columns: Iterable[Any]) -> list[JsonObject]:
    """Returns named columns of equal length as a list of dicts, one per row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def profile_json(profile: Profile) -> JsonObject:
    """Returns a profile's shape and each layer's load."""
    layers = [
        {"pairs": load_E.sum(), "skew": load_E.max() / load_E.mean() if load_E.any() else 0.0, "hottest": load_E.argmax()}
        for load_E in profile.load_LE
    ]
    head = fields_json(profile, "model windows sources experts top_k provenance")
    return {**head, "kinds": list(profile.curves), "layers": layers}


def plan_json(plan: Plan) -> JsonObject:
    """Returns a plan's strategies, objective and bounds, and each layer's dispatch."""
    models = []
    for model in plan.models:
        over = model.hierarchy
        layers = rows_json(
            dispatch_s=model.dispatch_s_L,
            fluid_bound_s=model.fluid_bound_s_L,
            one_to_one_bound_s=model.one_to_one_bound_s_L,
            cut_bound_s=[cut.bound_s for cut in model.cut_L] or [None] * len(model.dispatch_s_L),
        )
        hierarchy = over and {"servers": over.server_G, **fields_json(over, "chunks level_from")}
        models.append({"model": model.model, "hierarchy": hierarchy, "layers": layers})
    head = fields_json(plan, "scenario objective strategies notes")
    times = fields_json(plan, "objective_s estimated bound_s gap assignment_bound_s unseen_s slot_gain")
    return {**head, **times, "models": models}


def explanation_json(layers: Sequence[LayerExplanation]) -> list[JsonObject]:
    """Returns each layer's terms, the slowest GPU of each term, and how often the longest path has the term."""
    return [
        {
            "seconds": layer.value_s,
            **fields_json(layer, "layer assignment_bound_s bound_term"),
            "terms": rows_json(term=layer.terms, seconds=layer.seconds_X, gpu=layer.gpu_X, times=layer.times_X),
        }
        for layer in layers
    ]


def evaluation_json(plan: Plan, evaluation: Evaluation) -> JsonObject:
    """Returns a plan's times on other traffic, beside the times of a plan made for that traffic."""
    models = [
        {"model": model.model, "layers": rows_json(dispatch_s=dispatch_s_L, own_dispatch_s=replanned.dispatch_s_L)}
        for model, replanned, dispatch_s_L in zip(
            plan.models, evaluation.replanned.models, evaluation.dispatch_s_ML, strict=True
        )
    ]
    times = {
        "objective_s": evaluation.served_s_L.sum(),
        "own_objective_s": evaluation.replanned.objective_s,
        "layers_s": evaluation.served_s_L,
    }
    return {
        "objective": plan.objective,
        **times,
        **fields_json(evaluation, "estimated slowdown"),
        "models": models,
    }


def drift_json(drift: Drift) -> JsonObject:
    """Returns how much two profiles differ, by layer, and whether to plan again."""
    layers = rows_json(variation=drift.variation_L, by_chance=drift.noise_L, hot_overlap=drift.overlap_L)
    return {
        **fields_json(drift, "replan reason slowdown estimated slowdown_of_joint threshold moved hot"),
        "layers": layers,
    }


def summary_json(summary: Summary) -> JsonObject:
    """Returns a trace's times, utilisation and gaps."""
    layers = [{**asdict(layer), "gap": layer.gap} for layer in summary.layers]
    return {**fields_json(summary, "kind seconds phases utilisation exchange_gap"), "layers": layers}


def models_json(summary: Summary) -> list[JsonObject]:
    """Returns the seconds, the steps and the time per output token of each model or micro-batch of a trace."""
    return [
        {
            **fields_json(model, "model seconds"),
            "steps": len(model.step_s_T),
            "step_s": percentiles(model.step_s_T),
            "tpot_s": percentiles(model.between_s_X),
        }
        for model in summary.models
    ]


def comparison_json(comparison: Comparison | None) -> JsonObject | None:
    """Returns predicted and measured seconds by phase; None without a comparison."""
    return None if comparison is None else {**asdict(comparison), "error": comparison.error}


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
    names = "src", "dst", "bytes", "start_s", "end_s", "rate_Bps"
    return {
        "method": schedule.method,
        "n": ranks,
        **fields_json(schedule, "makespan_s fluid_bound_s one_to_one_bound_s"),
        **({} if schedule.cut is None else {"cut_bound_s": schedule.cut.bound_s, "cut_links": schedule.cut.links}),
        "gap": schedule.gap,
        "transfers": rows_json(**{name: getattr(schedule, f"{name}_X") for name in names}),
    }


def cluster_json(cluster: Cluster) -> JsonObject:
    """Returns a cluster's servers and its GPUs by rank."""
    return {
        **fields_json(cluster, "name incast"),
        "fabric": None if cluster.servers is None else servers_json(cluster.servers, cluster.gpus),
        "gpus": [asdict(gpu) for gpu in cluster.gpus],
    }


def curves_json(curves: Profile | ComputeCurves) -> JsonObject:
    """Returns compute curves: seconds at token counts, by GPU kind and phase."""
    kinds = curves.curves if isinstance(curves, Profile) else curves.kinds
    table = {
        kind: {phase: {"tokens": curve.tokens_X, "seconds": curve.seconds_X} for phase, curve in phases.items()}
        for kind, phases in kinds.items()
    }
    return {**fields_json(curves, "model provenance"), "kinds": table}


def requests_json(served: ServedRequests) -> JsonObject:
    """Returns times and throughput of served requests, and how uneven their ranks were."""
    return {
        **fields_json(served, "seconds tokens_per_s queue_grows steps busiest busiest_p99 cached_tokens"),
        "ttft_s": percentiles(served.ttft_s_Q),
        "tpot_s": percentiles(served.tpot_s_X),
    }


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
        served[name] = {**requests_json(simulation.served), "simulated_steps": simulation.points, "error": error}
    return {**head, **served, "even": requests_json(first.even), "assumptions": first.assumptions}


def recommendation_json(recommendation: Recommendation) -> JsonObject:
    """Returns a recommendation: the ways compared with the engine's default, and the best one."""
    best, way, simulated = recommendation.best, recommendation.way, recommendation.simulated
    return {
        **fields_json(recommendation, "engine version drawn"),
        "exchange": recommendation.default.exchange,
        "gpus": [gpu.kind for gpu in recommendation.cluster.gpus],
        "recommendation": best and way and {"name": best.name, "way": asdict(way)},
        "served": recommendation.served and ways_json(recommendation.served),
        "simulated": simulated
        and {
            **fields_json(simulated, "default_s tokens share"),
            "candidates": [fields_json(candidate, "name seconds gain low high") for candidate in simulated.candidates],
        },
        "requests": recommendation.requests
        and {
            **fields_json(recommendation.requests, "requests drawn ranks load expert_way best worth"),
            **{name: asdict(getattr(recommendation.requests, name)) for name in ("default", "experts", "both", "even")},
            "flags": {words: asdict(service) for words, service in recommendation.requests.flags.items()},
        },
        "disaggregation": (apart := recommendation.disaggregation)
        and {
            **fields_json(apart, "gain low high worth"),
            **fields_json(apart.rates, "prefill_per_s transfer_per_s decode_per_s limit requests kv_bytes transfer_s"),
            **asdict(apart.rates.service),
            "pools": {stage: {"name": pool.name, "way": pool.way and asdict(pool.way)} for stage, pool in apart.pools.items()},
        },
        "recorded": recommendation.recorded and fields_json(recommendation.recorded, "models gpus parts ratios"),
    }


def ways_json(served: WaysOfServing) -> JsonObject:
    """Returns ways of serving beside the engine's default and the ceiling, and the parts of the imbalance."""

    def way(compared: ComparedWay) -> JsonObject:
        numbers = fields_json(compared, "name method gain low high share memory_bytes moved_bytes worst starts")
        return {**numbers, **asdict(compared.service), "way": compared.way and asdict(compared.way)}

    def parts(split: ImbalanceSplit) -> JsonObject:
        shares = {name: asdict(getattr(split, name)) for name in ("whole", "stable", "drifting", "per_step")}
        return {**shares, **fields_json(split, "by_slots step_tokens windows")}

    prompts, answers = map(parts, served.splits)
    return {
        "load": asdict(served.load),
        "step_tokens": served.step_tokens,
        "imbalance": {"prompts": prompts, "answers": answers},
        "default": way(served.default),
        "ceiling": way(served.ceiling),
        "others": [way(other) for other in served.others],
        **fields_json(served, "left_out layers error borrowed"),
        "eplb": served.eplb and {**asdict(served.eplb), **fields_json(served.eplb, "life_s experts_life_s")},
        "memory": [{**asdict(fit), "total": fit.parts.total} for fit in served.memory],
    }
