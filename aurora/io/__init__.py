"""The one reader and writer of every file format."""

from pathlib import Path

from aurora.errors import BadInput
from aurora.io.clusters import load_cluster, save_cluster
from aurora.io.files import load_json, read_text, shipped, write_text
from aurora.io.gpu_kinds import load_gpus
from aurora.io.npz import load_curves, load_failures, load_loads, load_matrix, load_npz, load_profile, load_trace, save_npz
from aurora.io.plans import load_plan, save_plan
from aurora.types import Cluster, ComputeCurves, Plan, Profile, Trace

__all__ = [
    "load",
    "load_cluster",
    "load_curves",
    "load_failures",
    "load_gpus",
    "load_json",
    "load_loads",
    "load_matrix",
    "load_plan",
    "load_profile",
    "load_trace",
    "read_text",
    "save",
    "save_cluster",
    "shipped",
    "write_text",
]


def load(path: str | Path) -> Cluster | Profile | Plan | Trace | ComputeCurves:
    """Read a cluster (.toml, or a shipped one by name), a plan (.json), a profile, a trace or curves (.npz); else BadInput."""
    path = Path(path)
    match path.suffix:
        case "":
            return load_cluster(path)
        case ".toml":
            return load_cluster(path)
        case ".json":
            return load_plan(path)
        case ".npz":
            return load_npz(path, None)
    raise BadInput(f"{path}: expected a .toml, .json or .npz file, found {path.suffix}")


def save(value: Cluster | Plan | Profile | Trace | ComputeCurves, path: str | Path) -> None:
    """Write a cluster as TOML, a plan as JSON, everything else as npz, to exactly `path`."""
    path = Path(path)
    if isinstance(value, Plan):
        save_plan(value, path)
    elif isinstance(value, Profile | Trace | ComputeCurves):
        save_npz(value, path)
    elif isinstance(value, Cluster):
        save_cluster(value, path)
    else:
        raise BadInput(f"save: expected a Cluster, Plan, Profile or Trace, found {type(value).__name__}")
