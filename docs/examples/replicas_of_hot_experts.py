"""Places replicas of hot experts, beside EPLB's placement, and follows loads that change with few moves."""

import numpy as np

import aurora

loads_LE = np.random.default_rng(0).zipf(1.6, (4, 64)).clip(max=2000)  # tokens by layer and expert
slots = aurora.GpuSlots.equal(gpus=8, slots=10)  # 80 slots for 64 experts

placed = aurora.place(loads_LE, slots)
eplb = aurora.place(loads_LE, slots, method="eplb")
mean_L = loads_LE.sum(axis=1) / 8
for name, result in (("aurora", placed), ("EPLB", eplb)):
    print(f"{name}: fullest GPU over the mean, by layer: {np.round(result.max_load_L / mean_L, 3).tolist()}")
print(f"no placement is below {np.round(placed.bound_L / mean_L, 3).tolist()}")

later_LE = loads_LE[:, ::-1]  # the hot experts become others
followed = aurora.rebalance(later_LE, placed.placement, max_moves=12)
print(f"loads changed: fullest GPU over the mean {np.round(followed.before_L / mean_L, 2).tolist()}")
print(f"after {followed.moves_L.tolist()} moves: {np.round(followed.max_load_L / mean_L, 2).tolist()}")
