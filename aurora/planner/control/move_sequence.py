"""The sequence of moves from one placement to another: no GPU sends or receives two experts at once, and none is ever lost.

Moves come in rounds. In a round each GPU sends at most one expert and receives at most one, and what it sends it holds when the
round begins: received weights take their slots when the round ends. After every round the slots are a placement: every expert
is held somewhere, so that a system can serve from them, and stop there if a GPU is lost.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY


class Move(NamedTuple):
    """An expert's weights travel to a slot.

    Attributes:
        round: moves of a round run side by side, rounds one after the other.
        layer: index of the MoE layer.
        expert: whose weights travel.
        src: the GPU that sends them.
        dst: the GPU that receives them.
        slot: the slot of `dst` that they fill when the round ends.
    """

    round: int
    layer: int
    expert: int
    src: int
    dst: int
    slot: int


def move_sequence(held_LGP: IntArray, wanted_LGP: IntArray) -> tuple[tuple[Move, ...], IntArray]:
    """Puts the moves between two placements in sequence.

    A move waits while the slot that it needs holds the only copy of an expert. Where all moves wait, GPUs wait for each other
    in a circle; the moves of the circle make one round.

    Args:
        held_LGP: (L, G, P) int64, the expert in each slot, EMPTY for none. Each expert of `wanted_LGP` is held. Where a GPU
            holds an expert twice, as EPLB's may, the second slot counts as empty.
        wanted_LGP: (L, G, P) int64, the experts that each GPU is to hold; their slots do not matter.

    Returns:
        (moves, reached_LGP): the moves by round, and the slots after them. There each GPU holds the experts of `wanted_LGP`,
        those that it had in the slots that they had; other slots are empty. Slots that are empty in both tables stay so.
    """
    state = _State(held_LGP, wanted_LGP)
    moves: list[Move] = []
    number = 0
    while state.pending:
        made = state.round() or state.circle()
        moves += [Move(number, *each) for each in made]
        number += 1
    return tuple(moves), state.reached()


Copy = tuple[int, int, int]  # layer, expert, the GPU that is to hold it
Sent = tuple[int, int, int, int, int]  # layer, expert, source, destination, slot


class _State:
    """The slots while moves are put in sequence."""

    def __init__(self, held_LGP: IntArray, wanted_LGP: IntArray) -> None:
        self._held_LGP = held_LGP.copy()
        self._used_LGP = (held_LGP != EMPTY) | (wanted_LGP != EMPTY)  # GPUs may have fewer slots than the tables
        layers, gpus, _ = held_LGP.shape
        self._wanted = [[set(wanted_LGP[l, g].tolist()) - {EMPTY} for g in range(gpus)] for l in range(layers)]
        self._holders: list[dict[int, set[int]]] = [{} for _ in range(layers)]
        for l, g, p in np.argwhere(held_LGP != EMPTY).tolist():
            holders = self._holders[l].setdefault(int(held_LGP[l, g, p]), set())
            if g in holders:
                self._held_LGP[l, g, p] = EMPTY
            holders.add(g)
        self.pending: list[Copy] = [
            (l, e, g)
            for l in range(layers)
            for g in range(gpus)
            for e in sorted(self._wanted[l][g])
            if g not in self._holders[l][e]
        ]

    def round(self) -> list[Sent]:
        """Makes a round of moves that wait for nothing; those into the GPUs that lack most experts first."""
        lacking, sending = Counter(g for _, _, g in self.pending), Counter[int]()
        for l, e, _ in self.pending:
            if len(self._holders[l][e]) == 1:
                sending.update(self._holders[l][e])
        self.pending.sort(key=lambda copy: -max(lacking[copy[2]], max(sending[g] for g in self._holders[copy[0]][copy[1]])))
        out: set[int] = set()
        into: set[int] = set()
        dropped: set[tuple[int, int, int]] = set()  # layer, expert, GPU: what ends with the round
        made: list[Sent] = []
        for l, e, g in self.pending:
            free = sorted(self._holders[l][e] - out, key=lambda source: sending[source])
            if g in into or not free:
                continue
            slot = self._slot(l, g, dropped)
            if slot is None:
                continue
            out.add(free[0])
            into.add(g)
            if (x := int(self._held_LGP[l, g, slot])) != EMPTY:
                dropped.add((l, x, g))
            made.append((l, e, free[0], g, slot))
        self._perform(made)
        return made

    def _slot(self, l: int, g: int, dropped: set[tuple[int, int, int]]) -> int | None:
        """A slot of the GPU that may be filled when the round ends: empty, or with an expert that others hold on."""
        for p, x in enumerate(self._held_LGP[l, g].tolist()):
            if not self._used_LGP[l, g, p]:
                continue
            if x == EMPTY:
                return p
            if x in self._wanted[l][g] or (l, x, g) in dropped:
                continue
            if any(h != g and (l, x, h) not in dropped for h in self._holders[l][x]):
                return p
        return None

    def circle(self) -> list[Sent]:
        """Makes a round of moves that wait for each other: each GPU's expert goes to the next, in place of what that sends."""
        l = self.pending[0][0]
        wants = {e: g for layer, e, g in self.pending if layer == l}
        path = [self.pending[0][2]]
        sent: dict[int, tuple[int, int]] = {}  # by GPU: the expert that it sends, and its slot
        while path.count(path[-1]) == 1:
            g = path[-1]
            p, x = next(
                (p, x) for p, x in enumerate(self._held_LGP[l, g].tolist()) if x not in self._wanted[l][g] and x in wants
            )
            sent[g] = x, p
            path.append(wants[x])
        ring = path[path.index(path[-1]) : -1]
        made = [(l, sent[g][0], g, to, sent[to][1]) for g, to in zip(ring, [*ring[1:], ring[0]], strict=True)]
        self._perform(made)
        return made

    def _perform(self, made: list[Sent]) -> None:
        """Changes the slots as a round does when it ends."""
        for l, _, _, g, p in made:
            if (x := int(self._held_LGP[l, g, p])) != EMPTY:
                self._holders[l][x].discard(g)
        for l, e, _, g, p in made:
            self._held_LGP[l, g, p] = e
            self._holders[l][e].add(g)
        done = {(l, e, g) for l, e, _, g, _ in made}
        self.pending = [copy for copy in self.pending if copy not in done]

    def reached(self) -> IntArray:
        """The slots now, without the experts that are not wanted where they are."""
        for l, g, p in np.argwhere(self._held_LGP != EMPTY).tolist():
            if int(self._held_LGP[l, g, p]) not in self._wanted[l][g]:
                self._held_LGP[l, g, p] = EMPTY
        return self._held_LGP
