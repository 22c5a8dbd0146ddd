"""Compiles what numba compiles into its cache, on all cores: `make test` runs it first, so that no test's time limit has to allow for it.

With several workers each of them would compile the same functions at the same time.
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_plan, check_schedule
from aurora.algorithms.network.switch import timed
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.rebalance import rebalance
from aurora.algorithms.replicas.registry import REPLICAS
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Gpu, PlanOptions, Profile, Servers, SyntheticOptions

SHAPE = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "vocab_size": 64,
}  # fmt: skip
CLUSTER = Cluster("c", tuple(Gpu(f"g{i}", "x", i, 1e9 * (1 + i), 1e9 * (1 + i), 10**12) for i in range(3)))
BYTES_GG = np.arange(9).reshape(3, 3) * (1 - np.eye(3, dtype=np.int64))


def profile(correlation: float = 0.0) -> Profile:
    return draw_profile("uniform", SHAPE, SyntheticOptions(sources=3, token_level=True, correlation=correlation))


def plan(models: int = 1, **options: object) -> None:
    check_plan(make_plan(CLUSTER, [profile()] * models, PlanOptions(**{"order": "all-at-once", **options})))


def plan_over_servers() -> None:
    servers = Servers.of([0, 0, 1], 1e9)
    make_plan(replace(CLUSTER, servers=servers), [profile()], PlanOptions(all_to_all="hierarchical", slots_per_gpu=3))


def simulate() -> None:
    simulate_plan(make_plan(CLUSTER, [profile()]), [profile()])


def order(name: str) -> None:
    made = ORDER[name](BYTES_GG, CLUSTER.network, rng=np.random.default_rng(0))
    check_schedule(timed(made, BYTES_GG, CLUSTER.network), BYTES_GG, CLUSTER.network)


# The first takes longest, and what it compiles last (orders, the simulator) others compile before it gets there.
TASKS: tuple[Callable[[], object], ...] = (
    plan_over_servers,
    *(partial(order, name) for name in ORDER),
    simulate,
    partial(rebalance, [3.0, 2.0, 1.0], [[[0], [1], [2]]]),
    partial(profile, 0.5),
    partial(plan, models=2),
    *(partial(plan, place=place, slots_per_gpu=3) for place in (*REPLICAS, "swap-search", *PLACE)),
)


def main() -> None:
    began = time.perf_counter()
    with ProcessPoolExecutor() as processes:
        for task in [processes.submit(task) for task in TASKS]:
            task.result()
    print(f"compiled kernels are ready ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
