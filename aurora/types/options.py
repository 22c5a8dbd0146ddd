"""Options of the public functions; the options of runs and training are in `aurora.types.run_options`.

Each option is defined once, as a field of a dataclass. `aurora.cli.options` generates the commands' parameters, help and shell
completion from these fields: limits and flags come from their OptionField, help from their line under Args.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from aurora.errors import BadInput, check_one_of
from aurora.types.program import PRIORITIES
from aurora.types.read_numbers import whole_number

LONGEST_S = 1e6  # seconds that an option can ask to wait: eleven days
MOST_PROCESSES = 256  # that an option can ask for on one machine
MOST_TOKENS = 1 << 20  # of a prompt or an answer
MOST = 1 << 40  # of what is only counted
MOST_SEED = 2**63 - 1
MOST_PORT = 65535


@dataclass(frozen=True)
class OptionField:
    """Limits of one field of an options dataclass, and its form on the command line.

    The option's help is the field's line under Args of the dataclass. CHOICES are lists of names by kind, such as "order".

    Attributes:
        above: exclusive lower limit of the value; None: no such limit.
        least: inclusive lower limit; None: no such limit.
        most: inclusive upper limit, far above use and below what would hang or fill the memory; None: no limit.
        one_of: the names that the value, or each of its elements, can be; empty: any.
        flag: the option as typed; empty: the field's name with dashes.
        panel: heading in `--help-all` under which the option stands; None: the option is shown by `--help` too.
        choices: kinds of CHOICES, separated by spaces, whose names complete the option in a shell.
        names: text appended to the help, in which each {kind} is replaced by the names of that kind of CHOICES; None: the names
            of `one_of`, or of the first kind of `choices`, unless the help itself has a {kind} or names all of `one_of`.
        metavar: placeholder of the value in the help; empty: its type.
        read: converts the command line's text to the value; None: the field's type does.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    one_of: Sequence[str] = ()
    flag: str = ""
    panel: str | None = None
    choices: str = ""
    names: str | None = None
    metavar: str = ""
    read: Callable[[str], Any] | None = None


def option(default: Any, **how: Any) -> Any:
    """Returns a dataclass field with this default, which is also an option of the command line.

    Args:
        default: the field's default.
        how: attributes of its OptionField.
    """
    return field(default=default, metadata={"option": OptionField(**how)})


def check_options(options: Any) -> None:
    """Checks the fields of an options dataclass against the limits of their OptionField.

    Raises:
        BadInput: if a value is neither None nor within its limits.
    """
    for entry in fields(options):
        if (limits := entry.metadata.get("option")) is not None:
            check_value(entry.name, getattr(options, entry.name), limits)


def check_value(name: str, value: Any, limits: OptionField) -> None:
    """Raises BadInput unless an option's value (each value of a sequence) is None or within the limits."""
    if isinstance(value, list | tuple):
        for member in value:
            check_value(name, member, limits)
    elif value is not None:
        if limits.one_of:
            check_one_of(name, value, limits.one_of)
        if limits.above is not None and not limits.above < value < float("inf"):
            raise BadInput(f"`{name}`: expected more than {_written(limits.above)}, found {value}")
        if limits.least is not None and not limits.least <= value < float("inf"):
            raise BadInput(f"`{name}`: expected {_written(limits.least)} or more, found {value}")
        at_most(name, value, limits.most)


def at_most(name: str, value: float | None, most: float | None) -> None:
    """Raises BadInput, which names the option `name`, if `value` is more than `most`; None is no value or no limit."""
    if value is not None and most is not None and value > most:
        raise BadInput(f"`{name}`: expected at most {most}, found {value}")


def _written(number: float) -> str:
    return "zero" if number == 0 else f"{number:g}"


