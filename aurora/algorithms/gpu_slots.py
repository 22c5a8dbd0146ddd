"""Computes the expert slots of each GPU from memory and options, divides experts over them, fills slots, and sums up loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import Cluster, FailureDomains, Placement, PlanOptions, Profile
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.placement import EMPTY

USABLE = 0.9  # part of a GPU's memory that engines use
CACHE_KEPT = 0.9  # part of the KV cache without replicas that these leave


def memory_slots_G(cluster: Cluster, profiles: Sequence[Profile]) -> IntArray:
    """Returns (G,) int64: how many experts of profiles[0] fit on each GPU in every layer.

    The non-expert weights of all models are subtracted from the memory first.

    Raises:
        InfeasiblePlan: if the non-expert weights exceed a GPU's memory.
    """
    profile, other_bytes = profiles[0], sum(p.other_bytes for p in profiles)
    slot_bytes = profile.expert_bytes * profile.layers
    spare_G = np.array([gpu.memory_bytes - other_bytes for gpu in cluster.gpus])
    if (spare_G < 0).any():
        weakest = cluster.gpus[int(spare_G.argmin())]
        raise InfeasiblePlan(
            f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but the weights outside experts need {other_bytes}"
        )
    return np.minimum(spare_G // slot_bytes, profile.experts) if slot_bytes else np.full(len(spare_G), profile.experts)


def slots_G(cluster: Cluster, profile: Profile, options: PlanOptions) -> IntArray:
    """Returns (G,) int64: each GPU's expert slots in every layer, `options.slots_per_gpu` or as many as memory holds.

    Raises:
        InfeasiblePlan: if memory holds fewer slots than asked for, or the cluster has fewer slots than experts.
    """
    memory_G = memory_slots_G(cluster, [profile])
    if not options.slots_per_gpu:
        count_G = memory_G
    elif (short_G := memory_G < min(options.slots_per_gpu, profile.experts)).any():
        gpu = int(short_G.argmax())
        raise InfeasiblePlan(
            f"gpu {cluster.gpus[gpu].name!r}: `slots_per_gpu` {options.slots_per_gpu}, but its memory holds {memory_G[gpu]} "
            f"experts of {profile.model!r} in every layer"
        )
    else:
        count_G = np.full(len(cluster.gpus), min(options.slots_per_gpu, profile.experts))
    check_slots(cluster, profile, count_G)
    return count_G


@dataclass(frozen=True)
class SlotRoom:
    """Number of expert slots that fit on a GPU beside its other weights, activations and KV cache; `str` shows it.

    Attributes:
        slots: number of slots, at most one for each expert.
        memory_bytes: memory of the smallest GPU.
        activation_bytes: bytes of the rows that a GPU sends and receives in the largest step, in dispatch and combine.
        cache_bytes: bytes reserved for the KV cache.
        cache_tokens: number of tokens that fit into the KV cache; None if the profile does not have its bytes per token.
        slot_bytes: bytes of one slot: an expert's weights over all layers.
    """

    slots: int
    memory_bytes: int
    activation_bytes: int
    cache_bytes: int
    cache_tokens: int | None
    slot_bytes: int

    @classmethod
    def of(cls, cluster: Cluster, profile: Profile, options: PlanOptions) -> Self:
        """Computes the slots that fit beside a KV cache of nine tenths of the memory that it could have without replicas."""
        memory_bytes, slot_bytes = min(gpu.memory_bytes for gpu in cluster.gpus), profile.expert_bytes * profile.layers
        pairs = int(profile.tokens_TLSE.sum(axis=3).max())
        if options.tokens_per_step is not None:
            pairs = -(-options.tokens_per_step[1] // len(cluster)) * profile.top_k
        activation_bytes = 2 * pairs * (profile.dispatch_bytes + profile.combine_bytes)
        free_bytes = int(USABLE * memory_bytes) - profile.other_bytes - activation_bytes
        least = -(-profile.experts // len(cluster)) * slot_bytes
        cache_bytes = int(CACHE_KEPT * max(0, free_bytes - least))
        fitting = max(0, free_bytes - cache_bytes) // slot_bytes if slot_bytes else profile.experts
        tokens = int(cache_bytes / profile.kv_bytes) if profile.kv_bytes else None
        return cls(min(fitting, profile.experts), memory_bytes, activation_bytes, cache_bytes, tokens, slot_bytes)

    def __str__(self) -> str:
        tokens = f"for {self.cache_tokens:,} tokens" if self.cache_tokens is not None else "(bytes of a token unknown)"
        return (
            f"room for {self.slots} slots per GPU of {self.memory_bytes / 1e9:.4g} GB, beside other weights, activations and "
            f"{self.cache_bytes / 1e9:.4g} GB KV cache {tokens}"
        )


def check_slots(cluster: Cluster, profile: Profile, slots_G: IntArray) -> None:
    """Raises InfeasiblePlan if a cluster has fewer slots for a model than it has experts."""
    if slots_G.sum() < profile.experts:
        raise InfeasiblePlan(
            f"cluster {cluster.name!r} has {slots_G.sum()} expert slots a layer for {profile.model!r}, its {profile.experts} "
            f"experts need {profile.experts}"
        )


def shared_slots_MG(cluster: Cluster, profiles: Sequence[Profile]) -> list[IntArray]:
    """Returns (M, G): `memory_slots_G` of each model if the GPUs also hold the non-expert weights of the others."""
    others_M = [[*profiles[:model], *profiles[model + 1 :]] for model in range(len(profiles))]
    return [memory_slots_G(cluster, [profile, *others]) for profile, others in zip(profiles, others_M, strict=True)]


def replicas_fit(cluster: Cluster, profiles: Sequence[Profile]) -> bool:
    """Returns whether the memory of all GPUs together holds all experts of all models, and at least one replica."""
    other_bytes = sum(profile.other_bytes for profile in profiles)
    spare = sum(gpu.memory_bytes - other_bytes for gpu in cluster.gpus)
    once = sum(profile.layers * profile.experts * profile.expert_bytes for profile in profiles)
    return spare - once >= min(profile.expert_bytes for profile in profiles)


def even_slots(experts: int, slots_G: IntArray) -> IntArray:
    """Returns (G,) int64, the number of experts on each GPU if they are divided as equally as the slots slots_G (G,) allow.

    Raises:
        BadInput: if the experts outnumber the slots.
    """
    own_G = np.zeros_like(slots_G)
    while (rest := experts - int(own_G.sum())) > 0:
        open_G = np.flatnonzero(own_G < slots_G)
        if not len(open_G):
            raise BadInput(f"expected slots for {experts} experts, found {slots_G.sum()}")
        share = max(1, min(rest // len(open_G), int((slots_G - own_G)[open_G].min())))
        own_G[open_G[: rest if share == 1 else None]] += share
    return own_G


def failure_domains(cluster: Cluster, slots_G: IntArray) -> FailureDomains:
    """Returns the nodes of the cluster as failure domains, with slots_G (G,) slots on the GPUs.

    A node fails at the sum of its GPUs' failure rates; if a GPU has no rate, all nodes fail equally often.
    """
    node_G = np.unique([gpu.node for gpu in cluster.gpus], return_inverse=True)[1]
    rate_G = [gpu.failure_rate for gpu in cluster.gpus if gpu.failure_rate is not None]
    known = len(rate_G) == len(cluster.gpus)
    odds_D = np.bincount(node_G, weights=rate_G) if known else np.ones(int(node_G.max()) + 1)
    return FailureDomains(slots_G, node_G, odds_D.astype(np.float64))


def filled(
    placement: Placement, load_LE: IntArray | None = None, equal: bool = True, slots: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Adds replicas until every GPU holds the same number of experts in every layer.

    The least loaded GPU gets the next replica: of the most loaded expert whose even part leaves the GPU's load at or below the
    layer's maximum; if there is none, of the least loaded expert.

    Args:
        placement: the placement.
        load_LE: (L, E), tokens of each expert; None: all are equal.
        equal: whether a token takes equally long on all GPUs. If not, the tokens that the placement gives a GPU, over all
            layers, are taken as its speed.
        slots: number of experts of each GPU afterwards, at most E; None: as many as the fullest GPU holds.

    Returns:
        The experts of each layer and GPU, equally many, ascending, without duplicates on a GPU.
    """
    layers = range(len(placement.slots_LG))
    load_LE = np.ones((len(layers), placement.experts), dtype=np.int64) if load_LE is None else load_LE
    speed_G = np.ones(placement.gpus)
    if not equal:
        planned_G = np.sum([load_LE[l] @ placement.split_EG(l) for l in layers], axis=0)
        speed_G = np.maximum(planned_G / max(1.0, planned_G.max()), 1e-9)
    most = slots or (placement.experts + redundant_experts(placement)) // placement.gpus
    full_L = [_filled(placement.holds_EG(l), load_LE[l], speed_G, most) for l in layers]
    return tuple(tuple(tuple(np.flatnonzero(held_E).tolist()) for held_E in holds_EG.T) for holds_EG in full_L)


