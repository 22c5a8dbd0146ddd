"""Requests to a serving engine: when each arrives, and how many tokens it reads and writes."""

from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, counts, numbers
from aurora.types.option_checks import LONGEST_S, MOST_SEED, MOST_TOKENS, check_options, option

MOST_REQUESTS = 1_000_000  # of one simulation
SERVED = "Requests"  # panel of --help-all


@dataclass(frozen=True, eq=False, repr=False)
class Requests(Value):
    """Requests in the sequence in which they arrive.

    Attributes:
        arrival_s_Q: (Q,) float64, seconds from zero, never falling.
        input_tokens_Q: (Q,) int64, tokens of each prompt, one or more.
        output_tokens_Q: (Q,) int64, tokens that are generated for it, one or more.

    Raises:
        BadInput: if there are none or too many, shapes differ, times fall, or a request has no tokens.
    """

    arrival_s_Q: FloatArray
    input_tokens_Q: IntArray
    output_tokens_Q: IntArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrival_s_Q", numbers("requests, arrival_s", self.arrival_s_Q))
        for name in ("input_tokens_Q", "output_tokens_Q"):
            object.__setattr__(self, name, counts(f"requests, {name[:-2]}", getattr(self, name), 1))
        shapes = {array.shape for array in (self.arrival_s_Q, self.input_tokens_Q, self.output_tokens_Q)}
        if len(shapes) != 1:
            raise BadInput(f"requests: expected as many arrivals as inputs and outputs, found {sorted(shapes)}")
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
        """Returns those that arrive before `seconds`.

        Raises:
            BadInput: if there are none.
        """
        upto = int(np.searchsorted(self.arrival_s_Q, seconds))
        if not upto:
            raise BadInput(f"`duration_s`: expected requests in the first {seconds:g} seconds, found none")
        return Requests(self.arrival_s_Q[:upto], self.input_tokens_Q[:upto], self.output_tokens_Q[:upto])


@dataclass(frozen=True)
class RequestOptions:
    """Options of `aurora.simulate_requests`: requests that are drawn, where no trace is given, and the engine's limits.

    Args:
        rate: requests per second, which arrive at random (Poisson).
        isl: input sequence length: tokens of each prompt.
        osl: output sequence length: tokens that are generated for each request.
        duration_s: seconds in which requests arrive; None: 60, of a trace all.
        max_num_batched_tokens: tokens that a rank computes in one step at most, as vLLM's option.
        max_num_seqs: requests that a rank works on at once at most, as vLLM's option.
        seed: for arrivals, and for the tokens' experts.
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
