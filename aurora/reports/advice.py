"""Advice: sentences that recommend actions to users, based on simulations in which the action was tried."""

from dataclasses import replace
from math import isinf

from aurora.advisor.best_way import WORTH as SURE
from aurora.advisor.best_way import installs
from aurora.advisor.disaggregation import Disaggregation
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.eplb_pays import SPREAD, EplbAnswer
from aurora.advisor.ratio_errors import RATIO_ERRORS
from aurora.advisor.recommend import Recommendation
from aurora.advisor.request_balance import BalanceOfRequests
from aurora.advisor.served_ways import ComparedWay, WaysOfServing
from aurora.advisor.sharing import ApartSeconds
from aurora.advisor.two_models import HALVES, WORTH, TwoModels
from aurora.errors import plural
from aurora.planner.choice import TIE
from aurora.reports.comparisons import SHOWN_SHORT
from aurora.reports.formatting import percent, seconds, size
from aurora.reports.trace_times import Summary


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
    if sharing.refusal:
        return f"Serve one model after the other: {sharing.refusal}."
    gain, default = f"{sharing.gains[HALVES]:.2f}x", f"by {sharing.engine}'s default"
    batch = f"with {sharing.batch} tokens of a rank in a step"
    at = f"the throughput of one model after the other, each on all GPUs {default} ({batch}, MoE layers simulated)"
    if sharing.drawn:
        return f"No recommendation: traffic is drawn. In parts of {at}; {HALVES} {gain}."
    if sharing.way is None:
        return f"Serve one model after the other: nothing brings {WORTH:.2f}x {at}; {HALVES} {gain}."
    swapped = " (the first model on the second half)" * sharing.swapped
    return f"Split the GPUs, a half for each model{swapped}: {gain} {at}."


RECORDING = {  # how an engine's traffic becomes a profile
    "vllm": """serve with --additional-config '{"aurora": {"record": "seen"}}', then aurora record URL --folder seen""",
    "sglang": "dump SGLang's expert distribution recorder, then aurora import *.pt --format sglang-recorder --shape MODEL",
}


def recommendation_lines(recommendation: Recommendation) -> list[str]:
    """Returns a recommendation as sentences: the recommended way, if any; the gain of balancing; and the assumptions."""
    exchange = EXCHANGES[recommendation.default.exchange]
    moved = "" if exchange.follows_placement else ", whose bytes no placement changes"
    versions = SERVING_ENGINES[recommendation.engine].known_versions
    default = f"{recommendation.engine}'s own exchange ({versions}){moved}: {exchange.about}."
    lines, best, simulated = list[str](), recommendation.best, recommendation.simulated
    if recommendation.requests is not None:
        lines.append(requests_line(recommendation.requests))
    if recommendation.drawn:
        lines += _drawn_lines(recommendation)
    elif recommendation.served is not None:
        lines += [eplb_line(answer)] if (answer := recommendation.served.eplb) is not None else []
        lines += [said] if (said := replicas_line(recommendation.served)) else []
        lines += _served_lines(recommendation, recommendation.served)
    elif best is None:
        lines.append(f"Keep {recommendation.engine}'s default placement: no plan is surely faster by {SURE - 1:.0%}.")
    else:
        on = "(best case: measured on its own training traffic)"
        if best.low is not None:
            on = f"on traffic that it was not made for ({best.low:.2f}x to {best.high:.2f}x)"
        lines.append(f"Serve by the plan: {best.name}, {best.gain:.2f}x {on}.")
    lines += _version_lines(recommendation)
    if recommendation.disaggregation is not None:
        lines.append(disaggregation_line(recommendation.disaggregation, SERVING_ENGINES[recommendation.engine].pools))
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
    if (most := recommendation.default.batched_tokens) > 0:
        lines.append(f"The default fits with at most {most} tokens of a rank in a step: --max-num-batched-tokens or its like.")
    lines += [f"{fit.name} does not fit: {fit.why}." for fit in recommendation.served.memory if fit.why][:SHOWN_SHORT]
    allowed = f"Of those that were compared with measured ones, half were within {recommendation.served.error - 1:.0%}"
    if taken := recommendation.served.borrowed:
        own = " and ".join({gpu.kind: None for gpu in recommendation.cluster.gpus})
        allowed = f"How much of a peak kernels of {own} reach is not known, and taken from {' and '.join(taken)}"
    return [
        *lines,
        f"Requests have {load.isl} tokens and answers of {load.osl}, {load.concurrency} in flight on each GPU. Steps are "
        f"computed from datasheets. {allowed}; intervals allow {RATIO_ERRORS['experts'][0] - 1:.0%} for whole experts in place "
        f"of cut ones, {RATIO_ERRORS['attention'][0] - 1:.0%} for other layouts and {RATIO_ERRORS['exchange'][0] - 1:.0%} for "
        f"exchanges: most measured ratios are within. The default has {default}",
    ]


