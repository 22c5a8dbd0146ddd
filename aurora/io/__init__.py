"""Reads and writes all file formats; every format has its reader and writer in one module.

| file | module |
|---|---|
| cluster (.toml) with its servers, datasheets of GPUs (.toml) | clusters |
| profile, compute curves (.npz) | profiles |
| plan, placement (.json) | plans |
| trace of a run (.npz) | traces |
| requests that an engine was sent (.csv, .jsonl) | requests |
| an engine's placement; its recorded routing | engine_placements, engine_rows; routing_dumps |
| records of aurora's vLLM plugin, one file per rank (.npz) | plugin_records |
| traffic matrix of an all-to-all, tokens of each expert (.csv, .npy) | matrices |
| a model's config.json | model_configs |
| prompts (.txt, .jsonl) | prompts |

`files` has the containers (JSON, TOML, CSV, npz) and the atomic write; `schema` converts their tables to typed values and back.

`load` and `save` import the module of the given file; the other names are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from aurora.errors import BadInput
from aurora.lazy_names import fetcher

if TYPE_CHECKING:
    from aurora.io.clusters import *
    from aurora.io.files import *
    from aurora.io.matrices import *
    from aurora.io.model_configs import *
    from aurora.io.plans import *
    from aurora.io.profiles import *
    from aurora.io.requests import *
    from aurora.io.traces import *
    from aurora.types import Cluster, ComputeCurves, Plan, Profile, Trace

    _Kind = TypeVar("_Kind", Cluster, Profile, Plan, Trace, ComputeCurves)
else:
    NAMES = {  # those that each module defines
        "clusters": "load_cluster load_gpus save_cluster",
        "files": "load_json read_text shipped write_text",
        "matrices": "load_loads load_matrix",
        "model_configs": "load_model_config",
        "plans": "load_plan save_plan",
        "profiles": "load_curves load_profile save_curves save_profile",
        "requests": "load_requests",
        "traces": "load_trace save_trace",
    }
    __all__, __getattr__ = fetcher(__name__, NAMES)
    __all__ += ["load", "save"]


@overload
def load(path: str | Path) -> Cluster | Profile | Plan | Trace | ComputeCurves: ...
@overload
def load(path: str | Path, kind: type[_Kind]) -> _Kind: ...
def load(path: str | Path, kind: type[Any] | None = None) -> Any:
    """Reads a file that `save` or an aurora command wrote, or a cluster file that was written by hand.

    Args:
        path: a cluster (.toml), a plan (.json), or a profile, a trace or compute curves (.npz). A name without a suffix is one
            of the clusters that come with the package, such as "demo-4" or "paper-mixed-8".
        kind: the class that the value must have, such as `aurora.Profile`; type checkers take it as the type of the result.
            None: any class.

    Returns:
        The value, validated. A plan is also replayed by `check_plan`.

    Raises:
        BadInput: if the file is missing, damaged, or of another kind, format or schema.
        BrokenPlan: if a plan does not do what it claims.

    Example:
        >>> import aurora
        >>> aurora.load("demo-4", aurora.Cluster).gpus[0].out_Bps
        3000000.0
    """
    value = _load(Path(path))
    if kind is not None and not isinstance(value, kind):
        raise BadInput(f"{path}: expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _load(path: Path) -> Any:
    from aurora.io import clusters, files, plans, profiles, traces

    if path.suffix == ".npz":
        return files.load_npz(path, {**profiles.PROFILES, **traces.TRACES, **profiles.CURVES})
    if path.suffix not in ("", ".toml", ".json"):
        raise BadInput(f"{path}: expected a .toml, .json or .npz file, found {path.suffix}")
    return (plans.load_plan if path.suffix == ".json" else clusters.load_cluster)(path)


def save(value: Cluster | Plan | Profile | Trace | ComputeCurves, path: str | Path) -> None:
    """Writes a value so that `load` gives an equal one back. The file is written whole or not at all.

    Args:
        value: a Cluster becomes TOML, a Plan JSON, anything else npz.
        path: exact path of the file, which is replaced if it exists.

    Raises:
        BadInput: if `value` has no file format or the file cannot be written.

    Example:
        >>> import aurora, tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.toml"
        >>> aurora.save(aurora.load("demo-4"), file)
        >>> aurora.load(file) == aurora.load("demo-4")
        True
    """
    from aurora.io import clusters, plans, profiles, traces
    from aurora.types import Cluster, ComputeCurves, Plan, Profile, Trace

    savers: dict[type, Callable[[Any, Path], None]] = {
        Cluster: clusters.save_cluster, Plan: plans.save_plan, Profile: profiles.save_profile, Trace: traces.save_trace,
        ComputeCurves: profiles.save_curves,
    }  # fmt: skip
    if type(value) not in savers:
        raise BadInput(f"save: expected a Cluster, Plan, Profile, Trace or ComputeCurves, found {type(value).__name__}")
    savers[type(value)](value, Path(path))
