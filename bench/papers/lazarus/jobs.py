"""The training jobs of Lazarus' evaluation (arXiv:2407.04656 §6.1, §6.7) as `failures.TrainingJob`.

Experts, slots and sizes are the paper's. Its routing traces are not public: loads are Zipf, an exponent a layer from 0.4 to
1.6, drawn once. Seconds of a step: experts take SHARE of it; for the GPTs all of it is set by the rate that the paper gives of
one of them, 45 samples a second for GPT-M on 10 nodes, in proportion to the root of parameters.
"""

import numpy as np

from aurora.types.arrays import FloatArray
from bench.papers.lazarus.training_failures import TrainingJob

LAYERS, BATCH, NODES, SLOTS = 12, 4, 10, 6
SHARE = 0.6
GPT_M_STEP_S = NODES * BATCH / 45
STATE_BYTES = 16  # a parameter: weights, gradients' copy and two moments in mixed precision


def _zipf_loads(experts: int, layers: int, seed: int) -> FloatArray:
    """Returns (L, E) loads: Zipf with an exponent per layer from 0.4 to 1.6, experts shuffled."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(0.4, 1.6, layers)
    return np.array([rng.permutation((1.0 + np.arange(experts)) ** -exponent) for exponent in exponents])


def _gpt(experts: int, group: int, parameters: float, seed: int) -> TrainingJob:
    step_s = GPT_M_STEP_S * (parameters / 1.3e9) ** 0.5
    loads = _zipf_loads(experts, LAYERS, seed)
    return TrainingJob(loads, SLOTS, group, BATCH, (1 - SHARE) * step_s, SHARE * step_s, parameters * STATE_BYTES)


JOBS: dict[str, TrainingJob] = {
    "GPT-S": _gpt(8, 2, 521e6, 0),
    "GPT-M": _gpt(12, 2, 1.3e9, 1),
    "GPT-L": _gpt(16, 4, 1.7e9, 2),
}
DEEPSEEK_V3 = TrainingJob(
    _zipf_loads(256, 2, 3),
    slots=32,
    group=8,
    batch=256,
    dense_s=(1 - SHARE) * 20,
    experts_s=SHARE * 20,
    state_bytes=671e9 * 12,
    gpus=8,
    storage_Bps=50e9,
    start_s=300.0,
    reconfigure_s=40.0,
)
