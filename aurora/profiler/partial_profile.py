"""A profile that is not finished yet: valid for all that reads profiles, and counting can go on from it."""

import hashlib
from dataclasses import replace
from pathlib import Path

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.profiler.routing_counts import RoutingCounts
from aurora.types import Profile, ProfileOptions


def job_of(fingerprint: str, text: str, options: ProfileOptions) -> str:
    """A hash of all that decides what is counted, not of when it ends by precision or of how phases are timed."""
    counted = replace(options, precision=None, seed=0, share=1)
    return hashlib.sha256(repr((fingerprint, text, counted)).encode()).hexdigest()


def save_partial(profile: Profile, prompts: int, job: str, path: Path) -> None:
    """Keep what `prompts` prompts of `job` gave."""
    about = {**profile.provenance, "partial": f"the first {prompts} prompts", "served": str(prompts), "job": job}
    save(replace(profile, provenance=about), path)


def read_partial(path: Path, job: str) -> tuple[Profile, RoutingCounts]:
    """The profile so far, and what is counted, to go on from. BadInput for a profile of another job, or a finished one."""
    profile = load_profile(path)
    if profile.provenance.get("job") != job or not profile.provenance.get("served", "").isdecimal():
        raise BadInput(f"{path}: keeps another model's, text's or options' unfinished counts; remove it to start afresh")
    about = {name: said for name, said in profile.provenance.items() if name not in ("partial", "served", "job")}
    return replace(profile, provenance=about), RoutingCounts.of(profile, int(profile.provenance["served"]))
