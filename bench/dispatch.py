"""Ways of spreading recorded requests over eight ranks in lockstep, simulated: `python bench/dispatch.py --traces FOLDER`.

A step takes 20 ms, and 0.1 ms for each prompt token and each generating request of its busiest rank. The load is arrivals
over what even ranks can take. A planned cadence is compared with all fixed ones (prompts in every k-th step of all ranks),
and its constants with their halves and doubles.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tables import Table, write

from aurora.algorithms.requests import dispatch
from aurora.algorithms.requests import steps as rules
from aurora.algorithms.requests.dispatch import Dispatch
from aurora.algorithms.requests.ranks import by_tokens
from aurora.io import load_requests
from aurora.simulator.serving import serve, serve_evenly
from aurora.types import RequestOptions, Requests
from aurora.types.arrays import IntArray
from aurora.types.requests import ServedRequests

RANKS, MOST = 8, 3000
WAYS = ("requests", "round-robin", "tokens", "aligned:8", "interval:4", "interval:16", "cadence")
FIXED = (1, 2, 4, 8, 16, 32)


class Every(rules.EveryStep):
    """Computes prompts in every k-th step of all ranks."""

    def __init__(self, k: int) -> None:
        self.k = k

    def open_R(self, ranks: rules.RanksAtStep) -> list[bool]:
        """Returns for each rank if it computes prompts in this step."""
        return [ranks.step % self.k == 0 or not any(ranks.generating_R)] * len(ranks.waiting_R)


def step_s(prompt_G: IntArray, generating_G: IntArray) -> float:
    return 0.020 + 1e-4 * float(prompt_G.max() + generating_G.max())


def at_load(requests: Requests, load: float) -> Requests:
    """The first requests, without their prefixes, at a load."""
    q = requests.first(MOST)
    plain = Requests(q.arrival_s_Q, q.input_tokens_Q, q.output_tokens_Q)
    at_once = Requests(np.zeros(len(q)), q.input_tokens_Q, q.output_tokens_Q)
    needed_s = serve_evenly(at_once, RANKS, step_s).seconds
    return plain.at_rate(load * float(np.ptp(q.arrival_s_Q)) / needed_s)


def cells(served: ServedRequests) -> list[str]:
    q = served.requests
    rate = float((q.input_tokens_Q + q.output_tokens_Q).sum()) / served.seconds
    ttft_50, ttft_95 = np.percentile(served.ttft_s_Q, [50, 95])
    tpot = np.percentile(served.tpot_s_X, 50) * 1e3
    return [f"{rate:,.0f}", f"{ttft_50:.2f}", f"{ttft_95:.2f}", f"{tpot:.0f}", f"{served.busiest:.2f}"]


def by(name: str, requests: Requests) -> ServedRequests:
    return serve(requests, RANKS, step_s, RequestOptions(dispatch=name))


def every(k: int, requests: Requests) -> ServedRequests:
    with patch.dict(dispatch.DISPATCH, {"every": Dispatch(by_tokens, Every, 1, 1)}):
        return by(f"every:{k}", requests)


def rate(served: ServedRequests) -> float:
    return served.tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of request traces")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8, 1.0, 1.2, 1.3])
    args = parser.parse_args()
    command = f"python bench/dispatch.py --traces {args.traces.name} --loads {' '.join(map(str, args.loads))}"
    about = f"`{command}`; the first {MOST} requests of each, without their prefixes."
    head = "tokens/s | TTFT p50 s | p95 s | TPOT p50 ms | busiest rank"
    ways = Table("Ways of spreading requests", f"trace | load | way | {head}", about)
    fixed = Table(
        "A planned cadence and all fixed ones",
        "trace | load | tokens/s over the best fixed | every k-th step | over the default | TTFT p95 | TPOT p50",
        "Fixed: prompts in every k-th step of all ranks, the k with most tokens/s. The default is `requests`, vLLM's.",
    )
    constants = Table(
        "Constants of the cadence, half and double",
        "trace | load | constant | tokens/s: half | double | TTFT p95: half | double | TPOT p50: half | double",
        "Each over the constant as it is.",
    )
    for path in sorted(p for p in args.traces.iterdir() if p.suffix in (".csv", ".jsonl")):
        trace = load_requests(path)
        for load in args.loads:
            requests = at_load(trace, load)
            served = {name: by(name, requests) for name in WAYS} | {"even ranks": serve_evenly(requests, RANKS, step_s)}
            for name, one in served.items():
                ways.add(path.stem, load, name, *cells(one))
            rates = {k: rate(every(k, requests)) for k in FIXED}
            best = max(rates, key=lambda k: rates[k])
            planned, default = served["cadence"], served["requests"]
            latencies = latency(planned, default)
            fixed.add(
                path.stem, load, f"{rate(planned) / rates[best]:.3f}", best, f"{rate(planned) / rate(default):.2f}", *latencies
            )
            for constant in ("FILL", "RECENT_S", "MOST_INTERVAL"):
                half, double = (with_constant(constant, factor, requests) for factor in (0.5, 2))
                of_half, of_double = latency(half, planned), latency(double, planned)
                relative = [f"{rate(one) / rate(planned):.3f}" for one in (half, double)]
                constants.add(path.stem, load, constant, *relative, of_half[0], of_double[0], of_half[1], of_double[1])
    write("dispatch", ways.lines, fixed.lines, constants.lines)


def latency(one: ServedRequests, other: ServedRequests) -> list[str]:
    """TTFT p95 and TPOT p50 of one over the other's."""
    ttft, tpot = (
        (lambda served: np.percentile(served.ttft_s_Q, 95)),
        (lambda served: np.percentile(served.tpot_s_X, 50)),
    )
    return [f"{of(one) / of(other):.2f}" for of in (ttft, tpot)]


def with_constant(name: str, factor: float, requests: Requests) -> ServedRequests:
    kind: Callable[[float], float] = int if name == "MOST_INTERVAL" else float
    with patch.object(rules, name, kind(getattr(rules, name) * factor)):
        return by("cadence", requests)


if __name__ == "__main__":
    main()
