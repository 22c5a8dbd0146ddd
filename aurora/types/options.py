"""Options of the public functions; the options of runs and training are in `aurora.types.run_options`.

Each option is defined once, as a field of a dataclass: its type with its Limits, its default, and its line under Args.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from aurora.errors import BadInput, check_one_of
from aurora.types.program import PRIORITIES, TIME_SLICES

LONGEST_S = 1e6  # seconds that an option can ask to wait: eleven days
MOST_PROCESSES = 256  # that an option can ask for on one machine
MOST_TOKENS = 1 << 20  # of a prompt or an answer
MOST = 1 << 40  # of what is only counted
MOST_SEED = 2**63 - 1
MOST_PORT = 65535


@dataclass(frozen=True)
class Limits:
    """Annotation of an option with the values that it can have: `Annotated[int | None, Limits(above=0)]`.

    Attributes:
        above: exclusive lower limit of the value; None: no such limit.
        least: inclusive lower limit; None: no such limit.
        most: inclusive upper limit, far above use and below what would hang or fill the memory; None: no limit.
        one_of: the names that the value, or each of its elements, can be; empty: any.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    one_of: Sequence[str] = ()

    def check(self, name: str, value: Any) -> None:
        """Raises BadInput unless the option `name` (each of a sequence) is None or within the limits."""
        if isinstance(value, list | tuple):
            for member in value:
                self.check(name, member)
        elif value is not None:
            if self.one_of:
                check_one_of(name, value, self.one_of)
            if self.above is not None and not self.above < value < float("inf"):
                raise BadInput(f"`{name}`: expected more than {_written(self.above)}, found {value}")
            if self.least is not None and not self.least <= value < float("inf"):
                raise BadInput(f"`{name}`: expected {_written(self.least)} or more, found {value}")
            at_most(name, value, self.most)