LINK_TRANSPORTS = ("auto", "gloo", "nccl")  # those whose links can be measured
GATHERED = "allgather"  # and reduce-scatter, instead of all-to-alls
SIMULATED_ORDERS = ("plan", "batch", GATHERED)
ALL_TO_ALLS = ("flat", "hierarchical")
MOST_WEIGHT = 1000  # of a model's time slices
LEAST_PREEMPTION_S = 1e-6  # between preemption points; a simulation has an event for each
LENGTHENED = 0.1  # of a step's time that moves in the background take at most
AUTO_SLOTS = 0  # per GPU: replicas where they pay
MOST_MICRO_BATCHES = 4  # that a model's batches can be cut into
COUNTED, STRATEGY = "What is counted", "Strategies by name"  # panels of --help-all
PLACES = ": {place}; for several models {colocated_place}; with --min-replicas {survive}; or auto"
AIMS = ": {aim} (mean; for several models: own)"


def read_slots(text: str) -> int | None:
    """Converts text to slots per GPU: "auto" to AUTO_SLOTS, "memory" to None, digits to the number; else raises BadInput."""
    try:
        slots = {"auto": AUTO_SLOTS, "memory": None}[text] if text in ("auto", "memory") else whole_number(text)
    except BadInput:
        slots = -1
    if slots is not None and slots < (text != "auto"):
        raise BadInput(f"`slots_per_gpu`: expected auto, memory or a whole number above zero, found {text!r}")
    return slots


