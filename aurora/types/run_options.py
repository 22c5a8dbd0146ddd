"""Options of `aurora.run`; see aurora.types.options."""

import re
from dataclasses import dataclass

from aurora.errors import BadInput
from aurora.types.addresses import check_lead_and_join
from aurora.types.option_checks import LONGEST_S, MOST_PORT, MOST_TOKENS, check_options, option
from aurora.types.options import CHANGING, ControlOptions

DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSPORTS = ("auto", "gloo", "memory", "nccl", "shaped")
RUN_ORDERS = ("plan", "auto")
INTERLEAVE = ("on", "off", "processes")  # models: at the same time, one after the other, at the same time across processes

RANKS, SHARING, LOST, HOSTS = "Ranks and transport", "Orders and time slices", "Lost ranks", "Several hosts"  # panels


@dataclass(frozen=True)
class RunOptions:
    """Options of `aurora.run`.

    Args:
        max_new_tokens: tokens to generate for each prompt.
        batch: number of prompts that a rank decodes together.
        transport: how ranks exchange tokens; "auto": nccl if every rank has a GPU, else gloo.
        timeout_s: end the run if a rank waits this many seconds for a peer, or with join a host for its leader.
        keep_logits: return logits with the answers.
        port: port of the ranks' rendezvous, without survive; 0: a free one.
        deduplicate: send a token once to a rank that holds several of its experts; None: as planned.
        order: "plan": the planned orders; "auto": the fastest for each message size, measured before and during serving.
        predictable: return the routing and the measured network of the run, for a simulation.
        interleave: how models share the GPUs: at the same time, one after the other, or at the same time across processes.
        colocate: with interleave "processes": a name; all processes that share these GPUs give the same one.
        survive: continue with the remaining ranks when some are lost.
        respawn: with survive: how many times each lost rank is restarted.
        hang_s: with survive: seconds without a sign of life after which a rank counts as lost; at least two.
        lead: with survive: ADDRESS:PORT of this host, where hosts with its AURORA_CERTIFICATE join the run; None: none do.
        join: with survive: ADDRESS:PORT of the host whose run this host joins; None: this host has a run of its own.
        node: with lead or join: the plan's node that this host runs; None: a leader that runs no ranks.
        local_first: give a token first to replicas on its own rank; this costs one more exchange of counts per layer.
        dtype: dtype of weights and hidden states; "auto": float32 on a CPU, on GPUs that of the model's files.
        adapt: move experts to follow the traffic while serving, with these options; None: the placement stays.
        dry_run: with adapt: move nothing, only report the moves.
    """

    max_new_tokens: int = option(16, above=0, most=MOST_TOKENS)
    batch: int = option(8, above=0, most=MOST_TOKENS)
    transport: str = option("auto", one_of=TRANSPORTS)
    timeout_s: float = option(300.0, above=0, most=LONGEST_S, flag="--timeout", panel=RANKS)
    keep_logits: bool = False
    port: int = option(0, least=0, most=MOST_PORT, panel=RANKS)
    deduplicate: bool | None = option(None, panel=SHARING)
    order: str = option("plan", one_of=RUN_ORDERS, flag="--orders", panel=SHARING)
    predictable: bool = False
    interleave: str = option("on", one_of=INTERLEAVE)
    colocate: str | None = option(None, flag="--gpu-group", panel=SHARING)
    survive: bool = option(False)
    respawn: int = option(0, least=0, most=1000, panel=LOST)
    hang_s: float = option(5.0, above=0, most=LONGEST_S, flag="--hang", panel=LOST)
    lead: str | None = option(None, panel=HOSTS)
    join: str | None = option(None, panel=HOSTS)
    node: int | None = option(None, panel=HOSTS)
    local_first: bool = option(False, panel=SHARING)
    dtype: str = option("auto", one_of=DTYPES, panel=RANKS)
    adapt: ControlOptions | None = None
    dry_run: bool = option(False, panel=CHANGING)

    def __post_init__(self) -> None:
        check_options(self)
        if self.survive and (self.transport == "memory" or self.predictable):
            raise BadInput("`survive`: expected gloo, nccl or the shaped transport, and no `compare`")
        if self.survive and self.interleave != "on":
            raise BadInput(f"`survive`: expected `interleave` on, found {self.interleave}")
        if self.adapt is not None and self.predictable:
            raise BadInput("`adapt`: moves experts, expected no `compare`, which simulates a placement that stays")
        if self.dry_run and self.adapt is None:
            raise BadInput("`dry_run`: expected with `adapt`")
        if self.respawn and not self.survive:
            raise BadInput(f"`respawn`: is for a run with `survive`, found {self.respawn} without")
        self._check_hosts()
        if (self.colocate is not None) != (self.interleave == "processes"):
            raise BadInput("`colocate`: expected with `interleave` processes, and only there")
        if self.colocate is not None and not re.fullmatch(r"[\w.-]{1,40}", self.colocate):
            raise BadInput(f"`colocate`: expected at most 40 letters, digits, dots and dashes, found {self.colocate!r}")
        if self.port and self.survive:
            raise BadInput(f"`port`: expected none with `survive`, which needs no rendezvous, found {self.port}")

    def _check_hosts(self) -> None:
        """Raises BadInput if what tells of other hosts does not fit."""
        for name in ("lead", "join"):
            if (address := getattr(self, name)) is not None and not self.survive:
                raise BadInput(f"`{name}`: is for a run with `survive`, found {address} without")
        check_lead_and_join(self.lead, self.join)
        if self.join and self.node is None:
            raise BadInput("`node`: expected one of the plan's nodes with `join`, found none")
        if self.node is not None and not (self.lead or self.join):
            raise BadInput(f"`node`: goes with `lead` or `join`, found {self.node} without")
