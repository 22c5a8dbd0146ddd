"""Loads of GPUs, and the parts of replicas."""

import numpy as np

from aurora.algorithms.control.controller import Controller
from aurora.algorithms.control.load_tracker import ReplicaParts, gpu_loads
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
