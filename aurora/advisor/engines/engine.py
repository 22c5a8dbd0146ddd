"""Serving engines as they are: how they divide a model over GPUs, how tokens travel, and how a launch command says so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aurora.errors import BadInput, check_one_of
from aurora.types.arrays import IntArray

PLACEMENTS = {
    "linear": "experts in sequence, equally many on each GPU",
    "round_robin": "expert e on GPU e modulo the number of GPUs",
    "plan": "as aurora's plan has them",
}
SENDS = {
    "reduce": "all GPUs hold the same tokens; their partial sums are added up",
    "gather": "every token goes to every GPU, and the sums come back",
    "route": "a token goes to the GPUs of its experts, and comes back from there",
    "balance": "a token goes where the step's own balance sends it; weights of replicas go before",
}


@dataclass(frozen=True)
class Layout:
    """Division of a model over GPUs.

    Attributes:
        tensor: GPUs over which attention is cut (tensor parallelism).
        data: ranks that each hold all of attention and have requests of their own, but share experts (data parallelism).
        expert: GPUs over which whole experts are divided (expert parallelism); 1: each expert is cut over all of a copy's GPUs.
        copies: independent servers, each with all of the model.

    Raises:
        BadInput: if a size is below 1, or `expert` does not divide a copy's GPUs.

    Example:
        >>> Layout(data=8, expert=8, copies=2).gpus
        16
    """

    tensor: int = 1
    data: int = 1
    expert: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if type(size) is not int or size < 1:
                raise BadInput(f"`{name}` of a layout: expected a whole number from 1 on, found {size!r}")
        if self.copy_gpus % self.expert:
            raise BadInput(f"`expert` of a layout: expected a divisor of a copy's {self.copy_gpus} GPUs, found {self.expert}")

    @property
    def copy_gpus(self) -> int:
        """GPUs of one copy."""
        return self.tensor * self.data

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        return self.copy_gpus * self.copies


@dataclass(frozen=True)
class EngineExchange:
    """The way in which tokens reach experts and their results come back.

    Attributes:
        about: what it is.
        sends: one of SENDS.
        once_per: a token is sent once to each "expert", "gpu" or "server" (and there to the GPUs) that it goes to.
        graphs: whether decode steps keep CUDA graphs.
        hosts: whether it works between servers that no NVLink connects.
        needs: what must be installed or connected; empty: nothing.
        source: where it is described.
    """

    about: str
    sends: str
    once_per: str = "gpu"
    graphs: bool = True
    hosts: bool = True
    needs: str = ""
    source: str = ""

    @property
    def follows_placement(self) -> bool:
        """True if the bytes depend on where experts are. With "balance" neither bytes nor compute do."""
        return self.sends == "route"

    def rows(self, tokens_G: IntArray, chosen_GG: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the rows of a layer's dispatch and of its combine from each GPU to each other.

        Args:
            tokens_G: (G,) int64, tokens that start on each GPU; with "reduce", that each GPU has an equal part of.
            chosen_GG: (G, G) int64, rows from each GPU to the GPUs of the experts that its tokens chose, itself included:
                one for each expert, or one for all of a GPU's or server's where `once_per` says so.

        Returns:
            Two (G, G) int64 arrays with zero diagonals.

        Example:
            >>> import numpy as np
            >>> EXCHANGES["allgather"].rows(np.array([3, 5]), np.array([[3, 0], [5, 0]]))[0].tolist()
            [[0, 3], [5, 0]]
        """
        gpus, others_GG = len(tokens_G), 1 - np.eye(len(tokens_G), dtype=np.int64)
        if self.sends == "reduce":  # a reduce-scatter and an allgather of the sums
            return 0 * others_GG, -(-2 * int(tokens_G.sum()) // gpus) * others_GG
        if self.sends == "gather":
            there_GG = tokens_G[:, None] * others_GG
        elif self.sends == "balance":
            there_GG = -(-chosen_GG.sum(axis=1, keepdims=True) // gpus) * others_GG
        else:
            there_GG = chosen_GG * others_GG
        return there_GG, there_GG.T


EXCHANGES = {
    "all-reduce": EngineExchange("no exchange of tokens: an all-reduce adds up the GPUs' sums", "reduce"),
    "allgather": EngineExchange("allgather and reduce-scatter (or all-reduce) by NCCL", "gather"),
}


@dataclass(frozen=True)
class EplbSettings:
    """An engine's own balancer, which moves experts by the load of past steps.

    Attributes:
        window: steps whose load it looks at.
        interval: steps from one change of the placement to the next.

    Raises:
        BadInput: if one of them is below 1.
    """

    window: int
    interval: int

    def __post_init__(self) -> None:
        if min(self.window, self.interval) < 1:
            raise BadInput(f"EPLB: expected a window and an interval from 1 step on, found {self.window} and {self.interval}")


@dataclass(frozen=True)
class ServingWay:
    """Settings of an engine, all that a launch command says and a simulation needs to know.

    Attributes:
        engine: one of SERVING_ENGINES.
        layout: division of the model over GPUs.
        exchange: one of EXCHANGES.
        placement: of experts when serving starts, one of PLACEMENTS.
        redundant: expert slots of a layer beyond one for each expert, over all GPUs of a copy.
        eplb: settings of the engine's own balancer; None: it is off.
        balance: choice of replicas in each step: "" (in turn or at random), "lplb" (a linear program) or "waterfill".
        overlap: whether two halves of a batch overlap compute and exchange.
        per_server: GPUs of a server.

    Raises:
        BadInput: if a name is unknown or a number below what it may be.
    """

    engine: str
    layout: Layout
    exchange: str
    placement: str = "linear"
    redundant: int = 0
    eplb: EplbSettings | None = None
    balance: str = ""
    overlap: bool = False
    per_server: int = 8

    def __post_init__(self) -> None:
        check_one_of("exchange", self.exchange, EXCHANGES)
        check_one_of("placement", self.placement, PLACEMENTS)
        if self.redundant < 0 or self.redundant % self.layout.expert or (self.redundant and self.layout.expert == 1):
            raise BadInput(f"`redundant`: expected a multiple of the {self.layout.expert} GPUs, found {self.redundant}")
        if self.per_server < 1:
            raise BadInput(f"`per_server`: expected 1 or more, found {self.per_server}")

    @property
    def hosts(self) -> int:
        """Servers of one copy."""
        return -(-self.layout.copy_gpus // self.per_server)


@dataclass(frozen=True)
class ServingEngine:
    """A serving engine: what it does by default, what it can be told to do, and how.

    Attributes:
        versions: of the engine that this was read from.
        default: called with (GPUs, GPUs of a server); returns the way that the engine's documentation starts a MoE model over
            several GPUs with expert parallelism, and nothing else set.
        exchanges: names in EXCHANGES, with the engine's own name of each.
        command: called with (way, model's name or path, folder of the plan's files); returns the shell command, with several
            hosts or copies a line each.
        form: the placement format that it reads (one of PLACEMENT_FORMATS); None: the plan itself, by aurora's plugin.
        replicate: the placement with replicas that it can serve.
        file: the placement file's name.
    """

    versions: str
    default: Callable[[int, int], ServingWay]
    exchanges: Mapping[str, str]
    command: Callable[[ServingWay, str, Path], str]
    form: str | None
    replicate: str = "equal-split"
    file: str = "placement.json"
    facts: Mapping[str, str] = field(default_factory=dict)
