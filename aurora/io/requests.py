"""Reads request traces (.csv, JSON lines, benchmarks' results): arrival, tokens, prefixes and turns of each request.

The format, and with it the unit of its times, is recognised by its columns or keys: aurora's own; the Azure LLM inference
traces (Splitwise, arXiv:2311.18677); Mooncake (arXiv:2407.00079), in milliseconds; Bailian (arXiv:2506.02634), which has
Mooncake's keys, in seconds; BurstGPT (arXiv:2401.17644); and the detailed results of vLLM's and SGLang's serving benchmarks.
"""

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, field

from aurora.errors import BadInput, shown
from aurora.io.files import csv_rows, json_lines, json_value, read_text
from aurora.io.schema import FileTable, converted
from aurora.types.requests import MOST_REQUESTS, Requests

MOST_TOKENS = 1 << 30  # of a request's input or output
Time = Annotated[float, Meta(ge=0, lt=1e15)]


@dataclass(frozen=True)
class TraceFormat:
    """A format of request traces.

    Attributes:
        columns: names of the columns or keys of a request's time, input tokens and output tokens.
        unit: what times are: "seconds", "milliseconds" or "dates".
        mark: a further column that tells it from a format with the same ones.
        failed: whether no output tokens mean a request that failed, and is left out.
        sorted: whether requests are in the sequence of their times.
    """

    columns: tuple[str, str, str]
    unit: str = "seconds"
    mark: str = ""
    failed: bool = False
    sorted: bool = True


TRACE_FORMATS: dict[str, TraceFormat] = {
    "aurora": TraceFormat(("arrival_s", "input_tokens", "output_tokens")),
    "azure": TraceFormat(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), "dates"),
    "bailian": TraceFormat(("timestamp", "input_length", "output_length"), mark="chat_id"),
    "mooncake": TraceFormat(("timestamp", "input_length", "output_length"), "milliseconds"),
    "burstgpt": TraceFormat(("Timestamp", "Request tokens", "Response tokens"), failed=True),
    "bench": TraceFormat(("start_times", "input_lens", "output_lens"), failed=True, sorted=False),
}


@cache
def _row_of(form: TraceFormat) -> Any:
    """The FileTable of a format's rows, whose columns are under our names."""
    time, inputs, outputs = form.columns
    at = datetime.datetime if form.unit == "dates" else Time
    entries = [
        ("at", at | None, field(default=None, name=time)),  # which a later turn may lack
        ("inputs", Annotated[int, Meta(ge=1, le=MOST_TOKENS)], field(name=inputs)),
        ("outputs", Annotated[int, Meta(ge=0 if form.failed else 1, le=MOST_TOKENS)], field(name=outputs)),
        *(("session_id", int | str | None, None), ("delay", Time | None, None), ("hash_ids", list[int | str] | None, None)),
    ]
    return msgspec.defstruct("Request", entries, bases=(FileTable,), kw_only=True)


def _seconds(time: Any, form: TraceFormat) -> float:
    """Seconds of a time; a date without a zone is in UTC."""
    if isinstance(time, datetime.datetime):
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
    return float(time) / (1e3 if form.unit == "milliseconds" else 1)


def load_requests(path: str | Path) -> Requests:
    """Read a request trace. Times are shifted so that the first request arrives at 0 s.

    Rows may also have `hash_ids`, the blocks of a prompt's prefix, and `session_id` with `delay`: a later turn, which is sent
    `delay` (in the unit of the times) after the turn before it is answered.

    Args:
        path: the file. Its format is the one that has the columns of the first row; further columns or keys are ignored.

    Raises:
        BadInput: if the file cannot be read, has other columns or no rows, a row is not a time and two numbers of tokens, or
            times go backwards.
    """
    path = Path(path)
    rows = iter(_json_rows(path) if read_text(path).lstrip()[:1] == "{" else csv_rows(path))
    if (first := next(rows, None)) is None:
        raise BadInput(f"{path}: expected requests, found none")
    name = _recognised(path, *first)
    known, failed, last_s = TRACE_FORMATS[name], 0, 0.0
    session_of: dict[Any, tuple[int, float]] = {}  # by session_id: the session's number and first arrival
    number_of: dict[Any, int] = {}  # of a block
    made: list[tuple[Any, ...]] = []  # seconds, input, output, session, delay, blocks
    for number, row in chain([first], rows):
        where = f"{path}: line {number}"
        request = converted(row, _row_of(known), where, strict=False)
        begun = None if request.session_id is None or request.delay is None else session_of.get(request.session_id)
        if request.at is None and begun is None:
            raise BadInput(f"{where}: '{known.columns[0]}' is missing")
        if not request.outputs:
            failed += 1
            continue
        delay_s = _seconds(request.delay, known) if begun else 0.0
        if begun is None:
            begun = len(made), _seconds(request.at, known)
            if known.sorted and begun[1] < last_s:
                raise BadInput(f"{where}: expected times that never fall, found {row[known.columns[0]]} after a later one")
            last_s = begun[1]
        if request.session_id is not None:
            session_of[request.session_id] = begun
        blocks = tuple(number_of.setdefault(block, len(number_of)) for block in request.hash_ids or ())
        made.append((begun[1], request.inputs, request.outputs, begun[0], delay_s, blocks))
        if len(made) > MOST_REQUESTS:
            raise BadInput(f"{path}: expected at most {MOST_REQUESTS} requests, found more")
    if not made:
        raise BadInput(f"{path}: expected requests, found {failed} that failed")
    at_s, inputs, outputs, sessions, delays, blocks_Q = zip(*sorted(made, key=lambda request: request[0]), strict=True)
    turns = len(made) - len({*sessions})
    per_block = max((-(-tokens // len(of)) for tokens, of in zip(inputs, blocks_Q, strict=True) if of), default=0)
    said = f"{name}: times " + (f"in {known.unit}" if known.unit != "dates" else "are dates")
    said += f"; later turns, each sent when the one before is answered: {turns}" if turns else ""
    said += f"; failed and left out: {failed}" if failed else ""
    return Requests(
        np.array(at_s) - at_s[0],
        np.array(inputs),
        np.array(outputs),
        np.array(sessions) if turns else None,
        np.array(delays) if turns else None,
        blocks_Q if any(blocks_Q) else (),
        1 << (per_block - 1).bit_length() if per_block else 0,
        said,
    )


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
