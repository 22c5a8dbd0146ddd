"""Errors of predicted ratios of two ways of serving, by what differs between them, as measured ones show them."""

from math import exp, log, sqrt

from aurora.advisor.engines.engine import ServingWay
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.step_constants import borrowed
from aurora.types import GpuKind

RATIO_ERRORS = {  # by what differs: the factor that intervals allow on each side, and how many published ratios such ones hold
    "experts": (1.10, "10 of 11"),  # whole in place of cut, with the same kernels
    "attention": (1.30, "5 of 6"),  # data-parallel in place of tensor-parallel, or less of one for more of the other
    "exchange": (1.20, "1 of 2"),  # another exchange, beyond its published paces, or halves of a batch that overlap with it
    "steps": (1.10, "none"),  # more or fewer tokens
    "gpus": (1.25, "2 of 3"),  # more or fewer, per GPU
    "format": (1.15, "2 of 2"),  # of weights
    "borrowed": (1.15, "none"),  # shares of a peak are those of another kind of GPU
}


def ratio_error(kind: GpuKind, differences: frozenset[str]) -> float:
    """Returns the factor of error of a predicted ratio that intervals allow; errors of several differences are independent.

    Args:
        kind: the GPUs' kind.
        differences: what differs, among the keys of RATIO_ERRORS.

    Source: `bench/blind.py` counts published ratios inside the intervals.

    Example:
        >>> from aurora.io.clusters import load_gpus
        >>> round(ratio_error(load_gpus()["NVIDIA H200"], frozenset({"experts", "attention"})), 2)
        1.32
    """
    several = differences | {"borrowed"} if differences and borrowed(kind) else differences
    return exp(sqrt(sum(log(RATIO_ERRORS[name][0]) ** 2 for name in several)))


def differences(first: ServingWay, second: ServingWay) -> frozenset[str]:
    """Returns what differs between two ways of serving, as keys of RATIO_ERRORS.

    NCCL's all-reduce and allgather come with a layout, and are no difference of their own.

    Args:
        first, second: the ways.
    """
    one, other = first.layout, second.layout
    split = [(layout.tensor, layout.data, layout.copies, layout.pipeline) for layout in (one, other)]
    names = {first.exchange, second.exchange}
    nccl = all(EXCHANGES[name].sends in ("reduce", "gather") for name in names)
    return frozenset(
        name
        for name, differs in {
            "experts": (one.expert > 1) != (other.expert > 1),
            "attention": one.gpus == other.gpus and split[0] != split[1],
            "exchange": (len(names) > 1 and not nccl) or first.overlap != second.overlap,
            "steps": first.batched_tokens != second.batched_tokens,
            "gpus": one.gpus != other.gpus,
        }.items()
        if differs
    )
