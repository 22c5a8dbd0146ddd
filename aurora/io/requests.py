"""Reads request traces (.csv, JSON lines): the arrival and the numbers of input and output tokens of each request.

The columns have the names of aurora, of the Azure LLM inference traces (Splitwise, arXiv:2311.18677) or of Mooncake
(arXiv:2407.00079).
"""

import csv
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.files import json_of_line, numbered_lines, read_text
from aurora.types.read_numbers import finite_number, whole_number
from aurora.types.requests import MOST_REQUESTS, Requests

MOST_TOKENS = 1 << 30  # of a request's input or output


def _finite(value: Any) -> float:
    """Seconds or milliseconds from zero on."""
    number = finite_number(value)
    if not 0 <= number < 1e15:
        raise ValueError
    return number


def _date(value: Any) -> float:
    """Seconds of a date and time such as 2023-11-16 18:17:03.9799600; digits below a microsecond are dropped."""
    moment = datetime.datetime.fromisoformat(str(value).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


REQUEST_COLUMNS: dict[tuple[str, str, str], Callable[[Any], float]] = {  # time, input, output: seconds from the time
    ("arrival_s", "input_tokens", "output_tokens"): _finite,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _date,
    ("timestamp", "input_length", "output_length"): lambda value: _finite(value) / 1e3,
}


def load_requests(path: str | Path) -> Requests:
    """Read a request trace. Requests are sorted by arrival, and times are shifted so that the first one arrives at 0 s.

    Args:
        path: the file. Its columns, or the keys of each line, are named as one of the triples of REQUEST_COLUMNS; other columns
            are ignored.

    Raises:
        BadInput: if the file cannot be read, has other columns or no rows, or a row is not a time and two numbers of tokens.
    """
    path = Path(path)
    text = read_text(path)
    rows = _json_rows(path) if text.lstrip()[:1] == "{" else _csv_rows(path, text)
    requests: list[tuple[float, int, int]] = []
    for number, row in rows:
        requests.append(_request(path, number, row))
        if len(requests) > MOST_REQUESTS:
            raise BadInput(f"{path}: expected at most {MOST_REQUESTS} requests, found more")
    if not requests:
        raise BadInput(f"{path}: expected requests, found none")
    requests.sort(key=lambda request: request[0])
    at_s_Q = np.array([at_s for at_s, _, _ in requests])
    tokens_Q2 = np.array([tokens for _, *tokens in requests], dtype=np.int64)
    return Requests(at_s_Q - at_s_Q[0], tokens_Q2[:, 0], tokens_Q2[:, 1])


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in numbered_lines(path):
        row = json_of_line(line)
        if not isinstance(row, dict):
            raise BadInput(f"{path}, line {number}: expected a JSON object, found {line[:60]!r}")
        yield number, row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise BadInput(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _request(path: Path, number: int, row: Mapping[str, Any]) -> tuple[float, int, int]:
    """The seconds of a row, and its tokens."""
    names = next((names for names in REQUEST_COLUMNS if set(names) <= set(row)), None)
    if names is None:
        known = " or ".join(",".join(columns) for columns in REQUEST_COLUMNS)
        raise BadInput(f"{path}, line {number}: expected the columns {known}, found {','.join(map(str, row))[:100]!r}")
    values = [row[name] for name in names]
    try:
        at_s, tokens = REQUEST_COLUMNS[names](values[0]), [whole_number(value) for value in values[1:]]
        if not all(1 <= count <= MOST_TOKENS for count in tokens):
            raise ValueError
    except (ValueError, BadInput):
        said = ",".join(map(str, values))[:100]
        raise BadInput(
            f"{path}, line {number}: expected a time from zero on and two numbers of tokens above zero, found {said!r}"
        ) from None
    return at_s, tokens[0], tokens[1]
