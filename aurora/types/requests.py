"""Requests to a serving engine: arrival times, input and output tokens, and the times at which they were served."""

from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, check_arrays
from aurora.types.options import LONGEST_S, MOST_SEED, MOST_TOKENS, check_options, option

MOST_REQUESTS = 1_000_000  # of one simulation
GROWTH = 1.5  # of the queue from the second to the last quarter of the arrivals, above which it is said to grow
SERVED = "Requests"  # panel of --help-all


@dataclass(frozen=True, eq=False, repr=False)
class Requests(Value):
    """Requests in the sequence in which they arrive.

    Attributes:
        arrival_s_Q: (Q,) float64, seconds from zero, never falling.
        input_tokens_Q: (Q,) int64, tokens of each prompt, one or more.
        output_tokens_Q: (Q,) int64, tokens generated for each request, one or more.

    Raises:
        BadInput: if there are none or too many, shapes differ, times fall, or a request has no tokens.
    """

    arrival_s_Q: FloatArray
    input_tokens_Q: IntArray
    output_tokens_Q: IntArray

    def __post_init__(self) -> None:
        check_arrays(self, "requests, ")
        if not 1 <= len(self) <= MOST_REQUESTS:
            raise BadInput(f"requests: expected from one to {MOST_REQUESTS}, found {len(self)}")
        if self.arrival_s_Q[0] < 0 or (np.diff(self.arrival_s_Q) < 0).any():
            raise BadInput("requests: expected arrivals from zero seconds on that never fall")
        for name in ("input_tokens_Q", "output_tokens_Q"):
            if not (getattr(self, name) > 0).all():
                raise BadInput(f"requests, {name[:-2]}: expected one or more for each request, found zero")

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
        return Requests(self.arrival_s_Q[:upto], self.input_tokens_Q[:upto], self.output_tokens_Q[:upto])


@dataclass(frozen=True)
class RequestOptions:
    """Options of `aurora.simulate_requests`: the requests to draw if no trace is given, and the engine's limits.

    Args:
        rate: requests per second; they arrive at random (Poisson).
        isl: input sequence length: tokens of each prompt.
        osl: output sequence length: tokens that are generated for each request.
        duration_s: seconds in which requests arrive; None: 60, or all requests of a trace.
        max_num_batched_tokens: maximum tokens that a rank computes in one step, as vLLM's option.
        max_num_seqs: maximum requests that a rank serves at the same time, as vLLM's option.
        seed: random seed of arrivals and of the tokens' experts.
    """

    rate: float | None = option(None, above=0, most=1e6)
    isl: int | None = option(None, above=0, most=1 << 24, panel=SERVED)
    osl: int | None = option(None, above=0, most=1 << 24, panel=SERVED)
    duration_s: float | None = option(None, above=0, most=LONGEST_S, flag="--duration", panel=SERVED)
    max_num_batched_tokens: int = option(8192, above=0, most=MOST_TOKENS, panel=SERVED)
    max_num_seqs: int = option(256, above=0, most=MOST_TOKENS, panel=SERVED)
    seed: int = option(0, least=0, most=MOST_SEED, panel=SERVED)

    def __post_init__(self) -> None:
        check_options(self)
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

    isl: int = option(1024, least=1, most=1 << 20)
    osl: int = option(256, least=1, most=1 << 20)
    concurrency: int = option(32, least=1, most=1 << 16)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, eq=False)
class ServedRequests:
    """Requests with the times at which they were served.

    Attributes:
        requests: the requests.
        first_s_Q: (Q,) float64, time at which each request got its first token, in seconds on the clock of `arrival_s_Q`.
        last_s_Q: (Q,) float64, time at which it got its last token.
        rank_Q: (Q,) int64, the rank that served it.
        steps: number of forward passes that served all requests.
    """

    requests: Requests
    first_s_Q: FloatArray
    last_s_Q: FloatArray
    rank_Q: IntArray
    steps: int

    def __post_init__(self) -> None:
        check_arrays(self, "requests, ")

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token of all requests."""
        return float(self.last_s_Q.max() - self.requests.arrival_s_Q[0])

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, of all ranks."""
        return float(self.requests.output_tokens_Q.sum() / self.seconds)

    @property
    def ttft_s_Q(self) -> FloatArray:
        """(Q,) seconds from each request's arrival to its first token (time to first token)."""
        return self.first_s_Q - self.requests.arrival_s_Q

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
        arrival_s_Q = self.requests.arrival_s_Q
        span_s = float(arrival_s_Q[-1] - arrival_s_Q[0])
        if not span_s:
            return 0.0
        from_s, to_s = (float(arrival_s_Q[0]) + part * span_s for part in (begin, end))
        inside_s_Q = np.minimum(self.first_s_Q, to_s) - np.maximum(arrival_s_Q, from_s)
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
        points: number of simulated steps, between which the seconds of all other steps are interpolated.
        off_C: (C,) float64, interpolated / simulated seconds - 1 for C steps of the run: the error of the interpolation. The
            steps are drawn in proportion to their time, and simulated with all layers and other draws of the traffic.
        assumptions: sentences on effects that the prediction leaves out.
    """

    served: ServedRequests
    points: int
    off_C: FloatArray
    assumptions: tuple[str, ...]
