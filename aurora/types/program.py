"""What every rank does, in order: the one thing that is simulated and performed. It holds orders, not sizes."""

from dataclasses import dataclass

from aurora.types.plan import Order, Placement

BARRIERS = ("gpu", "global", "none")  # who waits for whom when a program is simulated


@dataclass(frozen=True)
class Compute:
    """Local work; one model at a time computes on a rank. phase: gate, expert or aggregate."""

    phase: str


@dataclass(frozen=True)
class Barrier:
    """All ranks of the model meet: the exchange of token counts, without which no rank knows its sizes."""

    phase: str


@dataclass(frozen=True)
class Exchange:
    """An all-to-all. Two models' exchanges alternate on every rank's port: a's first, b's first, a's second, ..."""

    phase: str
    order: Order


Op = Compute | Barrier | Exchange


@dataclass(frozen=True)
class Program:
    """ops_ML[m][l]: what each rank does for model m in MoE layer l of every step; the models run side by side.

    once_M: whether a token of each model travels once to a rank that holds several of its experts, or for every choice.
    """

    ranks: int
    names_M: tuple[str, ...]
    placements_M: tuple[Placement, ...]
    ops_ML: tuple[tuple[tuple[Op, ...], ...], ...]
    once_M: tuple[bool, ...]
