"""Text and bytes in and out: files are read as UTF-8 and written whole or not at all."""

import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from aurora.errors import BadInput

SCHEMA = 1  # of a format's contents, where SCHEMAS has no other
SCHEMAS = {"aurora plan": 2}
MADE_BY = {  # what makes a file of a format anew
    "aurora plan": "aurora plan",
    "aurora placement": "aurora place or aurora import",
    "aurora profile": "aurora profile",
    "aurora curves": "aurora profile",
    "aurora trace": "aurora simulate or aurora run",
    "aurora record": "the vLLM plugin",
}


def read_text(path: Path) -> str:
    """A UTF-8 file as text, or BadInput."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def load_json(path: str | Path) -> dict[str, Any]:
    """Any JSON object, or BadInput."""
    try:
        found = json.loads(read_text(Path(path)))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def load_toml(path: Path) -> dict[str, Any]:
    """Any TOML table, or BadInput."""
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all. Raises BadInput where the folder does not allow it."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` whole or not at all, as `write_text`."""
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write to a temporary name beside `path` and rename; a link keeps pointing to what it points to."""
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
    """A file or folder of `profiles/`, which travels with the package."""
    inside = Path(__file__).parents[1] / "profiles"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "profiles") / name


def schema_of(form: str) -> int:
    """The version of a format's contents, which every file of it says."""
    return SCHEMAS.get(form, SCHEMA)


def check_schema(path: Path, found: Mapping[str, Any], form: str = "") -> None:
    """Raise BadInput, with what makes the file anew, unless `found` says the schema of the format."""
    expected = schema_of(form)
    if found.get("schema") != expected or isinstance(found["schema"], bool):
        remedy = f"; make it anew with {MADE_BY[form]}" if form in MADE_BY else ""
        raise BadInput(f"{path}: expected schema = {expected}, found {found.get('schema')!r}{remedy}")


def check_keys(path: Path | str, where: str, found: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(found) - known):
        raise BadInput(f"{path}: {where}: unknown {', '.join(unknown)}; expected {', '.join(sorted(known))}")
