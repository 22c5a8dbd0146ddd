"""Unfinished profiles: valid for all that reads profiles, and counting can go on from them."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.profiler.routing_counts import RoutingCounts
from aurora.types import Profile, ProfileOptions

SAVE_S = 60.0  # between two savings of what is counted so far


def job_of(fingerprint: str, text: str, options: ProfileOptions) -> str:
    """A hash of all that decides what is counted; not of when counting ends by precision, nor of how phases are timed."""
    counted = replace(options, precision=None, seed=0, share=1)
    return hashlib.sha256(repr((fingerprint, text, counted)).encode()).hexdigest()


class PartialProfile:
    """The file that keeps what a job has counted so far. path: None keeps nothing. clock: seconds, of any origin."""

    def __init__(self, path: Path | None, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._job, self._clock, self._saved_s = path, job, clock, 0.0

    def load(self) -> tuple[Profile, RoutingCounts] | None:
        """The profile so far and its counts, None where there is none yet.

        Raises: BadInput: if the file is another job's, or a finished profile.
        """
        if self._path is None or not self._path.exists():
            return None
        profile = load_profile(self._path)
        if profile.provenance.get("job") != self._job or not profile.provenance.get("served", "").isdecimal():
            whose = "another model's, text's or options' unfinished counts"
            raise BadInput(f"{self._path}: keeps {whose}; remove it to start afresh")
        provenance = {name: said for name, said in profile.provenance.items() if name not in ("partial", "served", "job")}
        return replace(profile, provenance=provenance), RoutingCounts.of(profile, int(profile.provenance["served"]))

    def begin(self) -> None:
        """Counting begins: SAVE_S from now the first saving is due."""
        self._saved_s = self._clock()

    def save_if_due(self, build: Callable[[RoutingCounts], Profile], counts: RoutingCounts) -> None:
        """Saves build(counts) if the last saving is SAVE_S ago."""
        if self._path is not None and self._clock() - self._saved_s >= SAVE_S:
            self._save(build(counts), counts.prompts, self._path)
            self._saved_s = self._clock()

    def save_interrupted(self, build: Callable[[RoutingCounts], Profile], counts: RoutingCounts) -> str:
        """Saves build(counts) unless nothing is counted. Returns a sentence for the user."""
        if self._path is None or not counts.prompts:
            return "nothing is kept"
        self._save(build(counts), counts.prompts, self._path)
        return f"{self._path} keeps the counts of {counts.prompts} prompts; the same command goes on from there"

    def _save(self, profile: Profile, prompts: int, path: Path) -> None:
        unfinished = {"partial": f"the first {prompts} prompts", "served": str(prompts), "job": self._job}
        save(replace(profile, provenance={**profile.provenance, **unfinished}), path)
