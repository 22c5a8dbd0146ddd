"""Requests to a serving engine: arrival times, input and output tokens, and the times at which they were served."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, check_arrays
from aurora.types.options import Limits, Seconds, Seed, Tokens, check_options

MOST_REQUESTS = 1_000_000  # of one simulation
GROWTH = 1.5  # of the queue from the second to the last quarter of the arrivals, above which it is said to grow
PER_REQUEST = ("arrival_s_Q", "input_tokens_Q", "output_tokens_Q", "session_Q", "delay_s_Q", "blocks_Q")


@dataclass(frozen=True, eq=False, repr=False)
class Requests(Value):
    """Requests in the sequence in which they arrive.

    Attributes:
        arrival_s_Q: (Q,) float64, seconds from zero, never falling. A later turn of a session has the arrival of its first
            turn, and is sent when the turn before is answered.
        input_tokens_Q: (Q,) int64, tokens of each prompt, one or more.
        output_tokens_Q: (Q,) int64, tokens generated for each request, one or more.
        session_Q: (Q,) int64, number of each request's session; None: every request is a session of its own.
        delay_s_Q: (Q,) float64, seconds from the end of the turn before to each request; None: no seconds.
        blocks_Q: for each request the blocks of its prompt, in sequence: prompts whose first blocks are equal share a prefix.
            Empty: prompts share none.
        block_tokens: tokens of a block; the last one of a prompt may have fewer.
        source: description of the file that they were read from.

    Raises:
        BadInput: if there are none or too many, shapes differ, times fall, or a request has no tokens.
    """

    arrival_s_Q: FloatArray
    input_tokens_Q: IntArray
    output_tokens_Q: IntArray
    session_Q: IntArray | None = None
    delay_s_Q: FloatArray | None = None
    blocks_Q: tuple[tuple[int, ...], ...] = ()
    block_tokens: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        check_arrays(self, "requests, ")
        if not 1 <= len(self) <= MOST_REQUESTS:
            raise BadInput(f"requests: expected from one to {MOST_REQUESTS}, found {len(self)}")
        if self.arrival_s_Q[0] < 0 or (np.diff(self.arrival_s_Q) < 0).any():
            raise BadInput("requests: expected arrivals from zero seconds on that never fall")
        for name in ("input_tokens_Q", "output_tokens_Q"):
            if not (getattr(self, name) > 0).all():
                raise BadInput(f"requests, {name[:-2]}: expected one or more for each request, found zero")
        if self.delay_s_Q is not None and (self.delay_s_Q < 0).any():
            raise BadInput(f"requests, delay_s: expected zero or more seconds, found {self.delay_s_Q.min():g}")
        if self.blocks_Q and (len(self.blocks_Q) != len(self) or self.block_tokens < 1):
            raise BadInput(f"requests, blocks: expected blocks for each of {len(self)} requests, and their number of tokens")

    def __len__(self) -> int:
        return len(self.arrival_s_Q)

    def until(self, seconds: float) -> "Requests":
        """Returns the requests that arrive before `seconds`.

        Raises:
            BadInput: if no request arrives before.
        """
        upto = int(np.searchsorted(self.arrival_s_Q, seconds))
        if not upto:
            raise BadInput(f"`duration_s`: expected requests in the first {seconds:g} seconds, found none")
        return self.first(upto)

    def first(self, most: int) -> "Requests":
        """Returns the first `most` requests, or all if there are fewer."""
        cut: dict[str, Any] = {name: getattr(self, name) for name in PER_REQUEST}
        cut = {name: None if values is None else values[:most] for name, values in cut.items()}
        return replace(self, **cut)

    def at_rate(self, factor: float) -> "Requests":
        """Returns the same requests, arriving `factor` times as fast."""
        return replace(self, arrival_s_Q=self.arrival_s_Q / factor)


@dataclass(frozen=True)
class RequestOptions:
    """Options of `aurora.simulate_requests`: the requests to draw if no trace is given, and the engine's limits.

    Args:
        rate: requests per second; they arrive at random (Poisson).
        isl: input sequence length: tokens of each prompt.
        osl: output sequence length: tokens that are generated for each request.
        duration_s: seconds in which requests arrive; default: 60, or all requests of a trace.
        max_num_batched_tokens: maximum tokens that a rank computes in one step, as vLLM's option.
        max_num_seqs: maximum requests that a rank serves at the same time, as vLLM's option.
        dispatch: data-parallel rank of a request, and the steps in which prompts are computed: requests, the rank with the
            fewest requests (vLLM); round-robin (SGLang); tokens, the rank with the fewest prompt tokens to compute; prefix, the
            same without the tokens in the rank's prefix cache; aligned:N, by tokens, and prompts wait at most N
            steps for those of other ranks (TensorRT-LLM); interval:N, by tokens, and prompts are computed in every N-th step
            (vLLM's --prefill-schedule-interval); cadence, by tokens, and in every k-th step of all ranks, k planned from the
            load.
        ttft_s: seconds within which cadence should give a prompt of one step its first token; default: no bound.
        seed: random seed of arrivals and of the tokens' experts.
    """

    rate: Annotated[float | None, Limits(above=0, most=1e6)] = None
    isl: Annotated[int | None, Limits(above=0, most=1 << 24)] = None
    osl: Annotated[int | None, Limits(above=0, most=1 << 24)] = None
    duration_s: Seconds | None = None
    max_num_batched_tokens: Tokens = 8192
    max_num_seqs: Tokens = 256
    dispatch: str = "requests"
    ttft_s: Seconds | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.ttft_s is not None and self.dispatch != "cadence":
            raise BadInput(f"`ttft_s`: expected with `dispatch` cadence, found {self.dispatch}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise BadInput(
                f"`max_num_seqs`: expected at most the {self.max_num_batched_tokens} of `max_num_batched_tokens`, as each "
                f"request takes a token or more, found {self.max_num_seqs}"
            )


@dataclass(frozen=True)
class RequestLoad:
    """A constant load of requests of equal size, with equally many in flight on every GPU.

    Args:
        isl: tokens of a prompt.
        osl: tokens of an answer.
        concurrency: requests in flight for each GPU.
    """

    isl: Annotated[int, Limits(least=1, most=1 << 20)] = 1024
    osl: Annotated[int, Limits(least=1, most=1 << 20)] = 256
    concurrency: Annotated[int, Limits(least=1, most=1 << 16)] = 32

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, eq=False)
class ServedRequests:
    """Requests with the times at which they were served.

    Attributes:
        requests: the requests.
        arrival_s_Q: (Q,) float64, time at which each was sent: its arrival, or for a later turn of a session its delay after
            the end of the turn before.
        first_s_Q: (Q,) float64, time at which each request got its first token, in seconds on the clock of `arrival_s_Q`.
        last_s_Q: (Q,) float64, time at which it got its last token.
        rank_Q: (Q,) int64, the rank that served it.
        steps: number of forward passes that served all requests.
        busiest_X: (X,) float64, tokens of the busiest rank / mean of the ranks, for each run of equal steps.
        seconds_X: (X,) float64, seconds of each run of equal steps.
        cached_tokens: prompt tokens that were in a prefix cache.
    """

    requests: Requests
    arrival_s_Q: FloatArray
    first_s_Q: FloatArray
    last_s_Q: FloatArray
    rank_Q: IntArray
    steps: int
    busiest_X: FloatArray
    seconds_X: FloatArray
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        check_arrays(self, "requests, ")

    @property
    def busiest(self) -> float:
        """Tokens of the busiest rank / mean of the ranks, mean over the time; 1 is even."""
        return float(np.average(self.busiest_X, weights=self.seconds_X)) if self.seconds_X.any() else 1.0

    @property
    def busiest_p99(self) -> float:
        """The same, in the most uneven hundredth of the time at least."""
        order = np.argsort(self.busiest_X)
        passed_X = np.cumsum(self.seconds_X[order])
        return float(self.busiest_X[order][np.searchsorted(passed_X, 0.99 * passed_X[-1])])

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token of all requests."""
        return float(self.last_s_Q.max() - self.arrival_s_Q.min())

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, of all ranks."""
        return float(self.requests.output_tokens_Q.sum() / self.seconds)

    @property
    def ttft_s_Q(self) -> FloatArray:
        """(Q,) seconds from each request's arrival to its first token (time to first token)."""
        return self.first_s_Q - self.arrival_s_Q

    @property
    def tpot_s_X(self) -> FloatArray:
        """(X,) seconds per output token after the first, for each of the X requests with two or more output tokens."""
        after_Q = self.requests.output_tokens_Q - 1
        some = after_Q > 0
        return np.asarray((self.last_s_Q - self.first_s_Q)[some] / after_Q[some])

    def waiting(self, begin: float, end: float) -> float:
        """Returns the mean number of requests that have arrived and have no token yet, over an interval of time.

        Args:
            begin, end: ends of the interval; 0 is the first arrival and 1 the last, so (0.75, 1) is the last quarter.
        """
        first_s, span_s = float(self.arrival_s_Q.min()), float(np.ptp(self.arrival_s_Q))
        if not span_s:
            return 0.0
        from_s, to_s = (first_s + part * span_s for part in (begin, end))
        inside_s_Q = np.minimum(self.first_s_Q, to_s) - np.maximum(self.arrival_s_Q, from_s)
        return float(np.maximum(inside_s_Q, 0.0).sum() / (to_s - from_s))

    @property
    def queue_grows(self) -> bool:
        """True if requests arrive faster than they are served.

        Criterion: the mean queue length in the last quarter is more than GROWTH times that in the second, plus one per rank.
        """
        ranks = int(self.rank_Q.max()) + 1
        return self.waiting(0.75, 1.0) > GROWTH * self.waiting(0.25, 0.5) + ranks


@dataclass(frozen=True, eq=False)
class RequestSimulation:
    """Result of `aurora.simulate_requests`: requests served under a plan.

    Attributes:
        served: when each request was served.
        even: when each would be if ranks shared every step's tokens evenly.
        points: number of simulated steps, between which the seconds of all other steps are interpolated.
        off_C: (C,) float64, interpolated / simulated seconds - 1 for C steps of the run: the error of the interpolation. The
            steps are drawn in proportion to their time, and simulated with all layers and other draws of the traffic.
        assumptions: sentences on effects that the prediction leaves out.
    """

    served: ServedRequests
    even: ServedRequests
    points: int
    off_C: FloatArray
    assumptions: tuple[str, ...]
