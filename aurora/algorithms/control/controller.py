"""Controller of the placement in force: after each window of traffic it keeps the placement, or changes a few of its slots.

- A change must be worth its moves. The present traffic is expected to last as long as traffic usually does. A layer moves only
  if the time saved until then is CAUTION times what its moves cost, since all of a step counts as expert compute.
- Chance alone moves nothing: the placements are compared on loads drawn from the estimated distribution of the traffic.
- It learns from past moves how long moves take.

The controller has no threads and moves nothing itself: its caller reports loads, times and finished moves, and passes a clock.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.control.load_tracker import LoadTracker
from aurora.algorithms.control.move_times import MoveTimes
from aurora.algorithms.gpu_slots import gpu_loads
from aurora.algorithms.replicas.rebalance import checked_min_replicas, rebalance
from aurora.errors import BadInput
from aurora.types import Cluster, ControlOptions, GpuSlots, Placement, Profile
from aurora.types.arrays import FloatArray, IntArray, locked
from aurora.types.options import LENGTHENED
from aurora.types.placement import EMPTY

DRAWS = 8  # of loads, on which placements are compared
ENOUGH = 0.005  # relative: a layer this close to equal load is not changed further
CAUTION = 2.0  # times its cost that a change must save while the traffic lasts (bench/control.py)

Action = Literal["keep", "move"]
Kind = Literal["bad-loads", "no-tokens", "under-way", "balanced", "not-worth", "gain"]  # of reason


@dataclass(frozen=True, eq=False)
class Decision:
    """The controller's decision after a window of traffic.

    Attributes:
        action: "keep" the placement, or "move" experts.
        kind: the reason as a word, for programs. A placement is kept because the window has "bad-loads" or "no-tokens", moves
            are "under-way", the placement is "balanced", or moves are "not-worth" it. Experts move for a "gain".
        reason: the reason as one sentence.
        held_LGP: (L, G, P) int64, the expert in each slot of the wanted placement, -1 for none.
        moves: number of experts whose weights GPUs receive.
        bytes: bytes of all moves.
        layers: the layers that change.
        loss: expected time of the slowest GPUs under the placement in force / under the wanted one - 1.
        balancedness: mean load of the GPUs / largest load, under the placement in force in this window, over all layers; 1 is
            balanced. NaN if the window has no tokens.
        expected_balancedness: the expected ratio under the wanted placement in the next window.
        at_s: time of the decision, by the controller's clock.
    """

    action: Action
    kind: Kind
    reason: str
    held_LGP: IntArray
    moves: int
    bytes: int
    layers: tuple[int, ...]
    loss: float
    balancedness: float
    expected_balancedness: float
    at_s: float

    def __str__(self) -> str:
        """One line."""
        moves = f"; {self.moves} moves, {self.bytes / 1e6:.1f} MB" if self.moves else ""
        balancedness = f"; balancedness {self.balancedness:.3f}, {self.expected_balancedness:.3f} expected"
        return f"{self.action} ({self.kind}): {self.reason}{moves}{'' if math.isnan(self.balancedness) else balancedness}"


class Controller:
    """Decides after each window of traffic whether to change the placement in force, and how.

    Args:
        held: the placement in force: (L, G, P) int64, the expert in each slot, -1 for none; all experts are held. Replicas
            share evenly.
        expert_bytes: bytes of an expert's weights.
        options: the options that users set.
        slots: slots and cost of each GPU; None: equal GPUs with the slots of the table.
        move_Bps: first estimate of the bytes of weights that move per second, over all ports, until moves are timed; None:
            moves count as free until one is timed.
        clock: a function that returns the time in seconds.
        seed: random seed of the draws.
        stalls: True if serving waits while experts move; False if it goes on meanwhile.
        min_replicas: minimum number of GPUs, and of failure domains, that hold each expert; if the first placement has fewer,
            as many as there.
        domain_G: (G,) the failure domain of each GPU; None: each GPU is its own.

    Example:
        >>> controller = Controller(np.array([[[0, 1], [2, 3]]]), expert_bytes=1000)
        >>> decision = controller.window([[900, 800, 100, 200]])
        >>> decision.action, decision.moves
        ('move', 2)
        >>> controller.moved()
        >>> controller.window([[900, 800, 100, 200]]).action
        'keep'
    """

    def __init__(
        self,
        held: ArrayLike,
        expert_bytes: int,
        options: ControlOptions = ControlOptions(),
        slots: GpuSlots | None = None,
        move_Bps: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        stalls: bool = False,
        min_replicas: int = 1,
        domain_G: ArrayLike | None = None,
    ) -> None:
        self.held_LGP: IntArray = locked(np.array(held, dtype=np.int64))
        layers, gpus, width = self.held_LGP.shape
        self.options = options
        self.tracker = LoadTracker(layers, int(self.held_LGP.max()) + 1)
        self._slots = slots or GpuSlots.equal(gpus, width)
        self._min_replicas, self._domain_G = checked_min_replicas(min_replicas, domain_G, gpus)
        self._expert_bytes, self._stalls, self._clock = expert_bytes, stalls, clock
        self._move_times = MoveTimes(move_Bps)
        self._rng = np.random.default_rng(seed)
        self._wanted: Decision | None = None  # whose moves are under way

    def window(self, loads: ArrayLike, period_s: float | None = None) -> Decision:
        """Adds a window of traffic and returns the decision after it.

        Args:
            loads: (L, E) tokens of each expert in the window.
            period_s: seconds that the window took; None: as many as the window before, and for the first one
                `options.period_s`.

        Returns:
            The decision. Moves are under way until `moved` or `failed` is called; before that, placements are kept.
        """
        if period_s is not None:
            self.options = replace(self.options, period_s=period_s)
        try:
            load_LE = self.tracker.add(loads)
        except BadInput as error:
            return self._keep("bad-loads", str(error))
        if not load_LE.any():
            return self._keep("no-tokens", "the window has no tokens")
        now = self._balancedness(load_LE, self.held_LGP)
        if self._wanted is not None:
            return self._keep("under-way", "moves are under way", now)
        return self._change(now)

    def moved(self, seconds: float | None = None) -> None:
        """Reports to the controller that the moves of the last decision are done and its placement is in force.

        Args:
            seconds: seconds that the moves took; None: not measured.
        """
        assert self._wanted is not None, "no moves are under way"
        decision, self._wanted = self._wanted, None
        if seconds and decision.bytes:
            self._move_times.add(decision.bytes, seconds)
        self.held_LGP = decision.held_LGP

    def failed(self, held: ArrayLike | None = None) -> None:
        """Reports to the controller that the moves of the last decision were given up.

        Args:
            held: the placement in force now; None: the one before the moves.
        """
        self._wanted = None
        if held is not None:
            self.held_LGP = locked(np.array(held, dtype=np.int64))

    def _change(self, now: float) -> Decision:
        """The decision to move the layers that gain, or to keep all."""
        expected_LE, spread_LE = self.tracker.expected_LE, self.tracker.spread_LE
        next_LGP = self._levelled(expected_LE)
        kept_L, next_L = self._expected_max_L(expected_LE, spread_LE, self.held_LGP, next_LGP)
        mean_L = expected_LE.sum(axis=1) / (1 / self._slots.cost_G).sum()
        saved_L, bytes_L = kept_L - next_L, moves_L(self.held_LGP, next_LGP) * self._expert_bytes
        loss = max(float(saved_L.sum() / next_L.sum()), 0.0)
        loses = f"the placement loses {loss:.1%}"
        if not (saved_L > 0).any() or loss <= self.options.loss:
            return self._keep("balanced", f"{loses}, no more than {self.options.loss:.1%}", now, loss)
        chosen = self._paying(saved_L / mean_L.sum(), bytes_L)
        if not chosen:
            return self._keep("not-worth", f"{loses}, but moves cost more until traffic changes", now, loss)
        held_LGP = self.held_LGP.copy()
        held_LGP[chosen] = next_LGP[chosen]
        reason = f"{loses}; {len(chosen)} of {len(held_LGP)} layers change"
        moves, expected = int(moves_L(self.held_LGP, held_LGP).sum()), self._balancedness(expected_LE, held_LGP)
        done = reason, locked(held_LGP), moves, moves * self._expert_bytes, tuple(sorted(chosen))
        self._wanted = Decision("move", "gain", *done, loss, now, expected, self._clock())
        return self._wanted

    def _levelled(self, load_LE: FloatArray) -> IntArray:
        """(L, G, P) the slots that suit loads (L, E) best: all that change, whether that pays or not."""
        rules = ENOUGH, self._min_replicas, self._domain_G
        return rebalance(load_LE, self.held_LGP, self._slots, None, *rules).held_LGP

    def _paying(self, saved_L: FloatArray, bytes_L: IntArray) -> list[int]:
        """Layers whose moves cost less than they save from their end on, those first that save most for their bytes.

        saved_L are parts of a step's time. No layer counts as changed before the last one is: one more delays the others.
        """
        best_L = np.argsort(-saved_L / np.maximum(bytes_L, 1), kind="stable")
        best_L = best_L[saved_L[best_L] > 0]
        bytes_K, saved_K = bytes_L[best_L].cumsum(), saved_L[best_L].cumsum()  # of the first layers
        moving_s_K = self._move_times.seconds(bytes_K)
        cost_s_K = moving_s_K if self._stalls else moving_s_K * LENGTHENED
        after_s_K = np.maximum(self.options.period_s * self.tracker.horizon - moving_s_K, 0.0)
        gain_s_K = saved_K * after_s_K - CAUTION * cost_s_K
        return best_L[: gain_s_K.argmax() + 1].tolist() if gain_s_K.max() > 0 else []

    def _expected_max_L(self, expected_LE: FloatArray, spread_LE: FloatArray, *tables: IntArray) -> list[FloatArray]:
        """For each table of slots (L,), the largest load of a GPU times its cost, the mean over drawn loads.

        They differ from the expected loads by what is not known of these and by what windows differ by.
        """
        total_L1, sample_L1 = expected_LE.sum(axis=1, keepdims=True), np.maximum(self.tracker.sample_L, 1e-300)[:, None]
        variance_LE = expected_LE * total_L1 / sample_L1 + spread_LE**2
        scale_LE = np.divide(variance_LE, expected_LE, out=np.ones_like(expected_LE), where=expected_LE > 0)
        gamma_DLE = self._rng.gamma(np.broadcast_to(expected_LE / scale_LE, (DRAWS, *expected_LE.shape)), scale_LE)
        load_DLE = gamma_DLE * (total_L1[:, 0] / np.maximum(gamma_DLE.sum(axis=2), 1e-300))[:, :, None]
        loads = [gpu_loads(load_DLE, table, self._slots.cost_G) for table in tables]
        return [load_DLG.max(axis=2).mean(axis=0) for load_DLG in loads]

    def _balancedness(self, load_LE: FloatArray, held_LGP: IntArray) -> float:
        """Mean over largest load of the GPUs, the layers' loads summed."""
        gpu_LG = gpu_loads(load_LE[None], held_LGP, self._slots.cost_G)[0]
        return float(gpu_LG.mean(axis=1).sum() / max(gpu_LG.max(axis=1).sum(), 1e-300))

    def _keep(self, kind: Kind, reason: str, now: float = math.nan, loss: float = 0.0) -> Decision:
        return Decision("keep", kind, reason, self.held_LGP, 0, 0, (), loss, now, now, self._clock())


