"""Options of `aurora.run` and `aurora.train`, and the address of a lighthouse; see aurora.types.options."""

import ipaddress
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from aurora.errors import BadInput
from aurora.types.options import MOST_GROUPS, MOST_PROCESSES, Count, Few, Limits, Ranks, Seconds, Seed, Tokens, check_options


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Returns host and port of an address like 10.0.0.1:29600, node1:29600 or [fd00::1]:29600.

    Args:
        name: the parameter that has the address, for the error message.
        text: the address.

    Raises:
        BadInput: if it is no such address, or stands for all addresses of a host.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or 0
        host.encode("idna")  # refuses names whose parts are empty or too long
    except ValueError:
        host, port = "", 0
    plain = host.isascii() and host.isprintable() and " " not in host
    if not (host and port and plain and address_text((host, port)) == text.lower()):
        raise BadInput(f"`{name}`: expected ADDRESS:PORT such as 10.0.0.1:29600, found {text!r}")
    with suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            raise BadInput(f"`{name}`: expected the address of one host, found {host}")
    return host, port


def address_text(address: tuple[str, int]) -> str:
    """Converts (host, port) to text that `parse_address` accepts."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSPORTS = ("auto", "gloo", "memory", "nccl", "push", "shaped")
RUN_ORDERS = ("plan", "auto")
INTERLEAVE = ("on", "off", "processes")  # models: at the same time, one after the other, at the same time across processes


@dataclass(frozen=True)
class RunOptions:
    """Options of `aurora.run`.

    Args:
        max_new_tokens: tokens to generate for each prompt.
        batch: number of prompts that a rank decodes together.
        transport: how ranks exchange tokens; "auto": nccl if every rank has a GPU, else gloo; "push": ordered push of one model
            on GPUs of one NVLink domain, and for tests in Triton's interpreter on CPUs.
        timeout_s: end the run if a rank waits this many seconds for a peer.
        keep_logits: return logits with the answers.
        deduplicate: send a token once to a rank that holds several of its experts; default: as planned.
        order: "plan": the planned orders; "auto": the fastest for each message size, measured before serving.
        predictable: return the routing and the measured network of the run, for a simulation.
        interleave: how models share the GPUs: at the same time, one after the other, or at the same time across processes.
        colocate: with interleave "processes": name of the group of GPUs, the same in all processes that share them.
        overlap: groups of each rank's experts; the experts of a group compute while rows of other groups travel. 1: not so.
        dtype: dtype of weights and hidden states; "auto": float32 on a CPU, on GPUs that of the model's files.
    """

    max_new_tokens: Tokens = 16
    batch: Tokens = 8
    transport: Annotated[str, Limits(one_of=TRANSPORTS)] = "auto"
    timeout_s: Seconds = 300.0
    keep_logits: bool = False
    deduplicate: bool | None = None
    order: Annotated[str, Limits(one_of=RUN_ORDERS)] = "plan"
    predictable: bool = False
    interleave: Annotated[str, Limits(one_of=INTERLEAVE)] = "on"
    colocate: str | None = None
    overlap: Annotated[int, Limits(above=0, most=MOST_GROUPS)] = 1
    dtype: Annotated[str, Limits(one_of=DTYPES)] = "auto"

    def __post_init__(self) -> None:
        check_options(self)
        self._check_push()
        if self.overlap > 1 and (
            self.transport in ("nccl", "push") or self.order == "auto" or self.deduplicate or self.colocate
        ):
            raise BadInput(
                "`overlap`: runs on CPUs, one model in its planned orders, expected no `transport` nccl or push, `order` auto, "
                "`deduplicate` or `colocate`"
            )
        if (self.colocate is not None) != (self.interleave == "processes"):
            raise BadInput("`colocate`: expected with `interleave` processes, and only there")
        if self.colocate is not None and not re.fullmatch(r"[\w.-]{1,40}", self.colocate):
            raise BadInput(f"`colocate`: expected at most 40 letters, digits, dots and dashes, found {self.colocate!r}")

    def _check_push(self) -> None:
        """Raises BadInput if a run by ordered push, in which the host knows no sizes, is to do what needs them."""
        needs = (
            ["predictable"] * self.predictable
            + ["order"] * (self.order == "auto")
            + ["deduplicate"] * (self.deduplicate is False)
        )
        needs += ["interleave"] * (self.interleave == "processes")
        if self.transport == "push" and needs:
            raise BadInput(f"`transport` push: carries one placement in its planned order, found `{needs[0]}`")


TRAIN_DTYPES = ("float32", "bfloat16", "float64")
TRAIN_TRANSPORTS = ("auto", "gloo", "memory", "nccl")
OF_EACH_HOST = frozenset(("ranks", "respawn", "resume", "timeout_s", "lighthouse"))  # the others are the same on all


@dataclass(frozen=True)
class TrainOptions:
    """Options of `aurora.train`.

    Args:
        steps: total number of steps, including those before `resume`.
        ranks: number of processes that train on this host; under torchrun its ranks.
        batch: samples of a global batch; all ranks share them.
        length: tokens of a sample.
        learning_rate: step size of AdamW.
        weight_decay: weight decay of AdamW.
        max_norm: maximum Euclidean norm of a step's gradient; larger gradients are scaled down to it; None: no limit.
        router_loss: weight of the load-balancing loss; default: that of the model's config.
        min_replicas: minimum replicas of each expert, each on another rank; default: two, or one on one rank.
        slots_per_gpu: experts that each rank holds in a layer, replicas included; default: only those that min_replicas needs.
        rebalance_every: number of steps after which experts move if that pays; default: they stay.
        checkpoint_every: steps between two checkpoints; default: one at the end.
        resume: continue from the newest checkpoint in the output folder.
        elastic: continue with the remaining ranks when some are lost; see `transport`.
        respawn: with elastic: how many times each lost rank is restarted.
        min_ranks: with elastic: minimum ranks of all hosts; with fewer, training waits until ranks return or join.
        redundancy: number of ranks that compute each part of a batch, with all experts; above 1, no step waits for slow ones.
        scheme: with redundancy: gradient code that assigns the parts to ranks.
        lighthouse: with elastic: ADDRESS:PORT of a running torchft_lighthouse, at which the ranks of all hosts meet; default:
            this host trains alone.
        dtype: dtype in which the model computes; with bfloat16, weights are kept and updated in float32.
        transport: how ranks exchange tokens; "auto": nccl if every rank has a GPU, else gloo; the same on all hosts.
        seed: random seed of the sequence of samples.
        timeout_s: end the run if a rank waits this many seconds for a peer.
    """

    steps: Count = 100
    ranks: Annotated[int, Limits(above=0, most=MOST_PROCESSES)] = 1
    batch: Tokens = 8
    length: Tokens = 128
    learning_rate: Annotated[float, Limits(above=0, most=1e6)] = 1e-3
    weight_decay: Annotated[float, Limits(least=0, most=1e6)] = 0.01
    max_norm: Annotated[float | None, Limits(above=0, most=1e30)] = 1.0
    router_loss: Annotated[float | None, Limits(least=0, most=1e6)] = None
    min_replicas: Few | None = None
    slots_per_gpu: Few | None = None
    rebalance_every: Count | None = None
    checkpoint_every: Count | None = None
    resume: bool = False
    elastic: bool = False
    respawn: Annotated[int, Limits(least=0, most=1000)] = 0
    min_ranks: Ranks = 1
    redundancy: Annotated[int, Limits(above=0, most=1024)] = 1
    scheme: str = "balanced"
    lighthouse: str | None = None
    dtype: Annotated[str, Limits(one_of=TRAIN_DTYPES)] = "float32"
    transport: Annotated[str, Limits(one_of=TRAIN_TRANSPORTS)] = "auto"
    seed: Seed = 0
    timeout_s: Seconds = 300.0

    def __post_init__(self) -> None:
        check_options(self)
        if self.elastic and self.transport == "memory":
            raise BadInput(f"`elastic`: expected `transport` auto, gloo or nccl, found {self.transport}")
        for name, default in (("respawn", 0), ("min_ranks", 1), ("lighthouse", None)):
            if (value := getattr(self, name)) != default and not self.elastic:
                raise BadInput(f"`{name}`: is for a run with `elastic`, found {value} without")
        if self.redundancy > 1:
            self._check_redundancy()
        elif self.scheme != "balanced":
            raise BadInput(f"`scheme`: is for a run with `redundancy` above 1, found {self.scheme}")
        if self.lighthouse is not None:
            parse_address("lighthouse", self.lighthouse)
        elif self.min_ranks > self.ranks:
            raise BadInput(f"`min_ranks`: expected at most {self.ranks} ranks, found {self.min_ranks}")
        if self.length < 2:
            raise BadInput(f"`length`: expected two tokens or more, the second of which is predicted, found {self.length}")

    def _check_redundancy(self) -> None:
        """Raises BadInput unless each rank can compute parts of a batch without the others."""
        if self.elastic:
            raise BadInput("`redundancy`: goes on with lost ranks by itself, expected 1 with `elastic`")
        if self.transport != "auto":
            raise BadInput(f"`redundancy`: gradients travel over pipes, expected `transport` auto, found {self.transport}")
        if self.min_replicas not in (None, self.ranks):
            raise BadInput(
                f"`redundancy`: a rank computes parts of a batch without the others, so it holds all experts: expected "
                f"`min_replicas` {self.ranks}, the number of ranks, or none, found {self.min_replicas}"
            )
        for name in ("slots_per_gpu", "rebalance_every"):
            if (value := getattr(self, name)) is not None:
                raise BadInput(f"`{name}`: expected none with `redundancy`, where each rank holds all experts, found {value}")

    def min_replicas_among(self, ranks: int) -> int:
        """Returns the minimum number of replicas of each expert if `ranks` ranks train."""
        if self.redundancy > 1:
            return ranks
        return min(2 if self.min_replicas is None else self.min_replicas, ranks)
