"""What a user may choose for each verb. The command line reads its defaults from here."""

from dataclasses import dataclass

from aurora.errors import BadInput

TRANSPORTS = ("auto", "gloo", "memory", "nccl", "shaped")
RUN_ORDERS = ("plan", "auto")


@dataclass(frozen=True)
class ProfileOptions:
    """sources: ranks that prompts are dealt to. prompt_tokens: length of each prompt. batch: prompts a rank decodes
    together. max_new_tokens: 1 profiles prefill alone. limit: prompts used at most. share: how many processes compute on
    this machine at the same time while phases are timed. token_level: keep every token's choices, not their counts alone."""

    sources: int = 4
    prompt_tokens: int = 128
    batch: int = 8
    max_new_tokens: int = 1
    limit: int | None = None
    share: int = 1
    token_level: bool = False

    def __post_init__(self) -> None:
        _above_zero(self, "sources", "prompt_tokens", "batch", "max_new_tokens", "limit", "share")


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
            raise BadInput(f"--window-tokens: expected at most 1e9 tokens in all, found {total}")
        if not 0 <= self.correlation <= 1:
            raise BadInput(f"--correlation: expected a number from 0 to 1, found {self.correlation}")


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
    its experts, where that is shorter; wants one model alone whose profile holds its tokens' choices.
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
    affinity: bool = False

    def __post_init__(self) -> None:
        _seed(self.seed)
        _above_zero(self, "slots_per_gpu")
        if not 0 < self.time_limit_s < float("inf"):
            raise BadInput(f"--time-limit: expected seconds above zero, found {self.time_limit_s}")


@dataclass(frozen=True)
class RunOptions:
    """How to serve. batch: prompts that a rank decodes together. transport: "auto" is nccl where every rank has a GPU, else
    gloo; "shaped" is gloo held to the cluster file's rates; "memory" runs all ranks as threads of this process. order: the
    plan's, or by size the fastest of it, all at once and paced, which "auto" measures before serving. timeout_s: how long a
    rank waits for a peer. keep_logits: bring the logits home, for comparison. port: of the ranks' meeting point, 0 takes a
    free one. deduplicate: send a token once to a rank that holds several of its experts; None: as the plan counts it."""

    max_new_tokens: int = 16
    batch: int = 8
    transport: str = "auto"
    timeout_s: float = 300.0
    keep_logits: bool = False
    port: int = 0
    deduplicate: bool | None = None
    order: str = "plan"

    def __post_init__(self) -> None:
        _above_zero(self, "max_new_tokens", "batch", "timeout_s")
        if self.order not in RUN_ORDERS:
            raise BadInput(f"--order: expected one of {', '.join(RUN_ORDERS)}, found {self.order!r}")
        if self.transport not in TRANSPORTS:
            raise BadInput(f"--transport: expected one of {', '.join(TRANSPORTS)}, found {self.transport!r}")
        if not 0 <= self.port < 65536:
            raise BadInput(f"--port: expected a port from 0 to 65535, found {self.port}")


@dataclass(frozen=True)
class ReproduceOptions:
    """figure, traffic: by name, or "all". seeds: how many draws of the traffic."""

    figure: str = "all"
    traffic: str = "all"
    seeds: int = 6

    def __post_init__(self) -> None:
        _above_zero(self, "seeds")


def _seed(seed: int) -> None:
    if seed < 0:
        raise BadInput(f"--seed: expected zero or more, found {seed}")


def _above_zero(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"--{name.removesuffix('_s').replace('_', '-')}: expected more than zero, found {value}")
