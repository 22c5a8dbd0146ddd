"""The record that a vLLM worker writes of its traffic: rank-R.npz, periodically and on command."""

import logging
import time
from pathlib import Path

from aurora.errors import BadInput
from aurora.io.engine_records import save_record
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import EngineFacts, TrafficRecorder

LOG = logging.getLogger("vllm.aurora")


class WorkerRecords:
    """Starts, stops and writes one rank's record.

    Attributes:
        recorder: counts traffic; None while nothing is recorded.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.recorder: TrafficRecorder | None = None
        self._rank, self._folder, self._every_s = rank, settings.record, settings.record_every_s
        self._facts: EngineFacts | None = None
        self._written_s = time.monotonic()

    def begin(self, facts: EngineFacts) -> None:
        """Begins to record if the settings name a folder. Called once the model is loaded."""
        self._facts = facts
        if self._folder is not None:
            self.recorder = TrafficRecorder(facts)

    def command(self, name: str, folder: str | None = None) -> str:
        """Performs a recording command. Returns the sentence to show.

        Args:
            name: "start" (a new record), "write", or "stop" (writes, then stops).
            folder: for "start", the folder to record into; None: the last one.

        Raises:
            BadInput: if the command is unknown, or there is no folder to record into.
        """
        if name == "start":
            self._folder = Path(folder) if folder else self._folder
            if self._folder is None or self._facts is None:
                raise BadInput("start: expected a folder to record into")
            self.recorder = TrafficRecorder(self._facts)
            return f"rank {self._rank}: recording"
        if name not in ("stop", "write"):
            raise BadInput(f"expected start, stop or write, found {name!r}")
        if self.recorder is None:
            return f"rank {self._rank}: records nothing"
        path = self._write(self.recorder)
        if name == "stop":
            self.recorder = None
        return f"rank {self._rank}: wrote {path}"

    def write_if_due(self) -> bool:
        """Writes the record if `record_every_s` has passed since the last time. Returns whether it had.

        If the file cannot be written, recording stops with one warning.
        """
        if time.monotonic() - self._written_s < self._every_s:
            return False
        self._written_s = time.monotonic()
        if self.recorder is not None:
            try:
                self._write(self.recorder)
            except OSError as error:
                LOG.warning("aurora: cannot write to %s: %s; recording stops", self._folder, error.strerror)
                self.recorder = None
        return True

    def _write(self, recorder: TrafficRecorder) -> Path:
        assert self._folder is not None
        self._written_s = time.monotonic()
        return save_record(recorder.record(), self._folder)
