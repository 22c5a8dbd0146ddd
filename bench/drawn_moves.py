"""Ranks of bench/soak.py --adapt: their control loop changes the placement after every window, worth it or not."""

from collections.abc import Callable
from typing import Any

import numpy as np

from aurora.algorithms.control.controller import Controller, Decision
from aurora.elastic.control_channel import ControlChannel
from aurora.elastic.elastic_rank import serve_elastic_rank
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.live_placement import LivePlacement


def drawn(controller: Controller, decision: Decision) -> Decision:
    """The decision, or if it is to keep the placement one that swaps the experts of GPUs, as far as min replicas allow."""
    if decision.action != "keep" or decision.kind in ("bad-loads", "under-way"):
        return decision
    held_LGP, rng, slots_G = controller.held_LGP.copy(), controller._rng, controller._slots.slots_G
    for layer in rng.permutation(len(held_LGP))[: 1 + rng.integers(len(held_LGP))]:
        drawn_G = rng.permutation(len(slots_G))
        from_G = drawn_G[np.argsort(slots_G[drawn_G], kind="stable")]  # GPUs swap with those of as many slots
        held_LGP[layer, np.argsort(slots_G, kind="stable")] = controller.held_LGP[layer, from_G]
    decision = controller._decide("move", "gain", "drawn", held_LGP, 1.0, 0.0)
    if not decision.moves:
        controller._wanted = None
        return controller._keep("not-worth", "min replicas keep all", 1.0)
    return decision


def serve_with_drawn_moves(rank_info: RankInfo, channel: ControlChannel, *args: Any) -> None:
    """Serves as a rank of a run that survives. A rank that does not hold what the placement says fails when moves begin."""
    window, begin = Controller.window, LivePlacement._begin

    def decide(controller: Controller, *given: Any) -> Decision:
        return drawn(controller, window(controller, *given))

    def checked(live: LivePlacement, count: int) -> None:
        rank = live._context.transport.rank
        held_LP = [[expert for expert in row[rank].tolist() if expert >= 0] for row in live._held_LGP]
        assert held_LP == [list(layer.held) for layer in live._layers], "ranks hold what the placement says"
        assert all(set(np.unique(row)) >= set(range(row.max() + 1)) for row in live._held_LGP), "every expert is held"
        begin(live, count)

    replaced: list[tuple[type, str, Callable[..., Any]]] = [(Controller, "window", decide), (LivePlacement, "_begin", checked)]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    serve_elastic_rank(rank_info, channel, *args)
