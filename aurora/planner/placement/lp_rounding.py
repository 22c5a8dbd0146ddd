"""LP rounding: a placement near the optimum of the linear program over shares of experts, for a local search to start from."""

import numpy as np

from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.phase_program import SMALL, blocks, merged, phase_program
from aurora.planner.placement.phase_sums import PhaseSums
from aurora.types.arrays import IntArray


def lp_rounding(costs: LayerCosts, slots_G: IntArray) -> IntArray:
    """Places each expert on the GPU that takes its largest share in the linear program, as far as slots last.

    The program sees what is hard to reach by swaps: which GPUs hold how many experts where ports and speeds differ. In large
    layers it is solved for the sum of all scenarios, or for blocks of GPUs of a kind; an expert then goes to the GPU of its
    block that would compute least.

    Args:
        costs: one layer in W scenarios.
        slots_G: (G,) int64, how many experts each GPU can hold; at least E in all.

    Returns:
        (E,) int64, the GPU of each expert.
    """
    gpus, experts = costs.expert_s_WGE.shape[1:]
    if gpus * experts * len(costs.own_WGE) > SMALL:
        costs = costs.summed
    layer = PhaseSums.of(costs, slots_G)
    block_G = np.arange(gpus) if gpus * experts <= SMALL else blocks(costs, max(1, SMALL // experts))
    program = phase_program(merged(layer, block_G), np.zeros((2, len(costs.own_WGE))))
    share_GE = program.solved()[0][block_G]
    work_s_GE = costs.expert_s_WGE.sum(axis=0)
    busy_s_G, free_G, gpu_E = np.zeros(gpus), layer.slots_G.copy(), np.empty(experts, dtype=np.int64)
    for expert in np.lexsort((-costs.load_WE.sum(axis=0), -share_GE.max(axis=0))).tolist():
        after_s_G = busy_s_G + work_s_GE[:, expert]
        gpu = int(np.lexsort((after_s_G, -share_GE[:, expert], free_G == 0))[0])
        gpu_E[expert] = gpu
        busy_s_G[gpu], free_G[gpu] = after_s_G[gpu], free_G[gpu] - 1
    return gpu_E
