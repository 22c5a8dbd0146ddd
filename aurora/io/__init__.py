"""The one reader and writer of every file format.

| file | module |
|---|---|
| cluster (.toml) with its fabric, datasheets of GPUs (.toml) | clusters |
| profile, compute curves (.npz) | profiles |
| plan, placement (.json) | plans |
| trace of a run (.npz), requests that an engine was sent (.csv, .jsonl) | traces |
| an engine's placement; its recorded routing | engine_placements; routing_dumps |
| records of our vLLM plugin, a file a rank (.npz) | engine_records |
| tokens of a run while it serves (.jsonl) | journals |
| traffic matrix of an all-to-all, loads of experts (.csv, .npy) | matrices |
| GPU systems as aiconfigurator-core has measured them (its .parquet) | silicon_database, silicon_systems |
| prompts (.txt, .jsonl) | prompts |

`files` has the containers (JSON, TOML, npz), the schemas of all formats, and the atomic write.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io import profiles, traces
from aurora.io.clusters import load_cluster, load_gpus, save_cluster
from aurora.io.files import Arrays, load_json, load_model_config, load_npz, read_text, shipped, write_text
from aurora.io.matrices import load_loads, load_matrix
from aurora.io.plans import load_plan, save_plan
from aurora.io.profiles import load_curves, load_profile, save_curves, save_profile
from aurora.io.traces import load_requests, load_trace, save_trace
from aurora.types import Cluster, ComputeCurves, Plan, Profile, Trace

__all__ = [
    "load",
    "load_cluster",
    "load_curves",
    "load_gpus",
    "load_json",
    "load_loads",
    "load_matrix",
    "load_model_config",
    "load_plan",
    "load_profile",
    "load_requests",
    "load_trace",
    "read_text",
    "save",
    "save_cluster",
    "shipped",
    "write_text",
]

_NPZ_READERS: dict[str, Callable[[dict[str, Any], Arrays], Profile | Trace | ComputeCurves]] = {
    profiles.PROFILE_FORMAT: profiles.profile_from_arrays,
    traces.TRACE_FORMAT: traces.trace_from_arrays,
    profiles.CURVES_FORMAT: profiles.curves_from_arrays,
}


def load(path: str | Path) -> Cluster | Profile | Plan | Trace | ComputeCurves:
    """Read a cluster, a plan, a profile, a trace or compute curves.

    Args:
        path: a cluster (.toml, or the name of a shipped one), a plan (.json), or a profile, trace or compute curves (.npz).

    Raises:
        BadInput: if the file is missing, damaged or of another format.
        BrokenPlan: if a plan does not do what it claims.
    """
    path = Path(path)
    match path.suffix:
        case "":
            return load_cluster(path)
        case ".toml":
            return load_cluster(path)
        case ".json":
            return load_plan(path)
        case ".npz":
            return load_npz(path, _NPZ_READERS)
    raise BadInput(f"{path}: expected a .toml, .json or .npz file, found {path.suffix}")


def save(value: Cluster | Plan | Profile | Trace | ComputeCurves, path: str | Path) -> None:
    """Write a value to a file: a cluster as TOML, a plan as JSON, everything else as npz.

    Args:
        value: what to write.
        path: exact path of the file.

    Raises:
        BadInput: if the value is of another type or the file cannot be written.
    """
    path = Path(path)
    match value:
        case Plan():
            save_plan(value, path)
        case Profile():
            save_profile(value, path)
        case Trace():
            save_trace(value, path)
        case ComputeCurves():
            save_curves(value, path)
        case Cluster():
            save_cluster(value, path)
        case _:
            raise BadInput(f"save: expected a Cluster, Plan, Profile, Trace or ComputeCurves, found {type(value).__name__}")
