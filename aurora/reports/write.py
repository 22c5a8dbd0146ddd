"""Writes reports in one of several formats: a page, or traces for Perfetto. FORMS registers the formats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aurora.errors import BadInput, check_one_of, need
from aurora.io.files import write_bytes, write_text
from aurora.planner.layers_in_threads import Progress, untold
from aurora.reports.inputs import Baseline, ReportInputs
from aurora.types import Plan, Profile, Trace


@dataclass(frozen=True)
class ReportForm:
    """A file format of reports, and the function that writes it.

    Attributes:
        write: called with (inputs, path, progress); writes the report to the file `path`.
        about: description of the format, for help texts.
        output: default file name.
        needs: modules that the format needs, installed by the extra "report".
    """

    write: Callable[[ReportInputs, Path, Progress], None]
    about: str
    output: str
    needs: tuple[str, ...] = ()


def report(
    plan: Plan,
    traces: Mapping[str, Trace] | None = None,
    profiles: Sequence[Profile] = (),
    *,
    output: str | Path,
    format: str = "html",
    missing_profiles: str = "",
    baseline: Baseline = Baseline(),
    progress: Progress = untold,
) -> None:
    """Writes a report on a plan: its speed-up, its times, and advice on what to do next.

    Args:
        plan: the plan.
        traces: predicted and measured traces of the plan, by name; all are compared with the first.
        profiles: the traffic, one profile per model; to show drift, append one profile of later traffic per model.
        output: the file to write.
        format: "html" (one page) or "perfetto" (for ui.perfetto.dev; compressed if `output` ends in .gz).
        missing_profiles: sentence to show if there are no profiles, on how to provide them.
        baseline: as in `ReportInputs`.
        progress: called with (name of the work, amount done, whole amount).

    Raises:
        BadInput: if a trace or profile does not belong to the plan, the format is unknown or needs a trace, or the output
            cannot be written.
        MissingDependency: if a module that the format needs is not installed.

    Example:
        >>> import aurora, tempfile, pathlib
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> page = pathlib.Path(tempfile.mkdtemp()) / "report.html"
        >>> aurora.report(plan, {"predicted": aurora.simulate(plan, traffic)}, [traffic], output=page)
        >>> page.read_text()[:15]
        '<!DOCTYPE html>'
    """
    many = len(plan.models)
    if len(profiles) not in (0, many, 2 * many):
        raise BadInput(f"`profile`: expected {many}, or {2 * many} to show drift, found {len(profiles)}")
    inputs = ReportInputs(
        plan, tuple((traces or {}).items()), tuple(profiles[:many]), tuple(profiles[many:]), baseline=baseline
    )
    if missing_profiles:
        inputs = replace(inputs, without=f"{missing_profiles}. {inputs.without}")
    check_form(format)
    FORMS[format].write(inputs, Path(output), progress)


def check_form(form: str) -> None:
    """Raises BadInput unless `form` is one of FORMS, MissingDependency unless the modules that it needs are installed."""
    if form == "chakra":
        raise BadInput("`format` chakra is no more: perfetto has the same events, and `aurora.load` reads a trace as arrays")
    check_one_of("format", form, FORMS)
    need(*FORMS[form].needs, extra="report")


def _html(inputs: ReportInputs, output: Path, progress: Progress = untold) -> None:
    from aurora.reports.html import page

    write_text(output, page(inputs, progress))


def _perfetto(inputs: ReportInputs, output: Path, _: Progress = untold) -> None:
    from aurora.reports.perfetto import perfetto

    write_bytes(output, perfetto(inputs, packed=output.suffix == ".gz"))


FORMS: dict[str, ReportForm] = {
    "html": ReportForm(_html, "one page", "report.html", needs=("jinja2",)),
    "perfetto": ReportForm(_perfetto, "for ui.perfetto.dev (.gz: compressed)", "report.perfetto.json.gz"),
}
