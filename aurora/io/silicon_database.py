"""Silicon measurements of the optional package aiconfigurator-core: its Parquet tables, read where it is installed.

Systems, engines and columns are named as there. Nothing of the package is imported or run.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from aurora.errors import BadInput

PACKAGE = "aiconfigurator_core"
WIDTH = {"half": 2, "int8": 1}  # bytes of NCCL's types
ENGINES = ("sglang", "trtllm", "vllm")  # whose kernels were measured
INSTALL = "pip install 'aurora-moe[silicon]'"


def systems_folder() -> Path:
    """Returns the folder of the installed package that holds its systems.

    Raises:
        BadInput: if the package is not installed.
    """
    found = find_spec(PACKAGE)
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "systems"
    if folder is None or not folder.is_dir():
        raise BadInput(f"silicon measurements: expected the package aiconfigurator-core ({INSTALL}), found none")
    return folder


def systems() -> list[str]:
    """Returns the names of the systems that the installed package has measurements of."""
    folder = systems_folder()
    return sorted(file.stem for file in folder.glob("*.yaml") if (folder / "data" / file.stem).is_dir())


def check_engine(engine: str) -> None:
    """Raises BadInput unless an engine is one of ENGINES.

    Args:
        engine: its name.
    """
    if engine not in ENGINES:
        raise BadInput(f"`engine`: expected one of {', '.join(ENGINES)}, found {engine!r}")


def system_specs(system: str) -> Mapping[str, Any]:
    """Returns a system's datasheet: its tables `gpu` and `node`, in bytes, bytes per second and operations per second.

    Raises:
        BadInput: if there is no such system.
    """
    if system not in (names := systems()):
        raise BadInput(f"`system`: expected one of {', '.join(names)}, found {system!r}")
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


class _Columns(dict[str, list[Any]]):
    """The columns of a table; one that it lacks is named."""

    def __init__(self, file: str, columns: Mapping[str, list[Any]]) -> None:
        super().__init__(columns)
        self._file = file

    def __missing__(self, name: str) -> list[Any]:
        raise BadInput(f"{self._file}: expected a column {name}, found {', '.join(self)}")


def _version(text: str) -> tuple[tuple[bool, int | str], ...]:
    """What versions are sorted by: release candidates and posts come as their text does."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in re.findall(r"\d+|[a-z]+", text))


def collectives(system: str) -> Iterator[tuple[str, str, int, float, float]]:
    """Yields NCCL's collectives on one system: operation, type, GPUs, bytes of a GPU's whole buffer, seconds.

    Args:
        system: as in `systems`.
    """
    found = next(tables(system, "comm", "nccl", "nccl_perf"))
    columns = (found[name] for name in ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"))
    for operation, dtype, gpus, elements, milliseconds in zip(*columns, strict=True):
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
    for operation, _, gpus, buffer, seconds in collectives(system):
        if operation == "alltoall" and gpus > 1:
            points.setdefault(gpus - 1, []).append((buffer * (gpus - 1) / gpus, seconds))
    if not points:
        raise BadInput(f"silicon measurements of {system}: expected all-to-alls of NCCL, found none")
    return {partners: (np.array(found)[:, 0], np.array(found)[:, 1]) for partners, found in sorted(points.items())}
