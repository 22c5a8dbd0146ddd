"""Advice: all sentences that recommend actions to users, based on runs or simulations in which the action was tried."""

from collections.abc import Iterator

import numpy as np

from aurora.advisor.engines import engine
from aurora.advisor.recommend import WORTH as SURE
from aurora.advisor.recommend import Recommendation, installs
from aurora.advisor.request_balance import BalanceOfRequests
from aurora.advisor.served_ways import COMPUTED_ERROR, ComparedWay, WaysOfServing
from aurora.advisor.sharing import ApartSeconds
from aurora.advisor.two_models import BY_EXCHANGE, HALVES, IN_SEQUENCE, TIME_SLICED, WORTH, TwoModels, takes_turns
from aurora.algorithms.alltoall.schedule import auto_orders
from aurora.planner.choice import TIE
from aurora.planner.plan import order_model
from aurora.reports.formatting import percent, seconds
from aurora.reports.numbers import ReportNumbers, skew
from aurora.reports.plan_tables import expectation_lines, gap_line
from aurora.reports.trace_times import COMPUTE, EXCHANGES, TIMED_PHASES, Summary
from aurora.types import Plan
from aurora.types.arrays import gap

# thresholds for a sentence, each a part of the quantity named
OFF = 0.1  # a prediction off by more
MOST, FULL = 0.5, 0.8  # of a rank's time
LOPSIDED = 0.2  # the busiest port or GPU above the mean
SLACK = 0.03  # what a bound leaves to gain
LEAST = 0.005  # what a plan that was tried has to gain


def advice(report: ReportNumbers) -> list[str]:
    """Returns the advice of a report as sentences, the most important first; one on the placement is always among them."""
    kinds = _prediction, _placement, _ports, _experts, _orders, _time
    return [sentence for kind in kinds for sentence in kind(report)]


def _prediction(numbers: ReportNumbers) -> Iterator[str]:
    both = numbers.comparison
    if both is None or numbers.predicted is None or numbers.measured is None or abs(both.error) <= OFF:
        return
    if numbers.why_incomparable is not None:
        yield f"Compare the run with a prediction of its own traffic: {numbers.why_incomparable}."
        return
    slower = both.measured_s > both.predicted_s
    more, less = (numbers.summaries[n].phases for n in (numbers.measured, numbers.predicted)[:: 1 if slower else -1])
    differs = {phase: more[phase] - less[phase] for phase in TIMED_PHASES}
    differs["gate"] += differs.pop("head")
    phase = max(differs, key=differs.__getitem__)
    mend = "what delays ranks (other processes on their cores?)"
    if phase in COMPUTE:
        mend = "compute times (aurora profile on this machine, as many processes at a time)"
    elif phase in EXCHANGES or not slower:
        mend = "ports and start-up costs in the cluster file"
    yield (
        f"Check {mend} before trusting predictions to better than {percent(abs(both.error))}: the run took "
        f"{seconds(both.measured_s)}, {seconds(both.predicted_s)} were predicted, and the largest difference this way is in "
        f"{phase}, {seconds(differs[phase])} {'more' if slower else 'less'} (mean over ranks; models in it at once count once)."
    )


def _placement(numbers: ReportNumbers) -> Iterator[str]:
    """Yields a verdict on the placement by the plan's bounds, and the gain of one more slot per GPU that planning tried."""
    plan = numbers.of.plan
    saved = _left_to_save(plan)
    if saved <= SLACK:
        shorter = f"no placement is more than {percent(saved)} shorter on the traffic that was planned for"
        yield f"Moving experts has no more to give: {shorter}."
        return
    yield f"Placements may have more to give: {gap_line(plan)}."
    if plan.slot_gain is not None and plan.slot_gain > LEAST:
        slots = max(len(experts) for layer in plan.models[0].placement.slots_LG for experts in layer) + 1
        yield f"Try aurora plan --slots-per-gpu {slots}: {expectation_lines(plan)[-1]}."


