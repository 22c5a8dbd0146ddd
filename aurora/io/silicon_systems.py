"""A system of the silicon measurements as a Cluster, and as compute curves of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.silicon_attention import gate_curve
from aurora.io.silicon_database import check_engine, system_specs, tables
from aurora.io.silicon_exchanges import EXCHANGES
from aurora.planner.workload.grouped_kernels import BalancedPoints, grouped_curves
from aurora.planner.workload.model_config import Shape, weight_format
from aurora.types import OVERHEAD, Cluster, ComputeCurves, Curve, Gpu


def system_cluster(system: str, gpus: int | None = None, exchange: str = "nccl") -> Cluster:
    """Returns GPUs of one node of a system, with link curves of exchanges as measured there.

    Ports have the datasheet's rate, or that of the fastest all-to-all if it is faster. Orders are made for the seconds of the
    smallest.

    Args:
        system: its name, as in `aurora.io.silicon_database.systems`.
        gpus: how many GPUs; None: all of a node.
        exchange: what performs all-to-alls, a name of `aurora.io.silicon_exchanges.EXCHANGES`.

    Raises:
        BadInput: if nothing was measured there, or a node has fewer GPUs.
    """
    if exchange not in EXCHANGES:
        raise BadInput(f"`exchange`: expected one of {', '.join(EXCHANGES)}, found {exchange!r}")
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
    return str(next(tables(system, "comm", "nccl", "nccl_perf"))["device"][0])


def system_curves(config: Mapping[str, Any], system: str, engine: str, ranks: int) -> ComputeCurves:
    """Returns the compute curves of a model on a system, as an engine's kernels were measured there.

    `expert` and `overhead` are of the fused MoE kernel with balanced tokens, on the largest number of expert-parallel ranks
    that was measured and is at most `ranks`. `gate` is attention over one sequence, with its projections and the router.
    `aggregate` is the memory's rate of the datasheet. Weights have the type that the config says (`weight_format`).

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
    said = f"aiconfigurator-core, {system}, {engine}, {dtype}: {kernel} for balanced tokens; aggregate by the memory's rate"
    kind = device(system)
    return ComputeCurves(
        shape.model, "", shape.top_k, row_bytes, shape.expert_bytes, {kind: phases}, {f"curves of {kind}": said}
    )


def _expert(shape: Shape, system: str, engine: str, ranks: int, dtype: str) -> tuple[Curve, Curve, str]:
    """Seconds of one expert and of the overhead, as `grouped_curves`, and the kernel's name, of the newest version."""
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
            return *grouped_curves(points, *fewer), f"{kernel} on {ep} expert-parallel ranks"
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
