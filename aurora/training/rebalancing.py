"""Rebalancing: the controller of the placement in force decides, after each window of steps, whether experts move."""

from dataclasses import replace

import numpy as np
import torch

from aurora.moe.transport import Transport
from aurora.planner.control.controller import Controller
from aurora.planner.control.plan_controller import load_cost_G, slots_in_use
from aurora.planner.placement.slot_counts import failure_domains
from aurora.planner.replication.registry import best_divided
from aurora.types import Cluster, ControlOptions, Placement
from aurora.types.arrays import FloatArray, IntArray


class Rebalancer:
    """Decides for all ranks, on rank 0, which experts they hold from the next step on. Steps wait while experts move.

    Args:
        placement: the placement in force.
        cluster: the ranks' GPUs; those of a node fail together.
        expert_bytes: bytes that travel with an expert.
        min_replicas: replicas that each expert keeps at least.
        move_Bps: bytes that moved in a second so far, over all ranks; None: moves cost nothing until some were timed.
    """

    def __init__(
        self, placement: Placement, cluster: Cluster, expert_bytes: int, min_replicas: int, move_Bps: float | None
    ) -> None:
        slots = slots_in_use(placement, load_cost_G(cluster))
        domain_G = failure_domains(cluster, slots.slots_G).domain_N
        self._controller = Controller(
            placement,
            expert_bytes,
            ControlOptions(),
            slots,
            move_Bps,
            stalls=True,
            min_replicas=min_replicas,
            domain_G=domain_G,
        )
        self._held_LGP = self._controller.held_LGP  # on all ranks what rank 0's controller has

    def window(self, load_LE: IntArray, step_s: list[float], transport: Transport) -> Placement | None:
        """Returns the placement to move to after a window of steps, or None. A collective call.

        When its experts have moved, `moved` must be called.

        Args:
            load_LE: (L, E), the tokens of each expert in the window.
            step_s: seconds of each of its steps.
            transport: between the ranks.
        """
        wanted_LGP = self._held_LGP
        if transport.rank == 0:
            if step_s:
                self._controller.options = replace(self._controller.options, period_s=sum(step_s))
            wanted_LGP = self._controller.window(load_LE, float(np.median(step_s)) if step_s else None).held_LGP
        told_LGP = transport.gather(torch.from_numpy(wanted_LGP.copy()))[0].numpy()
        if np.array_equal(told_LGP, self._held_LGP):
            return None
        self._held_LGP = told_LGP
        evenly = Placement.of_slots(told_LGP)
        return Placement.stack([_divided(evenly, layer, load_E + 1.0) for layer, load_E in enumerate(load_LE)])

    def moved(self, seconds: float, transport: Transport) -> None:
        """Says how long it took until the experts of the last `window` were in place."""
        if transport.rank == 0:
            self._controller.moved(seconds)


def _divided(placement: Placement, layer: int, load_E: FloatArray) -> Placement:
    """One layer of a placement, with shares of the replicas that suit these loads (E,)."""
    holds_GE = placement.holds_EG(layer).T.astype(np.int64)
    return best_divided(holds_GE, load_E, np.ones(len(holds_GE)))
