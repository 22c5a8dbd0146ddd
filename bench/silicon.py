"""GPU systems as they were measured: a cluster of one node, and a model's compute curves, for GPUs that are not here.

`python bench/silicon.py h200_sxm -o h200.toml` writes the cluster; with `--shape config.json --curves curves.npz` the
curves too, which `aurora measure compute --add curves.npz -o PROFILE` adds to a profile.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from kernel_curves import curves_on_ranks
from silicon_database import ENGINES, EXCHANGES, newest, package, system_specs, tables

from aurora.algorithms.workload.attention import shared_width
from aurora.algorithms.workload.curve_fit import BalancedPoints, fit_curve
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.model_structure import flat_config, number
from aurora.errors import AuroraError, BadInput, check_one_of
from aurora.io import load_model_config, save, save_cluster
from aurora.types import OVERHEAD, Cluster, ComputeCurves, Curve, Gpu
from aurora.types.arrays import FloatArray


def system_cluster(system: str, gpus: int | None = None, exchange: str = "nccl") -> Cluster:
    """Returns GPUs of one node of a system, with link curves of exchanges as measured there.

    Ports have the datasheet's rate, or that of the fastest all-to-all if it is faster. Orders are made for the seconds of the
    smallest.

    Args:
        system: its name, as in `silicon_database.systems`.
        gpus: how many GPUs; None: all of a node.
        exchange: what performs all-to-alls, a name of `silicon_database.EXCHANGES`.

    Raises:
        BadInput: if nothing was measured there, or a node has fewer GPUs.
    """
    check_one_of("exchange", exchange, EXCHANGES)
    specs = system_specs(system)
    most = int(specs["node"]["num_gpus_per_node"])
    gpus = most if gpus is None else gpus
    if not 2 <= gpus <= most:
        raise BadInput(f"`gpus`: expected from 2 to {most}, the GPUs of a node of {system}, found {gpus}")
    curves = EXCHANGES[exchange](system)
    fastest_Bps = max(float((curve.bytes_X / curve.seconds_X).max()) for curve in curves)
    rate_Bps = max(float(specs["node"]["intra_node_bw"]), fastest_Bps)
    kind, memory = device(system), int(specs["gpu"]["mem_capacity"])
    startup_s = float(curves[0].seconds_X[0])
    members = (Gpu(f"{system}-{rank}", kind, 0, rate_Bps, rate_Bps, memory, startup_s=startup_s) for rank in range(gpus))
    return Cluster(system, tuple(members), link_curves=curves)


def device(system: str) -> str:
    """Returns the name of a system's GPUs, as it was recorded with their all-to-alls."""
    return str(newest(system, "comm", "nccl", "nccl_perf", op_name="alltoall")["device"][0])


def weight_format(config: Mapping[str, Any]) -> str:
    """Returns the number format of experts' weights, by aiconfigurator's names.

    "bfloat16" without `quantization_config`; "fp8", or "fp8_block" with scales per block; "w4a16_mxfp4"; for other methods
    their own name.

    Args:
        config: the content of a transformers config.json.
    """
    quantised = flat_config(config).get("quantization_config") or config.get("quantization_config")
    if not quantised:
        return "bfloat16"
    method = str(quantised.get("quant_method"))
    block = "_block" if quantised.get("weight_block_size") else ""
    return {"fp8": f"fp8{block}", "mxfp4": "w4a16_mxfp4"}.get(method, method)


def system_curves(config: Mapping[str, Any], system: str, engine: str, ranks: int) -> ComputeCurves:
    """Returns the compute curves of a model on a system, as an engine's kernels were measured there.

    `expert` and `overhead` are of the fused MoE kernel with balanced tokens, on the largest number of expert-parallel ranks
    that was measured and is at most `ranks`. `gate` is attention over one sequence, with its projections and the router.
    `aggregate` is the memory's rate of the datasheet. Weights have the type that the config says (`weight_format`).

    Args:
        config: the content of a transformers config.json.
        system: as in `system_cluster`.
        engine: one of `silicon_database.ENGINES`.
        ranks: expert-parallel ranks.

    Raises:
        BadInput: if the model's experts or attention were not measured there.
    """
    check_one_of("engine", engine, ENGINES)
    shape, specs = Shape.of(config), system_specs(system)
    dtype = weight_format(config)
    expert, overhead, kernel = _expert(shape, system, engine, ranks, dtype)
    row_bytes, memory_Bps = 2 * shape.hidden, float(specs["gpu"]["mem_bw"])
    at, least_s = expert.tokens_X, float(specs["gpu"]["mem_empirical_constant_latency"])
    phases = {
        "gate": gate_curve(config, system, engine),
        "expert": expert,
        OVERHEAD: overhead,
        "aggregate": Curve(at, least_s + at * (shape.top_k + 1) * row_bytes / memory_Bps),
    }
    said = f"{package()}, {system}, {engine}, {dtype}: {kernel} for balanced tokens; aggregate by the memory's rate"
    kind = device(system)
    return ComputeCurves(
        shape.model, "", shape.top_k, row_bytes, shape.expert_bytes, {kind: phases}, {f"curves of {kind}": said}
    )