def redundant_experts(placement: Placement) -> int:
    """Returns vLLM's `num_redundant_experts`: slots minus experts of a layer, all GPUs with the slots of the fullest one."""
    return max(len(experts) for layer in placement.slots_LG for experts in layer) * placement.gpus - placement.experts


def _filled(holds_EG: BoolArray, load_E: IntArray, speed_G: FloatArray, most: int) -> BoolArray:
    """One layer of `filled`."""
    while (open_G := holds_EG.sum(axis=0) < most).any():
        replicas_E = holds_EG.sum(axis=1)
        tokens_G = (load_E / replicas_E) @ holds_EG
        gpu = int(np.where(open_G, tokens_G / speed_G, np.inf).argmin())
        grown_E = (tokens_G[gpu] + load_E / (replicas_E + 1)) / speed_G[gpu]
        new_E = ~holds_EG[:, gpu]
        fits_E = new_E & (grown_E <= (tokens_G / speed_G).max())
        hottest, coldest = np.where(fits_E, load_E / replicas_E, -1).argmax(), np.where(new_E, grown_E, np.inf).argmin()
        holds_EG[hottest if fits_E.any() else coldest, gpu] = True
    return holds_EG


def gpu_loads(load_DLE: FloatArray, held_LGP: IntArray, cost_G: FloatArray, part_LGP: FloatArray | None = None) -> FloatArray:
    """Returns (D, L, G) float64, the load of each GPU times its cost.

    Args:
        load_DLE: (D, L, E) loads of experts, for each of D draws or windows.
        held_LGP: (L, G, P) int64, the expert in each slot, -1 for none.
        cost_G: (G,) cost of a unit of load on each GPU.
        part_LGP: (L, G, P) the part of its expert's load that each slot takes; None: replicas take even parts.
    """
    layers, experts = load_DLE.shape[1:]
    at_LGP = np.where(held_LGP != EMPTY, held_LGP, 0) + np.arange(layers)[:, None, None] * experts
    flat_DX = load_DLE.reshape(len(load_DLE), layers * experts)
    parts_LGP = _even_parts(held_LGP) if part_LGP is None else part_LGP
    return np.asarray((flat_DX[:, at_LGP] * parts_LGP).sum(axis=3) * cost_G)


def _even_parts(held_LGP: IntArray) -> FloatArray:
    """(L, G, P) float64, the parts of slots if replicas take even ones."""
    experts, used_LGP = int(held_LGP.max()) + 1, held_LGP != EMPTY
    at_LGP = np.where(used_LGP, held_LGP, 0) + np.arange(len(held_LGP))[:, None, None] * experts
    count_X = np.bincount(at_LGP[used_LGP], minlength=len(held_LGP) * experts)
    return np.asarray(np.where(used_LGP, 1 / np.maximum(count_X, 1)[at_LGP], 0.0))
