"""Prepares placement changes in a background thread: expert maps of each migration round, and orders for the end state."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.planner.control.move_rounds import Move, fill
from aurora.planner.workload.serving_gpus import tokens_to_gpus
from aurora.types import Exchange, Network, Op, Placement, Plan
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.options import LENGTHENED
from aurora.types.placement import EMPTY
from aurora.types.program import hierarchy_of

SAME = ("all-at-once", "paced")  # orders that are the same for all tokens
QUICK = {"openshop-best": "openshop"}  # orders within some percent of others whose search would stall serving
WARM_UPS = 8
REST_S = 0.1  # at most, after a piece of what is prepared; longer ones are compiled code, beside which serving goes on

SlotsG = tuple[tuple[int, ...], ...]
_compiled: set[str] = set()  # methods of orders, in this process


@dataclass
class Prepared:
    """Results of `ChangePreparation.prepare`, filled while it runs.

    Attributes:
        maps: the new expert maps by layer, one dict for each migration round that is ready.
        ops: the operations by layer, with new orders, to use after the last round; None until they are ready.
    """

    maps: list[dict[int, ExpertMap]] = field(default_factory=list)  # of the rounds that are prepared
    ops: dict[int, tuple[Op, ...]] | None = None

    @property
    def rounds(self) -> int:
        """Number of rounds whose expert maps are ready, plus one if the orders are ready."""
        return len(self.maps) + (self.ops is not None)


class ChangePreparation:
    """Builds the expert maps and orders that one rank needs for a placement change. Replicas get equal shares of tokens.

    Args:
        rank: this rank.
        row_bytes: bytes of one row of an all-to-all; converts token counts to traffic.
        network: the network for which orders are computed.
        local_first: as in `DistributedExperts.set_placement`.
        device: device of the layers.
    """

    def __init__(self, rank: int, row_bytes: int, network: Network, local_first: bool, device: torch.device) -> None:
        self._rank, self._row_bytes, self._network = rank, row_bytes, network
        self._local_first, self._device = local_first, device

    def warm_up(self, ops_L: Sequence[tuple[Op, ...]], held_GP: IntArray, experts: int) -> None:
        """Compiles the ordering methods that `ops_L` use. Compiling takes seconds, and would stall serving later.

        It computes one order per method, for random, uneven token counts. Methods that this process has compiled are skipped.

        Args:
            ops_L: the operations of each layer; their orders name the methods.
            held_GP: (G, P) the expert in each slot, of one layer.
            experts: number of experts.
        """
        held_G, rng = slots_G(held_GP), np.random.default_rng(0)
        for method, ops in {_method(ops): ops for ops in ops_L}.items():
            if method is None or method in _compiled:
                continue
            for draw in range(WARM_UPS):
                self.ordered(ops, draw, held_G, rng.integers(1, 10**6, (len(held_G), experts)))
            _compiled.add(method)

    def prepare(
        self,
        prepared: Prepared,
        rounds: Sequence[Sequence[Move]],
        held_LGP: IntArray,
        ops_L: Sequence[tuple[Op, ...]],
        tokens_SLE: IntArray,
    ) -> None:
        """Builds the expert maps of each migration round, then the orders for the traffic of the last window.

        Args:
            prepared: receives each result as soon as it is ready.
            rounds: the expert moves of each round.
            held_LGP: (L, G, P) the expert in each slot before the moves, EMPTY for none; changed in place.
            ops_L: the operations of each layer before the moves.
            tokens_SLE: (S, L, E) tokens of each rank for each expert in the last window.
        """
        for moves in rounds:
            fill(held_LGP, moves)
            layers = sorted({move.layer for move in moves})
            prepared.maps.append({layer: _rested(self._expert_map, slots_G(held_LGP[layer]), ops_L[layer]) for layer in layers})
        changed = sorted({move.layer for moves in rounds for move in moves})
        made = [_rested(self.ordered, ops_L[layer], layer, slots_G(held_LGP[layer]), tokens_SLE[:, layer]) for layer in changed]
        prepared.ops = dict(zip(changed, made, strict=True))

    def ordered(self, ops: tuple[Op, ...], layer: int, held_G: SlotsG, tokens_SE: IntArray) -> tuple[Op, ...]:
        """Returns the operations of a layer with orders computed anew for the given token counts.

        The orders are computed by the method of the present orders, or by its faster substitute in QUICK. `ops` are returned
        unchanged if the method ignores token counts, if it is not in ORDER, or if the all-to-alls are hierarchical.

        Args:
            ops: the present operations.
            layer: index of the layer; seeds the random generator.
            held_G: the experts that each GPU holds.
            tokens_SE: (S, E) tokens of each rank for each expert.
        """
        method = _method(ops)
        if method is None:
            return ops
        from aurora.planner.alltoall.schedule import both_ways

        bytes_GG = tokens_to_gpus(tokens_SE, _split_EG(held_G)) * self._row_bytes
        np.fill_diagonal(bytes_GG, 0)
        back_GG = np.ascontiguousarray(bytes_GG.T)
        made = both_ways(bytes_GG[None], back_GG[None], None, self._network, method, rng=np.random.default_rng(layer))
        orders = dict(zip(("dispatch", "combine"), made[:2], strict=True))
        return tuple(replace(op, order=orders[op.phase]) if isinstance(op, Exchange) else op for op in ops)

    def _expert_map(self, held_G: SlotsG, ops: tuple[Op, ...]) -> ExpertMap:
        return ExpertMap(held_G, self._rank, _split_EG(held_G), self._local_first, hierarchy_of(ops)).to(self._device)


def compile_orders(plan: Plan) -> None:
    """Compiles the ordering methods that a plan uses; see `ChangePreparation.warm_up`."""
    from aurora.planner.compile import compile_plan

    program = compile_plan(plan)
    preparation = ChangePreparation(0, 1, plan.cluster.network, False, torch.device("cpu"))
    for placement, ops_L in zip(program.placements_M, program.ops_ML, strict=True):
        preparation.warm_up(ops_L, placement.held_LGP()[0], placement.experts)


def _method(ops: tuple[Op, ...]) -> str | None:
    """The method by which a layer's orders are made anew; None: they stay."""
    method = next((op.order.method for op in ops if isinstance(op, Exchange)), None)
    if method is None or method in SAME or hierarchy_of(ops) is not None:
        return None
    from aurora.planner.alltoall.registry import ORDER  # thousands of lines, which engines with exchanges of their own need not

    return QUICK.get(method, method) if method in ORDER else None


def slots_G(held_GP: IntArray) -> SlotsG:
    """Returns, for each GPU, the experts in its slots of one layer. held_GP is (G, P); EMPTY entries are dropped."""
    return tuple(tuple(expert for expert in row if expert != EMPTY) for row in held_GP.tolist())


def _split_EG(held_G: SlotsG) -> FloatArray:
    """(E, G) the part of each expert's load that each GPU takes, if replicas take equal parts."""
    return Placement.evenly((held_G,)).split_EG(0)


def _rested(make: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `make`. Then this thread rests, to take no more than LENGTHENED of the interpreter from serving."""
    began_s = time.thread_time()
    made = make(*args)
    time.sleep(min((time.thread_time() - began_s) * (1 / LENGTHENED - 1), REST_S))
    return made
