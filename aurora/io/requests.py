"""Reads request traces (.csv, JSON lines, benchmarks' results): arrival, tokens, prefixes and turns of each request.

The format, and with it the unit of its times, is recognised by its columns or keys: aurora's own; the Azure LLM inference
traces (Splitwise, arXiv:2311.18677); Mooncake (arXiv:2407.00079), in milliseconds; Bailian (arXiv:2506.02634), which has
Mooncake's keys, in seconds; BurstGPT (arXiv:2401.17644); and the detailed results of vLLM's and SGLang's serving benchmarks.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput, check_one_of, shown
from aurora.io.files import csv_rows, json_lines, json_value, read_text
from aurora.types.read_numbers import finite_number, whole_number
from aurora.types.requests import MOST_REQUESTS, Requests

MOST_TOKENS = 1 << 30  # of a request's input or output


def _finite(value: Any) -> float:
    """Seconds or milliseconds from zero on."""
    number = finite_number(value)
    if not 0 <= number < 1e15:
        raise ValueError
    return number


def _milliseconds(value: Any) -> float:
    return _finite(value) / 1e3


def _date(value: Any) -> float:
    """Seconds of a date and time such as 2023-11-16 18:17:03.9799600; digits below a microsecond are dropped."""
    moment = datetime.datetime.fromisoformat(str(value).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


@dataclass(frozen=True)
class TraceFormat:
    """A format of request traces.

    Attributes:
        columns: names of the columns or keys of a request's time, input tokens and output tokens.
        seconds: function from a time to seconds.
        unit: what times are, in words.
        mark: a further column that tells it from a format with the same ones.
        failed: whether no output tokens mean a request that failed, and is left out.
        sorted: whether requests are in the sequence of their times.
    """

    columns: tuple[str, str, str]
    seconds: Callable[[Any], float]
    unit: str = "seconds"
    mark: str = ""
    failed: bool = False
    sorted: bool = True


TRACE_FORMATS: dict[str, TraceFormat] = {
    "aurora": TraceFormat(("arrival_s", "input_tokens", "output_tokens"), _finite),
    "azure": TraceFormat(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date, "dates"),
    "bailian": TraceFormat(("timestamp", "input_length", "output_length"), _finite, mark="chat_id"),
    "mooncake": TraceFormat(("timestamp", "input_length", "output_length"), _milliseconds, "milliseconds"),
    "burstgpt": TraceFormat(("Timestamp", "Request tokens", "Response tokens"), _finite, failed=True),
    "bench": TraceFormat(("start_times", "input_lens", "output_lens"), _finite, failed=True, sorted=False),
}


def load_requests(path: str | Path, form: str | None = None) -> Requests:
    """Read a request trace. Times are shifted so that the first request arrives at 0 s.

    Rows may also have `hash_ids`, the blocks of a prompt's prefix, and `session_id` with `delay`: a later turn, which is sent
    `delay` (in the unit of the times) after the turn before it is answered.

    Args:
        path: the file. Columns or keys beyond those of its format are ignored.
        form: a name in TRACE_FORMATS; None: the format that has the columns of the first row.

    Raises:
        BadInput: if the file cannot be read, has other columns or no rows, a row is not a time and two numbers of tokens, or
            times go backwards.
    """
    path = Path(path)
    rows = _json_rows(path) if read_text(path).lstrip()[:1] == "{" else csv_rows(path)
    trace: _Trace | None = None
    for number, row in rows:
        if trace is None:
            trace = _Trace(path, _recognised(path, number, row) if form is None else form)
        trace.add(number, row)
    if trace is None or not trace.rows:
        raise BadInput(f"{path}: expected requests, found " + (f"{trace.failed} that failed" if trace else "none"))
    return trace.requests()


def _recognised(path: Path, number: int, row: Mapping[str, Any]) -> str:
    """The first format whose columns a row has."""
    for name, form in TRACE_FORMATS.items():
        if {*form.columns, form.mark} - {""} <= set(row):
            return name
    known = " or ".join(",".join(form.columns) for form in TRACE_FORMATS.values() if not form.mark)
    raise BadInput(f"{path}: line {number}: expected the columns {known}, found {','.join(map(str, row))[:100]!r}")


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of JSON lines; a benchmark's result is one line, or one object, with a list for each column."""
    columns = TRACE_FORMATS["bench"].columns
    try:
        rows = [(1, json_value(read_text(path)))]
    except BadInput:
        rows = [*json_lines(path)]
    for number, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{path}: line {number}: expected a JSON object, found {shown(row)}")
        if "input_lens" not in row:
            yield number, row
            continue
        lists = [row.get(column) for column in columns]
        if not all(isinstance(values, list) for values in lists) or len({len(values) for values in lists if values}) > 1:
            raise BadInput(
                f"{path}: expected lists {', '.join(columns)} of one length, as of a benchmark saved with its details, found "
                + ", ".join(f"{name} {len(v) if isinstance(v, list) else '-'}" for name, v in zip(columns, lists, strict=True))
            )
        for at, values in enumerate(zip(*lists, strict=True), 1):
            yield at, dict(zip(columns, values, strict=True))