def _left_to_save(plan: Plan) -> float:
    """The share of a plan's objective that other placements save at most."""
    return 1 - plan.bound_s / plan.objective_s if plan.objective_s > plan.bound_s else 0.0


def _ports(numbers: ReportNumbers) -> Iterator[str]:
    """The port that costs most above its layer's mean, over all models, and what it is busy with."""
    lost = []
    for number, flows in enumerate(numbers.traffic_M):
        lost_L = flows.port_s_BLG[1].max(axis=1) - flows.port_s_BLG[1].mean(axis=1)
        lost.append((float(lost_L.max()), number, int(lost_L.argmax())))
    _, number, layer = max(lost, default=(0.0, 0, 0))
    if not lost or skew(numbers.traffic_M[number].port_s_BLG[1, layer]) <= LOPSIDED:
        return
    port_s_G, cluster = numbers.traffic_M[number].port_s_BLG[1, layer], numbers.of.plan.cluster
    gpu = int(port_s_G.argmax())
    split_E = numbers.of.plan.models[number].placement.split_EG(layer)[:, gpu]
    tokens_SE = numbers.of.profiles[number].tokens_TLSE[:, layer].sum(axis=0)
    into_E = np.delete(tokens_SE, gpu, axis=0).sum(axis=0) * split_E
    sends, own_S = tokens_SE[gpu].sum() - (tokens_SE[gpu] * split_E).sum(), tokens_SE.sum(axis=1)
    model, over = numbers.of.models[number], percent(skew(port_s_G))
    at = f"The port of GPU {gpu} is the bottleneck of {model}, layer {layer}: {over} above the mean"
    if into_E.sum() / cluster.in_Bps_G[gpu] >= sends / cluster.out_Bps_G[gpu]:
        expert = int(into_E.argmax())
        yield f"{at}. Expert {expert} draws {percent(into_E[expert] / into_E.sum())} of what it receives."
    elif (more := gap(float(own_S[gpu]), float(own_S.mean()))) > LOPSIDED:
        yield f"{at}, by what it sends. Deal requests evenly: this rank has {percent(more)} more tokens than the mean."
    else:
        yield f"{at}, by what it sends."


def _experts(numbers: ReportNumbers) -> Iterator[str]:
    """Lines on what slow GPUs cost, where other placements may cost less."""
    for model, flows in zip(numbers.of.models, numbers.traffic_M, strict=False):
        before_s, after_s = flows.expert_s_BLG.max(axis=2).sum(axis=1).tolist()
        over = gap(after_s, float(flows.expert_bound_s_L.sum()))
        if over > LOPSIDED and _left_to_save(numbers.of.plan) > SLACK:
            layer = int((flows.expert_s_BLG[1].max(axis=1) - flows.expert_bound_s_L).argmax())
            yield (
                f"Experts of {model} are uneven: the slowest GPUs compute {seconds(after_s)} over all layers, "
                f"{percent(over)} above their bound ({seconds(before_s)} without the plan); most is lost in layer {layer}."
            )


def _orders(numbers: ReportNumbers) -> Iterator[str]:
    """Yields how far dispatches are from their bounds, and another order if it is shorter on the given traffic."""
    plan = numbers.of.plan
    others = [name for name in auto_orders(len(plan.cluster)) if plan.options.order not in ("auto", name)]
    for number, (model, planned) in enumerate(zip(numbers.of.models, plan.models, strict=True)):
        over = gap(float(planned.dispatch_s_L.sum()), float(planned.bound_s_L.sum()))
        if over <= SLACK:
            continue
        layer = int((planned.dispatch_s_L - planned.bound_s_L).argmax())
        yield f"Dispatches of {model} take {percent(over)} longer than their bounds, most in layer {layer}."
        if numbers.of.profiles and planned.hierarchy is None:
            now_s = sum(dispatch.seconds for dispatch, _ in numbers.planned_MLW[number])
            other_s, name = min(((_dispatch_s(numbers, number, name), name) for name in others), default=(now_s, ""))
            if other_s < now_s * (1 - LEAST):
                less = percent(1 - other_s / now_s)
                yield f"Try --order {name}: dispatches of {model} take {less} less time on this traffic."


