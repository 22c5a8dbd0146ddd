"""Loads of GPUs, and the parts of replicas."""

import numpy as np

from aurora.algorithms.control.controller import Controller
from aurora.algorithms.control.load_tracker import ReplicaParts, gpu_loads
from aurora.algorithms.workload.serving_gpus import replica_tokens
from aurora.types import GpuSlots, Placement

UNEVEN = Placement((((0, 1), (0, 2)),) * 2, (((0.75, 1.0), (0.25, 1.0)),) * 2)  # expert 0 on both GPUs
LOAD_LE = np.array([[40.0, 10.0, 30.0]] * 2)


def test_replicas_take_even_parts_unless_told_otherwise():
    held_LGP = np.array([[[0, 1, -1], [0, 2, 1]]])
    assert gpu_loads(LOAD_LE[None, :1], held_LGP, np.array([1.0, 2.0])).tolist() == [[[25.0, 110.0]]]
    part_LGP = np.array([[[0.5, 1.0, 0.0], [0.5, 1.0, 0.0]]])
    assert gpu_loads(LOAD_LE[None, :1], held_LGP, np.array([1.0, 2.0]), part_LGP).tolist() == [[[30.0, 100.0]]]


def test_a_placements_split_counts_in_layers_until_they_change():
    split, held_LGP = ReplicaParts(UNEVEN), UNEVEN.held_LGP()
    assert split.parts(held_LGP).tolist() == [[[0.75, 1.0], [0.25, 1.0]]] * 2
    changed_LGP = held_LGP.copy()
    changed_LGP[1, 0] = 2, 1
    assert split.parts(changed_LGP).tolist() == [[[0.75, 1.0], [0.25, 1.0]], [[0.5, 1.0], [1.0, 0.5]]]
    split.change(changed_LGP)
    assert split.parts(held_LGP).tolist() == [[[0.75, 1.0], [0.25, 1.0]], [[0.5, 1.0], [0.5, 1.0]]]
    assert ReplicaParts(held_LGP).parts(held_LGP).tolist() == [[[0.5, 1.0], [0.5, 1.0]]] * 2


def test_a_placement_that_is_equal_by_its_split_is_kept():
    """Each of the two GPUs has 40 tokens; with even parts they would have 30 and 50."""
    slots = GpuSlots(np.array([2, 2]), np.ones(2))
    decision = Controller(UNEVEN, 1, slots=slots).window(LOAD_LE * 1e4)
    assert (decision.kind, decision.balancedness) == ("balanced", 1.0)
    assert Controller(UNEVEN.held_LGP(), 1, slots=slots).window(LOAD_LE * 1e4).balancedness == 0.8


def test_over_servers_a_slot_takes_what_its_server_serves():
    """Of 1200 tokens from each of five GPUs: servers of two GPUs, two and one. The plan's own split counts in the same way."""
    server_G, experts_GP = np.array([0, 0, 1, 1, 2]), (((0, 1), (0, 2), (0, 3), (1, 4), (5,)),)
    tokens_SE = np.full((5, 6), 1200)
    for placement in (Placement.evenly(experts_GP), Placement(experts_GP, (((0.6, 0.5), (0.2, 1), (0.2, 1), (0.5, 1), (1,)),))):
        tokens_SP, expert_P, gpu_P = replica_tokens(tokens_SE, placement.split_EG(0), server_G)
        held_LGP = placement.held_LGP()
        part_LGP = ReplicaParts(placement, server_G).parts(held_LGP)
        for tokens, expert, gpu in zip(tokens_SP.sum(axis=0), expert_P, gpu_P, strict=True):
            found = part_LGP[0, gpu, held_LGP[0, gpu] == expert] * 6000
            assert abs(found - tokens) <= 5  # cut to whole tokens by each source
        assert np.allclose(part_LGP.sum(), 6)
        again = ReplicaParts(placement, server_G)
        assert np.array_equal(again.parts(held_LGP), again.parts(held_LGP))
