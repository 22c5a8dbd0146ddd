"""Link curves of a node by what performs its exchanges: NCCL, or DeepEP's kernels, as aiconfigurator-core has measured them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.silicon_database import all_to_all_points, system_specs, tables
from aurora.planner.network.transfer_seconds import exchange_seconds, fit_transfer_curve
from aurora.types import TransferCurve
from aurora.types.arrays import FloatArray

FP8_BYTES = 1 + 4 / 128  # of a number that is dispatched: FP8, and a scale of 4 bytes for each 128
BF16_BYTES = 2  # of a number that is combined
MODEL = {"hidden_size": 7168, "num_topk": 8, "num_experts": 256}  # DeepSeek-V3, which was measured everywhere


@dataclass(frozen=True)
class DeepEpPoints:
    """DeepEP's exchanges of one model on the GPUs of a node, each GPU with equally many tokens whose experts are drawn evenly.

    Attributes:
        partners: GPUs of the node, less one.
        dispatch_bytes_X, dispatch_s_X: (X,) float64, bytes that a port sends in the mean, and seconds.
        combine_bytes_X, combine_s_X: (X,) float64, the same on the way back.
    """

    partners: int
    dispatch_bytes_X: FloatArray
    dispatch_s_X: FloatArray
    combine_bytes_X: FloatArray
    combine_s_X: FloatArray

    @property
    def ways(self) -> tuple[tuple[FloatArray, FloatArray], ...]:
        """Bytes and seconds of the dispatch, and of the combine."""
        return (self.dispatch_bytes_X, self.dispatch_s_X), (self.combine_bytes_X, self.combine_s_X)

    def curve(self) -> TransferCurve:
        """Returns one curve of both ways: the geometric mean of their seconds for the same bytes."""
        curves = [fit_transfer_curve(self.partners, *way) for way in self.ways]
        both_X = np.unique(np.concatenate([bytes_X for bytes_X, _ in self.ways]))
        seconds_X = np.sqrt(np.prod([exchange_seconds([curve], both_X, self.partners) for curve in curves], axis=0))
        return fit_transfer_curve(self.partners, both_X, seconds_X)


def deep_ep_points(system: str, low_latency: bool, hidden: int, top_k: int, experts: int) -> DeepEpPoints:
    """Returns DeepEP's exchanges of a model on one node, with SGLang; of several numbers of SMs the fastest counts.

    Low-latency kernels send a token to each of its experts, the normal ones once to each GPU that has some of them.

    Args:
        system: as in `aurora.io.silicon_database.systems`.
        low_latency: whether by the low-latency kernels.
        hidden, top_k, experts: the model's hidden size, experts of a token, and experts.

    Raises:
        BadInput: if they were not measured there.
    """
    wanted = {"node_num": 1, "hidden_size": hidden, "num_topk": top_k, "num_experts": experts}
    gpus = int(system_specs(system)["node"]["num_gpus_per_node"])
    found = next((columns for columns in _tables(system, low_latency, **wanted) if columns["num_token"]), None)
    if found is None:
        raise BadInput(
            f"silicon measurements of {system}: expected DeepEP's exchanges of hidden size {hidden}, top-{top_k} of {experts} "
            "experts on one node, found none"
        )
    rows = top_k * (gpus - 1) / gpus if low_latency else (gpus - 1) * _reached(experts, experts // gpus, top_k)
    tokens_X = np.array(found["num_token"], dtype=np.float64)
    sides = []
    for way, number_bytes in (("dispatch", FP8_BYTES), ("combine", BF16_BYTES)):
        parts = (f"{way}_avg_t_us",) if low_latency else (f"{way}_transmit_us", f"{way}_notify_us")
        took_X = np.sum([np.array(found[part], dtype=np.float64) for part in parts], axis=0) / 1e6
        sizes_X = np.unique(tokens_X)
        sides += [sizes_X * rows * hidden * number_bytes, np.array([took_X[tokens_X == size].min() for size in sizes_X])]
    return DeepEpPoints(gpus - 1, *sides)


def deep_ep_models(system: str, low_latency: bool) -> list[tuple[int, int, int]]:
    """Returns hidden size, experts of a token and experts of the models that `deep_ep_points` has, in rising sequence.

    Args:
        system, low_latency: as there.
    """
    found = set()
    for columns in _tables(system, low_latency, node_num=1):
        found |= set(zip(*(columns[name] for name in MODEL), strict=True))
    return sorted(found)


def _tables(system: str, low_latency: bool, **wanted: object) -> Iterator[dict[str, list[Any]]]:
    """The tables of one of DeepEP's kinds of kernels, newest first."""
    return tables(system, "comm", "sglang", f"wideep_deepep_{'ll' if low_latency else 'normal'}_perf", **wanted)


def _reached(experts: int, held: int, top_k: int) -> float:
    """Probability that one of a token's experts lies on a GPU that holds so many."""
    index_K = np.arange(top_k)
    return float(1 - np.prod((experts - held - index_K) / (experts - index_K)))


def _nccl(system: str) -> tuple[TransferCurve, ...]:
    return tuple(fit_transfer_curve(partners, *points) for partners, points in all_to_all_points(system).items())


EXCHANGES: dict[str, Callable[[str], tuple[TransferCurve, ...]]] = {
    "nccl": _nccl,
    "deepep": lambda system: (deep_ep_points(system, False, *MODEL.values()).curve(),),
    "deepep-low-latency": lambda system: (deep_ep_points(system, True, *MODEL.values()).curve(),),
}