class _Trace:
    """The requests of a file, row by row."""

    def __init__(self, path: Path, name: str) -> None:
        check_one_of("trace_format", name, TRACE_FORMATS)
        self.name, self.form = name, TRACE_FORMATS[name]
        self.rows: list[tuple[float, int, int, int, float]] = []  # seconds, input, output, session, delay
        self.failed = 0
        self._path = path
        self._blocks: list[tuple[int, ...]] = []
        self._number_of: dict[str, int] = {}  # of a block
        self._session_of: dict[str, tuple[int, float]] = {}  # by session_id: the session's number and first arrival
        self._last_s = 0.0

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Adds a row.

        Raises:
            BadInput: if it is not a request of the format, or earlier than the one before.
        """
        where, said_id = f"{self._path}: line {number}", row.get("session_id")
        begun = None if said_id is None or row.get("delay") is None else self._session_of.get(str(said_id))
        time, *lengths = self.form.columns
        if missing := {*lengths, *(() if begun else (time,))} - set(row):
            raise BadInput(
                f"{where}: expected the columns {','.join(self.form.columns)}, found no {', '.join(sorted(missing))}"
            )
        try:
            inputs, outputs = (whole_number(row[name]) for name in lengths)
            at_s = begun[1] if begun else self.form.seconds(row[time])
            delay_s = self.form.seconds(row["delay"]) if begun else 0.0
            failed = self.form.failed and outputs == 0
            if not 1 <= inputs <= MOST_TOKENS or not (failed or 1 <= outputs <= MOST_TOKENS):
                raise ValueError
        except (ValueError, BadInput):
            said = ",".join(str(row.get(name)) for name in self.form.columns)[:100]
            raise BadInput(
                f"{where}: expected a time from zero on and two numbers of tokens above zero, found {said!r}"
            ) from None
        if failed:
            self.failed += 1
            return
        if not begun:
            if self.form.sorted and at_s < self._last_s:
                raise BadInput(f"{where}: expected times that never fall, found {row[time]} after a later one")
            self._last_s = at_s
            begun = len(self.rows), at_s
        if said_id is not None:
            self._session_of[str(said_id)] = begun
        self.rows.append((at_s, inputs, outputs, begun[0], delay_s))
        self._blocks.append(self._numbered(where, row.get("hash_ids") or []))
        if len(self.rows) > MOST_REQUESTS:
            raise BadInput(f"{self._path}: expected at most {MOST_REQUESTS} requests, found more")

    def _numbered(self, where: str, blocks: Any) -> tuple[int, ...]:
        """Numbers of a prompt's blocks, which a file names by numbers or texts."""
        if not isinstance(blocks, list) or not all(isinstance(block, int | str) for block in blocks):
            raise BadInput(f"{where}: hash_ids: expected a list of blocks, found {str(blocks)[:60]!r}")
        return tuple(self._number_of.setdefault(str(block), len(self._number_of)) for block in blocks)

    def requests(self) -> Requests:
        """Returns all rows, by time; a later turn has the time of its session's first."""
        order = sorted(range(len(self.rows)), key=lambda at: self.rows[at][0])
        at_s, inputs, outputs, sessions, delays = zip(*(self.rows[at] for at in order), strict=True)
        blocks = tuple(self._blocks[at] for at in order) if any(self._blocks) else ()
        per_block = (
            max((-(-tokens // len(of)) for tokens, of in zip(inputs, blocks, strict=True) if of), default=0) if blocks else 0
        )
        turns = len(self.rows) - len(set(sessions))
        said = f"{self.name}: times in {self.form.unit}" if self.form.unit != "dates" else f"{self.name}: times are dates"
        said += f"; later turns, each sent when the one before is answered: {turns}" if turns else ""
        said += f"; failed and left out: {self.failed}" if self.failed else ""
        return Requests(
            np.array(at_s) - at_s[0],
            np.array(inputs),
            np.array(outputs),
            np.array(sessions) if turns else None,
            np.array(delays) if turns else None,
            blocks,
            1 << (per_block - 1).bit_length() if per_block else 0,
            said,
        )
