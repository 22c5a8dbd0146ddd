"""Traffic and timings that the vLLM plugin records, one file per rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.files import Arrays, load_npz, make_folder, save_npz
from aurora.io.schema import shared, table_of
from aurora.types.arrays import FloatArray, IntArray, check_arrays, layer_numbers

FORMAT = "aurora record"
TIMED = ("gate", "dispatch", "expert", "combine", "aggregate")


@dataclass(frozen=True)
class EngineRecord:
    """The traffic and timings that one expert-parallel rank recorded.

    Attributes:
        model: the model's name.
        fingerprint: hash of the model's router weights.
        engine: the engine and its version.
        kind: the kind of GPU.
        date: date of the recording.
        rank: number of this rank.
        ranks: number of ranks of the engine.
        top_k: experts per token.
        dispatch_bytes: bytes of a token on its way to an expert.
        combine_bytes: bytes of a token's result on its way back.
        expert_bytes: bytes of one expert's weights.
        other_bytes: bytes of all other weights.
        dense_layers: numbers of the decoder layers without experts.
        width: number of forward passes of a window, a power of two.
        window_T: (T,) int64, ascending numbers of the recorded windows; window n has forward passes width * n up to, but not
            including, width * (n + 1).
        tokens_TLE: (T, L, E) int64, (token, expert) pairs of the tokens of this rank's requests.
        seconds_LP: (L, P) float64, seconds of each layer and phase in TIMED, summed over the timed passes.
        passes_L: (L,) int64, how many passes were timed.
        gram_P33, target_P3: (P, 3, 3) and (P, 3) float64, for each of PHASES the normal equations of a least squares fit of
            seconds = a + b x + c y to the timed passes. x is the number of active experts (1 in other phases), y the tokens.
            Sums over ranks give the fit of all ranks.
        most_P: (P,) int64, for each of PHASES the largest number of tokens of one pass.
    """

    model: str
    fingerprint: str
    engine: str
    kind: str
    date: str
    rank: int
    ranks: int
    top_k: int
    dispatch_bytes: int
    combine_bytes: int
    expert_bytes: int
    other_bytes: int
    dense_layers: tuple[int, ...]
    width: int
    window_T: IntArray
    tokens_TLE: IntArray
    seconds_LP: FloatArray
    passes_L: IntArray
    gram_P33: FloatArray
    target_P3: FloatArray
    most_P: IntArray

    def __post_init__(self) -> None:
        what = f"record of rank {self.rank}"
        object.__setattr__(self, "dense_layers", layer_numbers(f"{what}, dense_layers", self.dense_layers))
        check_arrays(self, f"{what}, ", apart="P")
        if (np.diff(self.window_T) <= 0).any():
            raise BadInput(f"{what}: expected ascending windows, found {self.window_T.tolist()}")
        if not 0 <= self.rank < self.ranks or self.width < 1 or self.width & (self.width - 1):
            raise BadInput(f"{what}: expected a rank below {self.ranks} and a width that is a power of two, found {self.width}")


ARRAYS = ("window_T", "tokens_TLE", "seconds_LP", "passes_L", "gram_P33", "target_P3", "most_P")
RecordHeader: Any = table_of(EngineRecord, leave=ARRAYS)


def save_record(record: EngineRecord, folder: Path) -> Path:
    """Write the file rank-R.npz, whole or not at all. Returns its path.

    Args:
        record: the record of rank R.
        folder: folder to write to, which is made if it does not exist.

    Raises:
        BadInput: if the file or its folder cannot be written.
    """
    make_folder(folder)
    path = folder / f"rank-{record.rank}.npz"
    arrays = {name: getattr(record, name) for name in ARRAYS}
    save_npz(path, FORMAT, RecordHeader(**shared(record, RecordHeader)), arrays)
    return path


def load_record(path: Path) -> EngineRecord:
    """Reads one rank's file. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(path, {FORMAT: (RecordHeader, _record)})


def _record(header: Any, arrays: Arrays) -> EngineRecord:
    columns: dict[str, Any] = {name: arrays.pop(name) for name in ARRAYS}
    return EngineRecord(**shared(header, EngineRecord), **columns)
