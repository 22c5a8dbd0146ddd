"""Parses numbers in options, tables, environment variables and JSON; all readers of the package accept the same forms."""

import re
from typing import Any

from aurora.errors import BadInput, shown

WHOLE = re.compile(r"[+-]?[0-9]{1,400}")  # Python reads 1_0 and the digits of all scripts, too
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
MOST_DIGITS = 400  # of a number's text
SPACES = " \t\r\n"


def whole_number(value: Any) -> int:
    """Returns an int from an int, or from text of ASCII digits such as " 64 ", with or without spaces around it.

    Raises:
        BadInput: if it is anything else, such as true or false.
    """
    if type(value) is int or (type(value) is float and value.is_integer()):
        return int(value)
    if isinstance(value, str) and WHOLE.fullmatch(value.strip(SPACES)):
        return int(value)
    raise BadInput(f"expected a whole number, found {shown(value)}")


def finite_number(value: Any) -> float:
    """Returns a finite float from a number, or from ASCII text such as "-1.5e3", with or without spaces around it.

    Raises:
        BadInput: if it is anything else, such as true or false.
    """
    text = isinstance(value, str) and len(value) <= MOST_DIGITS and NUMBER.fullmatch(value.strip(SPACES))
    if text or type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if abs(number) < float("inf"):
            return number
    raise BadInput(f"expected a number, found {shown(value)}")
