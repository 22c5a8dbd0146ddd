"""Advice: what to do next, in sentences that follow from a report's figures."""

from collections.abc import Iterator

import numpy as np

from aurora.reports.numbers import ReportNumbers
from aurora.reports.summary import COMPUTE, EXCHANGES
from aurora.reports.tables import percent, seconds
from aurora.reports.traffic_loads import skew
from aurora.types import TRACE_PHASES
from aurora.types.arrays import gap

# thresholds for a sentence, each a part of the quantity named
OFF = 0.1  # a prediction off by more
NETWORK = 0.5  # of a rank's time in exchanges
LOPSIDED = 0.2  # the busiest port or GPU above the mean
SLACK = 0.03  # a gap to a bound


def advice(found: ReportNumbers) -> list[str]:
    """Returns sentences of advice, the most important first; if nothing stands out, one sentence that says so."""
    sentences = [*_drift(found), *_prediction(found), *_ports(found), *_experts(found), *_gaps(found), *_network(found)]
    return sentences or ["Nothing stands out: the plan is within a few percent of its bounds on what this report was given."]


def _drift(found: ReportNumbers) -> Iterator[str]:
    for model, moved in zip(found.of.models, found.drift_M, strict=False):
        if moved.replan:
            layer = int(moved.variation_L.argmax())
            yield (
                f"Replan {model} for its later traffic (aurora plan --profile LATER --from PLAN): what was made for the first "
                f"loses {percent(moved.loss)} on it, and {percent(float(moved.variation_L[layer]))} of the tokens of layer "
                f"{layer} go to other experts."
            )


def _prediction(found: ReportNumbers) -> Iterator[str]:
    both = found.comparison
    if both is None:
        return
    predicted_s, measured_s = both.predicted_s, both.measured_s
    if abs(off := gap(measured_s, predicted_s)) > OFF:
        differs = dict.fromkeys(TRACE_PHASES, 0.0)
        for one in both.phases:
            differs[one.phase] += one.measured_s - (one.predicted_s or 0.0)
        phase = max(differs, key=lambda p: abs(differs[p]))
        mend = "what counts and waiting cost" if phase == "counts" else "ports and start-up costs in the cluster file"
        if TRACE_PHASES.index(phase) in COMPUTE:
            mend = "compute times (aurora profile on this machine, as many processes at a time)"
        yield (
            f"Check {mend} before trusting predictions to better than {percent(abs(off))}: the run took {seconds(measured_s)}, "
            f"{seconds(predicted_s)} were predicted, and the largest difference is in {phase}, {seconds(abs(differs[phase]))} "
            f"{'more' if differs[phase] > 0 else 'less'} on the slowest ranks."
        )


def _ports(found: ReportNumbers) -> Iterator[str]:
    """The port that costs most above its layer's mean, over all models."""
    worst: tuple[float, str] | None = None
    for number, (model, flows) in enumerate(zip(found.of.models, found.traffic_M, strict=False)):
        port_s_LG = flows.port_s_BLG[1]
        lost_L = port_s_LG.max(axis=1) - port_s_LG.mean(axis=1)
        layer = int(lost_L.argmax())
        if skew(port_s_LG[layer]) <= LOPSIDED or (worst and worst[0] >= lost_L[layer]):
            continue
        gpu = int(port_s_LG[layer].argmax())
        planned = found.of.plan.models[number]
        split_E = planned.placement.split_EG(layer)[:, gpu]
        tokens_SE = found.of.profiles[number].tokens_TLSE[:, layer].sum(axis=0)
        into_E = np.delete(tokens_SE, gpu, axis=0).sum(axis=0) * split_E
        sends = tokens_SE[gpu].sum() - (tokens_SE[gpu] * split_E).sum()
        over = percent(skew(port_s_LG[layer]))
        at = f"The port of GPU {gpu} is the bottleneck of {model}, layer {layer}: {over} above the mean"
        expert = int(into_E.argmax())
        share = into_E[expert] / max(into_E.sum(), 1.0)
        cluster = found.of.plan.cluster
        if into_E.sum() / cluster.in_Bps_G[gpu] < sends / cluster.out_Bps_G[gpu]:
            sentence = f"{at}, by what it sends: deal its requests over more ranks, or give it the faster port."
        elif share > 0.5 and planned.placement.split_LG is None and len(found.of.models) == 1:
            slots = max(map(len, planned.placement.slots_LG[layer])) + 1
            sentence = (
                f"{at}. Replicate expert {expert}, to which {percent(share)} of what it receives goes "
                f"(aurora plan --slots-per-gpu {slots})."
            )
        else:
            sentence = f"{at}; expert {expert} draws {percent(share)} of what it receives: move or replicate it first."
        worst = float(lost_L[layer]), sentence
    if worst:
        yield worst[1]


