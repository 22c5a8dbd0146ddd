"""Reads routing that serving engines recorded, without trusting the file.

Nothing is unpickled freely: `.pt` files are loaded with `weights_only`, from torch's zip format. Declared sizes are checked
before anything of that size is read.

Sources: SGLang's expert distribution recorder in `stat` mode (`logical_count` [steps, layers, experts]), vLLM's
`expert_load_stats_path` JSON lines (`eplb_load_stats`, its pull request 41141), EPLB's `weight` [layers, experts].
"""

import csv
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.errors import AuroraError, BadInput, MissingDependency
from aurora.planner.workload.model_config import Shape
from aurora.types.arrays import IntArray, counts

MOST_BYTES = 1 << 32  # largest array that a file may declare
LINE = 1 << 26  # characters of a line, at most
MALFORMED = (  # errors that readers raise for damaged files; zipfile and torch raise RuntimeError
    *(KeyError, TypeError, ValueError, IndexError, EOFError, OverflowError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)

Where = Mapping[str, str]  # selects rows of a CSV: the value that each column must have


@dataclass(frozen=True)
class RecordedRouting:
    """Routing as an engine recorded it, without source ranks.

    Attributes:
        counts_TLE: (T, L, E) int64, the tokens of every expert in each recorded step; token-level files are one step.
        experts_ULK: (U, L, K) integers, the experts that each token chose; None unless the file is token-level.
        lengths_Q: (Q,) int64, the number of tokens of each sequence; None unless the file is token-level.
        layers: the numbers of the layers; None if the file does not name them.
    """

    counts_TLE: IntArray
    experts_ULK: NDArray[Any] | None = None
    lengths_Q: IntArray | None = None
    layers: tuple[int, ...] | None = None

    @property
    def which(self) -> str:
        """The numbers of the layers, or how many there are, in words."""
        return f"{self.counts_TLE.shape[1]} layers" if self.layers is None else f"layer {', '.join(map(str, self.layers))}"


@dataclass(frozen=True)
class RoutingFormat:
    """How to read one kind of recording.

    Attributes:
        read: called with (file, the model's Shape, selection of a CSV's rows); returns a RecordedRouting.
        files: the files' suffixes or contents, for help texts.
    """

    read: Callable[[Path, Shape, Where], RecordedRouting]
    files: str


def read_dump(path: Path, form: str, shape: Shape, where: Where) -> RecordedRouting:
    """Read the routing that an engine recorded.

    Args:
        path: the file.
        form: its format, one of ROUTING_FORMATS.
        shape: the model's shape, which the file must have.
        where: the value that each column of a CSV must have for a row to count; empty: all rows.

    Raises:
        BadInput: if the file has another format, is from a model of another shape, or holds no token.
    """
    try:
        if form not in ROUTING_FORMATS:
            raise BadInput(f"`format`: expected one of {', '.join(ROUTING_FORMATS)}, found {form!r}")
        if where and form != "csv":
            raise BadInput("`where` is for the columns of csv")
        if not path.is_file():
            raise BadInput("not a regular file" if path.exists() else "no such file")
        found = ROUTING_FORMATS[form].read(path, shape, where)
        if not found.counts_TLE.any():
            raise BadInput("expected tokens, found none")
    except AuroraError as error:
        raise type(error)(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except MALFORMED as error:
        raise BadInput(f"{path}: not of {form}: {' '.join(str(error).split())[:200]}") from None
    return found


def _sglang(path: Path, shape: Shape, where: Where) -> RecordedRouting:
    """SGLang's expert distribution recorder, mode stat."""
    found = _load_pt(path)
    if not isinstance(found, dict) or "logical_count" not in found:
        raise BadInput("expected logical_count, which the recorder writes in mode stat")
    return RecordedRouting(_steps(_tensor("logical_count", found["logical_count"]), shape))


def _vllm(path: Path, shape: Shape, where: Where) -> RecordedRouting:
    """vLLM's JSON lines, or a bare array of logical experts' loads."""
    if path.suffix in (".npy", ".npz", ".pt"):
        return _eplb(path, shape, where)
    steps = []
    for number, line in _lines(path):
        try:
            record = json.loads(line)
            if record["record_type"] != "eplb_load_stats":
                continue
            load_LP, logical_LP = counts("expert_load", record["expert_load"], 2), counts("p2l_map", record["p2l_map"], 2)
        except (ValueError, KeyError, TypeError, RecursionError, BadInput) as error:
            reason = error if isinstance(error, BadInput) else f"not a record of loads: {type(error).__name__}"
            raise BadInput(f"line {number}: {reason}") from None
        if load_LP.shape != logical_LP.shape or logical_LP.max(initial=0) >= shape.experts:
            raise BadInput(
                f"line {number}: expected for each of {load_LP.shape} loads one of {shape.experts} experts, found "
                f"{logical_LP.shape} up to {logical_LP.max(initial=0)}"
            )
        rows = zip(logical_LP, load_LP, strict=True)
        steps.append([_folded(logical_P, load_P, shape.experts) for logical_P, load_P in rows])
    if not steps:
        raise BadInput("expected lines of record_type eplb_load_stats, found none")
    return RecordedRouting(_steps(np.array(steps), shape))


def _eplb(path: Path, shape: Shape, where: Where) -> RecordedRouting:
    """A bare array of loads, as EPLB's `weight`."""
    if path.suffix == ".csv":
        rows = [[int(cell) for cell in line.split(",")] for _, line in _lines(path)]
        return RecordedRouting(_steps(np.array(rows), shape))
    if path.suffix == ".npy":
        return RecordedRouting(_steps(_load_npy(path), shape))
    if path.suffix == ".pt":
        return RecordedRouting(_steps(_tensor("the file", _load_pt(path)), shape))
    arrays = _load_npz(path)
    if len(arrays) != 1:
        raise BadInput(f"expected one array, found {', '.join(arrays) or 'none'}")
    return RecordedRouting(_steps(arrays.popitem()[1], shape))


def _tokens(path: Path, shape: Shape, where: Where) -> RecordedRouting:
    """A token-level file: the experts of every token, and the lengths of sequences."""
    arrays = _load_npz(path, "experts", "seq_len")
    experts_ULK, lengths_Q = arrays["experts"], counts("seq_len", arrays["seq_len"], 1)
    if experts_ULK.ndim != 3 or experts_ULK.dtype.kind not in "iu" or 0 in experts_ULK.shape:
        raise BadInput(f"experts: expected whole numbers, tokens by layers by choices, found shape {experts_ULK.shape}")
    if experts_ULK.shape[2] != shape.top_k:
        raise BadInput(f"expected {shape.top_k} choices a token as in the config, found {experts_ULK.shape[2]}")
    if int(experts_ULK.max()) >= shape.experts or int(experts_ULK.min()) < 0:
        raise BadInput(f"expected experts from 0 to {shape.experts - 1}, found {experts_ULK.min()} to {experts_ULK.max()}")
    if int(lengths_Q.sum()) != len(experts_ULK):
        raise BadInput(f"expected sequences of {len(experts_ULK)} tokens in all, found seq_len of {lengths_Q.sum()}")
    per_layer = (np.bincount(each_UK.ravel(), minlength=shape.experts) for each_UK in experts_ULK.transpose(1, 0, 2))
    counts_TLE = _steps(np.array(list(per_layer)), shape)
    return RecordedRouting(counts_TLE, experts_ULK[:, -counts_TLE.shape[1] :], lengths_Q)


def _csv(path: Path, shape: Shape, where: Where) -> RecordedRouting:
    """A CSV of counts; the layers that it names, in rising order."""
    wanted = ("layer", "expert", "count")
    found: dict[int, IntArray] = {}
    seen: dict[str, set[str]] = {}
    with path.open(encoding="utf-8", newline="") as text:
        rows = csv.DictReader(text, strict=True)
        try:
            columns = list(rows.fieldnames or ())
            if missing := [name for name in (*wanted, *where) if name not in columns]:
                raise BadInput(f"expected columns {', '.join(missing)}, found {', '.join(columns)[:200] or 'none'}")
            for row in rows:
                if any(row[column] != value for column, value in where.items()):
                    continue
                for column in columns:
                    if column not in wanted and len(values := seen.setdefault(column, set())) < 2:
                        values.add(row[column])
                layer, expert, count = (_whole(rows.line_num, name, row[name]) for name in wanted)
                if expert >= shape.experts or layer >= shape.layers + shape.dense:
                    raise BadInput(
                        f"line {rows.line_num}: expected experts below {shape.experts} and layers below "
                        f"{shape.layers + shape.dense} as in the config, found expert {expert} of layer {layer}"
                    )
                found.setdefault(layer, np.zeros(shape.experts, dtype=np.int64))[expert] += count
        except csv.Error as error:
            raise BadInput(f"line {rows.line_num}: not CSV: {error}") from None
    if several := [column for column, values in seen.items() if len(values) > 1]:
        raise BadInput(f"expected one value of {', '.join(several)}, found several; choose by `where` {several[0]}=VALUE")
    if not found:
        raise BadInput("expected rows of counts, found none" + (f" where {dict(where)}" if where else ""))
    return RecordedRouting(np.stack([found[layer] for layer in sorted(found)])[None], layers=tuple(sorted(found)))


ROUTING_FORMATS: dict[str, RoutingFormat] = {
    "sglang-recorder": RoutingFormat(_sglang, ".pt"),
    "vllm": RoutingFormat(_vllm, ".jsonl"),
    "eplb-load": RoutingFormat(_eplb, ".npy, .csv"),
    "tokens": RoutingFormat(_tokens, ".npz of experts and seq_len"),
    "csv": RoutingFormat(_csv, "layer,expert,count"),
}


def _steps(found: ArrayLike, shape: Shape) -> IntArray:
    """(T, L, E) int64 from an array (layers, experts) or (steps, layers, experts), without dense layers and empty steps."""
    array = np.asarray(found)
    counts_TLE = counts("loads", array[None] if array.ndim == 2 else array, 3)
    _, layers, experts = counts_TLE.shape
    if experts != shape.experts or layers not in (shape.layers, shape.layers + shape.dense):
        raise BadInput(
            f"expected {shape.layers} MoE layers of {shape.experts} experts as in the config, found {layers} of {experts}"
        )
    return counts_TLE[counts_TLE.any(axis=(1, 2)), layers - shape.layers :]


def _folded(logical_P: IntArray, load_P: IntArray, experts: int) -> IntArray:
    """(E,) int64: the loads of physical experts, summed by logical expert."""
    load_E = np.zeros(experts, dtype=np.int64)
    np.add.at(load_E, logical_P, load_P)
    return load_E


def _whole(line: int, name: str, cell: str | None) -> int:
    """A cell as a whole number of zero or more, or BadInput."""
    if cell is None or not cell.strip().isascii() or not cell.strip().isdigit() or len(cell) > 15:
        raise BadInput(f"line {line}: expected {name} as a whole number of zero or more, found {cell!r}")
    return int(cell)


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """Yield the numbered lines of a text file that are not blank."""
    with path.open(encoding="utf-8") as text:
        number = 0
        while line := text.readline(LINE):
            number += 1
            if len(line) == LINE:
                raise BadInput(f"line {number}: expected at most {LINE} characters in a line")
            if line.strip():
                yield number, line


def _check_size(what: str, declared: int) -> None:
    """Raise BadInput if a declared size is above MOST_BYTES."""
    if declared > MOST_BYTES:
        raise BadInput(f"{what}: declares {declared} bytes, expected at most {MOST_BYTES}")


def _load_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file, as a memory map."""
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise BadInput("expected one array")
    _check_size("the array", found.nbytes)
    return found


def _load_npz(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file with these names, or all."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := [name for name in names if name not in members]:
            raise BadInput(f"expected arrays {', '.join(missing)}, found {', '.join(members)[:200] or 'none'}")
        for name in names or members:
            _check_size(name, members[name].file_size)
            with archive.open(members[name]) as file:
                version = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                array_shape, _, dtype = header(file)
            declared = int(np.prod(array_shape, dtype=object)) * dtype.itemsize
            _check_size(name, declared)
            if declared > members[name].file_size:
                raise BadInput(f"{name}: declares {declared} bytes, found {members[name].file_size} in the archive")
            with archive.open(members[name]) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays


def _load_pt(path: Path) -> Any:
    """The contents of a .pt file, loaded with `weights_only`."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(f'torch is needed for .pt: pip install "aurora-moe[run]" ({error})') from None
    if not zipfile.is_zipfile(path):
        raise BadInput("expected the zip format of torch.save, or the file is cut short")
    with zipfile.ZipFile(path) as archive:
        _check_size("the archive", sum(info.file_size for info in archive.infolist()))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and its unpickler raise many kinds
        reason = " ".join(str(error).split())
        if "weights_only" in reason or "Weights only" in reason:
            raise BadInput("holds more than tensors, numbers and text, which could run code: not loaded") from None
        raise BadInput(f"not a file of torch.save: {reason[:200]}") from None


def _tensor(what: str, found: Any) -> NDArray[Any]:
    """A dense tensor as an array, or BadInput."""
    import torch

    if not isinstance(found, torch.Tensor) or found.is_sparse:
        raise BadInput(f"{what}: expected a tensor, found {type(found).__name__}")
    _check_size(what, found.numel() * 8)
    return np.asarray(found.detach().numpy())
