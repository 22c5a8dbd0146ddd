"""Compares what changes of a placement were expected to save with what they saved, by the loads of the windows after them.

An expectation is too high if traffic lasts less long than it seemed, or if it was an uneven sample of what followed. Then
later expectations are discounted by as much. In each window a change saves something between nothing and what was expected:
traffic that has changed for good is no reason not to follow it.
"""

import math
from dataclasses import dataclass

from aurora.planner.control.gpu_loads import gpu_loads
from aurora.types.arrays import FloatArray, IntArray

HALF_LIFE = 16  # windows in which what is known of earlier changes loses half of its weight
BELIEF = 0.5  # of a window's time, in expectations as they are, beside what was found
MOST_WINDOWS = 16  # of a change that are compared


@dataclass
class _Change:
    """A change whose windows are compared; its arrays are of the layers that it changed."""

    layers: IntArray
    old_XGP: IntArray
    new_XGP: IntArray
    old_part_XGP: FloatArray | None
    new_part_XGP: FloatArray | None
    saved: float  # of a window's time, expected in each window
    left: int  # windows


class GainRecord:
    """What changes saved, and what they were expected to save.

    Args:
        cost_G: (G,) cost of a unit of load on each GPU.
    """

    def __init__(self, cost_G: FloatArray) -> None:
        self._cost_G = cost_G
        self._changes: list[_Change] = []
        self._expected = self._found = 0.0  # times a window's time

    def expect(
        self,
        layers: IntArray,
        old_LGP: IntArray,
        new_LGP: IntArray,
        saved: float,
        windows: float,
        old_part_LGP: FloatArray | None = None,
        new_part_LGP: FloatArray | None = None,
    ) -> None:
        """Says that a change is in force.

        Args:
            layers: (X,) those that changed.
            old_LGP: (L, G, P) int64, the expert in each slot before.
            new_LGP: (L, G, P) int64, the same now.
            saved: part of a window's time with equal load that it is expected to save.
            windows: for so many windows.
            old_part_LGP: (L, G, P) float64, the part of its expert's load that each slot took before; None: even parts.
            new_part_LGP: (L, G, P) float64, the same now.
        """
        old_part_XGP, new_part_XGP = (
            None if part_LGP is None else part_LGP[layers] for part_LGP in (old_part_LGP, new_part_LGP)
        )
        left = min(max(math.ceil(windows), 1), MOST_WINDOWS)
        slots = old_LGP[layers], new_LGP[layers]
        self._changes.append(_Change(layers, *slots, old_part_XGP, new_part_XGP, saved, left))

    def forget(self) -> None:
        """Says that changes so far were undone: no more windows tell what they save."""
        self._changes = []

    def window(self, load_LE: FloatArray) -> None:
        """Compares the changes whose windows are not over, by the loads (L, E) of a window."""
        keeps = 0.5 ** (1 / HALF_LIFE)
        self._expected, self._found = self._expected * keeps, self._found * keeps
        equal = load_LE.sum() / (1 / self._cost_G).sum()
        for change in self._changes:
            load_XE = load_LE[change.layers]
            old, new = (change.old_XGP, change.old_part_XGP), (change.new_XGP, change.new_part_XGP)
            found = (self._slowest(load_XE, *old) - self._slowest(load_XE, *new)) / equal
            self._expected += change.saved
            self._found += min(max(found, 0.0), change.saved)
            change.left -= 1
        self._changes = [change for change in self._changes if change.left]

    def _slowest(self, load_XE: FloatArray, held_XGP: IntArray, part_XGP: FloatArray | None) -> float:
        """Load times cost of the slowest GPUs, summed over layers."""
        return float(gpu_loads(load_XE[None], held_XGP, self._cost_G, part_XGP).max(axis=2).sum())

    @property
    def discount(self) -> float:
        """What part of an expected saving is to be counted on, above 0 and up to 1."""
        return (BELIEF + self._found) / (BELIEF + self._expected)
