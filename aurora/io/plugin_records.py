"""Traffic and timings that the vLLM plugin records, one file per rank; `load_records` merges the files into a Profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from aurora.errors import BadInput
from aurora.io.files import Arrays, load_npz, make_folder, naming, save_npz
from aurora.io.schema import shared, table_of
from aurora.types import OVERHEAD, PHASES, Curve, Profile
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
_OF_A_RANK = ("kind", "date", "rank", "other_bytes", "width")  # values in which records of one run may differ


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


def load_records(folder: Path) -> Profile:
    """Read the records that all ranks wrote to a folder, as one Profile.

    Args:
        folder: the folder of the ranks' files.

    Raises:
        BadInput: if a rank's file is missing, damaged or of another run.
    """
    paths = sorted(folder.glob("rank-*.npz"))
    if not paths:
        raise BadInput(f"{folder}: expected files rank-0.npz, ..., found none")
    with naming(folder):
        return merged([load_record(path) for path in paths])


def merged(records: Sequence[EngineRecord]) -> Profile:
    """Merge the records of all ranks into one Profile.

    Each rank is a source rank. If records differ in the number of forward passes per window, windows are joined to the largest
    number. Windows without tokens are left out.

    Args:
        records: one per rank, in any sequence.

    Raises:
        BadInput: unless there is one record of every rank, all of one run, with some traffic.
    """
    first = records[0]
    if sorted(record.rank for record in records) != list(range(first.ranks)):
        raise BadInput(f"expected a record of each of {first.ranks} ranks, found {sorted(record.rank for record in records)}")
    same = [name for name in RecordHeader.__struct_fields__ if name not in _OF_A_RANK]
    for record in records:
        for name in same:
            if getattr(record, name) != getattr(first, name):
                differing = f"{getattr(record, name)!r} on rank {record.rank}, {getattr(first, name)!r} on rank {first.rank}"
                raise BadInput(f"expected records of one run, found {name} {differing}")
        if record.tokens_TLE.shape[1:] != first.tokens_TLE.shape[1:]:
            raise BadInput(f"expected records of one model, found {record.tokens_TLE.shape[1:]} layers and experts")
    width = max(record.width for record in records)
    window_T = np.unique(np.concatenate([record.window_T * record.width // width for record in records]))
    layers, experts = first.tokens_TLE.shape[1:]
    tokens_TLSE = np.zeros((len(window_T), layers, len(records), experts), dtype=np.int64)
    for record in records:
        at_T = np.searchsorted(window_T, record.window_T * record.width // width)
        np.add.at(tokens_TLSE[:, :, record.rank], at_T, record.tokens_TLE)
    if not tokens_TLSE.any():
        raise BadInput("no traffic was recorded")
    provenance = {"tool": "aurora import", "engine": first.engine, "date": max(record.date for record in records)}
    if not any(record.passes_L.any() for record in records):
        provenance["timings"] = "none: all forward passes were replayed from CUDA graphs"
    return Profile(
        model=first.model,
        fingerprint=first.fingerprint,
        tokens_TLSE=tokens_TLSE[tokens_TLSE.any(axis=(1, 2, 3))],
        top_k=first.top_k,
        dispatch_bytes=first.dispatch_bytes,
        combine_bytes=first.combine_bytes,
        expert_bytes=first.expert_bytes,
        other_bytes=max(record.other_bytes for record in records),
        dense_layers=first.dense_layers,
        curves={first.kind: _curves(records)},
        provenance=provenance,
    )


def _curves(records: Sequence[EngineRecord]) -> dict[str, Curve]:
    """Straight lines through the timings of all ranks, by phase; the experts' share of each call is the overhead."""
    curves = {}
    for index, phase in enumerate(PHASES):
        gram_33 = np.sum([record.gram_P33[index] for record in records], axis=0)
        target_3 = np.sum([record.target_P3[index] for record in records], axis=0)
        call_s, active_s, token_s = not_negative(gram_33, target_3).tolist()
        if phase == "expert":
            curves[OVERHEAD] = Curve(np.ones(1), np.full(1, call_s))
        fixed_s = active_s if phase == "expert" else call_s + active_s
        most = max(2, *(int(record.most_P[index]) for record in records))
        curves[phase] = Curve(np.array([1.0, most]), np.array([fixed_s + token_s, fixed_s + token_s * most]))
    return curves


def not_negative(gram_33: FloatArray, target_3: FloatArray) -> FloatArray:
    """Returns (3,) float64, the coefficients of a least squares fit, constrained to be zero or more.

    Args:
        gram_33: (3, 3) float64, the matrix of the normal equations.
        target_3: (3,) float64, their right-hand side.
    """
    if not gram_33.any():
        return np.zeros(3)
    scale_3 = np.sqrt(np.where(np.diag(gram_33) > 0, np.diag(gram_33), 1.0))
    power_3, vector_33 = np.linalg.eigh(gram_33 / np.outer(scale_3, scale_3))
    nonzero_3 = power_3 > 1e-12 * power_3.max()  # of equal columns, as of phases without experts, any sum does
    root_X = np.sqrt(power_3[nonzero_3])
    design_X3 = root_X[:, None] * vector_33[:, nonzero_3].T
    return np.asarray(nnls(design_X3, vector_33[:, nonzero_3].T @ (target_3 / scale_3) / root_X)[0] / scale_3)
