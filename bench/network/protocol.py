"""What commands share that measure on a network of namespaces: refusal elsewhere, repetitions by turns, sections of results."""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from net import refusal

BENCH = Path(__file__).resolve().parents[1]
sys.path.append(str(BENCH))  # after network, whose hosts.py and servers.py are others
from machine import machine  # noqa: E402
from tables import today  # noqa: E402

DEEP = 16 << 20  # bytes of a switch port's buffer that loses nothing
Way = TypeVar("Way")


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads a command's options; ends the process where no network can be built."""
    parser.add_argument("--out", type=Path, help="a file instead of the one in bench/results")
    chosen = parser.parse_args()
    if reason := refusal():
        print(f"skipped: {reason}")
        sys.exit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    return chosen


def by_turns(ways: Iterable[Way], repetitions: int) -> Iterator[tuple[int, Way]]:
    """The number of each repetition and each of the ways, which alternate their sequence."""
    in_sequence = list(ways)
    for number in range(repetitions):
        for way in in_sequence[:: 1 if number % 2 else -1]:
            yield number, way


class Results:
    """Results of one day in a file, a section for each setting; one that is measured anew replaces that of an earlier run.

    Args:
        name: of the file bench/results/NAME-DATE.md.
        title: its heading.
        out: a file instead; None: that one.
    """

    def __init__(self, name: str, title: str, out: Path | None = None) -> None:
        self._path = out or BENCH / "results" / f"{name}-{today()}.md"
        _, *parts = self._path.read_text().rstrip().split("\n\n## ") if self._path.exists() else [""]
        self._sections = {part.split("\n")[0]: f"## {part}" for part in parts}
        self._head = f"# {title}, {today()}\n\nOn {machine()}."
        self._begin()

    def _begin(self) -> None:
        """The next section begins."""
        self._began_s, self._load = time.perf_counter(), os.getloadavg()[0]

    def add(self, section: str, *lines: str) -> None:
        """Prints a section that was measured since the last one, with how, and writes the file."""
        script, *given = sys.argv
        command = shlex.join(["python", str(Path(script).resolve().relative_to(BENCH.parent)), *given])
        took_s, after = time.perf_counter() - self._began_s, os.getloadavg()[0]
        how = f"`{command}` took {took_s:.0f} s; load average {self._load:.1f} before, {after:.1f} after."
        self._sections[section] = "\n".join([f"## {section}", "", *lines, "", how])
        print(self._sections[section], flush=True)
        self._path.write_text("\n\n".join([self._head, *(self._sections[name] for name in sorted(self._sections))]) + "\n")
        print(f"wrote {self._path}", flush=True)
        self._begin()
