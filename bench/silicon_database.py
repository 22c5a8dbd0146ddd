"""Silicon measurements of the optional package aiconfigurator-core: its Parquet tables, and link curves of exchanges by them.

Its successor aisimulate has the same tables, newer ones among them, and is read first where both are installed.

Systems, engines and columns are named as there. Nothing of the package is imported or run.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from aurora.algorithms.network.transfer_seconds import exchange_seconds, fit_transfer_curve
from aurora.errors import BadInput, check_one_of
from aurora.types import TransferCurve
from aurora.types.arrays import FloatArray

PACKAGES = ("aisimulate_core", "aiconfigurator_core")  # aisimulate before 0.13 has the second name
WIDTH = {"half": 2, "int8": 1}  # bytes of NCCL's types
COLLECTIVES = ("all_gather", "all_reduce", "alltoall", "reduce_scatter")
ENGINES = ("sglang", "trtllm", "vllm")  # whose kernels were measured
INSTALL = "pip install aiconfigurator-core pyarrow"


def systems_folder() -> Path:
    """Returns the folder of the installed package that holds its systems.

    Raises:
        BadInput: if the package is not installed.
    """
    for found in filter(None, map(find_spec, PACKAGES)):
        if found.origin is not None and (folder := Path(found.origin).parent / "systems").is_dir():
            return folder
    raise BadInput(f"silicon measurements: expected the package aiconfigurator-core ({INSTALL}) or aisimulate, found neither")


def package() -> str:
    """Returns the name of the package that is read."""
    return systems_folder().parent.name.replace("_", "-")


def systems() -> list[str]:
    """Returns the names of the systems that the installed package has measurements of."""
    folder = systems_folder()
    return sorted(file.stem for file in folder.glob("*.yaml") if (folder / "data" / file.stem).is_dir())


def system_specs(system: str) -> Mapping[str, Any]:
    """Returns a system's datasheet: its tables `gpu` and `node`, in bytes, bytes per second and operations per second.

    Raises:
        BadInput: if there is no such system.
    """
    check_one_of("system", system, systems())
    specs: Mapping[str, Any] = yaml.safe_load((systems_folder() / f"{system}.yaml").read_text())
    return specs


def tables(system: str, operation: str, source: str, name: str, **wanted: object) -> Iterator[dict[str, list[Any]]]:
    """Yields the columns of each version of a table, newest first.

    Args:
        system: as in `systems`.
        operation, source: the table's folders, such as "moe" and "vllm".
        name: its file without suffix.
        wanted: by column, the value of the rows to read; none: all. A column that a table lacks is zero in all its rows.

    Raises:
        BadInput: if there is none, one cannot be read, or pyarrow is not installed.
    """
    system_specs(system)
    folder = systems_folder() / "data" / system / operation / source
    versions = sorted(folder.glob(f"*/{name}.parquet"), key=lambda file: _version(file.parent.name), reverse=True)
    if not versions:
        raise BadInput(f"silicon measurements of {system}: expected {operation}/{source}/*/{name}.parquet, found none")
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise BadInput(f"silicon measurements: expected the package pyarrow ({INSTALL}), found none") from None
    for file in versions:
        try:
            there = set(parquet.read_schema(file).names)
            filters = [(key, "=", value) for key, value in wanted.items() if key in there]
            found = parquet.read_table(file, filters=filters or None).to_pydict()
        except (ArrowException, OSError) as error:
            raise BadInput(f"{file}: expected a Parquet table, found {str(error).splitlines()[0]}") from None
        none = any(value != 0 for key, value in wanted.items() if key not in there)
        yield _Columns(str(file), {key: [] if none else values for key, values in found.items()})


def newest(system: str, operation: str, source: str, name: str, **wanted: object) -> dict[str, list[Any]]:
    """Returns the columns of the newest version of a table that has rows as wanted, or of the oldest, without rows.

    Args:
        system, operation, source, name, wanted: as in `tables`; some versions are of a few sizes only.

    Raises:
        BadInput: as `tables`.
    """
    found: dict[str, list[Any]] = {}
    for found in tables(system, operation, source, name, **wanted):
        if any(found.values()):
            break
    return found


class _Columns(dict[str, list[Any]]):
    """The columns of a table; one that it lacks is named."""

    def __init__(self, file: str, columns: Mapping[str, list[Any]]) -> None:
        super().__init__(columns)
        self._file = file

    def __missing__(self, name: str) -> list[Any]:
        raise BadInput(f"{self._file}: expected a column {name}, found {', '.join(self)}")


def _version(text: str) -> tuple[tuple[bool, int | str], ...]:
    """Returns the key that versions are sorted by: release candidates and posts come as their text does."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in re.findall(r"\d+|[a-z]+", text))


def collectives(system: str, *operations: str) -> Iterator[tuple[str, str, int, float, float]]:
    """Yields NCCL's collectives on one system: operation, type, GPUs, bytes of a GPU's whole buffer, seconds.

    Args:
        system: as in `systems`.
        operations: their names, each of the newest version that has it; none: COLLECTIVES.
    """
    for operation in operations or COLLECTIVES:
        found = newest(system, "comm", "nccl", "nccl_perf", op_name=operation)
        columns = (found[name] for name in ("nccl_dtype", "num_gpus", "message_size", "latency"))
        for dtype, gpus, elements, milliseconds in zip(*columns, strict=True):
            if dtype in WIDTH and milliseconds > 0:
                yield operation, dtype, int(gpus), float(elements) * WIDTH[dtype], float(milliseconds) / 1e3


def all_to_all_points(system: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns, by partners, the bytes that a port sends in NCCL's all-to-alls of a system, and their seconds.

    Args:
        system: as in `systems`.

    Raises:
        BadInput: if none were measured.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for _, _, gpus, buffer, seconds in collectives(system, "alltoall"):
        if gpus > 1:
            points.setdefault(gpus - 1, []).append((buffer * (gpus - 1) / gpus, seconds))
    if not points:
        raise BadInput(f"silicon measurements of {system}: expected all-to-alls of NCCL, found none")
    return {partners: (np.array(found)[:, 0], np.array(found)[:, 1]) for partners, found in sorted(points.items())}


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
    found = next((columns for columns in deep_ep_tables(system, low_latency, **wanted) if columns["num_token"]), None)
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


def deep_ep_tables(system: str, low_latency: bool, **wanted: object) -> Iterator[dict[str, list[Any]]]:
    """Returns the tables of one of DeepEP's kinds of kernels, newest first; the arguments are those of `tables`."""
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