def _version_lines(recommendation: Recommendation) -> list[str]:
    """Says of which versions the engine's defaults and settings are known, if another one was asked for."""
    use, version = SERVING_ENGINES[recommendation.engine], recommendation.version
    if use.describes(version):
        return []
    return [f"Defaults and settings are those of {use.name} {use.known_versions}: in {version} they may be others."]


def disaggregation_line(apart: Disaggregation, joined_by: str) -> str:
    """Returns whether to serve prefill and decode apart, with what it brings.

    Args:
        apart: the comparison.
        joined_by: what joins the engine's pools; empty: commands do not join them.
    """
    base, service = apart.together.service, apart.rates.service
    first, second = (pool.way.layout.gpus for pool in apart.pools.values() if pool.way)
    brings = (
        f"{first} GPUs for prompts and {second} for answers bring {apart.gain:.2f}x the tokens per second ({apart.low:.2f}x to "
        f"{apart.high:.2f}x) of {apart.together.name}; TTFT {seconds(service.ttft_s)} after {seconds(base.ttft_s)}, TPOT "
        f"{seconds(service.tpot_s)} after {seconds(base.tpot_s)}; the limit is {apart.rates.limit}; {apart.at_most}"
    )
    if not apart.worth:
        unless = ", unless you need its TPOT" * (service.tpot_s * apart.gain < base.tpot_s * apart.low)
        return f"Keep prefill and decode together{unless}: apart, {brings}."
    joins = f"It needs {joined_by}." if joined_by else "The commands start two pools; join them by the engine's own options."
    return f"Serve prefill and decode apart: {brings}. {joins}"


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


def _drawn_lines(recommendation: Recommendation) -> list[str]:
    """What to do without recorded experts: a layout or an exchange, if one is faster; what balancing brings; how to record."""
    recorded, served = recommendation.recorded, recommendation.served
    how = RECORDING.get(recommendation.engine, "aurora import reads its recordings")
    assert recorded is not None
    least, most = (f"{ratio - 1:.0%}" for ratio in recorded.ratios["linear"])
    lines, bring = list[str](), ""
    if served is not None:
        best, gain = recommendation.best, served.ceiling
        bring = f": with such imbalance perfect balance would bring {gain.low:.2f}x to {gain.high:.2f}x here"
        lines.append(
            f"{_serve_with(best, served)} Layouts and exchanges need no recorded experts."
            if isinstance(best, ComparedWay)
            else f"Keep {recommendation.engine}'s layout and exchange: no other is surely faster by {SURE - 1:.0%}."
        )
    return [
        *lines,
        "No recommendation of a placement: this traffic is drawn, and says nothing about your experts. Over "
        f"{len(recorded.models)} recorded models on about as many GPUs ({'; '.join(recorded.models)}) the slowest GPU's "
        f"experts take {least} to {most} longer than in perfect balance{bring}. Record yours: {how}.",
    ]


