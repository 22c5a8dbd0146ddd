"""Text and bytes: files are read as UTF-8, and written whole or not at all."""

import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from aurora.errors import BadInput

SCHEMA = 1  # version of a format's contents unless SCHEMAS names another
SCHEMAS = {"aurora plan": 5, "aurora profile": 2, "aurora record": 2}
MADE_BY = {  # the command that makes a file of a format
    "aurora plan": "aurora plan",
    "aurora placement": "aurora place or aurora import",
    "aurora profile": "aurora profile",
    "aurora curves": "aurora profile",
    "aurora trace": "aurora simulate or aurora run",
    "aurora record": "the vLLM plugin",
}


def read_text(path: Path) -> str:
    """Read a UTF-8 file as text. Raises BadInput if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object. Raises BadInput if the file holds anything else."""
    try:
        found = json.loads(read_text(Path(path)))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def load_model_config(source: str | Path) -> dict[str, Any]:
    """Reads a model's transformers config.json. Raises BadInput if it is missing or not JSON.

    Args:
        source: the file, the model's folder, or the name of a model that comes with the package, such as "mixtral-topics".
    """
    if not str(source):
        raise BadInput("`model`: expected a config.json or its folder, found an empty name")
    path = Path(source)
    if not path.exists() and path.name == str(source) and (named := shipped(f"models/{source}")).is_dir():
        path = named
    return load_json(path / "config.json" if path.is_dir() else path)


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises BadInput if it cannot be read."""
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all. Raises BadInput if the file cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` whole or not at all. Raises BadInput if the file cannot be written."""
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name in the same folder, then rename it. A symbolic link stays; its target is replaced.

    Args:
        path: exact path of the file.
        write: called with an open binary file, writes the contents to it.

    Raises:
        BadInput: if the file cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: cannot be written: not a regular file")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def shipped(name: str) -> Path:
    """Returns the path of a file or folder in `profiles/`, which is part of the package."""
    inside = Path(__file__).parents[1] / "profiles"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "profiles") / name


def schema_of(form: str) -> int:
    """Returns the version of a format's contents, which every file states."""
    return SCHEMAS.get(form, SCHEMA)


def check_schema(path: Path, found: Mapping[str, Any], form: str = "") -> None:
    """Raise BadInput unless a file has the schema of its format; the message names the command that makes a new file.

    Args:
        path: the file.
        found: its contents.
        form: the format, such as "aurora plan"; empty for a format of SCHEMA.
    """
    expected = schema_of(form)
    if found.get("schema") != expected or isinstance(found["schema"], bool):
        remedy = f"; make it anew with {MADE_BY[form]}" if form in MADE_BY else ""
        raise BadInput(f"{path}: expected schema = {expected}, found {found.get('schema')!r}{remedy}")


def check_keys(path: Path | str, where: str, found: Mapping[str, Any], known: set[str]) -> None:
    """Raise BadInput if a table has keys that are not known.

    Args:
        path: the file.
        where: which table, for the message.
        found: the table.
        known: the keys that it may have.
    """
    if unknown := sorted(set(found) - known):
        raise BadInput(f"{path}: {where}: unknown {', '.join(unknown)}; expected {', '.join(sorted(known))}")
