"""Seconds between two MoE layers of a model on a measured GPU system: attention, its projections and the router."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from aurora.errors import BadInput
from aurora.io.silicon_database import tables
from aurora.planner.workload.curve_fit import fit_curve
from aurora.planner.workload.model_config import Shape, flat_config, number, weight_format
from aurora.types import Curve
from aurora.types.arrays import FloatArray

DTYPE = "bfloat16"  # of activations and of keys and values
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # of measured kernels
MODULE = {"hidden_size": 7168, "q_lora_rank": 1536}  # of modules that were measured with their projections
PROJECTIONS = {"fp8": "fp8", "fp8_block": "fp8_block"}  # types of matrix products by that of the weights, else DTYPE


@dataclass(frozen=True)
class _Attention:
    """Attention of a model with keys and values for each group of heads.

    Attributes:
        heads, kv_heads: how many, and how many have keys and values of their own.
        width: of a head.
        windows: for each size of a sliding window, 0 for none, the part of the layers that have it.
    """

    heads: int
    kv_heads: int
    width: int
    windows: Mapping[int, float]

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden: int) -> Self:
        """Reads a config's content. Raises BadInput if it says nothing of heads."""
        heads = number(config, "num_attention_heads", "n_heads")
        nested = config.get("attn_config")
        kv_heads = (
            config.get("num_key_value_heads") or (nested.get("kv_n_heads") if isinstance(nested, dict) else None) or heads
        )
        width = config.get("head_dim") or hidden // heads
        if any(type(each) is not int or each < 1 for each in (kv_heads, width)):
            raise BadInput(
                f"config: expected heads for keys and values, and their width, above zero, found {kv_heads}, {width}"
            )
        types = config.get("layer_types")
        sliding = types.count("sliding_attention") / len(types) if isinstance(types, list) and types else 0.0
        window = number(config, "sliding_window") if sliding else 0
        return cls(heads, kv_heads, width, {size: part for size, part in ((window, sliding), (0, 1 - sliding)) if part})

    def curve(self, system: str, engine: str) -> Curve:
        """Seconds over one sequence by its tokens. Raises BadInput if it was not measured."""
        sizes = {"num_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.width, "batch_size": 1}
        types = {"attn_dtype": DTYPE, "kv_cache_dtype": DTYPE, "step": 0}
        curves = []
        for window, part in self.windows.items():
            columns = next(tables(system, "attention", engine, "context_attention_perf", window_size=window, **sizes, **types))
            if not columns["isl"]:
                about = f"silicon measurements of {system} with {engine}: expected attention of {self.heads} heads, "
                within = f" in a window of {window}" if window else ""
                raise BadInput(f"{about}{self.kv_heads} for keys and values, of width {self.width}{within}, found none")
            curves.append((part, fit_curve(columns["isl"], np.array(columns["latency"]) / 1e3).curve))
        tokens_X = np.unique(np.concatenate([curve.tokens_X for _, curve in curves]))
        return Curve(tokens_X, np.sum([part * curve(tokens_X) for part, curve in curves], axis=0))


def gate_curve(config: Mapping[str, Any], system: str, engine: str) -> Curve:
    """Returns seconds between two MoE layers by tokens: attention over one sequence, its projections, router, shared experts.

    Products of matrices are interpolated between measured widths. Latent attention (MLA) is measured with its projections
    where the model has DeepSeek-V3's widths, else without them.

    Args:
        config: the content of a transformers config.json.
        system: as in `aurora.io.silicon_database.systems`.
        engine: one of `aurora.io.silicon_database.ENGINES`.

    Raises:
        BadInput: if such attention or such products were not measured there.
    """
    shape, config = Shape.of(config), flat_config(config)
    dtype = PROJECTIONS.get(weight_format(config), DTYPE)
    router = _Products(system, engine, DTYPE)
    tokens_X = np.array(router.tokens)
    seconds_X = router.seconds(shape.experts, shape.hidden, tokens_X)
    if config.get("kv_lora_rank"):
        attention, sizes = _latent(config, shape, system, engine, dtype)
    else:
        found = _Attention.of(config, shape.hidden)
        own, kv = found.heads * found.width, found.kv_heads * found.width
        attention, sizes = found.curve(system, engine), [(own + 2 * kv, shape.hidden), (shape.hidden, own)]
    if shared := _shared_width(config, shape):
        sizes = [*sizes, (2 * shared, shape.hidden), (shape.hidden, shared)]
    products = router if dtype == DTYPE or not sizes else _Products(system, engine, dtype)
    seconds_X = sum((products.seconds(*size, tokens_X) for size in sizes), start=seconds_X)
    return fit_curve(tokens_X, seconds_X + attention(tokens_X)).curve


def _shared_width(config: Mapping[str, Any], shape: Shape) -> int:
    """Width of all shared experts together, which every token passes; zero without any."""
    own, many = config.get("shared_expert_intermediate_size"), config.get("n_shared_experts")
    width = own if own is not None else shape.inner * many if isinstance(many, int) else 0
    return width if isinstance(width, int) and width > 0 else 0


def _latent(
    config: Mapping[str, Any], shape: Shape, system: str, engine: str, dtype: str
) -> tuple[Curve, Sequence[tuple[int, int]]]:
    """Seconds of latent attention over one sequence by its tokens, and widths of the projections that these leave out."""
    heads, own = number(config, "num_attention_heads"), {name: config.get(name) for name in LATENT}
    if own != LATENT:
        wanted = ", ".join(f"{name} {value}" for name, value in LATENT.items())
        found = ", ".join(map(str, own.values()))
        raise BadInput(f"silicon measurements of {system}: expected latent attention with {wanted}, found {found}")
    about = {"num_heads": heads, "batch_size": 1, "mla_dtype": DTYPE, "kv_cache_dtype": DTYPE, "step": 0, "tp_size": 1}
    if {"hidden_size": shape.hidden, "q_lora_rank": config.get("q_lora_rank")} == MODULE:
        module = _measured(system, engine, "mla_context_module_perf", **about, gemm_type=dtype)
        if module is not None:
            return module, []
    kernel = _measured(system, engine, "context_mla_perf", **about)
    if kernel is None:
        raise BadInput(
            f"silicon measurements of {system} with {engine}: expected latent attention of {heads} heads, hidden size "
            f"{shape.hidden} and {dtype}, found none"
        )
    latent, rope, plain, values = LATENT.values()
    query = heads * (plain + rope)
    low = number(config, "q_lora_rank") if config.get("q_lora_rank") else 0
    queries = [(low + latent + rope, shape.hidden), (query, low)] if low else [(query + latent + rope, shape.hidden)]
    return kernel, [*queries, (heads * (plain + values), latent), (shape.hidden, heads * values)]


def _measured(system: str, engine: str, name: str, **wanted: object) -> Curve | None:
    """Seconds of latent attention by tokens in a table, the newest that has any; None if none has."""
    try:
        for columns in tables(system, "mla", engine, name, **wanted):
            if columns["isl"]:
                return fit_curve(columns["isl"], np.array(columns["latency"]) / 1e3).curve
    except BadInput:
        pass
    return None


class _Products:
    """Measured matrix products by output width n, inner width k and tokens m."""

    def __init__(self, system: str, engine: str, dtype: str) -> None:
        columns = next(tables(system, "gemm", engine, "gemm_perf", gemm_dtype=dtype))
        self._of = f"silicon measurements of {system} with {engine}: expected matrix products of {dtype}"
        self._points: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for n, k, tokens, milliseconds in zip(*(columns[name] for name in ("n", "k", "m", "latency")), strict=True):
            self._points.setdefault((n, k), []).append((tokens, milliseconds / 1e3))
        if not self._points:
            raise BadInput(f"{self._of}, found none")
        self.tokens = sorted(set(columns["m"]))
        self._n, self._k = (sorted({size[axis] for size in self._points}) for axis in (0, 1))

    def seconds(self, n: int, k: int, tokens_X: FloatArray) -> FloatArray:
        """(X,) seconds, linear between the measured widths; widths beyond them count as the nearest."""
        total_X = np.zeros(len(tokens_X))
        for at_n, part_n in _around(self._n, n):
            for at_k, part_k in _around(self._k, k):
                if (at_n, at_k) not in self._points:
                    raise BadInput(f"{self._of} with widths {at_n} and {at_k}, found none")
                points_X2 = np.array(self._points[at_n, at_k])
                total_X += part_n * part_k * fit_curve(points_X2[:, 0], points_X2[:, 1]).curve(tokens_X)
        return total_X


def _around(grid: Sequence[int], value: int) -> list[tuple[int, float]]:
    """The neighbours of a value in a rising grid, and their parts."""
    after = int(np.searchsorted(grid, value))
    if after == len(grid) or grid[after] == value or after == 0:
        return [(grid[min(after, len(grid) - 1)], 1.0)]
    part = (value - grid[after - 1]) / (grid[after] - grid[after - 1])
    return [(grid[after - 1], 1 - part), (grid[after], part)]
