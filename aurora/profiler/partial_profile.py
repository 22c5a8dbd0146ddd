"""Unfinished profiles: valid profiles from which counting can go on."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.profiler.routing_counts import RoutingCounts
from aurora.types import Profile, ProfileOptions

SAVE_S = 60.0  # from one saving of the counts to the next


def job_of(fingerprint: str, text: str, options: ProfileOptions) -> str:
    """Returns a hash of everything that decides what is counted.

    It leaves out the precision at which counting ends, and the options of timing.
    """
    counted = replace(options, precision=None, seed=0, share=1)
    return hashlib.sha256(repr((fingerprint, text, counted)).encode()).hexdigest()


class PartialProfile:
    """The file that keeps the counts of a job so far."""

    def __init__(self, path: Path | None, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._job, self._clock, self._saved_s = path, job, clock, 0.0

    def load(self) -> tuple[Profile, RoutingCounts] | None:
        """Returns the profile so far and its counts; None if there is no file yet."""
        if self._path is None or not self._path.exists():
            return None
        profile = load_profile(self._path)
        if profile.provenance.get("job") != self._job or not profile.provenance.get("served", "").isdecimal():
            whose = "another model's, text's or options' unfinished counts"
            raise BadInput(f"{self._path}: keeps {whose}; remove it to start afresh")
        provenance = {name: said for name, said in profile.provenance.items() if name not in ("partial", "served", "job")}
        return replace(profile, provenance=provenance), RoutingCounts.of(profile, int(profile.provenance["served"]))

    def begin(self) -> None:
        """Starts the clock: the first saving is due in SAVE_S seconds."""
        self._saved_s = self._clock()

    def save_if_due(self, build: Callable[[RoutingCounts], Profile], counts: RoutingCounts) -> None:
        """Saves build(counts) if the last saving is at least SAVE_S ago."""
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
        """Write the profile with what `load` needs to go on from it."""
        unfinished = {"partial": f"the first {prompts} prompts", "served": str(prompts), "job": self._job}
        save(replace(profile, provenance={**profile.provenance, **unfinished}), path)
