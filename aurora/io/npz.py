"""The npz container of arrays: named arrays, and a JSON header (schema, format, scalars) in the array "about"."""

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.io.files import check_schema, schema_of, write_whole

Arrays = Mapping[str, NDArray[Any]]
_Value = TypeVar("_Value")
MOST_BYTES = 1 << 32  # largest array that a file may declare
MOST_HEADER_BYTES = 1 << 26  # largest header
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)  # what zipfile raises


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


class NpzArrays(Mapping[str, NDArray[Any]]):
    """The arrays of an open npz archive, each read when it is asked for; nothing is unpickled.

    Sizes are checked before anything of that size is read: an array unpacks to exactly what its shape says.

    Args:
        archive: the open archive.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        self.unread = set(self._members)

    def __getitem__(self, name: str) -> NDArray[Any]:
        info = self._members[name]
        check_size(name, info.file_size)
        with self._archive.open(info) as file:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
            declared, found = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
        check_size(name, declared)
        if dtype.hasobject or declared != found:
            raise BadInput(f"{name}: expected {declared} bytes of numbers or text, as its shape says, found {found}")
        self.unread.discard(name)
        with self._archive.open(info) as file:
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def header(self) -> dict[str, Any]:
        """Returns the scalars of `save_npz`, read from the array "about"."""
        if self._members["about"].file_size > MOST_HEADER_BYTES:
            raise BadInput("the header is too large")
        about: dict[str, Any] = json.loads(str(self["about"]))
        return about


def check_size(what: str, declared: int) -> None:
    """Raise BadInput if a declared size is above MOST_BYTES."""
    if declared > MOST_BYTES:
        raise BadInput(f"{what}: declares {declared} bytes, expected at most {MOST_BYTES}")


def load_npy(path: Path) -> NDArray[Any]:
    """Open the array of an .npy file as a memory map. Raises BadInput if the file holds anything else."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile):  # numpy's advice is to unpickle
        raise BadInput(f"{path}: expected an .npy array of numbers, found another kind of file, or one cut short") from None
    if not isinstance(found, np.ndarray):
        raise BadInput(f"{path}: expected one array")
    check_size("the array", found.nbytes)
    return found


def load_npz(path: Path, readers: Mapping[str, Callable[[dict[str, Any], Arrays], _Value]]) -> _Value:
    """Read a file of `save_npz`; nothing is unpickled.

    Args:
        path: the file.
        readers: by name of each accepted format, a function called with (the header's scalars, arrays) that returns the value.

    Returns:
        The value.

    Raises:
        BadInput: if the file is missing, damaged, of another format or schema, or holds arrays that its format has not.
    """
    what = " or ".join(readers)
    with ExitStack() as stack:
        try:
            arrays = NpzArrays(stack.enter_context(zipfile.ZipFile(path)))
            about = arrays.header()
            form = str(about.pop("format"))
        except FileNotFoundError:
            raise BadInput(f"{path}: no such file") from None
        except Exception:  # zip, zlib, json and numpy raise many kinds for a file that is not theirs
            raise BadInput(f"{path}: expected an {what}, found another kind of file, or one cut short") from None
        if form not in readers:
            raise BadInput(f"{path}: expected an {what}, found format {form!r}")
        check_schema(path, about, form)
        about.pop("schema")
        try:
            value = readers[form](about, arrays)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        except DAMAGED:
            raise BadInput(f"{path}: damaged or cut short") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadInput(f"{path}: not a whole {form}: {type(error).__name__}: {error}") from None
        if arrays.unread:
            raise BadInput(f"{path}: unknown arrays {', '.join(sorted(arrays.unread))[:200]} in an {form}")
        return value
