"""Writes reports on plans to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.errors import BadInput, check_one_of
from aurora.io.files import write_bytes, write_text
from aurora.reports.html import page
from aurora.reports.inputs import FORMS, ReportInputs
from aurora.reports.perfetto import perfetto
from aurora.types import Plan, Profile, Trace


def report(
    plan: Plan,
    traces: Mapping[str, Trace] | None = None,
    profiles: Sequence[Profile] = (),
    *,
    output: str | Path,
    format: str = "html",
    missing_profiles: str = "",
    progress: Progress = no_progress,
) -> None:
    """Writes a report on a plan: its speed-up and its times.

    Args:
        plan: the plan.
        traces: predicted and measured traces of the plan, by name; all are compared with the first.
        profiles: the traffic, one profile per model.
        output: the file to write.
        format: "html" (one page) or "perfetto" (for ui.perfetto.dev; compressed if `output` ends in .gz).
        missing_profiles: sentence to show if there are no profiles, on how to provide them.
        progress: called with (name of the work, amount done, whole amount).

    Raises:
        BadInput: if a trace or profile does not belong to the plan, the format is unknown or needs a trace, or the output
            cannot be written.

    Example:
        >>> import aurora, tempfile, pathlib
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> page = pathlib.Path(tempfile.mkdtemp()) / "report.html"
        >>> aurora.report(plan, {"predicted": aurora.simulate(plan, traffic)}, [traffic], output=page)
        >>> page.read_text()[:15]
        '<!DOCTYPE html>'
    """
    if len(profiles) not in (0, many := len(plan.models)):
        raise BadInput(f"`profile`: expected {many}, found {len(profiles)}")
    without = {"without": f"{missing_profiles}."} if missing_profiles else {}
    inputs = ReportInputs(plan, tuple((traces or {}).items()), tuple(profiles), **without)
    check_one_of("format", format, FORMS)
    target = Path(output)
    if format == "html":
        write_text(target, page(inputs, progress))
    else:
        write_bytes(target, perfetto(inputs, packed=target.suffix == ".gz"))