@cache
def limits_of(kind: Any) -> dict[str, Limits]:
    """Returns the Limits of each field of an options dataclass that has some."""
    known = {name: limits_in(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return {name: limits for name, limits in known.items() if limits is not None}


def limits_in(hint: Any) -> Limits | None:
    """Returns the first Limits that a type, or a part of it, is annotated with; None: there are none."""
    found = (each if isinstance(each, Limits) else limits_in(each) for each in get_args(hint))
    return next((limits for limits in found if limits is not None), None)


def check_options(options: Any) -> None:
    """Checks the fields of an options dataclass against their Limits.

    Raises:
        BadInput: if a value is neither None nor within its limits.
    """
    for name, limits in limits_of(options.__class__).items():
        limits.check(name, getattr(options, name))


def at_most(name: str, value: float | None, most: float | None) -> None:
    """Raises BadInput, which names the option `name`, if `value` is more than `most`; None is no value or no limit."""
    if value is not None and most is not None and value > most:
        raise BadInput(f"`{name}`: expected at most {most}, found {value}")


def _written(number: float) -> str:
    return "zero" if number == 0 else f"{number:g}"


Seed = Annotated[int, Limits(least=0, most=MOST_SEED)]
Seconds = Annotated[float, Limits(above=0, most=LONGEST_S)]
Tokens = Annotated[int, Limits(above=0, most=MOST_TOKENS)]
Count = Annotated[int, Limits(above=0, most=MOST)]
Few = Annotated[int, Limits(above=0, most=1 << 16)]  # slots, replicas, experts
Ranks = Annotated[int, Limits(above=0, most=4096)]

GATHERED = "allgather"  # and reduce-scatter, instead of all-to-alls
SIMULATED_ORDERS = ("plan", "batch", GATHERED)
ALL_TO_ALLS = ("flat", "hierarchical")
LEAST_PREEMPTION_S = 1e-6  # between preemption points; a simulation has an event for each
LENGTHENED = 0.1  # of a step's time that moves in the background take at most
AUTO_SLOTS = 0  # per GPU: replicas where they pay
MOST_GROUPS = 16  # of a rank's experts, that overlap
MOST_MICRO_BATCHES = 4  # that a model's batches can be cut into


STRATEGIES: dict[str, list[str]] = {}  # by field of PlanOptions: the planner's names, users', and those of plans that were read


def know(names: Mapping[str, Any]) -> None:
    """Lets PlanOptions accept names of strategies, each under its field; other fields are ignored."""
    for field, known in STRATEGIES.items():
        if isinstance(name := names.get(field), str) and name not in known:
            known.append(name)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `aurora.profile`.

    Args:
        sources: number of source ranks; each prompt in turn goes to the next one.
        prompt_tokens: maximum tokens of a prompt; longer prompts are cut.
        batch: number of prompts that a rank decodes together.
        max_new_tokens: tokens to generate; 1: profile prefill only.
        limit: maximum number of prompts; default: all.
        share: number of processes that time the phases at once: as many as ranks will share this machine.
        token_level: keep the choices of every token, not only their counts.
        window: tokens of all sources in a window; default: each forward pass is one window.
        precision: stop when the busiest rank's load is known within this relative error at 95 % confidence; default: read all.
        seed: random seed of the resampling for `precision`.
    """

    sources: Ranks = 4
    prompt_tokens: Tokens = 128
    batch: Tokens = 8
    max_new_tokens: Tokens = 1
    limit: Count | None = None
    share: Annotated[int, Limits(above=0, most=MOST_PROCESSES)] = 1
    token_level: bool = False
    window: Count | None = None
    precision: Annotated[float | None, Limits(above=0, most=1.0)] = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class SyntheticOptions:
    """Options of `aurora.synthetic_profile`.

    Args:
        sources: number of source ranks.
        window_tokens: tokens of each source in a window.
        windows: number of windows, one per forward pass.
        seed: random seed.
        token_level: keep the choices of every token, not only their counts.
        correlation: how often the two experts of a pair are drawn together, from 0 to 1.
    """

    sources: Ranks = 4
    window_tokens: Annotated[int, Limits(above=0, most=1 << 30)] = 1024
    windows: Tokens = 1
    seed: Seed = 0
    token_level: bool = False
    correlation: Annotated[float, Limits(least=0, most=1)] = 0.0

    def __post_init__(self) -> None:
        check_options(self)
        if (total := self.sources * self.window_tokens * self.windows) > 10**9:
            raise BadInput(f"`window_tokens`: expected at most 1e9 tokens in all, found {total}")


@dataclass(frozen=True)
class PlanOptions:
    """Options of `aurora.plan`: strategies by name; "auto" chooses by the number of models and the cluster.

    Args:
        place: how experts are placed: one by one, in one group per GPU, or with replicas.
        assign: how the groups of one model are assigned to GPUs.
        colocate: how the groups of further models are placed on the GPUs of the first; "auto": in sequence if `assign` is.
        order: order of each all-to-all.
        seed: random seed of strategies that draw.
        slots_per_gpu: experts that each GPU holds, replicas included; auto (0): with replicas where these pay; memory (None):
            as memory allows, each expert once unless place or min_replicas asks for replicas.
        aim: how windows or domains count: "mean", "cvar" (the worse half), "worst", "sum" (as one), "own" (as one, and exact).
        min_replicas: minimum replicas of each expert, each on another node (on one node: another GPU); default: one.
        time_slice: how long a model has a port: "exchange", "layer" or a forward "step"; "auto": the faster of the first two.
        all_to_all: "flat": tokens go directly to each GPU; "hierarchical": once to each server, then on; "auto": the faster.
        priorities: one per model; "interactive" models go before "batch" models, which use the time left; default: equal.
        preemption_s: seconds for which a batch model may keep a GPU while an interactive one waits; default: a tenth of the
            interactive one's layer.
        micro_batches: number of parts of each batch of a single model, which overlap.
        tokens_per_step: tokens of all ranks in a step, N or LO:HI, as at decode; default: each window is a step.
    """

    place: str = "auto"
    assign: str = "auto"
    colocate: str = "auto"
    order: str = "auto"
    seed: Seed = 0
    slots_per_gpu: Annotated[int | None, Limits(least=0, most=1 << 16)] = AUTO_SLOTS
    aim: str = "auto"
    min_replicas: Few | None = None
    time_slice: Annotated[str, Limits(one_of=("auto", *TIME_SLICES))] = "auto"
    all_to_all: Annotated[str, Limits(one_of=("auto", *ALL_TO_ALLS))] = "auto"
    priorities: Annotated[tuple[str, ...], Limits(one_of=PRIORITIES)] = ()
    preemption_s: Annotated[float | None, Limits(least=LEAST_PREEMPTION_S, most=LONGEST_S)] = None
    micro_batches: Annotated[int, Limits(above=0, most=MOST_MICRO_BATCHES)] = 1
    tokens_per_step: Annotated[tuple[int, int] | None, Limits(above=0, most=MOST)] = None

    def __post_init__(self) -> None:
        if self.tokens_per_step is not None:
            tokens = self.tokens_per_step
            pair = (tokens, tokens) if isinstance(tokens, int) else tuple(tokens)
            if len(pair) != 2 or any(type(number) is not int for number in pair) or pair[0] > pair[1]:
                raise BadInput(f"`tokens_per_step`: expected two whole numbers, the fewest first, found {tokens}")
            object.__setattr__(self, "tokens_per_step", pair)
        check_options(self)
        for name, known in STRATEGIES.items():
            check_one_of(name, getattr(self, name), known)
        object.__setattr__(self, "priorities", tuple(self.priorities or ()))
        if self.priorities and self.time_slice == "step":
            raise BadInput("`priorities`: expected time slices by exchange or layer, found `time_slice` step")


@dataclass(frozen=True)
class ControlOptions:
    """Options of the controller that keeps a placement in force near its traffic.

    Args:
        loss: keep the placement while the slowest GPUs take at most this share longer than under a rebalanced one.
        period_s: seconds between two windows of traffic.
    """

    loss: float = 0.02
    period_s: Annotated[float, Limits(above=0)] = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise BadInput(f"`loss`: expected a number from zero to below one, found {self.loss}")
        check_options(self)