def _serve_with(best: ComparedWay, served: WaysOfServing) -> str:
    """Says how to serve, with what it brings."""
    base, service = served.default.service, best.service
    needs = installs(served, best) and f" It needs {installs(served, best)}."
    return (
        f"Serve with {best.name}: {best.gain:.2f}x the tokens per second ({best.low:.2f}x to {best.high:.2f}x), "
        f"{service.tokens_per_s:,.0f} after {base.tokens_per_s:,.0f}; TTFT {seconds(service.ttft_s)} after "
        f"{seconds(base.ttft_s)}, TPOT {seconds(service.tpot_s)} after {seconds(base.tpot_s)}.{needs}"
    )


def _imbalance(served: WaysOfServing) -> str:
    """The parts of the imbalance, of prompts and of answers."""
    said = []
    for name, split in zip(("prompts", "answers"), served.splits, strict=True):
        parts = {"stable": split.stable, "drifting": split.drifting, "per step": split.per_step}
        shown = ", ".join(f"{part} {share.value:.1%} [{share.low:.1%}, {share.high:.1%}]" for part, share in parts.items())
        said.append(f"{split.whole.value:.1%} in steps of {name}, {round(split.step_tokens)} tokens ({shown})")
    return "; ".join(said)


def eplb_line(answer: EplbAnswer) -> str:
    """Returns whether EPLB pays, what a rearrangement costs, and how long a placement must serve to make up for it."""
    advice = {
        "off": f"switch it off: neither it nor a planned placement is surely faster by {SURE - 1:.0%}",
        "map": f"leave it off and give the engine a map from a file: a planned placement brings {answer.placed:.2f}x",
        "eplb": f"use it with step_interval {answer.interval}: a planned placement that stays brings {answer.placed:.2f}x",
    }[answer.advice]
    if answer.eplb is not None:
        advice += f", EPLB {answer.eplb:.2f}x with its stalls, every {answer.interval} steps at best"
    if isinf(answer.life_s):
        return f"EPLB: {advice}. It saves nothing here."
    moves = "serving waits for moves" if answer.waits else "experts travel beside serving"
    how = f"computed, {moves}; published ones took up to {SPREAD:.0f} times as long: give yours by --eplb-stall"
    how = "as measured" if answer.given else how
    saved = "by the recorded drift" if answer.drift else "if all balance were perfect, as one recording shows no drift"
    steps = plural(max(1, round(answer.life_s / answer.step_s)), "step")
    return (
        f"EPLB: {advice}. A rearrangement stops serving for {seconds(answer.stall_s)} ({how}). A placement must serve "
        f"{seconds(answer.life_s)}, {steps}, to make up for it ({saved}, it saves "
        f"{answer.saved:.2%} of the time). Balancedness is {answer.balancedness:.4f}: were experts all of the time, "
        f"{seconds(answer.experts_life_s)} would do."
    )


def replicas_line(served: WaysOfServing) -> str:
    """Returns the least number of redundant experts, and what one more slot on each GPU takes and brings; empty: unknown."""
    default = served.default.way
    assert default is not None
    placed: dict[int, ComparedWay] = {}
    for other in served.others:
        if other.way is not None and other.way == replace(default, placement="plan", redundant=other.way.redundant):
            placed[other.way.redundant] = other
    least = -default.experts % default.layout.expert
    few, more = placed.get(least), placed.get(least + default.layout.expert)
    if few is None or more is None or not default.experts:
        return ""
    need = f"{least} redundant experts at least" if least else "no redundant experts"
    evenly = f"EPLB needs {need} for {default.experts} experts on {default.layout.expert} GPUs"
    if least and (none := placed.get(0)) is not None:
        evenly += f", which bring {few.gain / none.gain:.3f}x of a planned placement without"
    slot = size(more.memory_bytes - few.memory_bytes)
    return f"Replicas: {evenly}; one more slot on each GPU takes {slot} and brings {more.gain / few.gain:.3f}x of that."


def _served_lines(recommendation: Recommendation, served: WaysOfServing) -> list[str]:
    """Says what to do, or nothing; and what balancing can bring at most, by parts of the imbalance."""
    best, ceiling = recommendation.best, served.ceiling
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
    return [f"{_serve_with(best, served)} {at_most}", parts]
