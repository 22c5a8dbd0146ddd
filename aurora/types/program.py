"""What every rank does, in order: the one thing that is simulated and performed. It holds orders, not sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from aurora.types.placement import Placement
from aurora.types.schedule import Order
from aurora.types.value import Value

BARRIERS = ("gpu", "global", "none")  # who waits for whom when a program is simulated
TIME_SLICES = (
    "exchange",
    "layer",
)  # how long a port is one model's: for one all-to-all, or from a combine through the next dispatch
PART_S = 0.02  # of experts' work by layer: between its parts a gate or an aggregation of another model goes first


@dataclass(frozen=True)
class Compute:
    """Local work; one model at a time computes on a rank. phase: gate, expert or aggregate."""

    phase: str


@dataclass(frozen=True)
class Barrier:
    """All ranks of the model meet: the exchange of token counts, without which no rank knows its sizes."""

    phase: str


@dataclass(frozen=True, eq=False, repr=False)
class Exchange(Value):
    """An all-to-all. Models' turns on every rank's port alternate: a's first, b's first, a's second, ... A turn ends with the
    exchange, unless the model keeps the port for its next one too."""

    phase: str
    order: Order
    hold_port: bool = False


Op = Compute | Barrier | Exchange


def is_turn(over_M: Sequence[float], model: int) -> bool:
    """Whether a port is `model`'s next, given how many turns of each model are over there, infinity for one that is through:
    its i-th turn follows the i-th of all models before it and the (i-1)-th of all after it."""
    return all(over >= over_M[model] + (other < model) for other, over in enumerate(over_M) if other != model)


@dataclass(frozen=True, eq=False, repr=False)
class Program(Value):
    """ops_ML[m][l]: what each rank does for model m in MoE layer l of every step; the models run side by side.

    once_M: whether a token of each model travels once to a rank that holds several of its experts, or for every choice.
    """

    ranks: int
    names_M: tuple[str, ...]
    placements_M: tuple[Placement, ...]
    ops_ML: tuple[tuple[tuple[Op, ...], ...], ...]
    deduplicated_M: tuple[bool, ...]

    @property
    def by_layer(self) -> bool:
        """Whether a turn on a port goes from a layer's combine through the next one's dispatch. Then experts of the one model
        work while the other combines, gates and dispatches: its gate and aggregation go before experts' work that waits, and
        between parts of that which does not."""
        return any(isinstance(op, Exchange) and op.hold_port for layers in self.ops_ML for ops in layers for op in ops)
