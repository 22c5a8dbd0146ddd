"""Advice: what to do next, in sentences that follow from a report's figures."""

from collections.abc import Iterator

import numpy as np

from aurora.advisor.sharing import sharing_advice
from aurora.planner.placement.slot_counts import memory_slots_G
from aurora.planner.replication.failure_resilient import SURVIVE
from aurora.planner.replication.registry import REPLICAS
from aurora.planner.scenarios.exclusive import SWAP_SEARCH
from aurora.reports.formatting import percent, seconds, size
from aurora.reports.numbers import ReportNumbers, skew
from aurora.reports.trace_times import COMPUTE, EXCHANGES, TIMED_PHASES
from aurora.types.arrays import gap

# thresholds for a sentence, each a part of the quantity named
OFF = 0.1  # a prediction off by more
MOST, FULL = 0.5, 0.8  # of a rank's time
LOPSIDED = 0.2  # the busiest port or GPU above the mean
SLACK = 0.03  # what a bound leaves to gain
SEARCHES = ("local-search", "exact")  # of COLOCATE


def advice(found: ReportNumbers) -> list[str]:
    """Returns sentences of advice, the most important first; if nothing stands out, one sentence that says so."""
    sentences = [*_control(found), *_drift(found), *_prediction(found), *_placement(found), *_orders(found), *_time(found)]
    return sentences or ["Nothing stands out: the plan is within a few percent of its bounds on what this report was given."]


def _control(found: ReportNumbers) -> Iterator[str]:
    """Yields sentences on what kept experts from following their traffic, and on what a dry run would have done."""
    for model, report in found.control.items():
        if report.failures or report.stuck:
            yield (
                f"Read the log of {model}'s control loop: planning, moving or writing a line failed {report.failures} times, "
                f"and it was stuck {report.stuck} times. Experts may have stayed where they were."
            )
        if report.dry_run and report.changes:
            first, last = report.series[0], report.series[-1]
            yield (
                f"Let the experts of {model} move (aurora run without --dry-run): {size(report.bytes)} of weights would have "
                f"moved, and balancedness gone from {first.balancedness:.3f} to {last.balancedness:.3f}."
            )


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
    if both is None or abs(both.error) <= OFF:
        return
    if found.other_traffic is not None:
        yield f"Compare the run with a prediction of its own traffic: {found.other_traffic}."
        return
    differs = dict.fromkeys(TIMED_PHASES, 0.0)
    for one in both.phases:
        differs["gate" if one.phase == "head" else one.phase] += one.measured_s - one.predicted_s
    phase = max(differs, key=lambda p: abs(differs[p]))
    mend = "what delays ranks (other processes on their cores?)"
    if phase in EXCHANGES:
        mend = "ports and start-up costs in the cluster file"
    elif phase in COMPUTE:
        mend = "compute times (aurora profile on this machine, as many processes at a time)"
    yield (
        f"Check {mend} before trusting predictions to better than {percent(abs(both.error))}: the run took "
        f"{seconds(both.measured_s)}, {seconds(both.predicted_s)} were predicted, and the largest difference is in {phase}, "
        f"{seconds(abs(differs[phase]))} {'more' if differs[phase] > 0 else 'less'} on a rank, the mean."
    )


def _placement(found: ReportNumbers) -> Iterator[str]:
    """One verdict on the placement, then the busiest port and the experts, with what helps there if anything does."""
    plan, bounds_s, slots = found.of.plan, found.placement_bounds_s, None
    replicated = plan.options.place in (*REPLICAS, *SURVIVE)
    kind, saved = "no placement", _saved(plan.objective_s, plan.bound_s)
    if bounds_s is not None:  # of the given traffic, which may be other than the plan was made from
        planned_s = found.objective_s[1]
        saved, replicas = _saved(planned_s, bounds_s[replicated]), _saved(planned_s, bounds_s[1])
        kind = "no placement" if replicated else "no placement without replicas"
        slots = _next_slots(found) if not replicated and replicas > saved + SLACK else None
    kept_s = plan.assignment_bound_s  # colocation keeps the groups of experts
    reach = saved if kept_s is None or not plan.colocated else _saved(plan.objective_s, kept_s)
    searched = plan.options.colocate in SEARCHES if plan.colocated else replicated or plan.options.place == SWAP_SEARCH
    if slots:
        yield (
            f"Try replicas (aurora plan --slots-per-gpu {slots}): no placement without them is more than {percent(saved)} "
            f"shorter, with them the bound is {percent(replicas)} below this plan."
        )
    elif reach > SLACK and not searched:
        other = f"--colocate {' or '.join(SEARCHES)}" if plan.colocated else f"--place {SWAP_SEARCH}"
        yield f"Try {other}: the bound on what it searches is {percent(reach)} below this plan."
    elif saved <= SLACK:
        yield f"Moving experts has no more to give: {kind} is more than {percent(saved)} shorter."
    mend = "replicate" if slots else "move" if saved > SLACK else ""
    yield from _ports(found, mend)
    if mend:
        yield from _experts(found, mend)


def _saved(value_s: float, bound_s: float) -> float:
    """The part of `value_s` that is saved at most."""
    return 1 - bound_s / value_s if value_s > bound_s else 0.0


