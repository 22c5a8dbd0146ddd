"""Files and packages that subcommands need, checked before any work begins."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from aurora.errors import BadInput, MissingDependency
from aurora.types import Plan, Profile


def need(*modules: str, extra: str = "run") -> None:
    """Check that all of `modules` can be imported.

    Raises:
        MissingDependency: if one cannot; with the pip command that installs `extra`.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingDependency(f'{name} is needed: pip install "aurora-moe[{extra}]" ({error})') from None


def make_folder(path: Path) -> None:
    """Make the folder `path` and its parents.

    Raises:
        BadInput: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be made a folder: {error.strerror}") from None


def check_output(*outputs: Path | None, inputs: Sequence[Path]) -> None:
    """Check, before any work, that results can be written.

    Args:
        outputs: the files to write; None stands for a file that is not wanted.
        inputs: files that the command reads.

    Raises:
        BadInput: if a result cannot be written, or would replace an input or another result.
    """
    taken = {path.resolve(): path for path in inputs}
    for path in outputs:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: no such folder {path.parent}")
        if path.is_dir():
            raise BadInput(f"{path}: cannot be written: it is a folder")
        if path.resolve() in taken:
            raise BadInput(f"{path}: cannot be written: it would replace {taken[path.resolve()]}, which this command uses")
        taken[path.resolve()] = path


def profiles_of(plan: Plan, plan_path: Path, given: list[Path] | None) -> list[Profile]:
    """Load the profiles of a plan.

    Args:
        plan: the plan.
        plan_path: its file.
        given: the profiles' files, one per model; None or empty: the files that the plan names, relative to its own folder.

    Raises:
        BadInput: if the plan names no profile, or a file has changed since the plan was made.
    """
    from aurora.io import load_profile

    paths = given or [plan_path.resolve().parent / model.profile_path for model in plan.models]
    if not given and not all(model.profile_path for model in plan.models):
        raise BadInput(f"{plan_path}: names no profile; give one --profile per model")
    found = [load_profile(path) for path in paths]
    if not given:
        for path, profile, model in zip(paths, found, plan.models, strict=True):
            if profile.digest != model.profile_digest:
                raise BadInput(f"{path}: has changed since {plan_path} was made; plan again, or give --profile")
    return found


def relative(path: Path, plan_path: Path) -> str:
    """Returns `path` relative to the plan's folder."""
    return os.path.relpath(path.resolve(), plan_path.resolve().parent)
