"""The folder of recorded data that evaluations may use: named by an option or by AURORA_DATA, never guessed."""

from pathlib import Path

from aurora.errors import BadInput


def recorded_file(folder: Path | None, name: str) -> Path:
    """Returns the path of the recording `name` in `folder`, which need not exist. Raises BadInput if `folder` is None."""
    if folder is None:
        raise BadInput(f"`recorded`: expected the folder of recorded data, which holds {name}, or AURORA_DATA, found neither")
    return folder / name


def is_recorded(folder: Path | None, *names: str) -> bool:
    """Returns whether a folder was named and holds all of these recordings."""
    return folder is not None and all((folder / name).exists() for name in names)
