"""The npz container of arrays: named arrays, and a JSON header (schema, format, scalars) in the array "about"."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.io.files import check_schema, schema_of, write_whole

Arrays = Mapping[str, NDArray[Any]]
_Value = TypeVar("_Value")


def save_npz(path: Path, form: str, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a header and arrays to exactly `path`, whole or not at all.

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


def load_npz(path: Path, readers: Mapping[str, Callable[[dict[str, Any], Arrays], _Value]]) -> _Value:
    """Read a file of `save_npz`; nothing is unpickled.

    Args:
        path: the file.
        readers: by name of each accepted format, a function called with (the header's scalars, arrays) that returns the value.

    Returns:
        The value.

    Raises:
        BadInput: if the file is missing, damaged, or of another format or schema.
    """
    what = " or ".join(readers)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        form = str(about.pop("format"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except Exception as error:  # zip, zlib, json and numpy raise many kinds for a file that is not theirs
        raise BadInput(f"{path}: not an {what}, or cut short: {error}") from None
    if form not in readers:
        raise BadInput(f"{path}: expected an {what}, found format {form!r}")
    check_schema(path, about, form)
    about.pop("schema")
    try:
        return readers[form](about, arrays)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: not a whole {form}: {type(error).__name__}: {error}") from None
