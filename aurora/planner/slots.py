"""Chooses how many slots each GPU has for experts, replicas included, from a plan's simulated seconds with each number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aurora.algorithms.gpu_slots import SlotRoom, memory_slots_G
from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL
from aurora.types import Cluster, PlanOptions, Profile
from aurora.types.options import AUTO_SLOTS

SLOT_PAYS = 0.01  # of the simulated step, that a further slot on every GPU saves at least


@dataclass(frozen=True)
class WorthwhileSlots:
    """Chosen number of slots per GPU, and why.

    Attributes:
        per_gpu: the slots; None: experts have no replicas.
        more_gain: part of the simulated step that one more slot would save; None if a GPU's memory does not hold one more.
        notes: the reasons, as remarks for the plan.
    """

    per_gpu: int | None
    more_gain: float | None
    notes: tuple[str, ...]


def slots_open(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> bool:
    """Returns whether the planner chooses `slots_per_gpu`: "auto", for one model whose placement options are "auto", too."""
    left_open = options.place == options.assign == "auto" and options.min_replicas is None
    single = len(profiles) == 1 and not domains
    return options.slots_per_gpu == AUTO_SLOTS and left_open and single


def worthwhile_slots(
    fitting: SlotRoom, cluster: Cluster, profile: Profile, aside_s: Callable[[int | None], float], aside: str
) -> WorthwhileSlots:
    """Chooses slots per GPU: one more as long as there is room and it saves more than SLOT_PAYS of the simulated step.

    Args:
        fitting: number of slots that a GPU's memory has beside the KV cache.
        cluster: the GPUs.
        profile: the model.
        aside_s: function from slots per GPU (None: no replicas) to a plan's simulated seconds on held-out traffic.
        aside: description of the held-out traffic, for the notes.
    """
    first = profile.experts // len(cluster) + 1
    if fitting.slots < first:
        return WorthwhileSlots(None, None, (f"`slots_per_gpu`: every expert is held once, {fitting}",))
    per_gpu, now_s, fewer, more_gain = None, aside_s(None), "", None
    for slots in range(first, min(int(memory_slots_G(cluster, [profile]).min()), profile.experts) + 1):
        then_s = aside_s(slots)
        more_gain = 1 - then_s / now_s if now_s else 0.0
        if slots > fitting.slots or more_gain <= SLOT_PAYS:
            break
        fewer = f"; {'no replicas' if per_gpu is None else 'one fewer'} would take {now_s / then_s - 1:.1%} longer"
        per_gpu, now_s, more_gain = slots, then_s, None
    drawn = ", of drawn traffic" if profile.provenance.get("tool") == SYNTHETIC_TOOL else ""
    chosen = "every expert is held once" if per_gpu is None else f"{per_gpu} per GPU are taken"
    why = f"{chosen}, by steps simulated on {aside}{drawn}{fewer}"
    return WorthwhileSlots(per_gpu, more_gain, (f"`slots_per_gpu`: {fitting}", f"`slots_per_gpu`: {why}"))
