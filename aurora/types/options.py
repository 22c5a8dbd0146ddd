"""What a user may choose for each verb. The command line reads its defaults from here."""

import re
from dataclasses import dataclass

from aurora.errors import BadInput

TRANSPORTS = ("auto", "gloo", "memory", "nccl", "shaped")
RUN_ORDERS = ("plan", "auto")
INTERLEAVE = ("on", "off", "processes")


@dataclass(frozen=True)
class ProfileOptions:
    """sources: ranks that prompts are dealt to. prompt_tokens: length of each prompt. batch: prompts a rank decodes
    together. max_new_tokens: 1 profiles prefill alone. limit: prompts used at most. share: how many processes compute on
    this machine at the same time while phases are timed. token_level: keep every token's choices, not their counts alone.
    window: tokens of all sources in a window; None makes each forward pass one. pairs: count which experts are chosen
    together. precision: stop when the bottleneck's load is known within this part of itself. seed: of what that draws."""

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
        _seed(self.seed)


@dataclass(frozen=True)
class CountingOptions:
    """workers: processes, or ranks under torchrun. redundancy: how many of them count each part of the text at least; None:
    two where there are two. scheme: who counts what, by name. seed: of who that is. timeout_s: how long to wait for nothing."""

    workers: int
    redundancy: int | None = None
    scheme: str = "balanced"
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _above_zero(self, "workers", "redundancy", "timeout_s")
        _seed(self.seed)

    @property
    def copies(self) -> int:
        if self.redundancy is not None:
            return self.redundancy
        return 1 if self.scheme == "uncoded" else min(2, self.workers)


@dataclass(frozen=True)
class SyntheticOptions:
    """sources: ranks. window_tokens: how many each of them holds in each window. windows: forward passes. seed: of the
    drawing. token_level: keep every token's choices, not their counts alone. correlation: from 0 to 1, how often the two
    experts of a pair are drawn with one and the same luck."""

    sources: int = 4
    window_tokens: int = 1024
    windows: int = 1
    seed: int = 0
    token_level: bool = False
    correlation: float = 0.0

    def __post_init__(self) -> None:
        _above_zero(self, "sources", "window_tokens", "windows")
        _seed(self.seed)
        if (total := self.sources * self.window_tokens * self.windows) > 10**9:
            raise BadInput(f"`window_tokens`: expected at most 1e9 tokens in all, found {total}")
        if not 0 <= self.correlation <= 1:
            raise BadInput(f"`correlation`: expected a number from 0 to 1, found {self.correlation}")


@dataclass(frozen=True)
class PlanOptions:
    """Strategies by name. "auto" follows the scenario: the optimum or a search on mixed GPUs and for one model, Aurora's
    matching for two on equal GPUs, and the order that the switch finds shortest.

    place: experts into GPU-sized groups, or onto GPUs one by one, or with replicas. assign: groups of one model onto GPUs.
    colocate: the second model's groups onto the first's GPUs. order: one all-to-all. seed: for the random strategies.
    objective: of two models that share the GPUs, "causal" or "paper". time_limit_s: what searches that end by themselves may
    take in all before they end early. slots_per_gpu: how many experts each GPU holds, replicas included; by default as many as
    its memory does. aim: over a profile's windows or over domains, "mean", "cvar" (the worse half) or "worst"; "sum" takes them
    as one. affinity: experts that tokens choose together sit together, and a token counts once for each GPU that hosts some of
    its experts, where that is shorter; wants one model alone whose profile holds its tokens' choices. floor: so many replicas
    of each expert at least, on as many GPUs and nodes, so that one node less may fail; places for the failures of nodes.
    turns: of two models that share the GPUs, how long a port is one's at a time; "auto" is by exchange, which
    `simulate.choose.with_turns` looks at again.
    """

    place: str = "auto"
    assign: str = "auto"
    colocate: str = "auto"
    order: str = "auto"
    seed: int = 0
    objective: str = "causal"
    time_limit_s: float = 60.0
    slots_per_gpu: int | None = None
    aim: str = "sum"
    coactivation: bool = False
    min_replicas: int | None = None
    time_slice: str = "auto"

    def __post_init__(self) -> None:
        _seed(self.seed)
        _above_zero(self, "slots_per_gpu", "min_replicas")
        if not 0 < self.time_limit_s < float("inf"):
            raise BadInput(f"`time_limit_s`: expected seconds above zero, found {self.time_limit_s}")


