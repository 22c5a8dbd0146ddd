"""A system of the silicon measurements as a Cluster, and as compute curves of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.silicon_database import check_engine, system_specs, tables
from aurora.io.silicon_exchanges import EXCHANGES
from aurora.planner.workload.curve_fit import fit_curve
from aurora.planner.workload.grouped_kernels import BalancedPoints, grouped_curves
from aurora.planner.workload.model_config import Shape
from aurora.types import OVERHEAD, Cluster, ComputeCurves, Curve, Gpu

DTYPE = "bfloat16"


def system_cluster(system: str, gpus: int, exchange: str = "nccl") -> Cluster:
    """Returns GPUs of one node of a system, with link curves of exchanges as measured there.

    Ports have the datasheet's rate, or that of the fastest all-to-all if it is faster. Orders are made for the seconds of the
    smallest.

    Args:
        system: its name, as in `aurora.io.silicon_database.systems`.
        gpus: how many GPUs.
        exchange: what performs all-to-alls, a name of `aurora.io.silicon_exchanges.EXCHANGES`.

    Raises:
        BadInput: if nothing was measured there, or a node has fewer GPUs.
    """
    if exchange not in EXCHANGES:
        raise BadInput(f"`exchange`: expected one of {', '.join(EXCHANGES)}, found {exchange!r}")
    specs = system_specs(system)
    most = int(specs["node"]["num_gpus_per_node"])
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
    return str(next(tables(system, "comm", "nccl", "nccl_perf"))["device"][0])


def system_curves(config: Mapping[str, Any], system: str, engine: str, ranks: int) -> ComputeCurves:
    """Returns the compute curves of a model at bfloat16 on a system, as an engine's kernels were measured there.

    `expert` and `overhead` are of the fused MoE kernel with balanced tokens, on the largest number of expert-parallel ranks
    that was measured and is at most `ranks`. `gate` is the sum of the attention's two projections and the router, interpolated
    between measured matrix sizes, and of attention over one sequence. `aggregate` is the memory's rate of the datasheet.

    Args:
        config: the content of a transformers config.json.
        system: as in `system_cluster`.
        engine: one of `aurora.io.silicon_database.ENGINES`.
        ranks: expert-parallel ranks.

    Raises:
        BadInput: if the model's experts or attention were not measured there.
    """
    check_engine(engine)
    shape, specs = Shape.of(config), system_specs(system)
    expert, overhead, kernel = _expert(shape, system, engine, ranks)
    row_bytes, memory_Bps = 2 * shape.hidden, float(specs["gpu"]["mem_bw"])
    at, least_s = expert.tokens_X, float(specs["gpu"]["mem_empirical_constant_latency"])
    phases = {
        "gate": _gate(config, shape, system, engine),
        "expert": expert,
        OVERHEAD: overhead,
        "aggregate": Curve(at, least_s + at * (shape.top_k + 1) * row_bytes / memory_Bps),
    }
    said = f"aiconfigurator-core, {system}, {engine}, {DTYPE}: {kernel} for balanced tokens; aggregate by the memory's rate"
    kind = device(system)
    return ComputeCurves(
        shape.model, "", shape.top_k, row_bytes, 6 * shape.hidden * shape.inner, {kind: phases}, {f"curves of {kind}": said}
    )


def _expert(shape: Shape, system: str, engine: str, ranks: int) -> tuple[Curve, Curve, str]:
    """Seconds of one expert and of the overhead, as `grouped_curves`, and the kernel's name, of the newest version."""
    sizes = {"hidden_size": shape.hidden, "inter_size": shape.inner, "topk": shape.top_k, "num_experts": shape.experts}
    known, wanted = set(), tuple(sizes.values())
    for columns in tables(system, "moe", engine, "moe_perf", moe_dtype=DTYPE, distribution="balanced", moe_tp_size=1):
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
            return *grouped_curves(points, *fewer), f"{kernel} on {ep} expert-parallel ranks"
    raise BadInput(
        f"silicon measurements of {system} with {engine}: expected a model whose hidden size, expert width, top-k and experts "
        f"are one of {'; '.join(' x '.join(map(str, each)) for each in sorted(known))}, found {' x '.join(map(str, wanted))}"
    )


def _points(shape: Shape, columns: Mapping[str, Sequence[Any]], indices: Sequence[int], ranks: int) -> BalancedPoints:
    """Some rows of a table of grouped kernels, on so many expert-parallel ranks."""
    tokens_X, took_ms_X = (
        np.array([columns[name][index] for index in indices], dtype=np.float64) for name in ("num_tokens", "latency")
    )
    return BalancedPoints(tokens_X * shape.top_k, took_ms_X / 1e3, shape.experts, shape.experts // ranks)


def _gate(config: Mapping[str, Any], shape: Shape, system: str, engine: str) -> Curve:
    """Seconds between two MoE layers by tokens: projections, attention over one sequence, router."""
    heads = int(config.get("num_attention_heads", 0))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or (shape.hidden // heads if heads else 0))
    if not heads or "kv_lora_rank" in config:
        raise BadInput(
            f"silicon measurements of {system}: expected attention with num_attention_heads and num_key_value_heads, found "
            f"{'kv_lora_rank' if heads else 'neither'} in the config"
        )
    products = _Products(next(tables(system, "gemm", engine, "gemm_perf", gemm_dtype=DTYPE)))
    sizes = ((heads + 2 * kv_heads) * width, shape.hidden), (shape.hidden, heads * width), (shape.experts, shape.hidden)
    sequence = _attention(system, engine, heads, kv_heads, width)
    tokens_X = np.array(products.tokens)
    seconds_X = sum((products.seconds(*size, tokens_X) for size in sizes), start=np.zeros(len(tokens_X)))
    return fit_curve(tokens_X, seconds_X + sequence(tokens_X)).curve


class _Products:
    """Measured matrix products by output width n, inner width k and tokens m."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.tokens = sorted(set(columns["m"]))
        self._points: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for n, k, tokens, milliseconds in zip(*(columns[name] for name in ("n", "k", "m", "latency")), strict=True):
            self._points.setdefault((n, k), []).append((tokens, milliseconds / 1e3))
        self._n, self._k = (sorted({size[axis] for size in self._points}) for axis in (0, 1))

    def seconds(self, n: int, k: int, tokens_X: np.ndarray) -> np.ndarray:
        """(X,) seconds, linear between the measured widths; widths beyond them count as the nearest."""
        total_X = np.zeros(len(tokens_X))
        for at_n, part_n in _around(self._n, n):
            for at_k, part_k in _around(self._k, k):
                if (at_n, at_k) not in self._points:
                    raise BadInput(f"silicon measurements: expected a matrix product of widths {at_n} and {at_k}, found none")
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


def _attention(system: str, engine: str, heads: int, kv_heads: int, width: int) -> Curve:
    """Seconds of attention over one sequence by its tokens."""
    sizes = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width, "batch_size": 1, "window_size": 0}
    types = {"attn_dtype": DTYPE, "kv_cache_dtype": DTYPE, "step": 0}
    columns = next(tables(system, "attention", engine, "context_attention_perf", **sizes, **types))
    if not columns["isl"]:
        raise BadInput(
            f"silicon measurements of {system} with {engine}: expected attention of {heads} heads, {kv_heads} for keys and "
            f"values, of width {width}, found none"
        )
    return fit_curve(columns["isl"], np.array(columns["latency"]) / 1e3).curve
