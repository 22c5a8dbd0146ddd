"""Chooses how often a batch model lets an interactive one go first: by the interactive model's own layers, simulated alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aurora.planner.check.fit import check_traffic
from aurora.planner.compile import compile_plan
from aurora.simulator.interpreter import simulate
from aurora.types import PRIORITIES, Plan, Profile

LAYER_SHARE = 1 / 10  # of an interactive model's layer, between two preemption points
LAYERS = 4  # of a model that are simulated


def with_preemption(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Returns a plan with seconds between preemption points, if it has interactive models and its options leave them open.

    They are LAYER_SHARE of the shortest layer of an interactive model that has the GPUs to itself. A note on the plan says so.

    Args:
        plan: the plan.
        profiles: one profile per model.

    Raises:
        BadInput: if profiles are not those of the plan's models.
    """
    options = plan.options
    if options.preemption_s is not None or PRIORITIES[0] not in options.priorities:
        return plan
    check_traffic(plan, profiles)
    interactive = [model for model, name in enumerate(options.priorities) if name == PRIORITIES[0]]
    layer_s, name = min((_layer_s(plan, model, profiles[model]), plan.models[model].model) for model in interactive)
    if layer_s == 0:  # without compute curves and network times nothing is known
        return plan
    preemption_s = float(f"{layer_s * LAYER_SHARE:.2g}")
    note = f"`preemption`: {preemption_s:g} s, {LAYER_SHARE:.0%} of a layer of {name}, which takes {layer_s:.3g} s alone"
    return replace(plan, options=replace(options, preemption_s=preemption_s), notes=(*plan.notes, note))


def _layer_s(plan: Plan, model: int, profile: Profile) -> float:
    """Simulated seconds of one of a model's layers alone, with a window that few are smaller than: one of decoding."""
    some = np.unique(np.linspace(0, profile.layers - 1, min(LAYERS, profile.layers)).astype(np.int64))
    tokens_T = profile.tokens_TLSE.sum(axis=(1, 2, 3))
    served_T = np.flatnonzero(tokens_T)
    if plan.models[model].deduplicated or len(served_T) == 0:
        window = profile.first_windows(1)  # with its tokens' routing
    else:
        window = profile.at_windows([served_T[np.argsort(tokens_T[served_T], kind="stable")[len(served_T) // 4]]])
    program = compile_plan(plan)
    alone = replace(
        program,
        names_M=program.names_M[model : model + 1],
        placements_M=program.placements_M[model : model + 1],
        ops_ML=program.ops_ML[model : model + 1],
        deduplicated_M=program.deduplicated_M[model : model + 1],
        policies_M=(),
        plan_model_M=(),
    )
    return simulate(alone.at_layers([some]), plan.cluster, [window.at_layers(some)]).seconds / len(some)
