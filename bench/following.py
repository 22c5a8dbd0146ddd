"""Replays tasks that take turns under several ways to adapt placements: loads of GPUs, and bytes moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.control.controller import Controller
from aurora.algorithms.gpu_slots import gpu_loads
from aurora.algorithms.replicas.rebalance import rebalance
from aurora.algorithms.replicas.registry import place_unbounded
from aurora.types import ControlOptions, GpuSlots, Placement, Profile
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.placement import EMPTY

WHOLE = 10  # windows over which the worst mean is taken


@dataclass(frozen=True, eq=False)
class TakingTurns:
    """W windows of expert loads of D domains that take turns.

    Attributes:
        load_WLE: (W, L, E) float64, tokens of each expert by window.
        domain_W: (W,) int64, the domain of each window.
        share_DLE: (D, L, E) float64, the mean share of each expert in a layer's tokens, by domain.
    """

    load_WLE: FloatArray
    domain_W: IntArray
    share_DLE: FloatArray

    @classmethod
    def of(cls, profiles: Sequence[Profile], windows: int, lasting: int, pairs: int, seed: int) -> "TakingTurns":
        """Draws the windows: a recorded window of the domain each, and `pairs` (token, expert) pairs from its shares.

        Windows of one domain so differ as the recorded ones do, and by chance.

        Args:
            profiles: one profile for each domain, all of one model.
            windows: number of windows, W.
            lasting: number of windows of a turn.
            pairs: (token, expert) pairs of each layer in a window.
            seed: random seed of the draws.
        """
        recorded_D = [profile.tokens_TLSE.sum(axis=2) for profile in profiles]
        share_DTLE = [loads_TLE / np.maximum(loads_TLE.sum(axis=2, keepdims=True), 1) for loads_TLE in recorded_D]
        domain_W, rng = np.arange(windows) // lasting % len(profiles), np.random.default_rng(seed)
        load_WLE = np.zeros((windows, *recorded_D[0].shape[1:]))
        for window, domain in enumerate(domain_W.tolist()):
            share_LE = share_DTLE[domain][rng.integers(len(share_DTLE[domain]))]
            busy_L = share_LE.any(axis=1)
            load_WLE[window][busy_L] = rng.multinomial(pairs, share_LE[busy_L])
        return cls(load_WLE, domain_W, np.stack([share_TLE.mean(axis=0) for share_TLE in share_DTLE]))

    @property
    def mean_WLE(self) -> FloatArray:
        """(W, L, E) float64, the expected loads of each window: tokens x the domain's mean shares, without random draws."""
        return np.asarray(self.share_DLE[self.domain_W] * self.load_WLE.sum(axis=2, keepdims=True))

    @property
    def known_W(self) -> BoolArray:
        """(W,) bool: True for windows of the same domain as the window before, whose loads are predictable."""
        return np.concatenate([[False], self.domain_W[1:] == self.domain_W[:-1]])


@dataclass(frozen=True, eq=False)
class Followed:
    """Result of replaying traffic under one way to adapt the placement.

    Attributes:
        slowest_W: (W,) float64, load of the slowest GPU / mean load in each window, both summed over layers; 1 is balanced.
        bytes_W: (W,) int64, bytes of expert weights that moved before each window.
    """

    slowest_W: FloatArray
    bytes_W: IntArray


_Way = Callable[[int, IntArray], Placement | IntArray]  # for a window and the slots in force: the slots, or a placement


