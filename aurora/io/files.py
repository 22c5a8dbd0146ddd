"""Reads and writes text, JSON, TOML, .npy and npz, for all file formats. Readers trust no file; writers replace it atomically.

`open_locked` keeps two processes from writing one file.
"""

import fcntl
import io
import json
import os
import re
import secrets
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.errors import AuroraError, BadInput, shown

Arrays = dict[str, NDArray[Any]]
_Value = TypeVar("_Value")
MOST_BYTES = 1 << 32  # of an archive when it is unpacked
MOST_TEXT = 1 << 30  # bytes of a file that is read as one text
_Kind = TypeVar("_Kind")
SCHEMA = 1  # version of a format's contents unless SCHEMAS names another
SCHEMAS = {"aurora plan": 5, "aurora profile": 2, "aurora record": 2}
MALFORMED = (  # what readers, numpy, json and zipfile raise for contents of another form, or damaged ones
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, MemoryError, EOFError),
    *(zipfile.BadZipFile, zlib.error, RuntimeError, SyntaxError, TokenError),
)
SPOKEN = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
KINDS = {  # of files, by their first bytes
    "a zip archive (as .npz and .pt are)": (b"PK",),
    "an .npy array": (b"\x93NUMPY",),
    "a gzip archive": (b"\x1f\x8b",),
    "UTF-16 text": (b"\xff\xfe", b"\xfe\xff"),
    "a pickle": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
}
MADE_BY = {  # the command that makes a file of a format
    "aurora plan": "aurora plan",
    "aurora placement": "aurora place or aurora import",
    "aurora profile": "aurora profile",
    "aurora curves": "aurora profile",
    "aurora trace": "aurora simulate or aurora run",
    "aurora record": "the vLLM plugin",
}
OPEN_FILE = re.compile(r"/dev/(std|fd/)|/proc/")


