"""A placement that follows its traffic through EPLB: rank 0 decides after each of its windows, and all ranks take its map."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from aurora.planner.control.controller import Controller, Decision
from aurora.planner.control.plan_controller import compile_decisions, slowest_port_Bps
from aurora.types import Cluster, ControlOptions, GpuSlots
from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY
from aurora_vllm.control_metrics import ControlMetrics
from aurora_vllm.heartbeat import HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts

LOG = logging.getLogger("vllm.aurora")
MOST_PASSES = 1000  # whose times are kept for a window


class PassTimes:
    """The seconds between forward passes, and their tokens, since they were last asked for.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passes: deque[tuple[float, int]] = deque(maxlen=MOST_PASSES)

    def add(self, tokens: int) -> None:
        """Adds a forward pass, which begins now."""
        self._passes.append((self._clock(), tokens))

    def take(self) -> tuple[float, float] | None:
        """Returns the median seconds from pass to pass and their median tokens; None if there were fewer than two."""
        passes, self._passes = self._passes, deque(maxlen=MOST_PASSES)
        if len(passes) < 2:
            return None
        began_s_P, tokens_P = np.array(passes).T
        return float(np.median(np.diff(began_s_P))), float(np.median(tokens_P))


class EplbPlacement:
    """What EPLB's physical experts hold, on one rank.

    Rank 0 has the controller; what it decides goes to all ranks as a map, so that their clocks and step times may differ. No
    error leaves this class: experts then stay where they are, and one line and a counter say so.

    Args:
        settings: what users set of the controller, and whether it only says what it would do.
        facts: facts about the model and this rank.
        cluster: the ranks' GPUs and ports; None: equal ones, and moves cost nothing until they are measured.
        stalls: whether serving waits while experts move.
        broadcast: gives a tensor rank 0's values on all ranks; a collective call.
        metrics: count what happens.
        alive: returns whether what moves experts still runs.
        clock: returns seconds.

    Attributes:
        layers: number of MoE layers of the model.
        heartbeat: a step of it is a decision, or moves that others wait for.
        passes: the forward passes of this window.
    """

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        cluster: Cluster | None,
        stalls: bool,
        broadcast: Callable[[torch.Tensor], None],
        metrics: ControlMetrics,
        alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layers = facts.layers
        self._settings, self._facts, self._cluster, self._stalls = settings, facts, cluster, stalls
        self._broadcast, self._metrics, self._clock = broadcast, metrics, clock
        self.heartbeat, self.passes = HeartbeatThread(metrics.beat, alive), PassTimes(clock)
        self._controller: Controller | None = None
        if facts.rank == 0:
            compile_decisions()
        self._wanted: Decision | None = None  # whose moves are under way
        self._move_s, self._began_s = 0.0, clock()

    def next_map(self, load_LE: torch.Tensor, physical_LP: torch.Tensor) -> torch.Tensor:
        """Returns (L, P) int64, the expert in each physical expert from now on, the same on all ranks. A collective call.

        Args:
            load_LE: (L, E) tokens of each expert in the window, the same on all ranks.
            physical_LP: (L, P) the expert in each physical expert now, rank by rank.
        """
        with self.heartbeat.step():
            next_LP = physical_LP.to("cpu", torch.int64, copy=True)
            if self._facts.rank == 0:
                next_LP = torch.from_numpy(self._decide(load_LE.numpy(), next_LP.numpy()))
            try:
                self._broadcast(next_LP)
            except Exception as error:  # the group is broken, so the engine will say more
                self._failed(error)
                next_LP = physical_LP.to("cpu", torch.int64, copy=True)
        return next_LP

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager in which experts of the last decision move."""
        began_s = self._clock()
        with self.heartbeat.step():
            yield
        self._move_s += self._clock() - began_s

    def _decide(self, load_LE: IntArray, physical_LP: IntArray) -> IntArray:
        """(L, P) what the controller decides after a window; the physical experts as they are if there is an error."""
        try:
            held_LGP = physical_LP.reshape(len(physical_LP), self._facts.ranks, -1)
            controller = self._settled(held_LGP)
            ended_s = self._clock()
            controller.options = replace(controller.options, period_s=max(ended_s - self._began_s, 1e-3))
            self._began_s = ended_s
            decision = controller.window(load_LE, *(self.passes.take() or (None, None)))
            wanted_LGP = held_LGP
            if decision.action != "keep" and self._settings.dry_run:
                controller.failed()
            elif decision.action != "keep":
                wanted_LGP = _filled(decision.held_LGP, held_LGP)
                _check_all_held(wanted_LGP, load_LE.shape[1])
                self._wanted = decision
            self._metrics.decided(decision.kind, decision.balancedness, decision.expected_balancedness)
            LOG.info("aurora: %s%s", "dry run: " if self._settings.dry_run else "", decision)
            return wanted_LGP.reshape(physical_LP.shape)
        except Exception as error:
            self._failed(error)
            return physical_LP

    def _settled(self, held_LGP: IntArray) -> Controller:
        """The controller, which has been told what became of its last decision: what EPLB holds is in force."""
        if self._controller is None:
            options, cluster = ControlOptions(self._settings.loss, self._settings.bytes_per_s), self._cluster
            slots = move_Bps = None
            if cluster is not None:
                width_G = np.full(self._facts.ranks, held_LGP.shape[2])
                slots = GpuSlots(width_G, np.array([1 / gpu.speed for gpu in cluster.gpus]))
                move_Bps = slowest_port_Bps(cluster) * len(cluster)
            made_of = (held_LGP, self._facts.expert_bytes, options, slots, move_Bps, self._clock)
            self._controller = Controller(*made_of, stalls=self._stalls)
        controller, wanted, self._wanted = self._controller, self._wanted, None
        moved_LGP = controller.held_LGP if wanted is None else wanted.held_LGP
        as_wanted = bool((_filled(moved_LGP, held_LGP) == held_LGP).all())
        if not as_wanted:
            LOG.warning("aurora: vLLM has other experts in place than were decided on")
            controller.failed(held_LGP)
        elif wanted is not None:
            controller.moved(self._move_s)
            self._metrics.moved(wanted.bytes, self._move_s)
        self._move_s = 0.0
        return controller

    def _failed(self, error: Exception) -> None:
        """Says that experts stay where they are."""
        self._wanted = None
        if self._controller is not None:
            self._controller.failed()
        self._metrics.failed()
        LOG.warning("aurora: experts stay where they are: %s: %s", type(error).__name__, error)


def _filled(table_LGP: IntArray, held_LGP: IntArray) -> IntArray:
    """A table of slots in which those that are empty hold what they held."""
    return np.where(table_LGP == EMPTY, held_LGP, table_LGP)


def _check_all_held(table_LGP: IntArray, experts: int) -> None:
    """Raises RuntimeError if a layer of a table of slots lacks an expert, or has one that the model has not."""
    for layer, table_GP in enumerate(table_LGP):
        if set(table_GP.flat) != set(range(experts)):
            raise RuntimeError(f"the controller's table of layer {layer} has {sorted(set(table_GP.flat))} of {experts} experts")
