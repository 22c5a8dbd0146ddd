"""Writes docs/walkthrough.md, one plan of one layer with the arrays of every step; `python docs/walkthrough.py` renews it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aurora
from aurora.algorithms.alltoall.schedule import order_exchanges
from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.workload.forecast import layer_forecast
from aurora.algorithms.workload.traffic import exchange_bytes, exchange_rows
from aurora.planner.options import resolve
from aurora.planner.plan import plan
from aurora.planner.scenarios.exclusive import Exclusive
from aurora.simulator.interpreter import simulate_plan
from aurora.types.trace import TRACE_PHASES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "walkthrough.md"
CLUSTER = aurora.Cluster("four", tuple(aurora.Gpu(f"gpu-{rank}", "any", 0, 1e9, 1e9, 10**9) for rank in range(4)))


def traffic() -> aurora.Profile:
    """Returns drawn traffic of one layer with 8 experts: two windows of 12 tokens on each of 4 ranks, 2 experts a token."""
    options = aurora.SyntheticOptions(sources=4, windows=2, window_tokens=12, seed=3)
    return aurora.synthetic_profile("zipf:1", "mixtral-topics", options).at_layers([0])


def page() -> str:
    """Returns the page."""
    profile = traffic()
    made = plan(CLUSTER, profile, aurora.PlanOptions(slots_per_gpu=None))
    options = resolve(made.options, CLUSTER, [profile])
    scenario = Exclusive(CLUSTER, [profile], options)
    placed = scenario.place(np.random.default_rng(options.seed))
    placement = placed.placements_M[0]
    costs_M, splits_M = scenario.costs(0), scenario.splits([placement], 0)
    costs, split_EG = costs_M[0], splits_M[0]
    times = costs.summed.phase_times(split_EG)
    forecast = scenario._forecast(0)
    problem = scenario._problem(0, forecast, np.full(4, 8), np.random.default_rng((options.seed, 0)))
    kinds = problem.searched, problem.deciding, problem.reported, scenario._promised(0, forecast)
    by_costs_s = [kind.value_s(split_EG) for kind in kinds]
    rows_SGG = exchange_rows(profile, 0, split_EG)
    there_SGG, back_SGG = (exchange_bytes(rows_SGG, profile, phase, deduplicated=False) for phase in ("dispatch", "combine"))
    dispatch, _, schedule = order_exchanges(
        there_SGG, back_SGG, None, CLUSTER.network, options.order, rng=np.random.default_rng(options.seed)
    )
    trace = simulate_plan(made, [profile])
    assert made.models[0].placement == placement
    assert made.models[0].dispatch_L[0] == dispatch
    check_plan(made)
    parts = [
        "# A walk through one plan",
        "Four GPUs, eight experts, one layer: every array on the way from the traffic to the simulated trace. Each step is one "
        "function, named with its file. `make_plan` in `aurora/planner/plan.py` performs the steps from Options to Check. "
        "The unit us is a microsecond. `python docs/walkthrough.py` writes this page, and a test compares it with what the "
        "code returns.",
        "Array names end in their axes: T windows, L layers, S source ranks (in `rows_SGG`: steps of an all-to-all, one here), "
        "E experts, G GPUs, W cases of traffic, X transfers; the "
        "[glossary](glossary.md) lists all letters.",
        *step(
            "Traffic",
            type(profile),
            "counts (token, expert) pairs by window, layer, source rank and expert. Source rank g is on GPU g. "
            "A window is one forward pass here. A token chooses two experts.",
            **{"tokens_TLSE[:, 0]": profile.tokens_TLSE[:, 0]},
        ),
        *step(
            "Options",
            resolve,
            'replaces every "auto" by the name of a strategy, which follows from the scenario: one model on equal GPUs.',
            place=options.place,
            assign=options.assign,
            aim=options.aim,
            order=options.order,
        ),
        *step(
            "Forecast",
            layer_forecast,
            "estimates the traffic of windows to come. Two windows are a small sample, so the experts' shares are shrunk "
            "towards equal shares, as far as chance alone would spread them. `Exclusive.place` does the steps from here to "
            "Bound.",
            **{"recorded_E, the mean of the windows": profile.load_LE[0] / profile.windows},
            forecast_E=layer_forecast([profile], 0, False).expected_WSE.sum(axis=(0, 1)) / profile.windows,
        ),
        *step(
            "Costs",
            Exclusive.costs,
            "returns the pairs that each rank has for each expert in each case of traffic, here each window, and the seconds "
            "that an expert's tokens take on each GPU. So few tokens take as long as reading the expert's weights: "
            "21,504 bytes at 10^12 bytes/s. A layer has costs of four kinds of traffic (`ExclusiveProblem`). **searched**: the "
            "forecast, which the search for a placement minimises. **deciding**: cases drawn from the forecast, which decide "
            "between placements that were found. **reported**: the recorded windows, shown here; Price and Bound are of these. "
            "**promised**: other draws; the plan's `unseen_s` is of these.",
            pairs_WGE=costs.own_WGE,
            **{"expert_s_WGE[0, 0] in us": costs.expert_s_WGE[0, 0] * 1e6},
        ),
        *step(
            "Placement",
            Exclusive.place,
            "makes balanced groups of two experts. Then a search swaps and moves experts as long as that shortens the layer. "
            "`slots_LG[0]` has the experts of each GPU. The layer's seconds under this placement, by each of the costs:",
            **{
                "slots_LG[0]": str(placement.slots_LG[0]),
                "searched, deciding, reported, promised in us": "  ".join(f"{seconds * 1e6:.3f}" for seconds in by_costs_s),
            },
        ),
        *step(
            "Price",
            Exclusive.price,
            "adds up Eq. 1 of Aurora: max(gate + dispatch) + max(experts + combine) + max(aggregation), each over GPUs. The "
            "price is the mean over the windows. The phases below are the sums of both windows; GPU 2 is the slowest in "
            "both, so half of (10.068 + 5.632) + (0.043 + 5.632) + 20 is the price. The overhead of the expert "
            "kernel, which no placement changes, counts with the aggregation.",
            **{
                "gate_G in us": times.gate_G * 1e6,
                "dispatch_G in us": times.dispatch_G * 1e6,
                "expert_G in us": times.expert_G * 1e6,
                "combine_G in us": times.combine_G * 1e6,
                "aggregate_G in us": times.aggregate_G * 1e6,
                "price in us": scenario.price(costs_M, splits_M) * 1e6,
            },
        ),
        *step(
            "Bound",
            Exclusive.bounds,
            "solves a linear program over all placements, here without replicas, since no slot is left. No placement takes "
            "less. The gap is price / bound - 1.",
            **{"bound in us": made.bound_s * 1e6, "gap": made.gap},
        ),
        *step(
            "Rows",
            exchange_rows,
            "counts the rows, one for each (token, expert) pair, that each GPU (down) sends to each other GPU (across) in the "
            "dispatch, summed over both windows. Pairs whose expert is on the token's own GPU are not sent: the diagonal is 0.",
            **{"rows_SGG[0]": rows_SGG[0]},
        ),
        *step(
            "Order",
            order_exchanges,
            "finds the sequence in which pairs (sender, receiver) of GPUs send. A row has 128 bytes and a port sends 10^9 "
            "bytes/s, so the 44 rows that GPU 2 receives take 5.632 us, and no order takes less. The combine sends the "
            "reversed pairs in the reversed sequence.",
            **{
                "pairs_X2": dispatch.pairs_X2,
                "makespan in us": schedule.makespan_s * 1e6,
                "the order's bound in us": schedule.fluid_bound_s * 1e6,
            },
        ),
        *step(
            "Check",
            check_plan,
            "replays the orders and adds up the memory, by code that calls nothing of the above. It returns "
            "nothing, or raises `BrokenPlan`.",
        ),
        *step(
            "Program",
            compile_plan,
            "returns the operations of each rank, in sequence. At `counts`, ranks tell each other how many tokens they are "
            "about to send. An order holds no sizes, so it serves any batch.",
            operations=[
                type(op).__name__ + f"({getattr(op, 'phase', None) or op.name!r})" for op in compile_plan(made).ops_ML[0][0]
            ],
        ),
        *step(
            "Trace",
            simulate_plan,
            "simulates the program, one window after the other. In a trace the overhead of the expert kernel is part of the "
            "phase `expert`. The first window takes 20.453 us where Eq. 1 has 20.431, because a transfer of the combine also "
            "waits until its receiver has computed its experts: GPU 2 waits for GPU 1. The first window on GPU 0:",
            **{"phase, peer, start and end in us": rows_of(trace, 0)},
        ),
    ]
    return "\n\n".join(parts) + "\n"


def step(title: str, function: Callable[..., Any], text: str, **arrays: Any) -> list[str]:
    """Returns the paragraphs of a step: what the function does, and its arrays."""
    file = Path(inspect.getsourcefile(function) or "").resolve().relative_to(ROOT)
    parts = [f"## {title}", f"`{function.__qualname__}` in `{file}`: {text}"]
    if arrays:
        with np.printoptions(precision=3, suppress=True, linewidth=110):
            shown = [
                f"{name} =\n{value}" if np.ndim(value) > 1 else f"{name} = {_plain(value)}" for name, value in arrays.items()
            ]
        parts.append("```text\n" + "\n".join(shown) + "\n```")
    return parts


def rows_of(trace: aurora.Trace, rank: int) -> str:
    """Returns the events of a rank in the first step, a line each."""
    lines = [""]
    for x in np.flatnonzero((trace.rank_X == rank) & (trace.step_X == 0)).tolist():
        peer = "" if trace.peer_X[x] < 0 else f"{'to' if trace.sent_X[x] else 'from'} {trace.peer_X[x]}"
        phase = TRACE_PHASES[trace.phase_X[x]]
        lines.append(f"  {phase:10} {peer:7} {trace.start_s_X[x] * 1e6:9.3f} {trace.end_s_X[x] * 1e6:9.3f}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