def _dispatch_s(numbers: ReportNumbers, number: int, order: str) -> float:
    """Returns the seconds of the dispatches of a model, given by its number, in another order on the given traffic."""
    plan, planned = numbers.of.plan, numbers.of.plan.models[number]
    rng, profiles = np.random.default_rng(plan.options.seed), numbers.of.profiles[number : number + 1]
    other = order_model(plan.cluster, profiles, planned.placement, order, rng, "")
    return float(other.dispatch_s_L.sum())


def _time(numbers: ReportNumbers) -> Iterator[str]:
    """Yields what sharing is worth, and sentences on the ranks' time in the measured trace, else in the predicted one."""
    if numbers.shared is not None:
        yield sharing_line(*numbers.shared)
    number = numbers.measured if numbers.measured is not None else numbers.predicted
    if number is None:
        return
    name, summary = numbers.of.traces[number][0], numbers.summaries[number]
    network, compute = (took_s / max(summary.seconds, 1e-30) for took_s in (summary.exchanging_s, summary.computing_s))
    busy = f"in {name} a rank's port is busy {percent(network)} of the time, its GPU {percent(compute)}"
    busiest = max(network, compute)
    if busiest < FULL and not numbers.of.plan.colocated:
        most = f" sharing is worth at most {1 / max(busiest, 1e-3):.1f} times the throughput," if busiest > MOST else ""
        yield f"Ask aurora recommend, with two profiles, whether a second model should share these GPUs:{most} {busy}."
    elif busiest > MOST:
        yield f"Faster {'ports' if network > compute else 'GPUs'} would help most: {busy}."
    else:
        yield f"See the timeline for what ranks wait for: {busy}."
    if skew(summary.utilisation_G) > LOPSIDED:
        yield (
            f"GPU {int(summary.utilisation_G.argmax())} computes {percent(skew(summary.utilisation_G))} more than the mean in "
            f"{name}, and GPU {int(summary.utilisation_G.argmin())} least."
        )


def sharing_line(summary: Summary, apart: ApartSeconds) -> str:
    """Returns a sentence that compares models sharing the GPUs with the same models run one after the other.

    Times that differ by less than a factor of TIE count as equal.

    Args:
        summary: summary of the simulation in which the models share the GPUs.
        apart: seconds of the models run one after the other.
    """
    network, compute = (took_s / max(summary.seconds, 1e-30) for took_s in (summary.exchanging_s, summary.computing_s))
    apart_s, own_plan = min(apart), apart.by_own < apart.by_plan
    how = "each by a plan of its own" if own_plan else "under this plan"
    took = f"{seconds(summary.seconds)} at the same time, {seconds(apart_s)} one after the other, {how}"
    why = f"a rank's port is busy {percent(network)} of the time and its GPU {percent(compute)}"
    if max(summary.seconds, apart_s) <= TIE * min(summary.seconds, apart_s):
        return f"Sharing makes no difference here: {took}; {why}."
    if summary.seconds > apart_s:
        instead = "plan and serve each model alone" if own_plan else "serve with --interleave off"
        scarce = "ports" if network > compute else "GPUs"
        return f"Sharing loses here: {took}. The {scarce} leave nothing to fill ({why}): {instead}."
    return f"Sharing is worth {apart_s / max(summary.seconds, 1e-30):.2f}x here: {took}; {why}."