def _experts(found: ReportNumbers) -> Iterator[str]:
    for number, (model, flows) in enumerate(zip(found.of.models, found.traffic_M, strict=False)):
        before_s, after_s = flows.expert_s_BLG.max(axis=2).sum(axis=1).tolist()
        over = gap(after_s, float(flows.expert_bound_s_L.sum()))
        if over > LOPSIDED:
            layer = int((flows.expert_s_BLG[1].max(axis=1) - flows.expert_bound_s_L).argmax())
            top = int(found.of.profiles[number].tokens_TLSE[:, layer].sum(axis=(0, 1)).argmax())
            yield (
                f"Experts of {model} are uneven: the slowest GPUs compute {seconds(after_s)} over all layers, "
                f"{percent(over)} above what a perfect placement could reach ({seconds(before_s)} without the plan); most is "
                f"lost in layer {layer}, whose hottest expert is {top}."
            )


def _gaps(found: ReportNumbers) -> Iterator[str]:
    plan = found.of.plan
    for model, planned in zip(found.of.models, plan.models, strict=True):
        over = gap(float(planned.dispatch_s_L.sum()), float(planned.bound_s_L.sum()))
        if over > SLACK:
            layer = int((planned.dispatch_s_L - planned.bound_s_L).argmax())
            yield (
                f"Try other orders for {model} (aurora order PROFILE --layer {layer} --method all): its dispatches take "
                f"{percent(over)} longer than their bounds, most in layer {layer}."
            )
    if plan.gap > SLACK:
        other = "--colocate local-search or exact" if len(plan.models) == 2 else "--place swap-search"
        yield (
            f"Try {other}: the placement is {percent(plan.gap)} above what its groups of experts allow "
            f"({seconds(plan.objective_s)} against {seconds(plan.bound_s)})."
        )
    elif (above := gap(plan.objective_s, plan.free_bound_s)) <= SLACK:
        yield f"Moving experts has no more to give: no placement at all is more than {percent(above)} shorter."


def _network(found: ReportNumbers) -> Iterator[str]:
    number = found.measured if found.measured is not None else found.predicted
    if number is None:
        return
    phases, colocated = found.phases[number], found.of.plan.colocated
    exchange_s = sum(phases[TRACE_PHASES[i]] for i in EXCHANGES)
    compute_s = sum(phases[TRACE_PHASES[i]] for i in COMPUTE)
    share = exchange_s / max(exchange_s + compute_s, 1e-30)
    name = found.of.traces[number][0]
    what = f"exchanges, with the waiting inside them, are {share:.0%} of what ranks do in {name}"
    if share > NETWORK and not colocated:
        yield f"Share these GPUs with a second model (two --profile): {what}, and its computing would fill that time."
    elif share > NETWORK:
        yield f"Faster ports would help most: {what}, though two models share the GPUs."
    elif compute_s:
        yield f"Faster GPUs would help most: computing is {1 - share:.0%} of what ranks do in {name}."
    utilisation_G = found.summaries[number].utilisation_G
    if skew(utilisation_G) > LOPSIDED:
        yield (
            f"GPU {int(utilisation_G.argmax())} computes {percent(skew(utilisation_G))} more than the mean in {name}, while "
            f"GPU {int(utilisation_G.argmin())} computes least: move experts or requests between them."
        )
