"""Options of the public functions. The command line takes parameter names, defaults and help texts from here."""

import re
from dataclasses import dataclass

from aurora.errors import BadInput
from aurora.types.addresses import parse_address

DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSPORTS = ("auto", "gloo", "memory", "nccl", "shaped")
TRAIN_DTYPES = ("float32", "bfloat16", "float64")
TRAIN_TRANSPORTS = ("auto", "gloo", "memory", "nccl")
LINK_TRANSPORTS = ("auto", "gloo", "nccl")  # those whose links can be measured
RUN_ORDERS = ("plan", "auto")
SIMULATED_ORDERS = ("plan", "batch")
ALL_TO_ALLS = ("flat", "hierarchical")
INTERLEAVE = ("on", "off", "processes")  # models: at the same time, one after the other, at the same time across processes

LONGEST_S = 1e6  # seconds that an option can ask to wait: eleven days
MOST_PROCESSES = 256  # that an option can ask for on one machine
MOST = {  # the largest value of an option, by name: far above use, below what would hang or fill the memory
    "sources": 4096,
    "prompt_tokens": 1 << 20,
    "batch": 1 << 20,
    "max_new_tokens": 1 << 20,
    "limit": 1 << 40,
    "share": MOST_PROCESSES,
    "window": 1 << 40,
    "precision": 1.0,
    "workers": 1024,
    "redundancy": 1024,
    "agreeing": 1024,
    "timeout_s": LONGEST_S,
    "hang_s": LONGEST_S,
    "time_limit_s": LONGEST_S,
    "respawn": 1000,
    "min_ranks": 4096,
    "window_tokens": 1 << 30,
    "windows": 1 << 20,
    "slots_per_gpu": 1 << 16,
    "min_replicas": 1 << 16,
    "hot": 1 << 16,
    "threshold": 1e6,
    "seeds": 1000,
    "load": 1000,
    "iterations": 10_000,
    "process_iterations": 10_000,
    "stretch": 1000.0,
    "points": 10_000,
    "features": 1_000_000,
    "draws": 100_000,
    "seed": 2**63 - 1,
    "steps": 1 << 40,
    "ranks": MOST_PROCESSES,
    "length": 1 << 20,
    "learning_rate": 1e6,
    "weight_decay": 1e6,
    "max_norm": 1e30,
    "router_loss": 1e6,
    "rebalance_every": 1 << 40,
    "checkpoint_every": 1 << 40,
}


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `aurora.profile`.

    Args:
        sources: source ranks that the prompts are dealt to in turn.
        prompt_tokens: tokens of a prompt; longer prompts are cut.
        batch: prompts that a rank decodes together.
        max_new_tokens: tokens to generate; 1: profile prefill only.
        limit: prompts at most; None: all.
        share: processes that compute on this machine at the same time while phases are timed.
        token_level: keep every token's choices, not only their counts.
        window: tokens of all sources in a window; None: each forward pass is one.
        coactivation: count which experts are chosen together.
        precision: stop when the busiest rank's load is known within this relative error at 95 % confidence; None: read all.
        seed: for the resampling behind `precision`.
    """

    sources: int = 4
    prompt_tokens: int = 128
    batch: int = 8
    max_new_tokens: int = 1
    limit: int | None = None
    share: int = 1
    token_level: bool = False
    window: int | None = None
    coactivation: bool = False
    precision: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _above_zero(self, "sources", "prompt_tokens", "batch", "max_new_tokens", "limit", "share", "window", "precision")
        _zero_or_more(self, "seed")


@dataclass(frozen=True)
class CountingOptions:
    """Options of a profile that redundant workers count.

    Args:
        workers: processes that count; under torchrun its ranks.
        redundancy: least number of workers that count each part of the text; None: two where possible.
        scheme: gradient code that assigns parts of the text to workers.
        seed: for schemes that draw at random.
        timeout_s: seconds without any message after which the run ends.
        agreeing: how many workers must have sent the same for a part; 1: the first copy counts unless one that differs comes.
    """

    workers: int
    redundancy: int | None = None
    scheme: str = "balanced"
    seed: int = 0
    timeout_s: float = 300.0
    agreeing: int = 1

    def __post_init__(self) -> None:
        _above_zero(self, "workers", "redundancy", "timeout_s", "agreeing")
        _zero_or_more(self, "seed")

    @property
    def copies(self) -> int:
        """Returns how many workers count each part of the text at least."""
        if self.redundancy is not None:
            return self.redundancy
        return 1 if self.scheme == "uncoded" else min(2, self.workers)


@dataclass(frozen=True)
class SyntheticOptions:
    """Options of `aurora.synthetic_profile`.

    Args:
        sources: source ranks.
        window_tokens: tokens of each source in a window.
        windows: windows, one per forward pass.
        seed: for the draws.
        token_level: keep every token's choices, not only their counts.
        correlation: how often the two experts of a pair are drawn together, from 0 to 1.
    """

    sources: int = 4
    window_tokens: int = 1024
    windows: int = 1
    seed: int = 0
    token_level: bool = False
    correlation: float = 0.0

    def __post_init__(self) -> None:
        _above_zero(self, "sources", "window_tokens", "windows")
        _zero_or_more(self, "seed")
        if (total := self.sources * self.window_tokens * self.windows) > 10**9:
            raise BadInput(f"`window_tokens`: expected at most 1e9 tokens in all, found {total}")
        if not 0 <= self.correlation <= 1:
            raise BadInput(f"`correlation`: expected a number from 0 to 1, found {self.correlation}")


@dataclass(frozen=True)
class PlanOptions:
    """Options of `aurora.plan`: strategies by name; "auto" chooses by the number of models and the cluster.

    Args:
        place: placement of experts: each by itself, in one group per GPU, or with replicas.
        assign: assignment of one model's groups to GPUs.
        colocate: placement of further models' groups on the GPUs of the first.
        order: order of each all-to-all.
        seed: for strategies that draw at random.
        objective: time of two colocated models ("paper": Aurora's Table 2), or of more; "simulated": simulate several plans.
        time_limit_s: seconds after which exact searches stop with the best plan found and its bound.
        slots_per_gpu: experts that each GPU holds, replicas included; None: what its memory holds.
        aim: how windows or domains count: "mean", "cvar" (the worse half), "worst", "sum" (as one), "own" (as one, and exact).
        coactivation: count a token once per GPU, and place experts that tokens choose together on one GPU, where faster.
        min_replicas: replicas that each expert has at least, each on another node (of one node: on another GPU); None: one.
        time_slice: how long a port belongs to one of the models, "exchange" or "layer"; "auto": the faster in the simulator.
        all_to_all: whether a token goes once to each server and on from there ("hierarchical"); "auto": if that is faster.
    """

    place: str = "auto"
    assign: str = "auto"
    colocate: str = "auto"
    order: str = "auto"
    seed: int = 0
    objective: str = "auto"
    time_limit_s: float = 60.0
    slots_per_gpu: int | None = None
    aim: str = "auto"
    coactivation: bool = False
    min_replicas: int | None = None
    time_slice: str = "auto"
    all_to_all: str = "auto"

    def __post_init__(self) -> None:
        _zero_or_more(self, "seed")
        _above_zero(self, "slots_per_gpu", "min_replicas", "time_limit_s")


@dataclass(frozen=True)
class DriftOptions:
    """Options of `aurora.drift`.

    Args:
        threshold: relative loss of the plan above which planning again pays.
        hot: how many of the most loaded experts count as hot; None: an eighth of all.
        seed: for the resampling that tells drift from chance.
    """

    threshold: float = 0.05
    hot: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _above_zero(self, "hot")
        _zero_or_more(self, "seed", "threshold")


@dataclass(frozen=True)
class ControlOptions:
    """Options of the controller that keeps a placement in force near its traffic.

    Args:
        loss: time that the slowest GPUs lose by the placement in force, as a share, up to which it is kept.
        bytes_per_s: bytes of expert weights that may move in a second; None: as many as pay.
        period_s: seconds between two windows of traffic.
    """

    loss: float = 0.02
    bytes_per_s: float | None = None
    period_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise BadInput(f"`loss`: expected a number from zero to below one, found {self.loss}")
        for name in ("bytes_per_s", "period_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(f"`{name}`: expected a number above zero, found {value}")


@dataclass(frozen=True)
class RunOptions:
    """Options of `aurora.run`.

    Args:
        max_new_tokens: tokens to generate for each prompt.
        batch: prompts that a rank decodes together.
        transport: how ranks exchange tokens; "auto": nccl where every rank has a GPU, else gloo.
        timeout_s: seconds that a rank waits for a peer before the run ends.
        keep_logits: return logits with the answers.
        port: port of the ranks' rendezvous, without survive; 0: a free one.
        deduplicate: send a token once to a rank that holds several of its experts; None: as planned.
        order: "plan": the planned orders; "auto": the fastest by message size, measured before and while serving.
        predictable: return the run's routing and measured network, from which it can be simulated.
        interleave: how models share the GPUs: at the same time, one after the other, or at the same time across processes.
        colocate: with interleave "processes": a name, the same for all processes that share these GPUs.
        survive: continue with the remaining ranks when some are lost.
        respawn: with survive: how many times each lost rank is restarted.
        hang_s: with survive: seconds without a message after which a rank is lost.
        lead: with survive: ADDRESS:PORT at which this host leads a run, which other hosts join; None: no other host takes part.
        join: with survive: ADDRESS:PORT of the host that leads the run that this host's ranks join; None: a run of its own.
        node: with lead or join: which of the plan's nodes this host is; None: a leader without ranks of its own.
        local_first: replicas on a token's rank take it first; costs one more exchange of counts per layer.
        dtype: dtype of weights and hidden states; "auto": float32 on a CPU, on GPUs that of the model's files.
        adapt: experts move to follow the traffic while serving, as these options say; None: the placement stays.
        dry_run: with adapt: nothing moves; say what would.
    """

    max_new_tokens: int = 16
    batch: int = 8
    transport: str = "auto"
    timeout_s: float = 300.0
    keep_logits: bool = False
    port: int = 0
    deduplicate: bool | None = None
    order: str = "plan"
    predictable: bool = False
    interleave: str = "on"
    colocate: str | None = None
    survive: bool = False
    respawn: int = 0
    hang_s: float = 5.0
    lead: str | None = None
    join: str | None = None
    node: int | None = None
    local_first: bool = False
    dtype: str = "auto"
    adapt: ControlOptions | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        _above_zero(self, "max_new_tokens", "batch", "timeout_s", "hang_s")
        if self.survive and (self.transport not in ("auto", "gloo", "shaped") or self.predictable):
            raise BadInput("`survive`: expected gloo or the shaped transport, and no `compare`")
        if self.survive and self.interleave != "on":
            raise BadInput(f"`survive`: expected `interleave` on, found {self.interleave}")
        if self.adapt is not None and self.predictable:
            raise BadInput("`adapt`: moves experts, expected no `compare`, which simulates a placement that stays")
        if self.dry_run and self.adapt is None:
            raise BadInput("`dry_run`: expected with `adapt`")
        _zero_or_more(self, "respawn")
        if self.respawn and not self.survive:
            raise BadInput(f"`respawn`: is for a run with `survive`, found {self.respawn} without")
        self._check_hosts()
        for name, known in (("interleave", INTERLEAVE), ("order", RUN_ORDERS), ("transport", TRANSPORTS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise BadInput(f"`{name}`: expected one of {', '.join(known)}, found {getattr(self, name)!r}")
        if (self.colocate is not None) != (self.interleave == "processes"):
            raise BadInput("`colocate`: expected with `interleave` processes, and only there")
        if self.colocate is not None and not re.fullmatch(r"[\w.-]{1,40}", self.colocate):
            raise BadInput(f"`colocate`: expected at most 40 letters, digits, dots and dashes, found {self.colocate!r}")
        if not 0 <= self.port < 65536:
            raise BadInput(f"`port`: expected a port from 0 to 65535, found {self.port}")
        if self.port and self.survive:
            raise BadInput(f"`port`: expected none with `survive`, which needs no rendezvous, found {self.port}")

    def _check_hosts(self) -> None:
        """Raises BadInput if what tells of other hosts does not fit."""
        for name in ("lead", "join"):
            if (address := getattr(self, name)) is not None:
                if not self.survive:
                    raise BadInput(f"`{name}`: is for a run with `survive`, found {address} without")
                parse_address(name, address)
        if self.lead and self.join:
            raise BadInput(f"`join`: expected none on the host that leads, found {self.join}")
        if self.join and self.node is None:
            raise BadInput("`node`: expected one of the plan's nodes with `join`, found none")
        if self.node is not None and not (self.lead or self.join):
            raise BadInput(f"`node`: goes with `lead` or `join`, found {self.node} without")


@dataclass(frozen=True)
class TrainOptions:
    """Options of `aurora.train`.

    Args:
        steps: steps to take in all, those before `resume` included.
        ranks: processes that train; under torchrun its ranks.
        batch: samples of a global batch, which all ranks share.
        length: tokens of a sample.
        learning_rate: step size of AdamW.
        weight_decay: weight decay of AdamW.
        max_norm: Euclidean norm above which the gradient of a step is scaled down to it; None: none.
        router_loss: weight of the load-balancing loss; None: that of the model's config.
        min_replicas: replicas that each expert has at least, each on another rank; None: two, or one on one rank.
        slots_per_gpu: experts that each rank holds in a layer, replicas included; None: as many as the least replicas take.
        rebalance_every: steps after which experts move, if their loads say that it pays; None: they stay.
        checkpoint_every: steps between two checkpoints; None: one at the end.
        resume: go on from the newest checkpoint in the output folder.
        elastic: go on with the remaining ranks when some are lost; ranks are processes on CPUs that use gloo.
        respawn: with elastic: how many times each lost rank is restarted.
        min_ranks: with elastic: with fewer ranks training waits until lost ones are back, or others join.
        redundancy: ranks, all with all experts, that compute each part of a global batch; slow ones are not waited for.
        scheme: with redundancy: gradient code that assigns the parts to ranks.
        lead: with elastic: ADDRESS:PORT at which this host leads a run, which other hosts join; None: no other host takes part.
        join: with elastic: ADDRESS:PORT of the host that leads the run which this host's ranks join; None: a run of its own.
        dtype: dtype in which the model computes; weights of bfloat16 are kept and updated in float32.
        transport: how ranks exchange tokens; "auto": nccl where every rank has a GPU, else gloo.
        seed: for the sequence of the samples.
        timeout_s: seconds that a rank waits for a peer before the run ends.
        port: port of the ranks' rendezvous; 0: a free one.
    """

    steps: int = 100
    ranks: int = 1
    batch: int = 8
    length: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_norm: float | None = 1.0
    router_loss: float | None = None
    min_replicas: int | None = None
    slots_per_gpu: int | None = None
    rebalance_every: int | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    elastic: bool = False
    respawn: int = 0
    min_ranks: int = 1
    redundancy: int = 1
    scheme: str = "balanced"
    lead: str | None = None
    join: str | None = None
    dtype: str = "float32"
    transport: str = "auto"
    seed: int = 0
    timeout_s: float = 300.0
    port: int = 0

    def __post_init__(self) -> None:
        _above_zero(self, "steps", "ranks", "batch", "length", "learning_rate", "max_norm", "min_replicas", "slots_per_gpu")
        _above_zero(self, "rebalance_every", "checkpoint_every", "timeout_s", "min_ranks", "redundancy")
        _zero_or_more(self, "weight_decay", "seed", "respawn")
        if self.router_loss is not None:
            _zero_or_more(self, "router_loss")
        for name, known in (("dtype", TRAIN_DTYPES), ("transport", TRAIN_TRANSPORTS)):
            if getattr(self, name) not in known:
                raise BadInput(f"`{name}`: expected one of {', '.join(known)}, found {getattr(self, name)!r}")
        if self.elastic and self.transport not in ("auto", "gloo"):
            raise BadInput(f"`elastic`: expected `transport` gloo, found {self.transport}")
        for name, default in (("respawn", 0), ("min_ranks", 1), ("lead", None), ("join", None)):
            if (found := getattr(self, name)) != default and not self.elastic:
                raise BadInput(f"`{name}`: is for a run with `elastic`, found {found} without")
        if self.redundancy > 1:
            self._check_redundancy()
        elif self.scheme != "balanced":
            raise BadInput(f"`scheme`: is for a run with `redundancy` above 1, found {self.scheme}")
        self._check_hosts()
        if self.min_ranks > self.ranks and not self.over_hosts:
            raise BadInput(f"`min_ranks`: expected at most {self.ranks} ranks, found {self.min_ranks}")
        if self.length < 2:
            raise BadInput(f"`length`: expected two tokens or more, the second of which is predicted, found {self.length}")
        if not 0 <= self.port < 65536:
            raise BadInput(f"`port`: expected a port from 0 to 65535, found {self.port}")

    def _check_redundancy(self) -> None:
        """Raises BadInput unless each rank can compute parts of a batch without the others."""
        if self.elastic:
            raise BadInput("`redundancy`: goes on with lost ranks by itself, expected 1 with `elastic`")
        if self.transport != "auto":
            raise BadInput(f"`redundancy`: gradients travel through a store, expected `transport` auto, found {self.transport}")
        if self.min_replicas not in (None, self.ranks):
            raise BadInput(
                f"`redundancy`: a rank computes parts of a batch without the others, so it holds all experts: expected "
                f"`min_replicas` {self.ranks}, the number of ranks, or none, found {self.min_replicas}"
            )
        for name in ("slots_per_gpu", "rebalance_every"):
            if (found := getattr(self, name)) is not None:
                raise BadInput(f"`{name}`: expected none with `redundancy`, where each rank holds all experts, found {found}")

    @property
    def over_hosts(self) -> bool:
        """Whether other hosts may take part in the run."""
        return bool(self.lead or self.join)

    def _check_hosts(self) -> None:
        """Raises BadInput if what tells of other hosts does not fit."""
        for name in ("lead", "join"):
            if (address := getattr(self, name)) is not None:
                parse_address(name, address)
        if self.lead and self.join:
            raise BadInput(f"`join`: expected none on the host that leads, found {self.join}")
        if self.over_hosts and self.port:
            raise BadInput(f"`port`: expected none with `lead` or `join`, which have one, found {self.port}")
        if self.join and self.resume:
            raise BadInput("`resume`: is for the host that leads the run, expected none with `join`")

    def min_replicas_among(self, ranks: int) -> int:
        """Returns how many replicas each expert has at least if this many ranks train."""
        if self.redundancy > 1:
            return ranks
        return min(2 if self.min_replicas is None else self.min_replicas, ranks)


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of `aurora reproduce aurora`.

    Args:
        figure: name of a figure, or "all".
        traffic: name of a traffic, or "all".
        seeds: random draws of the traffic.
    """

    figure: str = "all"
    traffic: str = "all"
    seeds: int = 6

    def __post_init__(self) -> None:
        _above_zero(self, "seeds")


@dataclass(frozen=True)
class BccOptions:
    """Options of `aurora reproduce bcc`.

    Args:
        workers: numbers of workers to try; each time there are as many batches as workers.
        load: batches per worker, in schemes with redundancy.
        iterations: gradient descent iterations in simulated time.
        process_iterations: iterations by real processes; 0: none.
        stretch: factor on the processes' delays, so that the processes' own overhead on one machine is small beside them.
        points: examples per batch of the process runs.
        features: features of an example.
        draws: random placements on the mixed cluster.
        seed: for all draws.
    """

    workers: tuple[int, ...] = (50, 100)
    load: int = 10
    iterations: int = 100
    process_iterations: int = 6
    stretch: float = 3.0
    points: int = 10
    features: int = 8000
    draws: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        _above_zero(self, "load", "iterations", "stretch", "points", "features", "draws")
        _zero_or_more(self, "process_iterations", "seed")
        for workers in self.workers:
            _at_most("workers", workers)
            if workers < self.load:
                raise BadInput(f"`workers`: expected at least `load` {self.load} workers, found {workers}")


def _above_zero(options: object, *names: str) -> None:
    """Raises BadInput unless each of these options is None or above zero, and at most its MOST."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"`{name}`: expected more than zero, found {value}")
        _at_most(name, value)


def _zero_or_more(options: object, *names: str) -> None:
    """Raises BadInput unless each of these options is None or zero or more, and at most its MOST."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise BadInput(f"`{name}`: expected zero or more, found {value}")
        _at_most(name, value)


def _at_most(name: str, value: float | None) -> None:
    if value is not None and value > MOST[name]:
        raise BadInput(f"`{name}`: expected at most {MOST[name]}, found {value}")