def _next_slots(found: ReportNumbers) -> int | None:
    """The fewest slots a GPU that leave some for replicas; None if the memory of the GPUs does not hold them."""
    slots = max(len(held) for layer in found.of.plan.models[0].placement.slots_LG for held in layer) + 1
    return slots if memory_slots_G(found.of.plan.cluster, found.of.profiles).min() >= slots else None


def _ports(found: ReportNumbers, mend: str) -> Iterator[str]:
    """The port that costs most above its layer's mean, over all models. mend: what helps against a hot expert, if anything."""
    lost = []
    for number, flows in enumerate(found.traffic_M):
        lost_L = flows.port_s_BLG[1].max(axis=1) - flows.port_s_BLG[1].mean(axis=1)
        lost.append((float(lost_L.max()), number, int(lost_L.argmax())))
    _, number, layer = max(lost, default=(0.0, 0, 0))
    if not lost or skew(found.traffic_M[number].port_s_BLG[1, layer]) <= LOPSIDED:
        return
    port_s_G, cluster = found.traffic_M[number].port_s_BLG[1, layer], found.of.plan.cluster
    gpu = int(port_s_G.argmax())
    split_E = found.of.plan.models[number].placement.split_EG(layer)[:, gpu]
    tokens_SE = found.of.profiles[number].tokens_TLSE[:, layer].sum(axis=0)
    into_E = np.delete(tokens_SE, gpu, axis=0).sum(axis=0) * split_E
    sends = tokens_SE[gpu].sum() - (tokens_SE[gpu] * split_E).sum()
    model, over = found.of.models[number], percent(skew(port_s_G))
    at = f"The port of GPU {gpu} is the bottleneck of {model}, layer {layer}: {over} above the mean"
    if into_E.sum() / cluster.in_Bps_G[gpu] < sends / cluster.out_Bps_G[gpu]:
        yield f"{at}, by what it sends: deal its requests over more ranks, or give it the faster port."
    elif mend:
        expert = int(into_E.argmax())
        yield f"{at}; {mend} expert {expert} first, which draws {percent(into_E[expert] / into_E.sum())} of what it receives."


def _experts(found: ReportNumbers, mend: str) -> Iterator[str]:
    for number, (model, flows) in enumerate(zip(found.of.models, found.traffic_M, strict=False)):
        before_s, after_s = flows.expert_s_BLG.max(axis=2).sum(axis=1).tolist()
        over = gap(after_s, float(flows.expert_bound_s_L.sum()))
        if over > LOPSIDED:
            layer = int((flows.expert_s_BLG[1].max(axis=1) - flows.expert_bound_s_L).argmax())
            top = int(found.of.profiles[number].tokens_TLSE[:, layer].sum(axis=(0, 1)).argmax())
            yield (
                f"Experts of {model} are uneven: the slowest GPUs compute {seconds(after_s)} over all layers, "
                f"{percent(over)} above their bound ({seconds(before_s)} without the plan); most is lost in layer {layer}, "
                f"where expert {top} is the first to {mend}."
            )


def _orders(found: ReportNumbers) -> Iterator[str]:
    for model, planned in zip(found.of.models, found.of.plan.models, strict=True):
        over = gap(float(planned.dispatch_s_L.sum()), float(planned.bound_s_L.sum()))
        if over > SLACK:
            layer = int((planned.dispatch_s_L - planned.bound_s_L).argmax())
            yield (
                f"Try other orders for {model} (aurora order PROFILE --layer {layer} --method all): its dispatches take "
                f"{percent(over)} longer than their bounds, most in layer {layer}."
            )


def _time(found: ReportNumbers) -> Iterator[str]:
    """Yields sentences on the ranks' time in the measured trace, else in the predicted one."""
    number = found.measured if found.measured is not None else found.predicted
    if number is None:
        return
    name, one = found.of.traces[number][0], found.summaries[number]
    network, compute = (sum(one.phases[phase] for phase in phases) / max(one.seconds, 1e-30) for phases in (EXCHANGES, COMPUTE))
    what = f"in {name} a rank's port is busy {percent(network)} of the time, its GPU {percent(compute)}"
    busiest = max(network, compute)
    if busiest < FULL and not found.of.plan.colocated and found.sharing is not None:
        yield f"{sharing_advice(found.sharing)} Now {what}."
    elif busiest < FULL and not found.of.plan.colocated and not found.of.profiles:
        most = f"; at most {1 / max(busiest, 1e-3):.1f} times the throughput" if busiest > MOST else ""
        yield f"Share these GPUs with a second model (two --profile), which would fill the rest: {what}{most}."
    elif busiest > MOST:
        yield f"Faster {'ports' if network > compute else 'GPUs'} would help most: {what}."
    else:
        yield f"See the timeline for what ranks wait for: {what}."
    if skew(one.utilisation_G) > LOPSIDED:
        yield (
            f"GPU {int(one.utilisation_G.argmax())} computes {percent(skew(one.utilisation_G))} more than the mean in {name}, "
            f"while GPU {int(one.utilisation_G.argmin())} computes least: deal requests to ranks with that in mind."
        )
