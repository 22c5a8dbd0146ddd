"""The one reader and writer of every file format."""

from pathlib import Path

from aurora.errors import BadInput
from aurora.store.arrays import load_loads, load_matrix, load_npz, load_profile, load_trace, save_npz
from aurora.store.clusters import load_cluster
from aurora.store.files import load_json, read_text, shipped, write_text
from aurora.store.plans import load_plan, save_plan
from aurora.types import Cluster, Plan, Profile, Trace

__all__ = [
    "load",
    "load_cluster",
    "load_json",
    "load_loads",
    "load_matrix",
    "load_plan",
    "load_profile",
    "load_trace",
    "read_text",
    "save",
    "shipped",
    "write_text",
]


def load(path: str | Path) -> Cluster | Profile | Plan | Trace:
    """Read a cluster (.toml), a plan (.json), a profile or a trace (.npz). Raises BadInput for anything else."""
    path = Path(path)
    match path.suffix:
        case ".toml":
            return load_cluster(path)
        case ".json":
            return load_plan(path)
        case ".npz":
            return load_npz(path, None)
    raise BadInput(f"{path}: expected a .toml, .json or .npz file, found {path.suffix or 'no suffix'}")


def save(value: Plan | Profile | Trace, path: str | Path) -> None:
    """Write a plan as JSON, a profile or trace as npz, to exactly `path`."""
    path = Path(path)
    if isinstance(value, Plan):
        save_plan(value, path)
    elif isinstance(value, Profile | Trace):
        save_npz(value, path)
    else:
        raise BadInput(f"save: expected a Plan, Profile or Trace, found {type(value).__name__}")
