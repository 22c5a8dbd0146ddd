"""Tables of a recommendation: ways of serving compared, what balancing takes, and simulated plans."""

from dataclasses import astuple
from typing import Any

from aurora.advisor.disaggregation import Disaggregation
from aurora.advisor.recommend import CONFIDENCE, Recommendation, SimulatedPlans
from aurora.advisor.request_balance import ABOVE, BELOW, BalanceOfRequests
from aurora.advisor.served_ways import METHODS, ComparedWay, WaysOfServing
from aurora.reports.formatting import seconds, size
from aurora.reports.tables import Columns, Table, text

SHOWN_WAYS = 12  # of a recommendation, at most
SHOWN_SHORT = 4  # ways that do not fit, at most
RATE, GAIN = "{:,.0f}".format, "{:.2f}x".format  # of tokens per second, and of a way over another


def recommendation_table(recommendation: Recommendation) -> Table:
    """Returns a table that compares the fastest ways of serving, and perfect balance, with the engine's default."""
    kinds = [gpu.kind for gpu in recommendation.cluster.gpus]
    title = f"{recommendation.profile.model} on " + " and ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if recommendation.simulated is not None:
        return _plans_table(recommendation.engine, recommendation.simulated, title)
    assert recommendation.served is not None
    served, rows = recommendation.served, list[Any]()
    for part in ([served.default, served.ceiling], served.others[:SHOWN_WAYS]):
        for way in part:
            name = f"{recommendation.engine}'s default: {recommendation.default.layout}" if way is served.default else way.name
            interval = f"{way.low:.2f}-{way.high:.2f}"
            rows.append((name, way.service.tokens_per_s, way.service.ttft_s, way.service.tpot_s, way.gain, interval, way.share))
        rows.append(())
    columns: Columns = {"way": text, "tokens/s": RATE, "TTFT": seconds, "TPOT": seconds, "gain": GAIN, "interval": str}
    caption = "share: of what perfect balance would save"
    return Table({**columns, "share": "{:.0%}".format}, rows[:-1], title, caption)


def disaggregation_table(apart: Disaggregation) -> Table:
    """Returns a table of prefill and decode apart, pool by pool, beside the best way of serving together."""
    rates, tokens = apart.rates, apart.rates.service.tokens_per_s / apart.rates.per_s
    caption = (
        "tokens/s: generated; of a pool the most that it can do, of both what the slower allows.\n"
        f"TTFT: with {seconds(rates.transfer_s)} for {size(rates.kv_bytes)} of KV cache of each prompt"
    )
    rows: list[tuple[Any, ...]] = [
        (stage, *_way_cells(pool), per_s * tokens, None, None)
        for (stage, pool), per_s in zip(apart.pools.items(), (rates.prefill_per_s, rates.decode_per_s), strict=True)
    ]
    both, together = (pool.way.layout.gpus for pool in apart.pools.values() if pool.way), apart.together
    for name, cells, service in (
        ("both", (sum(both), None, None, None), rates.service),
        ("together", _way_cells(together), together.service),
    ):
        rows += [*([()] if name == "both" else []), (name, *cells, service.tokens_per_s, service.ttft_s, service.tpot_s)]
    columns: Columns = {"pool": text, "GPUs": str, "layout": text, "exchange": text, "experts": text}
    return Table({**columns, "tokens/s": RATE, "TTFT": seconds, "TPOT": seconds}, rows, caption=caption)


def _way_cells(other: ComparedWay) -> tuple[int, str, str, str]:
    """Number of GPUs, layout, exchange, and what places experts, of a way that the engine has."""
    assert other.way is not None
    more = next((f", {change}" for change in other.changes if change.startswith("+")), "")
    placed = METHODS.get(other.method, "cut over GPUs") + more
    return other.way.layout.gpus, str(other.way.layout), other.way.exchange, placed


def requests_table(spread: BalanceOfRequests) -> Table:
    """Returns a table of requests as the engine spreads them over ranks, as it could, and with balanced experts."""
    caption = (
        f"tokens/s: generated, with {ABOVE:.0%} of what even ranks can take arriving; the rest with {BELOW:.0%}; busiest rank: "
        "its tokens in a step over the mean"
    )
    shown = {"the engine's default": spread.default} | (spread.flags if spread.worth else {})
    shown |= {spread.expert_way: spread.experts, "both": spread.both, f"even ranks, {spread.expert_way}": spread.even}
    rows = [(name, row.tokens_per_s, row.ttft_p95_s, row.tpot_p50_s, row.busiest) for name, row in shown.items()]
    columns: Columns = {"requests over ranks": text, "tokens/s": RATE, "TTFT p95": seconds, "TPOT p50": seconds}
    return Table({**columns, "busiest rank": "{:.2f}".format}, rows, caption=caption)


def balancing_costs(served: WaysOfServing) -> Table:
    """Returns a table of the cost of the engine's balancing methods: memory, moved bytes, and start-up."""
    caption = "worst: the slowest GPU's experts over perfect balance, in the worst window"
    layout = served.default.way and served.default.way.layout
    rows = {
        (way.method, way.memory_bytes): (METHODS[way.method], way.memory_bytes, way.moved_bytes, way.starts, way.worst)
        for way in (*served.others, served.default)
        if way.method and way.way is not None and way.way.layout == layout
    }
    columns: Columns = {"balancing": text, "memory\nof a GPU": size, "weights moved\nin a step": size, "works": str}
    by_memory = sorted(rows.values(), key=lambda row: (row[1], row[4]))
    return Table({**columns, "worst": GAIN}, by_memory, caption=caption)


def memory_table(engine: str, served: WaysOfServing) -> Table:
    """Returns a table of the memory of a GPU, part by part, in the ways that differ in it; those that do not fit come last."""
    caption = (
        f"GB: 10^9 bytes; {engine} fills {served.memory[0].usable_bytes / 1e9:.1f}.\n"
        "tokens: the most of a rank in a step that fit;\n"
        "slots: the most for replicas that fit.\n"
        "From sources and datasheets, not measured"
    )
    short, rows = [fit for fit in served.memory if fit.why], list[tuple[Any, ...]]()
    for group in ([fit for fit in served.memory if not fit.why], short[:SHOWN_SHORT]):
        for fit in group:
            parts = *astuple(fit.parts), fit.parts.total
            rows.append((fit.name or f"{engine}'s default", *(part / 1e9 for part in parts), fit.most_tokens, fit.most_slots))
        rows.append(())
    parts = ("weights", "experts", "cache", "activ.", "buffers", "EPLB", "graphs", "total")
    columns: Columns = {"GB a GPU": text, **dict.fromkeys(parts, "{:.1f}".format), "tokens": "{:,}".format, "slots": str}
    return Table(columns, rows[:-1], caption=caption)


def _plans_table(engine: str, plans: SimulatedPlans, title: str) -> Table:
    """A table of simulated plans beside the engine's default."""
    rows: list[tuple[Any, ...]] = [(f"{engine}'s default", plans.default_s, plans.tokens / plans.default_s, 1.0, "")]
    for candidate in plans.candidates:
        between = "" if candidate.low is None else f"{candidate.low:.2f}x to {candidate.high:.2f}x"
        rows.append((candidate.name, candidate.seconds, plans.tokens / candidate.seconds, candidate.gain, between))
    columns: Columns = {"plan": text, "step": seconds, "processed\ntokens/s": RATE, "gain": GAIN}
    return Table({**columns, f"{CONFIDENCE:.0%} interval": str}, rows, title)