def two_models_advice(sharing: TwoModels) -> str:
    """Returns a sentence that recommends how an engine should serve two models on given GPUs, with the gain of each way."""
    gains = {way: gain for way, gain in sharing.gains.items() if way not in (IN_SEQUENCE, sharing.way)}
    others = "".join(f"; {TURNS.get(way, way)} {gain:.2f}x" for way, gain in gains.items())
    batch, default = f"with {sharing.batch} tokens of a rank in a step", f"by {sharing.engine}'s default"
    at = f"the throughput of one model after the other, each on all GPUs {default} ({batch}, MoE layers simulated)"
    turns = f" {NO_TURNS}" if not takes_turns(sharing.engine, sharing.cluster) else ""
    if sharing.drawn:
        return f"No recommendation: traffic is drawn. In parts of {at}{others}."
    if sharing.way is None:
        if not gains:
            why = next(iter(sharing.left_out.values()), "the engine has no way of sharing these GPUs")
            return f"Serve one model after the other: {why}.{turns}"
        return f"Serve one model after the other: nothing brings {WORTH:.2f}x {at}{others}.{turns}"
    first = f"Share all GPUs: servers take turns at GPUs and ports, by aurora's plugin {NO_GRAPHS}"
    if sharing.way == HALVES:
        first = f"Split the GPUs, a half for each model{' (the first model on the second half)' * sharing.swapped}"
    return f"{first}: {sharing.gains[sharing.best]:.2f}x {at}{others}.{turns}"


TURNS = {TIME_SLICED: "by the same plans without overlap", BY_EXCHANGE: "sharing all GPUs in turns"}  # ways, of an engine
NO_GRAPHS = "(which turns CUDA graphs off: not simulated)"
NO_TURNS = "Only vLLM's servers take turns on the same GPUs, by aurora's plugin, and with all ranks on one machine."


RECORDING = {  # how an engine's traffic becomes a profile
    "vllm": """serve with --additional-config '{"aurora": {"record": "seen"}}', then aurora record URL --folder seen""",
    "sglang": "dump SGLang's expert distribution recorder, then aurora import *.pt --format sglang-recorder --shape MODEL",
}


def recommendation_lines(recommendation: Recommendation) -> list[str]:
    """Returns a recommendation as sentences: the recommended way, if any; the gain of balancing; and the assumptions."""
    exchange = engine.EXCHANGES[recommendation.default.exchange]
    moved = "" if exchange.follows_placement else ", whose bytes no placement changes"
    default = f"{recommendation.engine}'s own exchange{moved}: {exchange.about}."
    lines, best, simulated = list[str](), recommendation.best, recommendation.simulated
    if recommendation.requests is not None:
        lines.append(requests_line(recommendation.requests))
    if recommendation.drawn:
        lines.append(_drawn_line(recommendation))
    elif recommendation.served is not None:
        lines += _served_lines(recommendation, recommendation.served)
    elif best is None:
        lines.append(f"Keep {recommendation.engine}'s default placement: no plan is surely faster by {SURE - 1:.0%}.")
    else:
        on = "(best case: measured on its own training traffic)"
        if best.low is not None:
            on = f"on traffic that it was not made for ({best.low:.2f}x to {best.high:.2f}x)"
        lines.append(f"Serve by the plan: {best.name}, {best.gain:.2f}x {on}.")
    if recommendation.plan is not None:
        lines.append("It holds while traffic stays as in the profile: aurora evaluate --before compares later traffic with it.")
    if best is not None and len({gpu.node for gpu in recommendation.cluster.gpus}) != recommendation.default.hosts:
        lines.append("Servers have different numbers of GPUs, so the command is for one: add the engine's options for several.")
    if recommendation.served is None:
        assert simulated is not None
        part = f"{simulated.share:.0%} of a step, which experts and exchanges take on the slowest kind of GPU"
        rest = f" Their gains count for {part}." if simulated.share < 1 else ""
        return [*lines, f"Steps are MoE layers with the attention between them, simulated with {default}{rest}"]
    load = recommendation.served.load
    return [
        *lines,
        f"Requests have {load.isl} tokens and answers of {load.osl}, {load.concurrency} in flight on each GPU. Steps are "
        f"computed from datasheets. Of those that were compared with measured ones, half were within {COMPUTED_ERROR - 1:.0%}: "
        f"intervals allow for that between layouts or exchanges. The default has {default}",
    ]


