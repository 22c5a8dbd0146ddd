"""Recorded times of training steps by worker (.csv with the columns worker and batch_time_norm). Source: Alibaba PAI."""

import csv
from pathlib import Path

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray


def load_step_times(path: str | Path) -> dict[int, FloatArray]:
    """Read how long each worker's steps took.

    Args:
        path: the CSV file; other columns are ignored.

    Returns:
        (I,) float64 for each worker, by its number: the time of each step in the file's sequence and unit.

    Raises:
        BadInput: if the file cannot be read, has no rows, or a cell is not a number of zero or more.
    """
    path = Path(path)
    times: dict[int, list[float]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text, strict=True):
                seconds = float(row["batch_time_norm"])
                if not 0 <= seconds < float("inf"):
                    raise ValueError(f"batch_time_norm {seconds}")
                times.setdefault(int(float(row["worker"])), []).append(seconds)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file of recorded stragglers") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadInput(f"{path}: expected numbers in columns worker and batch_time_norm: {error}") from None
    if not times:
        raise BadInput(f"{path}: expected rows of step times, found none")
    return {worker: np.array(seconds) for worker, seconds in sorted(times.items())}
