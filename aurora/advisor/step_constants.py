"""Constants of serving engines and GPUs that datasheets do not give, from which the seconds of a step are computed."""

from dataclasses import dataclass, replace
from functools import cache
from math import log
from typing import Self

from aurora.advisor.engines.exchanges import EngineExchange
from aurora.io.clusters import load_gpus
from aurora.types import GpuKind
from aurora.types.cluster import SHARES


@dataclass(frozen=True)
class StepConstants:
    """Constants of an engine on a host and of GPUs.

    `of` has the shares of a kind of GPU. The other defaults are of vLLM 0.20.1 on a server of B300. Kernels, launches, the
    step, experts and linear attention are fitted to one configuration, Qwen3.6-35B-A3B on one GPU, and rounded; others are from
    AISimulate's tables of B300, from times of NCCL (shares of links) and DeepEP (of NICs) on servers of H100 in aiconfigurator
    095f58a, or from the fits and public times of kernels that `bench/steps.py` names.

    Attributes:
        memory_share: memory bandwidth that kernels reach / the datasheet's.
        flops_share: operations per second that matrix products reach / the datasheet's.
        grouped_share, grouped_fp8_share: the same for grouped matrix products of experts, at half precision and at fp8.
        fused_fp8_share: the same at fp8 for Triton's fused kernels.
        quantised_share: memory bandwidth that grouped products of weights below 16 bits reach / the datasheet's.
        attention_share: operations per second that attention over many pairs of tokens reaches / the datasheet's.
        linear_share: the same for linear attention in prefill.
        index_share: the same for the scores of an indexer of sparse attention.
        choice_s: seconds for each token of a prompt in which a layer with an indexer chooses among scored entries.
        evenness: 1 / variance of (an expert's popularity / mean popularity): with small values, tokens share few experts.
        kernel_s: fixed seconds of a kernel within a CUDA graph.
        hyper_s: seconds of the kernels of hyper-connections before and after half a layer, for few tokens.
        launch_s: seconds of the host, with the engine's Python, to launch attention in steps with prompts, where graphs break.
        eager_s: seconds of the host for any other launch in a step too large for graphs.
        step_s: seconds of a step outside its layers: scheduler, inputs, sampling.
        reduce_s: seconds of an all-reduce without bytes, on GPUs of one server, within a CUDA graph.
        collective_s: seconds of any other collective without bytes, on GPUs of one server.
        collective_rank_s: seconds that each rank adds to a collective other than an all-reduce.
        link_share: bandwidth that large collectives reach / bandwidth of the links, each way.
        small_share: the same for small ones, which NCCL sends by a protocol of lower latency and lower bandwidth.
        large_s: seconds by which the protocol of large ones begins later.
        nic_share: bandwidth that collectives between servers reach / bandwidth of the NICs, each way.
        coordination_s: seconds in which data-parallel ranks agree on the size of a step.
    """

    memory_share: float = 0.83
    flops_share: float = 0.6
    grouped_share: float = 0.36
    grouped_fp8_share: float = 0.36
    fused_fp8_share: float = 0.36
    quantised_share: float = 0.6
    attention_share: float = 0.4
    linear_share: float = 0.053
    index_share: float = 0.22
    choice_s: float = 2.1e-7
    evenness: float = 1.3
    kernel_s: float = 2.1e-6
    hyper_s: float = 28e-6
    launch_s: float = 18e-6
    eager_s: float = 27e-6
    step_s: float = 4.6e-4
    reduce_s: float = 7e-6
    collective_s: float = 5.5e-6
    collective_rank_s: float = 1.3e-6
    link_share: float = 0.7
    small_share: float = 0.2
    large_s: float = 16e-6
    nic_share: float = 0.85
    coordination_s: float = 5e-4

    @classmethod
    def of(cls, kind: GpuKind) -> Self:
        """Returns the constants with the shares of a kind of GPU, each from the nearest kind of which it was measured."""
        shares = {NAMES.get(name, name): getattr(nearest(kind, name), name) for name in SHARES}
        return cls(**shares, fused_fp8_share=kind.fused_fp8_share or shares["grouped_fp8_share"])

    def beside(self, sent: EngineExchange) -> Self:
        """Returns the constants during overlap, while the exchange `sent` occupies part of a GPU's multiprocessors."""
        names = [name for name in vars(self) if name.endswith("_share") and name not in MOVING]
        return replace(self, **{name: getattr(self, name) * (1 - sent.processors) for name in names})


MOVING = "memory_share", "quantised_share", "link_share", "small_share", "nic_share"  # of what moves bytes
DEFAULT = StepConstants()
COMPUTED_ERROR = 1.10  # half of the steps of bench/steps.py on GPUs whose shares are known are within this factor
BORROWED_ERROR = 1.25  # with another kind's shares; published steps of H800 and H20 are within it with their own
NAMES = {"dense_share": "flops_share"}  # of GpuKind's shares, where StepConstants has another


@cache
def nearest(kind: GpuKind, share: str) -> GpuKind:
    """Returns the kind whose share is taken for another: itself if it has one, else the nearest.

    The lower the peak, the larger the share, and the more so with fast memory. So the nearest kind is that with the least
    distance, in logarithms, of operations per second and of operations per byte of memory.

    Args:
        kind: a kind of GPU.
        share: one of SHARES.
    """
    measured = [other for other in (kind, *load_gpus().values()) if getattr(other, share) is not None]

    def distance(other: GpuKind) -> float:
        peak, memory = other.half_flops / kind.half_flops, other.memory_Bps / kind.memory_Bps
        return abs(log(peak)) + abs(log(peak / memory))

    return min(measured, key=distance)


def borrowed(kind: GpuKind) -> list[str]:
    """Returns the kinds whose shares are taken for another, because those of its own products or attention are not known."""
    either = "grouped_share" if kind.grouped_fp8_share is None else "grouped_fp8_share"
    kinds = [nearest(kind, share).kind for share in ("dense_share", either, "attention_share")]
    return [name for name in dict.fromkeys(kinds) if name != kind.kind]


def computed_error(kind: GpuKind) -> float:
    """Returns the factor of error of computed steps that intervals allow."""
    return BORROWED_ERROR if borrowed(kind) else COMPUTED_ERROR
