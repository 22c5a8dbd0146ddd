"""Wire format of messages between hosts: MessagePack that holds values of known dataclasses, and arrays as their bytes.

Nothing is unpickled: what another host sends can only become one of the dataclasses that the receiver knows.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgspec
import numpy as np

from aurora.errors import AuroraError


class Refused(Exception):
    """Raised when the other end of a connection sends no message, or one that it may not send."""


@dataclass(frozen=True)
class Alive:
    """Both ways, every HEARTBEAT_S: the process runs."""


class WireFormat:
    """Packs values as bytes, and unpacks them.

    Besides instances of `kinds` values may be None, booleans, numbers, strings, tuples, lists, sets, dictionaries and numpy
    arrays of numbers, in each other to any depth. Each is unpacked as what it was.

    Args:
        kinds: dataclasses and AuroraErrors, of different names; an error is told by its sentence.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        assert len(self._kinds) == len(kinds), "two of one name"

    def pack(self, value: Any) -> bytes:
        """Returns a value as bytes."""
        return msgspec.msgpack.encode(self._plain(value))

    def unpack(self, packed: bytes) -> Any:
        """Returns the value that `pack` was given.

        Raises:
            Refused: if the bytes are not packed by a host with the same kinds, or a value is not what its class takes: a number
                or a string where it wants one, and what its constructor checks.
        """
        try:
            return self._value(msgspec.msgpack.decode(packed))
        except Exception as error:  # also what the constructor of a value raises
            raise Refused(f"no message of this version: {type(error).__name__}") from None

    def _plain(self, value: Any) -> Any:
        """Returns a value as a list that begins with what it is, or a number, a string or None."""
        match value:
            case None | bool() | str():
                return value
            case np.bool_() | np.integer() | np.floating():
                return value.item()
            case int() | float():
                return value
            case tuple():
                return ["tuple", *map(self._plain, value)]
            case list():
                return ["list", *map(self._plain, value)]
            case AbstractSet():
                return ["set", *map(self._plain, value)]
            case Mapping():
                return ["dict", *([self._plain(key), self._plain(each)] for key, each in value.items())]
            case np.ndarray():
                return ["array", value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
            case AuroraError():
                return [self._name(value), str(value)]
        assert is_dataclass(value), f"{type(value).__name__} does not travel between hosts"
        return [self._name(value), *(self._plain(getattr(value, field.name)) for field in fields(value) if field.init)]

    def _name(self, value: Any) -> str:
        name = type(value).__name__
        assert self._kinds.get(name) is type(value), f"{name} does not travel between hosts"
        return name

    def _value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            if isinstance(plain, (dict, bytes)):
                raise ValueError
            return plain
        kind, *parts = plain
        if kind == "dict":
            return {self._value(key): self._value(each) for key, each in parts}
        if kind == "array":
            dtype, shape, content = parts
            return _array(dtype, shape, content)
        values = list(map(self._value, parts))
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](values)
        made = self._kinds[kind]
        if issubclass(made, AuroraError):
            return made(*values)
        taken = dict(zip((field for field in fields(made) if field.init), values, strict=True))
        if not all(isinstance(value, _CLASSES.get(field.type, object)) for field, value in taken.items()):
            raise TypeError
        return made(**{field.name: value for field, value in taken.items()})


_CLASSES: Mapping[Any, type | tuple[type, ...]] = {int: (int, float), float: (int, float), str: str}  # of fields' values
_COLLECTIONS: Mapping[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "list": list, "set": set}


def _array(dtype: str, shape: list[int], content: bytes) -> np.ndarray:
    """Returns an array. Raises ValueError or TypeError if it is none of numbers."""
    found = np.dtype(dtype)
    if found.kind not in "biuf":
        raise ValueError
    return np.frombuffer(content, found).reshape(shape).copy()
