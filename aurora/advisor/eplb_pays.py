"""Decides whether an engine's balancer (EPLB) pays: what a rearrangement costs, and how long a placement must live for it."""

from dataclasses import dataclass
from math import inf

from aurora.advisor.step_constants import DEFAULT
from aurora.types import GpuKind

MOVE_S = 1.5e-3  # of a slot beside its bytes: 0.91 s for 522 (vLLM pull 43219, GB200) and 0.26 for 208 (28369, H100)
SPREAD = 10.0  # published rearrangements took up to as many times as long as computed: 15 s (vLLM 24116), 41.8 s (50647)


def rearrangement_s(slots: int, layers: int, expert_bytes: float, kind: GpuKind, link_Bps: float, waits: bool) -> float:
    """Returns the seconds for which serving waits in a rearrangement, if all slots of a GPU get another expert.

    If serving waits, that is the time over the link, and MOVE_S for each slot. If experts travel beside serving (vLLM's default
    since its pull request 43219), it waits while each layer is copied from the buffer in the GPU's own memory.

    Args:
        slots: slots of a GPU in a layer.
        layers: MoE layers.
        expert_bytes: bytes of an expert's weights in a layer.
        kind: the GPUs' datasheet.
        link_Bps: bytes per second that large transfers reach, by a GPU's port, or by its NIC between servers.
        waits: whether serving waits for the transfer.

    Example:
        >>> from aurora.io.clusters import load_gpus
        >>> round(rearrangement_s(8, 26, 17.3e6, load_gpus()["NVIDIA H100 80GB HBM3"], 315e9, waits=True), 3)
        0.323
    """
    if waits:
        return slots * layers * (expert_bytes / link_Bps + MOVE_S)
    return slots * layers * 2 * expert_bytes / (kind.memory_Bps * DEFAULT.memory_share)


def least_life_s(stall_s: float, saved: float) -> float:
    """Returns the seconds that a placement must serve to make up for the stall before it; infinite if it saves nothing.

    Args:
        stall_s: seconds for which serving waits.
        saved: part of the time of serving that the placement saves.

    Example:
        >>> round(least_life_s(41.8, 0.0645))
        648
    """
    return stall_s / saved if saved > 0 else inf


@dataclass(frozen=True)
class EplbAnswer:
    """Answer to whether EPLB pays in the default's layout and exchange.

    Attributes:
        stall_s: seconds for which serving waits in a rearrangement.
        waits: whether the engine moves experts while serving waits, or beside serving.
        given: whether the user measured them; otherwise they are computed, and published ones took up to SPREAD times as long.
        balancedness: mean / largest load of a GPU under the engine's default placement, over all of the traffic; vLLM logs it.
        saved: part of the time of serving that EPLB saves, without stalls: by drift as recorded, or at most (perfect balance).
        drift: whether `saved` follows from the recorded drift.
        step_s: seconds of a step, in the mean.
        interval: steps between two rearrangements with which EPLB is fastest, of those that the recording can tell.
        eplb: tokens per second with EPLB at that interval, stalls included, over the default's; None: the drift is not known.
        placed: tokens per second with a planned placement that stays, over the default's.
        advice: "off", "map" (a planned placement, from a file) or "eplb".
    """

    stall_s: float
    waits: bool
    given: bool
    balancedness: float
    saved: float
    drift: bool
    step_s: float
    interval: int
    eplb: float | None
    placed: float
    advice: str

    @property
    def life_s(self) -> float:
        """Seconds that a placement must serve at least."""
        return least_life_s(self.stall_s, self.saved)

    @property
    def experts_life_s(self) -> float:
        """The same if experts took all of the time, and were perfectly balanced afterwards: no placement pays sooner."""
        return least_life_s(self.stall_s, 1 - self.balancedness)