def follow(
    traffic: TakingTurns,
    held_LGP: IntArray,
    slots: GpuSlots,
    expert_bytes: int,
    port_Bps: float,
    options: ControlOptions = ControlOptions(),
    every: Sequence[int] = (1, 3, 10),
) -> dict[str, Followed]:
    """Replays windows of traffic under each way to adapt the placement.

    - "as it is": the placement never changes.
    - "EPLB every N": EPLB places experts anew every N windows, for the loads of the last N.
    - "controller": aurora's controller. A change takes effect after the whole windows that its moves take at the ports' rate.
    - "mean known": rebalances before each window for its expected loads, without the random draws.
    - "clairvoyant": rebalances before each window for its actual loads.

    Args:
        traffic: the windows.
        held_LGP: (L, G, P) int64, the expert in each slot before the first window, -1 for none.
        slots: the slots of the GPUs and the cost of load there.
        expert_bytes: bytes of an expert's weights.
        port_Bps: bytes per second that a GPU's port sends, and receives.
        options: options of the controller.
        every: the intervals N, in windows, of the EPLB ways.
    """
    load_WLE = traffic.load_WLE
    controller = Controller(held_LGP, expert_bytes, options, slots, port_Bps * slots.gpus)
    under_way: list[tuple[float, float]] = []  # the window from which moves are done, and their seconds

    def controlled(window: int, held_LGP: IntArray) -> IntArray:
        if window and (decision := controller.window(load_WLE[window - 1])).action != "keep":
            seconds = float(moved_G(held_LGP, decision.held_LGP).max() * expert_bytes / port_Bps)
            under_way.append((window + seconds // options.period_s, seconds))
        if under_way and under_way[0][0] <= window:
            controller.moved(under_way.pop()[1])
        return controller.held_LGP

    def knowing(known_WLE: FloatArray) -> _Way:
        return lambda window, held_LGP: rebalance(known_WLE[window], held_LGP, slots).held_LGP

    def eplb(many: int) -> _Way:
        def planned(window: int, held_LGP: IntArray) -> Placement | IntArray:
            if not window or window % many:
                return held_LGP
            return place_unbounded(load_WLE[window - many : window].sum(axis=0), slots, "eplb")

        return planned

    ways: dict[str, _Way] = {
        "as it is": lambda window, held_LGP: held_LGP,
        **{f"EPLB every {many}": eplb(many) for many in every},
        "controller": controlled,
        "mean known": knowing(traffic.mean_WLE),
        "clairvoyant": knowing(load_WLE),
    }
    return {name: _followed(way, load_WLE, held_LGP, slots, expert_bytes) for name, way in ways.items()}


def _followed(way: _Way, load_WLE: FloatArray, held_LGP: IntArray, slots: GpuSlots, expert_bytes: int) -> Followed:
    """The replay of one way."""
    slowest_W, bytes_W = np.ones(len(load_WLE)), np.zeros(len(load_WLE), dtype=np.int64)
    placement: Placement | None = None  # of the last change, if it tells the parts of replicas
    for window, load_LE in enumerate(load_WLE):
        target = way(window, held_LGP)
        if isinstance(target, Placement):
            placement, next_LGP = target, target.held_LGP(held_LGP.shape[2])
        else:
            next_LGP = target
        if next_LGP is not held_LGP:
            bytes_W[window] = moved_G(held_LGP, next_LGP)[0].sum() * expert_bytes
            held_LGP = next_LGP
        if placement is None:
            gpu_LG = gpu_loads(load_LE[None], held_LGP, slots.cost_G)[0]
        else:
            gpu_LG = np.stack([load_E @ placement.split_EG(layer) for layer, load_E in enumerate(load_LE)]) * slots.cost_G
        if gpu_LG.any():
            slowest_W[window] = gpu_LG.max(axis=1).sum() / gpu_LG.mean(axis=1).sum()
    return Followed(slowest_W, bytes_W)


def moved_G(held_LGP: IntArray, next_LGP: IntArray) -> IntArray:
    """(2, G) experts that each GPU receives, and sends, between two placements; the holder that sent the fewest sends."""
    both_G = np.zeros((2, held_LGP.shape[1]), dtype=np.int64)
    for held_GP, next_GP in zip(held_LGP, next_LGP, strict=True):
        for gpu, (held_P, next_P) in enumerate(zip(held_GP, next_GP, strict=True)):
            for expert in set(next_P.tolist()) - set(held_P.tolist()) - {EMPTY}:
                if (holders := np.flatnonzero((held_GP == expert).any(axis=1))).size:
                    both_G[0, gpu] += 1
                    both_G[1, holders[both_G[1, holders].argmin()]] += 1
    return both_G