def moves_L(old_LGP: IntArray, new_LGP: IntArray) -> IntArray:
    """Returns (L,) int64, number of experts whose weights GPUs receive in each layer for a change from old_LGP to new_LGP.

    Both arguments are (L, G, P) int64, the expert in each slot.
    """
    lacking_LGP = (new_LGP[:, :, :, None] != old_LGP[:, :, None, :]).all(axis=3) & (new_LGP != EMPTY)
    return np.asarray(lacking_LGP.sum(axis=(1, 2)), dtype=np.int64)


def slots_in_use(placement: Placement, cost_G: ArrayLike) -> GpuSlots:
    """Returns GpuSlots in which each GPU has as many slots as it uses in its fullest layer of a placement.

    cost_G (G,) is the cost of a unit of load on each GPU.
    """
    held_G = (placement.held_LGP() >= 0).sum(axis=2).max(axis=0)
    return GpuSlots(np.maximum(held_G, 1), np.array(cost_G))


def load_cost_G(cluster: Cluster, profile: Profile | None = None) -> FloatArray:
    """Returns (G,) the cost of a unit of load on each GPU.

    Args:
        cluster: the GPUs.
        profile: the cost is the expert's seconds by its compute curves; None: the cost is 1 / speed of the GPU.
    """
    cost_G = np.array([1 / gpu.speed for gpu in cluster.gpus])
    if profile is not None:
        tokens = profile.tokens_TLSE.sum(axis=2).mean()  # of an expert in a window
        found_G = np.array([float(profile.seconds("expert", gpu, tokens)) for gpu in cluster.gpus])
        cost_G = found_G if found_G.all() else cost_G
    return cost_G


def slowest_port_Bps(cluster: Cluster) -> float:
    """Returns the lowest rate of a port or of a GPU's share of its NIC, in bytes per second."""
    network, servers = cluster.network, cluster.servers
    port_Bps = float(min(network.out_Bps_G.min(), network.in_Bps_G.min()))
    if servers is not None:
        port_Bps = min(port_Bps, servers.nic_Bps / max(map(servers.nic_G.count, servers.nic_G)))
    return port_Bps
