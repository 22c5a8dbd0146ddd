"""Merges the records of the vLLM plugin, one of each rank, into a Profile, and fits compute curves to their timings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from aurora.errors import BadInput
from aurora.io.files import naming
from aurora.io.plugin_records import EngineRecord, load_record
from aurora.io.schema import shared
from aurora.types import OVERHEAD, PHASES, Curve, Profile
from aurora.types.arrays import FloatArray

SIZES = ("ranks", "top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "dense_layers")
OF_A_RUN = ("model", "fingerprint", "engine", *SIZES)  # values that are equal in all records of one run


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
    for record in records:
        for name in OF_A_RUN:
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
    about = shared(first, Profile) | {"other_bytes": max(record.other_bytes for record in records)}
    seen_TLSE = tokens_TLSE[tokens_TLSE.any(axis=(1, 2, 3))]
    return Profile(tokens_TLSE=seen_TLSE, curves={first.kind: _curves(records)}, provenance=provenance, **about)


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
