"""Reads and writes text, JSON, TOML, CSV, .npy and npz. Readers trust no file; writers replace it atomically."""

import csv
import io
import json
import os
import re
import secrets
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.errors import AuroraError, BadInput, shown
from aurora.io.schema import FileTable, converted, plain

Arrays = dict[str, NDArray[Any]]
_Value = TypeVar("_Value")
MOST_BYTES = 1 << 32  # of a file or of an array, of an archive when it is unpacked
MOST_TEXT = 1 << 30  # of a file that is read as one text
MALFORMED = (  # what numpy, torch, json and zipfile raise for contents of another form, or damaged ones
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, MemoryError, EOFError),
    *(zipfile.BadZipFile, zlib.error, RuntimeError, SyntaxError, TokenError),
)
FORMATS = {  # version of a format's contents, and the command that makes its files
    "aurora plan": (5, "aurora plan"),
    "aurora placement": (1, "aurora place or aurora import"),
    "aurora profile": (2, "aurora profile"),
    "aurora curves": (1, "aurora profile"),
    "aurora trace": (1, "aurora simulate or aurora run"),
    "aurora record": (2, "the vLLM plugin"),
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
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x}, as in text of another encoding or no text"
        raise BadInput(f"{path}: expected {form or 'UTF-8 text'}, found {found}") from None
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


def check_size(what: str, declared: int, most: int | None = None) -> None:
    """Raises BadInput if `declared` bytes are more than `most` (None: MOST_BYTES); `what` names what has them."""
    if declared > (most := MOST_BYTES if most is None else most):
        raise BadInput(f"{what}: declares {declared} bytes, expected at most {most}")


def open_text(path: Path, newline: str | None = None) -> IO[str]:
    """Opens a UTF-8 text file, with or without a byte order mark. Call it inside `naming`, which names the file in errors."""
    return path.open(encoding="utf-8-sig", newline=newline)


def read_text(path: Path, form: str = "") -> str:
    """Reads a UTF-8 file as text. Raises BadInput if it cannot be read; the message has `form`, the expected contents."""
    with naming(path, form), open_text(path) as file:
        check_size("the text", os.fstat(file.fileno()).st_size, MOST_TEXT)
        return file.read()


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """Reads the lines of a UTF-8 file that are not blank, with their numbers from 1. Raises BadInput if it cannot be read."""
    return [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def check_once(keys: Sequence[str]) -> None:
    """Raises BadInput if a key comes twice."""
    if len(set(keys)) < len(keys):
        raise BadInput(f"expected each key once, found {shown(next(key for key in keys if keys.count(key) > 1))} twice")


def json_value(text: str) -> Any:
    """Returns the JSON value of a text. Raises BadInput for other text, and if an object has a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_once([key for key, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise BadInput("not JSON: nested too deep") from None
    except ValueError as error:
        raise BadInput(f"not JSON: {error if text.strip() else 'the file is empty'}") from None


def load_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object. Raises BadInput if the file holds anything else."""
    text = read_text(Path(path), "JSON")
    with naming(path):
        value = json_value(text)
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected a JSON object, found {shown(value)}")
    return value


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the values of JSON lines with their lines' numbers. Raises BadInput for a line of other text."""
    for number, line in numbered_lines(path):
        with naming(f"{path}: line {number}"):
            value = json_value(line)
        yield number, value


def load_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises BadInput if it cannot be read."""
    try:
        return tomllib.loads(read_text(path, "TOML"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a CSV by its header, with their lines' numbers.

    Raises:
        BadInput: if the file is no CSV, or a row has fewer or more fields than the header.
    """
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        with naming(path):
            check_once(reader.fieldnames or ())
        for row in reader:
            given = [*row.values()]
            if None in row or None in given:
                fields, found = len(reader.fieldnames or ()), "more" if None in row else str(given.index(None))
                raise BadInput(f"{path}: line {reader.line_num}: expected {fields} fields, found {found}")
            yield reader.line_num, row
    except csv.Error as error:
        raise BadInput(f"{path}: line {reader.line_num}: not CSV: {error}") from None


def load_csv(path: Path, dtype: type) -> NDArray[Any]:
    """Reads the numbers of a CSV without a header, rows by columns. Raises BadInput if a cell is not of `dtype`."""
    if not (text := read_text(path)).strip():
        raise BadInput(f"{path}: expected rows of numbers, found none")
    numbers = "whole numbers" if dtype is np.int64 else "numbers"
    try:
        rows: NDArray[Any] = np.loadtxt(io.StringIO(text), dtype, delimiter=",", comments=None, ndmin=2)
    except ValueError as error:
        said = re.sub(r"row (\d+), column (\d+)\.", lambda at: f"row {int(at[1]) + 1}, column {at[2]}", str(error))
        raise BadInput(f"{path}: expected rows of {numbers}: {said.partition(';')[0]}") from None
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0]
        raise BadInput(f"{path}: row {row + 1}, column {column + 1}: expected a finite number, found {rows[row, column]}")
    return rows


