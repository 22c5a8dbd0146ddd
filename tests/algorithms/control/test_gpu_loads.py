"""Loads of GPUs, and the parts of replicas."""

import numpy as np

from aurora.algorithms.gpu_slots import gpu_loads

LOAD_LE = np.array([[40.0, 10.0, 30.0]] * 2)


def test_replicas_take_even_parts_unless_told_otherwise():
    held_LGP = np.array([[[0, 1, -1], [0, 2, 1]]])
    assert gpu_loads(LOAD_LE[None, :1], held_LGP, np.array([1.0, 2.0])).tolist() == [[[25.0, 110.0]]]
    part_LGP = np.array([[[0.5, 1.0, 0.0], [0.5, 1.0, 0.0]]])
    assert gpu_loads(LOAD_LE[None, :1], held_LGP, np.array([1.0, 2.0]), part_LGP).tolist() == [[[30.0, 100.0]]]