def _expert(shape: Shape, system: str, engine: str, ranks: int, dtype: str) -> tuple[Curve, Curve, str]:
    """Seconds of one expert and of the overhead, as `curves_on_ranks`, and the kernel's name, of the newest version."""
    sizes = {"hidden_size": shape.hidden, "inter_size": shape.inner, "topk": shape.top_k, "num_experts": shape.experts}
    known, wanted = set(), tuple(sizes.values())
    for columns in tables(system, "moe", engine, "moe_perf", moe_dtype=dtype, distribution="balanced", moe_tp_size=1):
        of_X = list(zip(*(columns[name] for name in sizes), strict=True))
        known |= set(of_X)
        ep_X = columns["moe_ep_size"]
        found = [index for index, each in enumerate(of_X) if each == wanted and ep_X[index] <= ranks]
        if found:
            ep = max(ep_X[index] for index in found)
            own = [index for index in found if ep_X[index] == ep]
            kernel = columns["kernel_source"][own[0]]
            same = [index for index in found if columns["kernel_source"][index] == kernel]
            points, *fewer = (
                _points(shape, columns, [index for index in same if ep_X[index] == each], each)
                for each in dict.fromkeys((ep, min(ep_X[index] for index in same)))
            )
            return *curves_on_ranks(points, *fewer), f"{kernel} on {ep} expert-parallel ranks"
    what = f"silicon measurements of {system} with {engine}"
    if not known:
        raise BadInput(f"{what}: expected grouped kernels of {dtype} for balanced tokens, found none")
    raise BadInput(
        f"{what}: expected a model with {dtype} experts whose hidden size, expert width, top-k and experts are one of "
        f"{'; '.join(' x '.join(map(str, each)) for each in sorted(known))}, found {' x '.join(map(str, wanted))}"
    )


def _points(shape: Shape, columns: Mapping[str, Sequence[Any]], indices: Sequence[int], ranks: int) -> BalancedPoints:
    """Some rows of a table of grouped kernels, on so many expert-parallel ranks."""
    tokens_X, took_ms_X = (
        np.array([columns[name][index] for index in indices], dtype=np.float64) for name in ("num_tokens", "latency")
    )
    return BalancedPoints(tokens_X * shape.top_k, took_ms_X / 1e3, shape.experts, shape.experts // ranks)


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
            columns = newest(system, "attention", engine, "context_attention_perf", window_size=window, **sizes, **types)
            if not columns["isl"]:
                about = f"silicon measurements of {system} with {engine}: expected attention of {self.heads} heads, "
                within = f" in a window of {window}" if window else ""
                raise BadInput(f"{about}{self.kv_heads} for keys and values, of width {self.width}{within}, found none")
            curves.append((part, fit_curve(columns["isl"], np.array(columns["latency"]) / 1e3)))
        tokens_X = np.unique(np.concatenate([curve.tokens_X for _, curve in curves]))
        return Curve(tokens_X, np.sum([part * curve(tokens_X) for part, curve in curves], axis=0))


def gate_curve(config: Mapping[str, Any], system: str, engine: str) -> Curve:
    """Returns seconds between two MoE layers by tokens: attention over one sequence, its projections, router, shared experts.

    Products of matrices are interpolated between measured widths. Latent attention (MLA) is measured with its projections
    where the model has DeepSeek-V3's widths, else without them.

    Args:
        config: the content of a transformers config.json.
        system: as in `silicon_database.systems`.
        engine: one of `silicon_database.ENGINES`.

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
    if shared := shared_width(config, shape):
        sizes = [*sizes, (2 * shared, shape.hidden), (shape.hidden, shared)]
    products = router if dtype == DTYPE or not sizes else _Products(system, engine, dtype)
    seconds_X = sum((products.seconds(*size, tokens_X) for size in sizes), start=seconds_X)
    return fit_curve(tokens_X, seconds_X + attention(tokens_X))


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
                return fit_curve(columns["isl"], np.array(columns["latency"]) / 1e3)
    except BadInput:
        pass
    return None


class _Products:
    """Measured matrix products by output width n, inner width k and tokens m."""

    def __init__(self, system: str, engine: str, dtype: str) -> None:
        columns = newest(system, "gemm", engine, "gemm_perf", gemm_dtype=dtype)
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
                total_X += part_n * part_k * fit_curve(points_X2[:, 0], points_X2[:, 1])(tokens_X)
        return total_X


def _around(grid: Sequence[int], value: int) -> list[tuple[int, float]]:
    """The neighbours of a value in a rising grid, and their parts."""
    after = int(np.searchsorted(grid, value))
    if after == len(grid) or grid[after] == value or after == 0:
        return [(grid[min(after, len(grid) - 1)], 1.0)]
    part = (value - grid[after - 1]) / (grid[after] - grid[after - 1])
    return [(grid[after - 1], 1 - part), (grid[after], part)]


def main() -> None:
    """Writes the cluster of a system, and with a shape the model's compute curves there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", help="such as h200_sxm; an unknown name lists all")
    parser.add_argument("--gpus", type=int, help="of one node; default: all of it")
    parser.add_argument("--exchange", default="nccl", help=f"what performs all-to-alls: {', '.join(EXCHANGES)}")
    parser.add_argument("--shape", help="a config.json, its folder or a shipped model, whose compute curves to write")
    parser.add_argument("--engine", default="vllm", help=f"whose kernels were measured: {', '.join(ENGINES)}")
    parser.add_argument("--curves", type=Path, default=Path("curves.npz"), help="with --shape: the curves to write")
    parser.add_argument("-o", "--output", type=Path, default=Path("cluster.toml"), help="the cluster to write")
    args = parser.parse_args()
    try:
        cluster = system_cluster(args.system, args.gpus, args.exchange)
        about = f"Link curves: {args.exchange} on {args.system}, from {package()} (Apache-2.0); other figures: its datasheet."
        save_cluster(cluster, args.output, [about])
        print(f"wrote {args.output}")
        if args.shape:
            save(system_curves(load_model_config(args.shape), args.system, args.engine, len(cluster)), args.curves)
            print(f"wrote {args.curves}")
    except AuroraError as error:
        sys.exit(f"silicon: {error}")


if __name__ == "__main__":
    main()