@dataclass(frozen=True)
class DriftOptions:
    """threshold: the loss from which planning again pays. hot: how many of the most loaded experts count as hot; None: an
    eighth of all. seed: of what differs by chance."""

    threshold: float = 0.05
    hot: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _above_zero(self, "hot")
        _seed(self.seed)
        if not 0 <= self.threshold < float("inf"):
            raise BadInput(f"`threshold`: expected zero or more, found {self.threshold}")


@dataclass(frozen=True)
class RunOptions:
    """How to serve. batch: prompts that a rank decodes together. transport: "auto" is nccl where every rank has a GPU, else
    gloo; "shaped" is gloo held to the cluster file's rates; "memory" runs all ranks as threads of this process. order: the
    plan's, or by size the fastest of it, all at once and paced, which "auto" measures before serving. timeout_s: how long a
    rank waits for a peer. keep_logits: bring the logits home, for comparison. port: of the ranks' meeting point, 0 takes a
    free one. deduplicate: send a token once to a rank that holds several of its experts; None: as the plan counts it.
    predictable: bring home what a prediction of the run wants, its routing and the network as measured before. interleave:
    several models side by side, taking turns on GPU and port, or "off", one after the other; "processes": taking turns also
    with whatever other process of this machine gives the same name to colocate. local_first: replicas share the tokens of all
    ranks, a rank's own first, which takes one more exchange of counts a layer. survive: go on when ranks are lost; respawn: how
    many times each of them is started anew; hang_s: a rank that says nothing for so long is lost."""

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
    local_first: bool = False

    def __post_init__(self) -> None:
        _above_zero(self, "max_new_tokens", "batch", "timeout_s", "hang_s")
        if self.survive and (self.transport not in ("auto", "gloo", "shaped") or self.order != "plan" or self.predictable):
            raise BadInput("`survive`: expected gloo or the shaped transport, the plan's order, and no `compare`")
        if self.survive and self.interleave != "on":
            raise BadInput(f"`survive`: expected `interleave` on, found {self.interleave}")
        if self.respawn < 0 or (self.respawn and not self.survive):
            raise BadInput(f"`respawn`: expected zero or more, above zero with `survive`, found {self.respawn}")
        if self.interleave not in INTERLEAVE:
            raise BadInput(f"`interleave`: expected one of {', '.join(INTERLEAVE)}, found {self.interleave!r}")
        if (self.colocate is not None) != (self.interleave == "processes"):
            raise BadInput("`colocate`: expected with `interleave` processes, and only there")
        if self.colocate is not None and not re.fullmatch(r"[\w.-]{1,40}", self.colocate):
            raise BadInput(f"`colocate`: expected at most 40 letters, digits, dots and dashes, found {self.colocate!r}")
        if self.order not in RUN_ORDERS:
            raise BadInput(f"`order`: expected one of {', '.join(RUN_ORDERS)}, found {self.order!r}")
        if self.transport not in TRANSPORTS:
            raise BadInput(f"`transport`: expected one of {', '.join(TRANSPORTS)}, found {self.transport!r}")
        if not 0 <= self.port < 65536:
            raise BadInput(f"`port`: expected a port from 0 to 65535, found {self.port}")


@dataclass(frozen=True)
class ReproduceOptions:
    """figure, traffic: by name, or "all". seeds: how many draws of the traffic."""

    figure: str = "all"
    traffic: str = "all"
    seeds: int = 6

    def __post_init__(self) -> None:
        _above_zero(self, "seeds")


@dataclass(frozen=True)
class BccOptions:
    """workers: numbers of them, each with as many batches, of which a worker with copies holds `load`. iterations: of the
    descent by the simulated clock. process_iterations: by real processes, none: 0, on `points` a batch with `features` each and
    delays `stretch` times as long, so that what many processes on one machine cost beside them weighs little. draws: of random
    placements on a mixed cluster."""

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
        if self.process_iterations < 0:
            raise BadInput(f"`process_iterations`: expected zero or more, found {self.process_iterations}")
        _seed(self.seed)
        for workers in self.workers:
            if workers < self.load:
                raise BadInput(f"`workers`: expected at least `load` {self.load} workers, found {workers}")


def _seed(seed: int) -> None:
    if seed < 0:
        raise BadInput(f"`seed`: expected zero or more, found {seed}")


def _above_zero(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"`{name}`: expected more than zero, found {value}")
