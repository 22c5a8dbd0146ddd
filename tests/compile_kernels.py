"""Compiles what numba compiles into its cache: `make test` runs it first, so that no test's time limit has to allow for it.

With several workers each of them would compile the same functions at the same time.
"""

import time

import numpy as np

from aurora.planner.alltoall.hierarchical_order import hierarchical_order
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.make_plan import make_plan
from aurora.planner.network.schedule_time import timed
from aurora.planner.placement.exclusive_layers import place_exclusive
from aurora.planner.placement.grouping import PLACE
from aurora.planner.placement.hierarchical_layers import place_hierarchical
from aurora.planner.replication.registry import REPLICAS
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.types import Cluster, Gpu, Hierarchy, PlanOptions, SyntheticOptions

SHAPE = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "vocab_size": 64,
}  # fmt: skip


def main() -> None:
    began = time.perf_counter()
    gpus = [Gpu(f"g{i}", "x", i, 1e9 * (1 + i), 1e9 * (1 + i), 10**12) for i in range(3)]
    cluster = Cluster("c", tuple(gpus))
    profile = synthetic_profile("uniform", SHAPE, SyntheticOptions(sources=3))
    synthetic_profile("uniform", SHAPE, SyntheticOptions(correlation=0.5))
    for place in (*PLACE, "swap-search", *REPLICAS):
        make_plan(cluster, [profile], PlanOptions(place, slots_per_gpu=3, seed=0))
    make_plan(cluster, [profile, profile], PlanOptions(seed=0))
    routed = synthetic_profile("uniform", SHAPE, SyntheticOptions(sources=3, token_level=True))
    unreplicated = PlanOptions("swap-search", "exact", slots_per_gpu=3, aim="own", seed=0)
    start = place_exclusive(cluster, routed, (), unreplicated)
    place_hierarchical(cluster, routed, start, unreplicated, Hierarchy(np.array([0, 0, 1])))
    bytes_GG = np.arange(9).reshape(3, 3) * (1 - np.eye(3, dtype=np.int64))
    for order in ORDER.values():
        made = order(bytes_GG, cluster.network, rng=np.random.default_rng(0))
        timed(made, bytes_GG, cluster.network)
    hierarchical_order(bytes_GG, Hierarchy(np.array([0, 0, 1])), cluster.network, rng=np.random.default_rng(0))
    print(f"compiled kernels are ready ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