def read_step_tokens(text: str) -> tuple[int, int] | None:
    """Converts text to (fewest, most) tokens of a step: "64" to (64, 64), "16:64" to (16, 64), "auto" to None.

    Raises:
        BadInput: if the text is anything else.
    """
    least, _, most = text.partition(":")
    try:
        return None if text == "auto" else (whole_number(least), whole_number(most or least))
    except BadInput:
        raise BadInput(f"`tokens_per_step`: expected auto, or whole numbers as N or LO:HI, found {text!r}") from None


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `aurora.profile`.

    Args:
        sources: number of source ranks; each prompt in turn goes to the next one.
        prompt_tokens: maximum tokens of a prompt; longer prompts are cut.
        batch: number of prompts that a rank decodes together.
        max_new_tokens: tokens to generate; 1: profile prefill only.
        limit: maximum number of prompts; None: all.
        share: number of processes that time the phases at once: as many as ranks will share this machine.
        token_level: keep the choices of every token, not only their counts.
        window: tokens of all sources in a window; None: each forward pass is one window.
        precision: stop when the busiest rank's load is known within this relative error at 95 % confidence; None: read all.
        seed: random seed of the resampling for `precision`.
    """

    sources: int = option(4, above=0, most=4096)
    prompt_tokens: int = option(128, above=0, most=MOST_TOKENS)
    batch: int = option(8, above=0, most=MOST_TOKENS)
    max_new_tokens: int = option(1, above=0, most=MOST_TOKENS)
    limit: int | None = option(None, above=0, most=MOST)
    share: int = option(1, above=0, most=MOST_PROCESSES, panel=COUNTED)
    token_level: bool = option(False, flag="--tokens", panel=COUNTED)
    window: int | None = option(None, above=0, most=MOST, panel=COUNTED)
    precision: float | None = option(None, above=0, most=1.0)
    seed: int = option(0, least=0, most=MOST_SEED, panel=COUNTED)

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

    sources: int = option(4, above=0, most=4096)
    window_tokens: int = option(1024, above=0, most=1 << 30)
    windows: int = option(1, above=0, most=MOST_TOKENS)
    seed: int = option(0, least=0, most=MOST_SEED)
    token_level: bool = option(False, flag="--tokens")
    correlation: float = option(0.0, least=0, most=1)

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
        colocate: how the groups of further models are placed on the GPUs of the first model.
        order: order of each all-to-all.
        seed: random seed of strategies that draw.
        objective: formula for a layer's time with colocated models ("paper": Aurora's Table 2).
        slots_per_gpu: experts that each GPU holds, replicas included; 0, auto: with replicas where these pay; None, memory: as
            memory allows, each expert once unless place or min_replicas asks for replicas.
        aim: how windows or domains count: "mean", "cvar" (the worse half), "worst", "sum" (as one), "own" (as one, and exact).
        min_replicas: minimum replicas of each expert, each on another node (on one node: another GPU); None: one.
        time_slice: how long a model has a port: "exchange", "layer" or a forward "step"; "auto": the faster of the first two.
        all_to_all: "flat": tokens go directly to each GPU; "hierarchical": once to each server, then on; "auto": the faster.
        priorities: one per model; "interactive" models go before "batch" models, which use the time left; empty: all are equal.
        weights: one per model; number of time slices per slice of a model of weight 1; empty: 1 each.
        preemption_s: seconds for which a batch model may keep a GPU while an interactive one waits; None: a tenth of a layer of
            the interactive one.
        micro_batches: number of parts of each batch of a single model, which overlap.
        kv_tokens: tokens that the KV cache of a GPU must hold beside replicas; None: nine tenths of those without replicas.
        tokens_per_step: tokens of all ranks in a step, N or LO:HI, as at decode; None, auto: each window is a step.
    """

    place: str = option("auto", choices="place survive", names=PLACES)
    assign: str = option("auto", choices="assign", panel=STRATEGY)
    colocate: str = option("auto", choices="colocate", panel=STRATEGY)
    order: str = option("auto", choices="order")
    seed: int = option(0, least=0, most=MOST_SEED, panel=STRATEGY)
    objective: str = option("auto", choices="objective")
    slots_per_gpu: int | None = option(AUTO_SLOTS, least=0, most=1 << 16, read=read_slots, metavar="N|auto|memory")
    aim: str = option("auto", choices="aim", names=AIMS, panel=STRATEGY)
    min_replicas: int | None = option(None, above=0, most=1 << 16)
    time_slice: str = option("auto", choices="time_slice", panel=STRATEGY)
    all_to_all: str = option("auto", choices="all_to_all", panel=STRATEGY)
    priorities: tuple[str, ...] = option((), one_of=PRIORITIES, flag="--priority", panel=STRATEGY)
    weights: tuple[int, ...] = option((), flag="--weight", panel=STRATEGY)
    preemption_s: float | None = option(None, least=LEAST_PREEMPTION_S, most=LONGEST_S, flag="--preemption", panel=STRATEGY)
    micro_batches: int = option(1, above=0, most=MOST_MICRO_BATCHES, panel=STRATEGY)
    kv_tokens: int | None = option(None, least=0, most=MOST, panel=COUNTED)
    tokens_per_step: tuple[int, int] | None = option(
        None, above=0, most=MOST, read=read_step_tokens, metavar="N|LO:HI", panel=COUNTED
    )

    def __post_init__(self) -> None:
        if self.tokens_per_step is not None:
            tokens = self.tokens_per_step
            pair = (tokens, tokens) if isinstance(tokens, int) else tuple(tokens)
            if len(pair) != 2 or any(type(number) is not int for number in pair) or pair[0] > pair[1]:
                raise BadInput(f"`tokens_per_step`: expected two whole numbers, the fewest first, found {tokens}")
            object.__setattr__(self, "tokens_per_step", pair)
        check_options(self)
        object.__setattr__(self, "priorities", tuple(self.priorities or ()))
        object.__setattr__(self, "weights", tuple(self.weights or ()))
        if self.priorities and self.time_slice == "step":
            raise BadInput("`priorities`: expected time slices by exchange or layer, found `time_slice` step")
        for weight in self.weights:
            if not 1 <= weight <= MOST_WEIGHT or weight != int(weight):
                raise BadInput(f"`weights`: expected each a whole number from 1 to {MOST_WEIGHT}, found {weight}")


@dataclass(frozen=True)
class DriftOptions:
    """Options of `aurora.drift`.

    Args:
        threshold: slowdown of the plan, as a share of its time, above which planning again pays.
        hot: number of experts that count as hot, the most loaded ones; None: an eighth of all.
        seed: random seed of the resampling that separates drift from chance.
    """

    threshold: float = option(0.05, least=0, most=1e6)
    hot: int | None = option(None, above=0, most=1 << 16)
    seed: int = option(0, least=0, most=MOST_SEED)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ControlOptions:
    """Options of the controller that keeps a placement in force near its traffic.

    Args:
        loss: keep the placement while the slowest GPUs take at most this share longer than under a rebalanced one.
        period_s: seconds between two windows of traffic.
    """

    loss: float = 0.02
    period_s: float = option(10.0, above=0)

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise BadInput(f"`loss`: expected a number from zero to below one, found {self.loss}")
        check_options(self)
