"""Experts of vLLM's layers that move between forward passes without EPLB, where kernels honour expert maps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aurora.types import Placement
from aurora_vllm.vllm_internals.patches import PatchedWorker

if TYPE_CHECKING:
    from aurora_vllm.choice_counter import ChoiceCounter
    from aurora_vllm.traffic_recorder import EngineFacts


def follow_by_expert_maps(worker: PatchedWorker, choices: ChoiceCounter, facts: EngineFacts, served_name: str) -> None:
    """Makes the experts follow the traffic, from the end of warm-up on. Called on all ranks once the model is loaded.

    Args:
        worker: what the patches share.
        choices: counts what the routers chose.
        facts: facts about the model and this rank.
        served_name: the name under which vLLM serves the model.
    """
    from aurora_vllm.expert_map_placement import ExpertMapPlacement, ExpertSlots
    from aurora_vllm.plugin_status import ControlMetrics

    integration = worker.integration
    assert integration is not None
    slots_LG, layers = [], []
    for experts in sorted(worker.layers, key=lambda each: each.aurora_layer):
        number = experts.aurora_layer
        slots_LG.append(worker.slots(number))
        maps = [experts.expert_map, experts.expert_map_manager.expert_map]
        orders = integration.served.planned_orders(number)
        held = slots_LG[-1][facts.rank]
        layers.append(ExpertSlots(held, [*experts.get_expert_weights()], maps, orders, partial(integration.alltoall, number)))
    integration.moving = ExpertMapPlacement(
        integration.settings, facts, integration.served.cluster, layers, Placement(tuple(slots_LG)), choices,
        integration.transport(), integration.time_slices, ControlMetrics(served_name, facts.rank), integration.served.profile,
    )  # fmt: skip
