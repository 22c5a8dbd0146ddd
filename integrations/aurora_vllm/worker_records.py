"""Traffic records of a vLLM worker, written to rank-R.npz periodically, on command and at the end."""

import atexit
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aurora.errors import BadInput
from aurora.io.plugin_records import save_record
from aurora.types.arrays import IntArray
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import ChoiceCounts, EngineFacts, Span, TrafficRecorder

LOG = logging.getLogger("vllm.aurora")
COMMANDS = ("start", "write", "stop")


class WorkerRecords:
    """Manages one rank's traffic records, each in a separate folder.

    The record in the settings' folder begins with serving. Commands start further records in named subfolders; records are
    independent.

    Attributes:
        between_passes: lock that each forward pass holds; whoever else holds it may read counts and timings.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.between_passes = threading.RLock()
        self._rank, self._folder, self._every_s = rank, settings.record, settings.record_every_s
        self._recorders: dict[Path, TrafficRecorder] = {}
        self._facts: EngineFacts | None = None
        self._on_write: Callable[[IntArray], None] = lambda _: None
        self._on_failure: Callable[[], None] = lambda: None
        self._saving = threading.Lock()
        self._ended = threading.Event()
        self._device: int | None = None
        self._take: Callable[[], IntArray | None] = lambda: None
        self._last_step = 0  # of the passes whose counts `_take` returns

    @property
    def dense(self) -> bool:
        """True if a record needs the counts and times of each pass by itself, as one that has just begun."""
        return any(recorder.dense for recorder in self._recorders.values())

    @property
    def active(self) -> bool:
        """True if at least one record is being recorded."""
        return bool(self._recorders)

    def begin(
        self,
        facts: EngineFacts,
        on_write: Callable[[IntArray], None] = lambda _: None,
        on_failure: Callable[[], None] = lambda: None,
        take: Callable[[], IntArray | None] = lambda: None,
    ) -> None:
        """Starts the record in the settings' folder, if one is set, and the writing thread. Called after loading.

        Args:
            facts: metadata about the model and this rank.
            on_write: called, in any thread, with the tokens (T, L, E) of the settings' folder's record after each write.
            on_failure: called, in any thread, when a record has ended because it could not be written.
            take: returns the (L, E) sum of the counts of passes that `add_pass` was told of; None: there are none.
        """
        self._facts, self._on_write, self._on_failure, self._take = facts, on_write, on_failure, take
        if self._folder is None:
            return
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._folder = self._folder.resolve()
        self._recorders[self._folder] = TrafficRecorder(facts)
        threading.Thread(target=self._write_periodically, daemon=True, name="aurora-records").start()
        atexit.register(self.end)

    def end(self) -> None:
        """Writes all records a last time. Called when the worker ends."""
        if not self._ended.is_set():
            self._ended.set()
            self._write_all()

    # What is recorded

    def add_timing(self, layer: int, phase: str, seconds: Span | float | None, tokens: int = 0, active: int = 1) -> None:
        """Records the duration of a phase of a layer; see `TrafficRecorder.add_timing`."""
        for recorder in self._recorders.values():
            recorder.add_timing(layer, phase, seconds, tokens, active)

    def add_pass(self, step: int) -> None:
        """Ends a forward pass of real tokens whose counts are in the sum that `take` returns."""
        self._last_step = step

    def _take_sums(self) -> None:
        """Adds the sum of counts to all records."""
        if (counts_LE := self._take()) is not None:
            for recorder in self._recorders.values():
                recorder.count(self._last_step, range(len(counts_LE)), counts_LE)

    def end_pass(self, step: int, own: ChoiceCounts, local: ChoiceCounts, *layers: Any) -> None:
        """Ends a forward pass of real tokens that is counted by itself; see `TrafficRecorder.end_pass`."""
        self._take_sums()
        for recorder in self._recorders.values():
            recorder.end_pass(step, own, local, *layers)

    # Commands

    def command(self, *words: Any) -> str:
        """Runs a recording command. Returns a sentence for the user on its success or failure.

        Args:
            words: "start" (a new record), "write", or "stop" (write, then end the record). A second word names a subfolder of
                the settings' folder with the record; without it, the command is for the record in the settings' folder.
        """
        try:
            return f"rank {self._rank}: {self._perform(*self._parsed(words))}"
        except BadInput as error:
            return f"rank {self._rank}: refused: {error}"

    def _parsed(self, words: tuple[Any, ...]) -> tuple[str, Path | None]:
        """The command's name and the folder that it names. Raises BadInput for what is no command."""
        if not words or words[0] not in COMMANDS or len(words) > 2 or not isinstance(words[-1], str):
            line = " ".join(map(str, words)) or "nothing"
            raise BadInput(f"expected start, write or stop, and at most one folder, found {line}")
        if self._folder is None:
            raise BadInput('expected "record" among the settings of the server, the folder that it may write to, found none')
        if len(words) == 1:
            return words[0], None
        try:
            path = (self._folder / words[1]).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise BadInput(f"expected a folder, found {words[1]!r}: {error}") from None
        if not path.is_relative_to(self._folder):
            raise BadInput(f"expected a folder in {self._folder}, the server's record, found {words[1]}")
        return words[0], path

    def _perform(self, name: str, named: Path | None) -> str:
        assert self._folder is not None
        folder = named or self._folder
        if name == "start":
            if self._facts is None:
                raise BadInput("start: expected a server that can record, found one that cannot; its log says why")
            if named is not None and folder in self._recorders:
                raise BadInput(f"start: {folder} is being recorded already")
            with self.between_passes:
                self._take_sums()  # which are not of the new record
                self._recorders[folder] = TrafficRecorder(self._facts)
            return f"recording to {folder}"
        if folder not in self._recorders:
            return f"records nothing to {folder}"
        path = self._write(folder)
        if name == "stop":
            with self.between_passes:
                del self._recorders[folder]
        return f"wrote {path}"

    # Writing

    def _write_periodically(self) -> None:
        while not self._ended.wait(self._every_s):
            self._write_all()

    def _write_all(self) -> None:
        """Writes all records. One that cannot be written ends with a warning."""
        for folder in list(self._recorders):
            try:
                self._write(folder)
            except BadInput as error:
                LOG.warning("aurora: %s; recording stops", error)
                self._on_failure()
                with self.between_passes:
                    self._recorders.pop(folder, None)

    def _write(self, folder: Path) -> Path | None:
        """Writes the record to a folder and returns its file; None if the record has been stopped."""
        with self._saving:
            with self.between_passes:
                if (recorder := self._recorders.get(folder)) is None:
                    return None
                if self._device is not None:  # observations are made on the stream of another thread
                    torch.cuda.synchronize(self._device)
                self._take_sums()
                record = recorder.record()
            path = save_record(record, folder)
        if folder == self._folder:
            self._on_write(record.tokens_TLE)
        return path
