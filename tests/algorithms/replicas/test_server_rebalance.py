"""Rebalancing inside servers: what each server holds stays, and no GPU becomes slower than the slowest of its server was."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.control.load_tracker import ReplicaParts, gpu_loads
from aurora.algorithms.replicas.rebalance import rebalance_inside
from aurora.types import GpuSlots

EMPTY = -1


def on_servers(held_GP, server_G):
    """The experts that each server holds."""
    return [set(held_GP[server_G == server].flat) - {EMPTY} for server in np.unique(server_G)]


@given(st.integers(0, 2**32))
def test_experts_stay_on_their_servers(seed):
    rng = np.random.default_rng(seed)
    server_G = rng.permutation(np.append(np.arange(2), rng.integers(0, 2, 4)))
    slots_G, held_LGP = rng.integers(2, 5, 6), np.full((3, 6, 4), EMPTY)
    for held_GP in held_LGP:  # all experts somewhere, none twice on a GPU, some slots empty
        for gpu, slots in enumerate(slots_G):
            held_GP[gpu, :slots] = np.where(rng.random(slots) < 0.8, rng.permutation(8)[:slots], EMPTY)
        for expert in np.setdiff1d(np.arange(8), held_GP):
            places = [(gpu, slot) for gpu in range(6) for slot in range(slots_G[gpu])]
            spare = [place for place in places if held_GP[place] == EMPTY or (held_GP == held_GP[place]).sum() > 1]
            held_GP[tuple(rng.choice(spare))] = expert
    load_LE, slots = rng.integers(1, 1000, (3, 8)).astype(float), GpuSlots(slots_G, rng.uniform(1, 2, 6))
    part_LGP = ReplicaParts(held_LGP, server_G).parts(held_LGP)
    next_LGP = rebalance_inside(load_LE, held_LGP, part_LGP, slots, server_G, 0.0)
    for before_GP, after_GP in zip(held_LGP, next_LGP, strict=True):
        assert on_servers(before_GP, server_G) == on_servers(after_GP, server_G)
        assert (after_GP[np.arange(4) >= slots_G[:, None]] == EMPTY).all()


def test_gpus_of_a_server_become_equal():
    """Server 0 has the loads 7, 5, 1, 1 and server 1 has 8, 4, 6, 2."""
    held_LGP, server_G = np.array([[[0, 1], [4, 5], [2, 3], [6, 7]]]), np.array([0, 1, 0, 1])
    load_LE, slots = np.array([[7.0, 5.0, 1.0, 1.0, 8.0, 4.0, 6.0, 2.0]]), GpuSlots.equal(4, 2)
    next_LGP = rebalance_inside(load_LE, held_LGP, (held_LGP >= 0).astype(float), slots, server_G)
    assert sorted(gpu_loads(load_LE[None], next_LGP, np.ones(4))[0, 0].tolist()) == [6.0, 8.0, 10.0, 10.0]
    assert on_servers(next_LGP[0], server_G) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
