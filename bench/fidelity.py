"""How far predictions are from what was recorded on GPUs: `python bench/fidelity.py` writes bench/results/fidelity-DATE.md.

Recordings are read from AURORA_DATA (default ../shared/data) and from the package aiconfigurator-core where it is installed.
Nothing is timed here. Errors are |predicted / recorded - 1| of recordings that the prediction was not fitted to.
"""

import datetime
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from collectives import RECORDED, WIDTH, recorded_rows
from machine import machine
from silicon_database import MODEL, collectives, deep_ep_points, deep_ep_tables, systems
from skewed_kernels import skewed_kernels

from aurora.algorithms.network.transfer_seconds import exchange_seconds, fit_transfer_curve
from aurora.errors import BadInput
from aurora.types.arrays import FloatArray

Points = dict[tuple[str, int], tuple[FloatArray, FloatArray]]  # by operation and GPUs: bytes of a buffer, seconds
SHARED = "gpu_moe_aiconfigurator"
ALL_TO_ALL = "alltoall"
OTHER_MODELS = "other models from DeepSeek-V3"


def sources() -> Iterator[tuple[str, str, Points]]:
    """Source, system and recorded collectives."""
    for path in sorted(RECORDED.glob("collectives_*.csv")):
        rows = (
            (
                row["op_name"],
                int(row["num_gpus"]),
                float(row["message_size_elems"]) * WIDTH[row["nccl_dtype"]],
                float(row["latency_ms"]) / 1e3,
            )
            for row in recorded_rows(path.name)
        )
        yield SHARED, path.stem.removeprefix("collectives_"), grouped(rows)
    try:
        names = systems()
    except BadInput as error:
        print(error)
        return
    for name in names:
        try:
            rows = ((operation, gpus, size, seconds) for operation, _, gpus, size, seconds in collectives(name))
            yield "aiconfigurator-core", name, grouped(rows)
        except BadInput as error:
            print(error)


def grouped(rows: Iterator[tuple[str, int, float, float]]) -> Points:
    """The rows by operation and GPUs; a buffer has at least one byte for each GPU."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for operation, gpus, size, seconds in rows:
        if gpus > 1 and size >= gpus:
            found.setdefault((operation, gpus), []).append((size, seconds))
    return {key: (np.array(points)[:, 0], np.array(points)[:, 1]) for key, points in sorted(found.items())}


def held_back(size_X: FloatArray, seconds_X: FloatArray, gpus: int) -> FloatArray:
    """Errors at every other size, between those that the curve was fitted to."""
    sizes = np.unique(size_X)
    kept_X = np.isin(size_X, sizes[::2])
    asked_X = ~kept_X & (size_X < sizes[::2].max())
    curve = fit_transfer_curve(gpus - 1, size_X[kept_X], seconds_X[kept_X])
    return np.asarray(abs(exchange_seconds([curve], size_X[asked_X], gpus - 1) / seconds_X[asked_X] - 1))


def recorded_twice(size_X: FloatArray, seconds_X: FloatArray) -> FloatArray:
    """Errors of one recording of a size as prediction of the other, with the other type: how well recordings repeat."""
    pairs = (seconds_X[size_X == size] for size in np.unique(size_X))
    return np.array([abs(one / other - 1) for one, other in (pair for pair in pairs if len(pair) == 2)])


def from_fewer(points: Points, gpus: int) -> FloatArray | None:
    """Errors of all-to-alls on so many GPUs, from the two next smaller numbers of GPUs; None where they were not recorded."""
    fewer = sorted(many for operation, many in points if operation == ALL_TO_ALL and many < gpus)[-2:]
    if len(fewer) < 2:
        return None
    curves = [
        fit_transfer_curve(many - 1, points[ALL_TO_ALL, many][0] * (many - 1) / many, points[ALL_TO_ALL, many][1])
        for many in fewer
    ]
    size_X, seconds_X = points[ALL_TO_ALL, gpus]
    return np.asarray(abs(exchange_seconds(curves, size_X * (gpus - 1) / gpus, gpus - 1) / seconds_X - 1))


def shown(errors: list[FloatArray]) -> str:
    error_X = np.concatenate(errors) if errors else np.zeros(0)
    return f"{np.median(error_X):.1%} | {np.quantile(error_X, 0.9):.1%} | {len(error_X)}" if len(error_X) else "- | - | 0"


def row(*cells: object) -> str:
    print(" | ".join(map(str, cells)), flush=True)
    return f"| {' | '.join(map(str, cells))} |"


def collective_rows() -> list[str]:
    """One row for each recorded system and kind of prediction, and pooled ones."""
    lines, pooled = [], {}
    for source, system, points in sources():
        halves: dict[str, list[FloatArray]] = {}
        for (operation, gpus), (size_X, seconds_X) in points.items():
            kind = "all-to-all" if operation == ALL_TO_ALL else "other collectives"
            halves.setdefault(f"{kind}: half of the sizes from the other half", []).append(held_back(size_X, seconds_X, gpus))
            halves.setdefault(f"{kind}: one recording from another of its size", []).append(recorded_twice(size_X, seconds_X))
        larger = {gpus: from_fewer(points, gpus) for operation, gpus in points if operation == ALL_TO_ALL}
        for gpus, errors in larger.items():
            if errors is not None:
                halves[f"all-to-all: {gpus} GPUs from fewer"] = [errors]
        for what, found in halves.items():
            lines.append(row(what, system, source, shown(found)))
            pooled.setdefault((what, source), []).extend(found)
    return [*lines, *(row(f"**{what}**", "all", source, shown(found)) for (what, source), found in pooled.items())]


def deepep_rows() -> list[str]:
    """Rows for each system and kind of DeepEP's kernels: sizes held back, models that the curve is not of; and pooled ones."""
    lines, pooled = [], {}
    for low_latency, table in ((False, "normal"), (True, "low latency")):
        for of, errors_of in (("half of the sizes from the other half", deepep_halves), (OTHER_MODELS, deepep_errors)):
            what = f"DeepEP, {table}: {of}"
            for system, errors in errors_of(low_latency):
                lines.append(row(what, system, "aiconfigurator-core", shown(errors)))
                pooled.setdefault(what, []).extend(errors)
    return [*lines, *(row(f"**{what}**", "all", "aiconfigurator-core", shown(found)) for what, found in pooled.items())]