@contextmanager
def naming(path: Path | str, form: str = "") -> Iterator[None]:
    """Context manager for code that reads a file: adds the file's name to the errors that the code raises.

    Args:
        path: the file.
        form: the expected contents in words, such as "a placement". A KeyError, TypeError, ValueError or the like then means
            malformed contents, and becomes a BadInput. Empty: such an error is a bug and passes unchanged.

    Raises:
        AuroraError: as raised inside, with the path put before its message.
        BadInput: if the file cannot be read, or its contents are malformed.
    """
    try:
        check_ends(path)
        yield
    except AuroraError as error:
        raise type(error)(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected {form or 'UTF-8 text'}, found {kind_of(Path(path))}") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except MALFORMED as error:
        if not form:
            raise
        raise BadInput(f"{path}: not {form}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Converts an exception raised by reading a file to one line that says what is malformed in the file."""
    said = " ".join(str(error).split())[:200]
    if isinstance(error, KeyError) and isinstance(error.args[0], str):
        return f"{said} is missing"
    other = isinstance(error, (TypeError, AttributeError, LookupError, OverflowError, RecursionError))
    return "a value in it is missing, or of another kind" if other else said


def check_ends(*paths: Path | str) -> None:
    """Raises BadInput for a path whose reading may never end: a named pipe, a device or a socket.

    Unnamed pipes that the shell passes, such as <(...), are allowed.
    """
    with suppress(OSError, ValueError):  # reading says what is wrong
        for path in map(Path, paths):
            if path.exists() and not path.is_file() and not path.is_dir() and path.resolve().exists():
                raise BadInput(f"{path}: not a regular file")


def kind_of(path: Path, own: str = "") -> str:
    """Returns a description of a file's kind, such as "a pickle" or "an aurora plan (JSON)", for error messages.

    It is derived from the file's first bytes, or from the `format` in aurora's files.

    Args:
        path: the file.
        own: the first words of the expected kind, such as "an .npy". If the file is of that kind, its rest must be damaged, and
            the result says so. Empty: no kind is expected.
    """
    start = b""
    with suppress(Exception):  # zip, zlib, json and numpy raise many kinds for a file that is not theirs
        with path.open("rb") as file:
            start = file.read(512)
        if start.startswith(b"PK"):
            return f"an {json.loads(str(_unpacked(path)['about']))['format']} (.npz)"
        if start.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
            return f"an {json.loads(read_text(path))['format']} (JSON)"
    text = "text" if start.isascii() and b"\0" not in start else "text of another encoding, or no text"
    kind = next((name for name, signs in KINDS.items() if start.startswith(signs)), text if start else "an empty file")
    return f"{kind} of other contents, or one cut short" if own and kind.startswith(own) else kind


def open_text(path: Path, newline: str | None = None) -> IO[str]:
    """Opens a UTF-8 text file, with or without a byte order mark. Call it inside `naming`, which names the file in errors."""
    return path.open(encoding="utf-8-sig", newline=newline)


def read_text(path: Path, form: str = "") -> str:
    """Read a UTF-8 file as text. Raises BadInput if it cannot be read; the message has `form`, the expected contents."""
    with naming(path, form), open_text(path) as file:
        check_size("the text", os.fstat(file.fileno()).st_size, MOST_TEXT)
        return file.read()


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """Read the lines of a UTF-8 file that are not blank, with their numbers from 1. Raises BadInput if it cannot be read."""
    return [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object. Raises BadInput if the file holds anything else."""
    text = read_text(Path(path), "JSON")
    with naming(path):
        try:
            value = json_value(text)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"not JSON: {error if text.strip() else 'the file is empty'}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected a JSON object, found {shown(value)}")
    return value


def json_value(text: str) -> Any:
    """Returns the JSON value of a text. Raises BadInput if an object has a key twice, of which json takes the last."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            keys = [key for key, _ in pairs]
            raise BadInput(f"expected each key once, found {shown(next(key for key in keys if keys.count(key) > 1))} twice")
        return table

    return json.loads(text, object_pairs_hook=once)


def json_of_line(line: str) -> Any:
    """Returns the JSON value of one line; None for text that is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises BadInput if it cannot be read."""
    try:
        return tomllib.loads(read_text(path, "TOML"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None


def make_folder(path: Path) -> None:
    """Make the folder `path` and its parents unless they exist.

    Raises:
        BadInput: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be made a folder: {error.strerror}") from None


def check_regular(path: Path) -> None:
    """Raises BadInput for a path that no file may replace: a folder, a device, or another name of a process's open file."""
    where = path.resolve()
    if (where.exists() and not where.is_file()) or OPEN_FILE.match(str(path.absolute())):
        raise BadInput(f"{path}: cannot be written: not a regular file")


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
    check_regular(path)
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            write(file)
        os.replace(temporary, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def shipped(name: str) -> Path:
    """Returns the path of a file or folder in `profiles/`, which is part of the package."""
    inside = Path(__file__).parents[1] / "profiles"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "profiles") / name


def schema_of(form: str) -> int:
    """Returns the schema version of a file format; every file of the format has it under `schema`."""
    return SCHEMAS.get(form, SCHEMA)


def check_schema(path: Path, found: Mapping[str, Any], form: str = "") -> None:
    """Raise BadInput unless a file has the current schema of its format; the message names the command to make a new file.

    Args:
        path: the file.
        found: the file's contents.
        form: the format, such as "aurora plan"; empty: a format whose version is SCHEMA.
    """
    expected = schema_of(form)
    if found.get("schema") != expected or isinstance(found["schema"], bool):
        remedy = f"; make it anew with {MADE_BY[form]}" if form in MADE_BY else ""
        raise BadInput(f"{path}: expected schema = {expected}, found {found.get('schema')!r}{remedy}")


def check_keys(path: Path | str, where: str, found: Mapping[str, Any], known: set[str]) -> None:
    """Raise BadInput if a table has keys that are not known.

    Args:
        path: the file.
        where: name of the table, for the message.
        found: the table.
        known: the keys that it may have.
    """
    if unknown := sorted(set(found) - known):
        found_keys = ", ".join(unknown)[:200]
        raise BadInput(f"{path}: {where[:200]}: unknown {found_keys}; expected {', '.join(sorted(known))}")


def typed(path: Path | str, where: str, found: Mapping[str, Any], key: str, kind: type[_Kind], default: Any = None) -> _Kind:
    """Returns found[key], or `default`. Raises BadInput if the value is not of type `kind`; an int is accepted as a float.

    Args:
        path, where, found: as in `check_keys`.
        key: the key.
        kind: the type, one of the keys of SPOKEN.
        default: the value if the table does not have the key; None: the key is required.
    """
    value = found.get(key, default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise BadInput(f"{path}: {where}: {key} must be {SPOKEN[kind]}, found {shown(value)}")
    try:
        return kind(value)  # type: ignore[call-arg]
    except OverflowError:
        raise BadInput(f"{path}: {where}: {key} is too large") from None


def save_npz(path: Path, form: str, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a header and arrays to a file, whole or not at all.

    Args:
        path: exact path of the file.
        form: the format, such as "aurora profile"; readers of other formats refuse the file.
        about: the header's scalars, which JSON can hold.
        arrays: arrays by name, none of them called "about".

    Raises:
        BadInput: if the file cannot be written.
    """
    header = np.array(json.dumps({"schema": schema_of(form), "format": form, **about}))
    write_whole(path, lambda file: np.savez_compressed(file, about=header, **arrays))


def check_archive(path: Path) -> None:
    """Raises BadInput if an archive unpacks to more than MOST_BYTES, by its directory. Nothing is unpacked."""
    with zipfile.ZipFile(path) as archive:
        check_size("the archive", sum(info.file_size for info in archive.infolist()))


def _unpacked(path: Path) -> Arrays:
    """The arrays of an .npz file by name."""
    check_archive(path)
    arrays: Arrays = {}
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            try:
                arrays[name] = np.asarray(archive[name])
            except MALFORMED as error:
                raise BadInput(f"{name}: {reason(error)}") from None
    return arrays


def read_npz(path: Path, what: str = "an .npz archive") -> Arrays:
    """Returns the arrays of an .npz file by name, without unpickling. Raises BadInput if it holds anything else.

    Args:
        path: the file.
        what: the expected contents in words, for messages.
    """
    with naming(path):
        try:
            return _unpacked(path)
        except MALFORMED:  # numpy's advice is to unpickle
            raise BadInput(f"expected {what}, found {kind_of(path, 'a zip')}") from None


def check_size(what: str, declared: int, most: int | None = None) -> None:
    """Raise BadInput if `declared` bytes are more than `most` (None: MOST_BYTES); `what` names the array in the message."""
    if declared > (most := MOST_BYTES if most is None else most):
        raise BadInput(f"{what}: declares {declared} bytes, expected at most {most}")


def load_npy(path: Path) -> NDArray[Any]:
    """Open the array of an .npy file as a memory map. Raises BadInput if the file holds anything else."""
    with naming(path):
        try:
            return np.lib.format.open_memmap(path, mode="r")
        except MALFORMED:
            raise BadInput(f"expected an .npy array of numbers, found {kind_of(path, 'an .npy')}") from None


def load_csv(path: Path, dtype: type, header: bool = False) -> NDArray[Any]:
    """Read the numbers of a CSV, rows by columns, perhaps after a header. Raises BadInput if a cell is not of `dtype`."""
    if not (text := read_text(path)).strip():
        raise BadInput(f"{path}: expected rows of numbers, found none")
    try:
        return np.loadtxt(io.StringIO(text), dtype, delimiter=",", comments=None, ndmin=2, skiprows=int(header))
    except ValueError as error:
        numbers = "whole numbers" if dtype is np.int64 else "numbers"
        said = re.sub(r"row (\d+), column (\d+)\.", lambda at: f"row {int(at[1]) + 1}, column {at[2]}", str(error))
        raise BadInput(f"{path}: expected rows of {numbers}: {said.partition(';')[0]}") from None


def load_npz(path: Path, readers: Mapping[str, Callable[[dict[str, Any], Arrays], _Value]]) -> _Value:
    """Read a file that `save_npz` wrote, by the reader of its format; nothing is unpickled.

    Args:
        path: the file.
        readers: dict from the name of each accepted format to a function (header's scalars, arrays) -> value,
            which takes what it reads out of both.

    Returns:
        The value that the reader returned.

    Raises:
        BadInput: if the file is missing, damaged, of another format or schema, or holds an array that the reader left.
    """
    what = " or ".join(form if form.endswith("s") else f"an {form}" for form in readers)
    arrays = read_npz(path, what)
    try:
        about: dict[str, Any] = json.loads(str(arrays.pop("about")))
        form = str(about.pop("format"))
    except MALFORMED:
        raise BadInput(f"{path}: expected {what}, found {kind_of(path, 'a zip')}") from None
    if form not in readers:
        raise BadInput(f"{path}: expected {what}, found format {form!r}")
    check_schema(path, about, form)
    about.pop("schema")
    with naming(path, f"a whole {form}"):
        value = readers[form](about, arrays)
    if arrays:
        raise BadInput(f"{path}: unknown arrays {', '.join(sorted(arrays))[:200]} in an {form}")
    return value


def open_locked(path: Path, shared: bool = False) -> io.FileIO:
    """Opens a file for reading and appending under a lock, exclusive or shared, and creates it if it is missing.

    Raises:
        BadInput: if another process holds the lock, or the file cannot be written.
    """
    try:
        while True:
            file = path.open("a+b", buffering=0)
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # who had it before has removed it
    except BlockingIOError:
        raise BadInput(f"{path}: another run writes it") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
