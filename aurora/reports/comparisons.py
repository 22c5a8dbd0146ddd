"""Tables of a recommendation: ways of serving compared, what balancing takes, and simulated plans."""

from dataclasses import astuple

from rich.table import Column, Table

from aurora.advisor.disaggregation import Disaggregation
from aurora.advisor.recommend import CONFIDENCE, Recommendation, SimulatedPlans
from aurora.advisor.request_balance import ABOVE, BELOW, BalanceOfRequests
from aurora.advisor.served_ways import METHODS, ComparedWay, WaysOfServing
from aurora.reports.formatting import DASH, right, seconds, size

SHOWN_WAYS = 12  # of a recommendation, at most
SHOWN_SHORT = 4  # ways that do not fit, at most


def recommendation_table(recommendation: Recommendation) -> Table:
    """Returns a table that compares the fastest ways of serving, and perfect balance, with the engine's default."""
    kinds = [gpu.kind for gpu in recommendation.cluster.gpus]
    title = f"{recommendation.profile.model} on " + " and ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if recommendation.simulated is not None:
        return _plans_table(recommendation.engine, recommendation.simulated, title)
    assert recommendation.served is not None
    served, heads = recommendation.served, right("tokens/s", "TTFT", "TPOT", "gain", "interval", "share")
    table = Table(Column("way", min_width=18), *heads, title=title, caption="share: of what perfect balance would save")
    for part in ([served.default, served.ceiling], served.others[:SHOWN_WAYS]):
        for way in part:
            table.add_row(
                f"{recommendation.engine}'s default: {recommendation.default.layout}" if way is served.default else way.name,
                f"{way.service.tokens_per_s:,.0f}",
                seconds(way.service.ttft_s),
                seconds(way.service.tpot_s),
                f"{way.gain:.2f}x",
                f"{way.low:.2f}-{way.high:.2f}",
                DASH if way.share is None else f"{way.share:.0%}",
            )
        table.add_section()
    return table


def disaggregation_table(apart: Disaggregation) -> Table:
    """Returns a table of prefill and decode apart, pool by pool, beside the best way of serving together."""
    rates, tokens = apart.rates, apart.rates.service.tokens_per_s / apart.rates.per_s
    caption = (
        "tokens/s: generated; of a pool the most that it can do, of both what the slower allows.\n"
        f"TTFT: with {seconds(rates.transfer_s)} for {size(rates.kv_bytes)} of KV cache of each prompt"
    )
    heads = right("GPUs", "tokens/s", "TTFT", "TPOT")
    table = Table(Column("pool", min_width=8), heads[0], "layout", "exchange", "experts", *heads[1:], caption=caption)
    for (stage, pool), per_s in zip(apart.pools.items(), (rates.prefill_per_s, rates.decode_per_s), strict=True):
        table.add_row(stage, *_way_cells(pool), f"{per_s * tokens:,.0f}", DASH, DASH)
    both, together = (pool.way.layout.gpus for pool in apart.pools.values() if pool.way), apart.together
    rows = ("both", (str(sum(both)), DASH, DASH, DASH), rates.service), ("together", _way_cells(together), together.service)
    table.add_section()
    for name, cells, service in rows:
        times = seconds(service.ttft_s), seconds(service.tpot_s)
        table.add_row(name, *cells, f"{service.tokens_per_s:,.0f}", *times)
    return table


def _way_cells(other: ComparedWay) -> tuple[str, str, str, str]:
    """Number of GPUs, layout, exchange, and what places experts, of a way that the engine has."""
    assert other.way is not None
    more = next((f", {change}" for change in other.changes if change.startswith("+")), "")
    placed = METHODS.get(other.method, "cut over GPUs") + more
    return str(other.way.layout.gpus), str(other.way.layout), other.way.exchange, placed


def requests_table(spread: BalanceOfRequests) -> Table:
    """Returns a table of requests as the engine spreads them over ranks, as it could, and with balanced experts."""
    caption = (
        f"tokens/s: generated, with {ABOVE:.0%} of what even ranks can take arriving; the rest with {BELOW:.0%}; busiest rank: "
        "its tokens in a step over the mean"
    )
    heads = right("tokens/s", "TTFT p95", "TPOT p50", "busiest rank")
    table = Table(Column("requests over ranks", min_width=18), *heads, caption=caption)
    rows = {"the engine's default": spread.default} | (spread.flags if spread.worth else {})
    rows |= {spread.expert_way: spread.experts, "both": spread.both, f"even ranks, {spread.expert_way}": spread.even}
    for name, row in rows.items():
        latencies = seconds(row.ttft_p95_s), seconds(row.tpot_p50_s)
        table.add_row(name, f"{row.tokens_per_s:,.0f}", *latencies, f"{row.busiest:.2f}")
    return table


def balancing_costs(served: WaysOfServing) -> Table:
    """Returns a table of the cost of the engine's balancing methods: memory, moved bytes, and start-up."""
    caption = "worst: the slowest GPU's experts over perfect balance, in the worst window"
    heads = right("memory\nof a GPU", "weights moved\nin a step", "works", "worst")
    table = Table(Column("balancing", min_width=18), *heads, caption=caption)
    layout = served.default.way and served.default.way.layout
    rows = {
        (way.method, way.memory_bytes): (size(way.memory_bytes), size(way.moved_bytes), way.starts, f"{way.worst:.2f}x")
        for way in (*served.others, served.default)
        if way.method and way.way is not None and way.way.layout == layout
    }
    for (method, _), row in sorted(rows.items(), key=lambda entry: (entry[0][1], entry[1][3])):
        table.add_row(METHODS[method], *row)
    return table


def memory_table(engine: str, served: WaysOfServing) -> Table:
    """Returns a table of the memory of a GPU, part by part, in the ways that differ in it; those that do not fit come last."""
    caption = (
        f"GB: 10^9 bytes; {engine} fills {served.memory[0].usable_bytes / 1e9:.1f}.\n"
        "tokens: the most of a rank in a step that fit;\n"
        "slots: the most for replicas that fit.\n"
        "From sources and datasheets, not measured"
    )
    heads = right("weights", "experts", "cache", "activ.", "buffers", "EPLB", "graphs", "total", "tokens", "slots")
    table = Table(Column("GB a GPU", min_width=10), *heads, caption=caption)
    short = [fit for fit in served.memory if fit.why]
    for group in ([fit for fit in served.memory if not fit.why], short[:SHOWN_SHORT]):
        for fit in group:
            gigabytes = [f"{size / 1e9:.1f}" for size in (*astuple(fit.parts), fit.parts.total)]
            tokens = str(fit.most_tokens) if fit.most_tokens < 100_000 else f"{fit.most_tokens // 1000}k"
            table.add_row(fit.name or f"{engine}'s default", *gigabytes, tokens, str(fit.most_slots))
        table.add_section()
    return table


def _plans_table(engine: str, plans: SimulatedPlans, title: str) -> Table:
    """A table of simulated plans beside the engine's default."""
    table = Table("plan", "step", "processed\ntokens/s", "gain", f"{CONFIDENCE:.0%} interval", title=title)
    table.add_row(f"{engine}'s default", seconds(plans.default_s), f"{plans.tokens / plans.default_s:,.0f}", "1.00x", "")
    for candidate in plans.candidates:
        between = "" if candidate.low is None else f"{candidate.low:.2f}x to {candidate.high:.2f}x"
        rate = f"{plans.tokens / candidate.seconds:,.0f}"
        table.add_row(candidate.name, seconds(candidate.seconds), rate, f"{candidate.gain:.2f}x", between)
    return table