def deep_ep_models(system: str, low_latency: bool) -> list[tuple[int, ...]]:
    """Hidden size, experts of a token and experts of the models that `deep_ep_points` has, in rising sequence."""
    tables = deep_ep_tables(system, low_latency, node_num=1)
    return sorted({model for columns in tables for model in zip(*(columns[name] for name in MODEL), strict=True)})


def deepep_halves(low_latency: bool) -> Iterator[tuple[str, list[FloatArray]]]:
    """By system with such kernels, errors of dispatches and combines of each model at every other number of tokens."""
    for system in systems():
        try:
            models = deep_ep_models(system, low_latency)
            points = [deep_ep_points(system, low_latency, *model) for model in models]
        except BadInput:
            continue
        yield system, [held_back(*way, each.partners + 1) for each in points for way in each.ways]


def deepep_errors(low_latency: bool) -> Iterator[tuple[str, list[FloatArray]]]:
    """By system with such kernels, errors of dispatches and combines of each model but MODEL."""
    for system in systems():
        try:
            curve = deep_ep_points(system, low_latency, *MODEL.values()).curve()
        except BadInput:
            continue
        errors = []
        for model in deep_ep_models(system, low_latency):
            if model != tuple(MODEL.values()):
                points = deep_ep_points(system, low_latency, *model)
                for bytes_X, took_X in points.ways:
                    errors.append(np.abs(exchange_seconds([curve], bytes_X, points.partners) / took_X - 1))
        yield system, errors


def kernel_rows() -> list[str]:
    """One row for each system, engine and prediction of skewed expert kernels, and pooled ones; none without the package."""
    lines, pooled = [], {}
    try:
        for what, system, error_X in skewed_kernels():
            lines.append(row(what, system, "aiconfigurator-core", shown([error_X])))
            pooled.setdefault(what, []).append(error_X)
    except BadInput as error:
        print(error)
    return [*lines, *(row(f"**{what}**", "all", "aiconfigurator-core", shown(found)) for what, found in pooled.items())]


def main() -> None:
    rows = [*collective_rows(), *(deepep_rows() if find_spec("aiconfigurator_core") else ()), *kernel_rows()]
    if not rows:
        print(f"no recordings under {RECORDED} and no package aiconfigurator-core: nothing written")
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [
        f"# Predictions against recordings, {today}",
        f"`python bench/fidelity.py`, computed on {machine()}; nothing is timed here. Errors are |predicted / recorded - 1|.",
        f"Sources: `{SHARED}` is ai-dynamo/aiconfigurator @ 095f58a (NCCL on 2, 4 and 8 GPUs of a node), Apache-2.0; "
        "`aiconfigurator-core` the tables of the installed package, the newest version of each, Apache-2.0. Both types that "
        "were recorded (half and int8) are predicted by one curve over bytes; one row says how well recordings repeat.",
        "Skewed experts are fused MoE kernels at bfloat16 whose tokens follow a power law (the most loaded expert-parallel "
        "rank), predicted from balanced ones; nothing is fitted to them. `experts and overhead` is what the simulator takes: "
        "an overhead, told by balanced points with at most one row an expert, and the sum of the experts beyond it; on several "
        "ranks experts as on the fewest measured, if shorter, and the rest of the balanced kernel as overhead by all rows,"
        " which never falls.",
        "\n".join(["| prediction | system | source | median | p90 | recordings |", "|---|---|---|---|---|---|", *rows]),
    ]
    out = Path(__file__).parent / "results" / f"fidelity-{today}.md"
    out.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
