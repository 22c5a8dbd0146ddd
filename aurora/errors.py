"""Failures that a user can mend. Everything else is a bug and stays an assertion or a traceback."""

import importlib
import reprlib
from collections.abc import Collection

__all__ = ["AuroraError", "BadInput", "BrokenPlan", "InfeasiblePlan", "MissingDependency", "RankFailed"]


class AuroraError(Exception):
    """Base of every error that is shown to the user as one sentence, with exit code 2."""


class BadInput(AuroraError):
    """A file, option or array is not what it should be: says what, where, what was expected and what was found."""


class InfeasiblePlan(AuroraError):
    """The inputs are well formed, but no plan exists for them."""


class BrokenPlan(AuroraError):
    """The checker found that a plan or schedule does not do what it claims."""


class RankFailed(AuroraError):
    """A rank died, hung, or failed during a run in a way that ends its work."""


class MissingDependency(AuroraError):
    """An optional package, or a driver, is needed; for a package the message holds the pip command that installs it."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has no message.

    Example:
        >>> first_line(ValueError("expected 2\\nfound 3")), first_line(TimeoutError())
        ('expected 2', 'TimeoutError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_SHORT = reprlib.Repr()  # of lists that hold one another, as by YAML's aliases
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring = 4, 20, 20, 60


def shown(value: object) -> str:
    """Returns a value as messages show what was found: in words where it is None, and cut to what fits a sentence."""
    show = _SHORT.repr if isinstance(value, list | dict) else repr
    try:
        return "none" if value is None else show(value).replace("\n", " ")[:60]
    except ValueError:  # more digits than Python writes
        return "a number of too many digits"


def plural(count: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 step" and "2 steps"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def network_reason(error: BaseException) -> str:
    """Returns why nothing answers at an address, such as "Connection refused", by the error of asking there."""
    why = getattr(error, "reason", error)  # of a URLError
    return str(getattr(why, "strerror", None) or why)


def need(*modules: str, extra: str = "run") -> None:
    """Check that all of `modules` can be imported.

    Raises:
        MissingDependency: if one cannot; with the pip command that installs `extra`.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingDependency(f'{name} is needed: pip install "aurora-moe[{extra}]" ({error})') from None


def check_one_of(option: str, value: str, known: Collection[str]) -> None:
    """Raises BadInput unless the value of an option is one of the names that are known.

    Args:
        option: the option's name.
        value: its value.
        known: the names.
    """
    if value not in known:
        raise BadInput(f"`{option}`: expected one of {', '.join(known)}, found {shown(value)}")
