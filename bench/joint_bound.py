"""A bound on the mean, over several tasks, of the fullest GPU's load, for placements with replicas that serve even parts.

A mixed-integer program leaves out which GPU is which. It chooses the number of replicas of each expert, and on how many GPUs
replicas of two experts meet. The GPUs that hold an expert are, on average, no fuller than the fullest. Where there are too many
meetings, they are left out, so that a GPU may be as full as any one replica.
"""

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

MOST_MEETINGS = 20_000
MOST_REPLICAS = 24  # told apart; beyond, replicas count as 24 and carry as little as one on every GPU would
SECONDS = 60.0


def joint_bound(load_DE: np.ndarray, gpus: int, slots: int) -> float:
    """Returns a lower bound on the mean over D tasks of max / mean load of GPUs that hold at most `slots` experts each.

    load_DE is (D, E), the load of each expert in each task. A GPU holds no expert twice. The bound is -inf if none is found in
    SECONDS.
    """
    load_DE = load_DE / load_DE.sum(axis=1, keepdims=True) * gpus
    tasks, experts = load_DE.shape
    possible = min(gpus, gpus * slots - experts + 1)
    most = min(possible, MOST_REPLICAS)
    # An option X is an expert with a number of replicas, a meeting M two options of different experts.
    expert_X, count_X = np.repeat(np.arange(experts), most), np.tile(np.arange(1.0, most + 1), experts)
    load_DX = load_DE[:, expert_X] / np.where(count_X < most, count_X, possible)
    options = len(expert_X)
    one_M = other_M = np.arange(0)
    if most == possible and options * (options - most) // 2 <= MOST_MEETINGS:
        one_M, other_M = np.nonzero(expert_X[:, None] < expert_X)
    meetings = len(one_M)
    meeting_M, of_M = np.tile(np.arange(meetings), 2), np.concatenate([one_M, other_M])
    option_EX = sparse.csr_array((np.ones(options), (expert_X, np.arange(options))), (experts, options))

    # Columns: how often options meet, which are chosen, the neighbours that empty slots cost them, the tasks' largest loads.
    no_EX, no_ED = sparse.csr_array((experts, options)), sparse.csr_array((experts, tasks))
    limits = [
        _rows([sparse.csr_array((experts, meetings)), option_EX, no_EX, no_ED], 1.0, 1.0),
        _rows([np.zeros((1, meetings)), count_X[None], np.zeros((1, options + tasks))], 0.0, gpus * slots),
    ]
    if meetings:
        meets_XM = sparse.csr_array((np.ones(2 * meetings), (of_M, meeting_M)), (options, meetings))
        no_XD = sparse.csr_array((options, tasks))
        limits += [
            _rows([meets_XM, -(slots - 1) * sparse.diags_array(count_X), sparse.eye_array(options), no_XD], 0.0, 0.0),
            _rows(
                [np.zeros((1, meetings)), (slots - 1) * count_X[None], np.ones((1, options)), np.zeros((1, tasks))],
                0.0,
                gpus * slots * (slots - 1),
            ),
        ]
    for task, load_X in enumerate(load_DX):
        beside_M = np.concatenate([load_X[other_M] / count_X[one_M], load_X[one_M] / count_X[other_M]])
        beside_EM = sparse.csr_array((beside_M, (expert_X[of_M], meeting_M)), (experts, meetings))
        top_ED = np.zeros((experts, tasks))
        top_ED[:, task] = -1.0
        limits.append(_rows([beside_EM, option_EX * load_X, no_EX, top_ED], -np.inf, 0.0))
    zeros_MX = np.zeros(meetings + 2 * options)
    upper_M = np.minimum(count_X[one_M], count_X[other_M])
    found = milp(
        np.concatenate([zeros_MX, np.full(tasks, 1 / tasks)]),
        constraints=limits,
        integrality=np.concatenate([np.zeros(meetings), np.ones(options), np.zeros(options + tasks)]),
        bounds=Bounds(
            np.concatenate([zeros_MX, np.ones(tasks)]),
            np.concatenate([upper_M, np.ones(options), np.full(options + tasks, np.inf)]),
        ),
        options={"time_limit": SECONDS, "mip_rel_gap": 1e-3},
    )
    return -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)


def _rows(columns: list, low: float, high: float) -> LinearConstraint:
    """Rows of the program, given by blocks of columns."""
    return LinearConstraint(sparse.hstack([sparse.csr_array(block) for block in columns], format="csr"), low, high)
