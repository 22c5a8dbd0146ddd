"""Checks and loads the files that subcommands need, before any other work begins."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from aurora.cli.options import RUNNING
from aurora.errors import AuroraError, BadInput
from aurora.io import load_json, load_loads, load_profile
from aurora.io.files import check_regular
from aurora.types import Plan, Profile
from aurora.types.arrays import FloatArray

OTHERS = "plan again, or give simulate or report one --profile per model"  # where a plan's own profiles cannot be read


def check_output(**outputs: Path | None) -> None:
    """Check, before any work, that output files can be written, and that they do not replace files that this command reads.

    Files that it reads: all other paths on the command line, files in folders given there, and profiles named by plans.

    Args:
        outputs: the files to write, by the subcommand's parameter or, if it has none, by a description; None: not requested.

    Raises:
        BadInput: if a file cannot be written, or would replace an input or another output.
    """
    targets: dict[Path, Path] = {}
    for path in outputs.values():
        if path is None:
            continue
        where = Path(os.path.realpath(path))  # also of links that go round
        if not where.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: no such folder {path.parent}")
        if where.is_dir():
            raise BadInput(f"{path}: cannot be written: it is a folder")
        check_regular(path)
        _check_writable(path, where.parent)
        if where in targets:
            raise BadInput(f"{path}: cannot be written: it would replace {targets[where]}, which this command writes too")
        targets[where] = path
    _check_kept([path for path in outputs.values() if path is not None], set(outputs))


def check_folder(output: Path, *names: str) -> None:
    """Check, before any work, that files can be written to a folder, which need not exist yet.

    Args:
        output: the folder, from the subcommand's parameter `output`.
        names: names of the files that will be written.

    Raises:
        BadInput: if the folder cannot be created, or one of the files would replace an input.
    """
    target = Path(os.path.realpath(output))
    nearest = next(path for path in (target, *target.parents) if path.exists())
    if not nearest.is_dir():
        raise BadInput(f"{output}: cannot be made a folder: {nearest} is a file")
    _check_writable(output, nearest)
    _check_kept([output / name for name in names], {"output"})


def _check_writable(path: Path, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{path}: cannot be written: {folder} is not writable")


def _check_kept(outputs: Sequence[Path], parameters: set[str]) -> None:
    """Raises BadInput if an output is a file that the running command reads, by whatever name or link."""
    existing = [path for path in outputs if path.exists()]
    for read, named_by in _read_by_this_command(parameters) if existing else ():
        for path in existing:
            if path.samefile(read):
                raise BadInput(f"{path}: cannot be written: it would replace {read}, which this command uses{named_by}")


def _read_by_this_command(but: set[str]) -> Iterator[tuple[Path, str]]:
    """Yields the files that the command line names, all parameters `but` these, and how they are named if not by themselves."""
    for name, value in RUNNING.get().given.items():
        for argument in value if isinstance(value, list | tuple) else [value]:
            if name in but or not isinstance(argument, str | Path) or not os.path.exists(path := Path(argument)):
                continue
            yield path, ""
            inside = [*path.rglob("*")] if path.is_dir() else _profiles_named_by(path)
            yield from ((file, f" ({path} {'holds' if path.is_dir() else 'names'} it)") for file in inside if file.is_file())


def _profiles_named_by(path: Path) -> list[Path]:
    """Returns the profiles that a plan's file names; none if it is no plan."""
    try:
        plan = load_json(path) if path.suffix == ".json" else {}
        return [path.resolve().parent / str(model["profile"]["path"]) for model in plan["models"]]
    except (AuroraError, OSError, ValueError, KeyError, TypeError):
        return []  # the command says what is wrong with it


def check_model(path: str | Path) -> None:
    """Check that a model exists locally, without loading it.

    Args:
        path: a model folder, or a name in the local hub cache.

    Raises:
        BadInput: if there is no such folder, and no such model in the cache.
    """
    from aurora.models.hub import model_folder

    folder = model_folder(path)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{path}: expected a model folder with a config.json, found none")
    load_json(folder / "config.json")


TOLD: set[tuple[Path, str]] = set()  # files and doubts of them that were said


def load_traffic(path: Path) -> Profile:
    """Returns the profile in a file; each doubt of its traffic and its compute times is a line on standard error."""
    from aurora.algorithms.workload.timing_doubts import timing_doubts
    from aurora.algorithms.workload.traffic_doubts import traffic_doubts

    profile = load_profile(path)
    _tell(path, *traffic_doubts(profile), *timing_doubts(profile.provenance))
    return profile


def loads_of(path: Path) -> FloatArray:
    """Returns (L, E) float64, the tokens of each expert in a profile or a file of `load_loads`; doubts as by `load_traffic`."""
    from aurora.algorithms.workload.traffic_doubts import load_doubts

    if path.suffix == ".npz":
        return load_traffic(path).load_LE.astype(np.float64)
    load_LE = load_loads(path)
    _tell(path, *load_doubts(load_LE))
    return load_LE


def _tell(path: Path, *doubts: str) -> None:
    """Says doubts of a file on standard error, each once in a process: `aurora demo` runs many commands."""
    for doubt in doubts:
        if (said := (path.resolve(), doubt)) not in TOLD:
            TOLD.add(said)
            print(f"aurora: {path}: {doubt}", file=sys.stderr)


def traffic_of(paths: Iterable[Path], gpus: int) -> list[Profile]:
    """Returns profiles loaded from files, each with one source rank per GPU.

    A profile with another number of source ranks is converted (`at_sources`); a line on standard error says so.
    """
    profiles = [(path, load_traffic(path)) for path in paths]
    for path, profile in profiles:
        if profile.sources != gpus:
            print(f"aurora: {path}: traffic of {profile.sources} source ranks, dealt to {gpus} GPUs", file=sys.stderr)
    return [profile.at_sources(gpus) for _, profile in profiles]


def profiles_of(plan: Plan, plan_path: Path, files: list[Path] | None) -> list[Profile]:
    """Load and return the profiles of a plan, one per model.

    Args:
        plan: the plan.
        plan_path: the plan's file.
        files: the profiles' files, one per model; None or empty: the files that the plan names, relative to its folder.

    If compute curves were measured again since the plan was made, a line on standard error says so.

    Raises:
        BadInput: if the plan names no profile, or one that is gone or has other traffic than when the plan was made.
    """
    paths = files or [plan_path.resolve().parent / model.profile_path for model in plan.models]
    if not files and not all(model.profile_path for model in plan.models):
        raise BadInput(f"{plan_path}: names no profile; {OTHERS}")
    if not files and (gone := [path for path in paths if not path.exists()]):
        raise BadInput(f"{plan_path}: expected its profile {gone[0]}, found no such file; {OTHERS}")
    profiles = traffic_of(paths, len(plan.cluster))
    if not files:
        for path, profile, model in zip(paths, profiles, plan.models, strict=True):
            if not model.made_from(profile):
                raise BadInput(f"{plan_path}: was planned from a different version of {path}; {OTHERS}")
            if profile.digest != model.profile_digest:
                note = f"aurora: {path} has compute times measured after {plan_path} was made; times are by the new ones"
                print(note, file=sys.stderr)
    return profiles