def requests_line(spread: BalanceOfRequests) -> str:
    """Returns what balance of requests over data-parallel ranks brings, before that of experts, and how to get it."""
    if spread.drawn:
        whose = f"{spread.requests} requests of drawn lengths, which advise nothing (give yours by --requests). Of them"
    else:
        whose = f"{spread.requests} requests, which are {spread.load:.0%} of what even ranks of these GPUs can take. Of them"
    best, default = spread.flags[spread.best], spread.default
    experts, both, even = (row.tokens_per_s / default.tokens_per_s for row in (spread.experts, spread.both, spread.even))
    rest = f"{spread.expert_way} brings {experts:.2f}x, both together {both:.2f}x; even ranks and that would bring {even:.2f}x"
    if not spread.worth:
        return f"Requests over {spread.ranks} ranks: {whose}, no setting spreads them better than the default does; {rest}."
    brings = (
        f"{best.tokens_per_s / default.tokens_per_s:.2f}x the tokens per second, TTFT p95 {seconds(best.ttft_p95_s)} after "
        f"{seconds(default.ttft_p95_s)}, TPOT p50 {seconds(best.tpot_p50_s)} after {seconds(default.tpot_p50_s)}"
    )
    return f"Requests over {spread.ranks} ranks: {whose}, {spread.best} brings {brings}; {rest}."


def _drawn_line(recommendation: Recommendation) -> str:
    """A sentence in place of a recommendation: what balancing brings over recorded models, and how to record."""
    recorded, how = recommendation.recorded, RECORDING.get(recommendation.engine, "aurora import reads its recordings")
    assert recorded is not None
    least, most = (f"{ratio - 1:.0%}" for ratio in recorded.ratios["linear"])
    gains = recommendation.at_most
    bring = f": with such imbalance perfect balance would bring {gains[0]:.2f}x to {gains[1]:.2f}x here" if gains else ""
    return (
        "No recommendation: this traffic is drawn, and says nothing about your experts, whose imbalance also decides between "
        f"layouts and exchanges. Over {len(recorded.models)} recorded models on about as many GPUs "
        f"({'; '.join(recorded.models)}) the slowest GPU's experts take {least} to {most} longer "
        f"than in perfect balance{bring}. Record yours: {how}."
    )


def _imbalance(served: WaysOfServing) -> str:
    """The parts of the imbalance, of prompts and of answers."""
    said = []
    for name, split in zip(("prompts", "answers"), served.splits, strict=True):
        parts = {"stable": split.stable, "drifting": split.drifting, "per step": split.per_step}
        shown = ", ".join(f"{part} {share.value:.1%} [{share.low:.1%}, {share.high:.1%}]" for part, share in parts.items())
        said.append(f"{split.whole.value:.1%} in steps of {name}, {round(split.step_tokens)} tokens ({shown})")
    return "; ".join(said)


def _served_lines(recommendation: Recommendation, served: WaysOfServing) -> list[str]:
    """Says what to do, or nothing; and what balancing can bring at most, by parts of the imbalance."""
    base, best, ceiling = served.default.service, recommendation.best, served.ceiling
    parts = (
        "Experts take longer than in perfect balance, because of what is stable (a planned placement), drifts (EPLB), "
        "or is of single steps (replicas, or methods that see each batch), "
        f"with 95 % intervals: {_imbalance(served)}."
    )
    at_most = f"Perfect balance of every batch would bring {ceiling.gain:.2f}x."
    if not isinstance(best, ComparedWay):
        return [
            f"Keep {recommendation.engine}'s default: nothing that it can be told to do is surely faster by {SURE - 1:.0%}. "
            f"{at_most}",
            parts,
        ]
    service, needs = best.service, installs(served, best) and f" It needs {installs(served, best)}."
    return [
        f"Serve with {best.name}: {best.gain:.2f}x the tokens per second ({best.low:.2f}x to {best.high:.2f}x), "
        f"{service.tokens_per_s:,.0f} after {base.tokens_per_s:,.0f}; TTFT {seconds(service.ttft_s)} after "
        f"{seconds(base.ttft_s)}, TPOT {seconds(service.tpot_s)} after {seconds(base.tpot_s)}.{needs} {at_most}",
        parts,
    ]
