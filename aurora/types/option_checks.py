"""Fields of options dataclasses: defaults, limits, and what the command line shows of them; the check of their numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from aurora.errors import BadInput, check_one_of

LONGEST_S = 1e6  # seconds that an option can ask to wait: eleven days
MOST_PROCESSES = 256  # that an option can ask for on one machine
MOST_TOKENS = 1 << 20  # of a prompt or an answer
MOST = 1 << 40  # of what is only counted
MOST_SEED = 2**63 - 1
MOST_PORT = 65535


@dataclass(frozen=True)
class OptionField:
    """Limits of an options dataclass's field, and its option on the command line, whose help is the field's line under Args.

    Attributes:
        above: the value is more than this; None: no such limit.
        least: the value is at least this; None: no such limit.
        most: the value is at most this, far above use and below what would hang or fill the memory; None: no limit.
        one_of: the names that the value, or each of its values, can be; empty: any.
        flag: the option as typed; empty: the field's name with dashes.
        panel: panel of `--help-all`; an option without one is shown by `--help` too.
        choices: kinds of CHOICES, with spaces between, whose names complete the option.
        names: text after the help, each {kind} of CHOICES in it becomes names; None: those of `one_of` or of `choices`, unless
            the help has such a {kind} or all names.
        metavar: what help shows in place of the value; empty: its type.
        read: reads the value from the command line's text; None: the field's type does.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    one_of: Sequence[str] = ()
    flag: str = ""
    panel: str | None = None
    choices: str = ""
    names: str | None = None
    metavar: str = ""
    read: Callable[[str], Any] | None = None


def option(default: Any, **how: Any) -> Any:
    """Returns a dataclass field with this default that the command line offers as an option; `how`: see OptionField."""
    return field(default=default, metadata={"option": OptionField(**how)})


def check_options(options: Any) -> None:
    """Check the fields of an options dataclass against the limits of their OptionField.

    Raises:
        BadInput: if a value is neither None nor within its limits.
    """
    for each in fields(options):
        if (limits := each.metadata.get("option")) is not None:
            check_value(each.name, getattr(options, each.name), limits)


def check_value(name: str, value: Any, limits: OptionField) -> None:
    """Raises BadInput if the value of an option, or one of its values, is neither None nor within the limits."""
    if isinstance(value, list | tuple):
        for each in value:
            check_value(name, each, limits)
    elif value is not None:
        if limits.one_of:
            check_one_of(name, value, limits.one_of)
        if limits.above is not None and not limits.above < value < float("inf"):
            raise BadInput(f"`{name}`: expected more than {_written(limits.above)}, found {value}")
        if limits.least is not None and not limits.least <= value < float("inf"):
            raise BadInput(f"`{name}`: expected {_written(limits.least)} or more, found {value}")
        at_most(name, value, limits.most)


def at_most(name: str, value: float | None, most: float | None) -> None:
    """Raises BadInput if an option of this name is more than `most`."""
    if value is not None and most is not None and value > most:
        raise BadInput(f"`{name}`: expected at most {most}, found {value}")


def _written(number: float) -> str:
    return "zero" if number == 0 else f"{number:g}"
