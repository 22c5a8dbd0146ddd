"""What the verbs share: where plans find their profiles, and dependencies that come late."""

import importlib
import os
from pathlib import Path

from aurora.errors import BadInput, MissingDependency
from aurora.types import Plan, Profile


def need(*modules: str) -> None:
    """MissingDependency with the pip command unless all of `modules` import."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingDependency(f'{name} is needed: pip install "aurora-moe[run]" ({error})') from None


def check_output(*paths: Path | None) -> None:
    """BadInput before any work when a result could not be written."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: no such folder {path.parent}")
        if path is not None and path.is_dir():
            raise BadInput(f"{path}: cannot be written: it is a folder")


def profiles_of(plan: Plan, plan_path: Path, given: list[Path] | None) -> list[Profile]:
    """The plan's profiles: those given, else those that it names, relative to its own folder."""
    from aurora.store import load_profile

    paths = given or [plan_path.parent / model.profile_path for model in plan.models]
    if not given and not all(model.profile_path for model in plan.models):
        raise BadInput(f"{plan_path}: names no profile; give one --profile a model")
    found = [load_profile(path) for path in paths]
    if not given:
        for path, profile, model in zip(paths, found, plan.models, strict=True):
            if profile.digest != model.profile_digest:
                raise BadInput(f"{path}: has changed since {plan_path} was made; plan again, or give --profile")
    return found


def relative(path: Path, plan_path: Path) -> str:
    """`path` as seen from the plan's folder."""
    return os.path.relpath(path.resolve(), plan_path.resolve().parent)