def load_npy(path: Path) -> NDArray[Any]:
    """Opens the array of an .npy file as a memory map. Raises BadInput if the file holds anything else."""
    with naming(path):
        try:
            return np.lib.format.open_memmap(path, mode="r")
        except MALFORMED:
            raise BadInput("expected an .npy array of numbers, found another file, or one cut short") from None


def check_archive(path: Path) -> None:
    """Raises BadInput if an archive unpacks to more than MOST_BYTES, or has a file twice, by its directory; unpacks nothing."""
    with zipfile.ZipFile(path) as archive:
        check_size("the archive", sum(info.file_size for info in archive.infolist()))
        check_once(archive.namelist())


def read_npz(path: Path, what: str = "an .npz archive") -> Arrays:
    """Returns the arrays of an .npz file by name, without unpickling. Raises BadInput if it holds anything else.

    Args:
        path: the file.
        what: the expected contents in words, for messages.
    """
    with naming(path):
        try:
            check_archive(path)
            with np.load(path, allow_pickle=False) as archive:
                return {name: np.asarray(archive[name]) for name in archive.files}
        except MALFORMED as error:
            raise BadInput(f"expected {what}, found another file, or a damaged one: {reason(error)}") from None


def save_npz(path: Path, form: str, header: FileTable, arrays: Mapping[str, Any]) -> None:
    """Writes a header and arrays to a file, whole or not at all.

    Args:
        path: exact path of the file.
        form: the format, such as "aurora profile"; readers of other formats refuse the file.
        header: the header's values.
        arrays: arrays by name, none of them called "about".

    Raises:
        BadInput: if the file cannot be written.
    """
    about = np.array(json.dumps({"schema": schema_of(form), "format": form, **plain(header)}))
    write_whole(path, lambda file: np.savez_compressed(file, about=about, **arrays))


def load_npz(path: Path, readers: Mapping[str, tuple[type[Any], Callable[[Any, Arrays], _Value]]]) -> _Value:
    """Reads a file that `save_npz` wrote, by the reader of its format; nothing is unpickled.

    Args:
        path: the file.
        readers: by name of each accepted format, the FileTable of its header, and a function (header, arrays) -> value, which
            takes what it reads out of the arrays.

    Returns:
        The value that the reader returned.

    Raises:
        BadInput: if the file is missing, damaged, of another format or schema, or holds an array that the reader left.
    """
    what = " or ".join(form if form.endswith("s") else f"an {form}" for form in readers)
    arrays = read_npz(path, what)
    with naming(path):
        about = converted(json_value(str(arrays.pop("about", "{}"))), dict[str, Any], "about")
        form = about.pop("format", None)
        if form not in [*readers]:  # it may be of any type
            raise BadInput(f"expected {what}, found format {shown(form)}")
        check_schema(path, about, form)
        about.pop("schema")
        header, reader = readers[form]
    with naming(path, f"a whole {form}"):
        value = reader(converted(about, header, "about"), arrays)
    if arrays:
        raise BadInput(f"{path}: unknown arrays {', '.join(sorted(arrays))[:200]} in an {form}")
    return value


def schema_of(form: str) -> int:
    """Returns the schema version of a file format; every file of the format has it under `schema`."""
    return FORMATS[form][0] if form in FORMATS else 1


def check_schema(path: Path, found: Mapping[str, Any], form: str = "") -> None:
    """Raises BadInput unless a file has the current schema of its format; the message names the command to make a new file.

    Args:
        path: the file.
        found: the file's contents.
        form: the format, such as "aurora plan"; empty: one that people write, of version 1.
    """
    expected = schema_of(form)
    if found.get("schema") != expected or type(found["schema"]) is not int:
        remedy = f"; make it anew with {FORMATS[form][1]}" if form in FORMATS else ""
        raise BadInput(f"{path}: expected schema = {expected}, found {shown(found.get('schema'))}{remedy}")


def make_folder(path: Path) -> None:
    """Makes the folder `path` and its parents unless they exist.

    Raises:
        BadInput: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be made a folder: {error.strerror}") from None


def check_regular(path: Path) -> None:
    """Raises BadInput for a path that no file may replace: a folder, a device, or another name of a process's open file."""
    where = os.path.realpath(path)
    if (os.path.lexists(where) and not os.path.isfile(where)) or OPEN_FILE.match(os.path.abspath(path)):
        raise BadInput(f"{path}: cannot be written: not a regular file")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text whole or not at all. Raises BadInput if the file cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `content` whole or not at all. Raises BadInput if the file cannot be written."""
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file under a temporary name in the same folder, then renames it. A symbolic link stays; its target is replaced.

    Args:
        path: exact path of the file.
        write: called with an open binary file, writes the contents to it.

    Raises:
        BadInput: if the file cannot be written.
    """
    check_regular(path)
    path = Path(os.path.realpath(path))
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
