"""Checks that the installed vLLM has the functions and classes that the plugin needs, which needed.toml lists."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aurora.errors import BadInput

OLDEST = (0, 30)
PLACE = re.compile(r"([\w.]+)(?:\((.*)\))?(?: by (\S+))?")  # "name.name(parameter, parameter) by module:caller"
OBJECTS = ".self"  # after a class
MOE = "vllm.model_executor.layers.fused_moe"
LAYER_INDEX = "vllm.model_executor.models.utils:extract_layer_index"


@dataclass(frozen=True)
class ApiCheck:
    """Requirement that vLLM has a function, class or property, with certain parameters."""

    what: str  # the purpose that needs it, for messages
    where: str  # "module:name.name"
    needs: tuple[str, ...] = ()  # parameters that the function or class must take, or names that the property's code must use
    called_by: str | None = None  # "module:name.name" of the function that must call it while serving; None: not checked
    of_objects: bool = False  # True: `needs` are attributes that objects of a class must have

    def missing(self) -> str | None:
        """Returns a part of a sentence on what vLLM lacks; None if the requirement is met."""
        try:
            target = find(self.where)
        except (ImportError, AttributeError):
            return f"{self.what}: there is no {self.where}"
        has: Iterable[str] = ()
        if self.of_objects:
            has = attributes(target)
        elif isinstance(target, property):
            has = target.fget.__code__.co_names if target.fget is not None else ()
        elif self.needs:
            has = inspect.signature(target).parameters
        lacks = [name for name in self.needs if name not in has]
        if lacks:
            return f"{self.what}: {self.where} has no {', '.join(lacks)}"
        return None if self._is_called() else f"{self.what}: {self.called_by} does not call {self.name}"

    @property
    def name(self) -> str:
        """The last name in `where`: "init" for "module:Class.init"."""
        return re.split("[:.]", self.where)[-1]

    def _is_called(self) -> bool:
        """Returns whether `called_by` calls it, by its source; True if there is no source to look at."""
        if self.called_by is None:
            return True
        try:
            source = inspect.getsource(find(self.called_by))
        except (ImportError, AttributeError):
            return False
        except (OSError, TypeError):
            return True
        return calls(ast.parse(textwrap.dedent(source)), self.name)


def attributes(kind: type) -> set[str]:
    """Returns the names of attributes that objects of a class have, by the source of its classes too."""
    found = set(dir(kind))
    for base in kind.__mro__:
        found |= set(inspect.get_annotations(base))
        with suppress(OSError, TypeError):
            found |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(base)))
    return found


def calls(node: ast.AST, name: str) -> bool:
    """Returns True if code calls a function or method named `name`, or passes that name as a string to a call."""
    for call in (child for child in ast.walk(node) if isinstance(child, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if name == called or any(isinstance(argument, ast.Constant) and argument.value == name for argument in call.args):
            return True
    return False


@functools.cache
def groups() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Returns the table needed.toml, {group: {purpose: {module: what is needed of it}}}, which says how it is written."""
    return tomllib.loads(resources.files(__package__).joinpath("needed.toml").read_text())


def needed(*names: str) -> tuple[ApiCheck, ...]:
    """Returns the checks of the groups with these names in needed.toml, each once."""
    checks = [
        _check(purpose, module, place)
        for name in names
        for purpose, modules in groups()[name].items()
        for module, places in modules.items()
        for place in places
    ]
    return tuple(dict.fromkeys(checks))


def _check(purpose: str, module: str, place: str) -> ApiCheck:
    """The check that a line of needed.toml asks for."""
    match = PLACE.fullmatch(place)
    assert match is not None, place
    name, needs, caller = match.groups()
    called_by = f"{module}:{caller}" if caller is not None and ":" not in caller else caller
    of_objects = name.endswith(OBJECTS)
    return ApiCheck(
        purpose, f"{module}:{name.removesuffix(OBJECTS)}", tuple(needs.split(", ")) if needs else (), called_by, of_objects
    )  # fmt: skip


def find(where: str) -> Any:
    """Returns the object at "module:name.name".

    Raises:
        ImportError: if the module does not exist.
        AttributeError: if the module has no such name.
    """
    module, _, names = where.partition(":")
    return functools.reduce(getattr, filter(None, names.split(".")), importlib.import_module(module))


def check_api(*names: str) -> None:
    """Checks that the installed vLLM is new enough and has what the groups with these names in needed.toml list.

    Raises:
        BadInput: if it is too old or lacks something.
    """
    try:
        release = version("vllm")
    except PackageNotFoundError:
        release = str(find("vllm:__version__"))
    numbers = tuple(int(part) for part in release.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST:
        raise BadInput(f"vLLM {release} is older than {'.'.join(map(str, OLDEST))}, the first that the plugin knows")
    missing: dict[str, str] = {}
    for check in needed(*names):
        if lack := check.missing():
            missing.setdefault(check.what, lack)
    if missing:
        raise BadInput(f"vLLM {release} lacks what the plugin needs: {'; '.join(missing.values())}")


def lacks(*names: str) -> Iterator[str]:
    """Yields a sentence if `check_api` raises BadInput."""
    try:
        check_api(*names)
    except BadInput as error:
        yield str(error)
