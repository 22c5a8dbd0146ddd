"""Reports by form: one page, figures for papers, or a trace for Perfetto."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aurora.errors import BadInput
from aurora.io.files import write_bytes, write_text
from aurora.reports.inputs import ReportInputs
from aurora.types import Plan, Profile, Trace


def report(plan: Plan, traces: Mapping[str, Trace], profiles: Sequence[Profile], output: Path, form: str) -> None:
    """Write what `aurora.report` documents."""
    many = len(plan.models)
    if len(profiles) not in (0, many, 2 * many):
        raise BadInput(f"`profile`: expected {many}, or {2 * many} to show drift, found {len(profiles)}")
    write(ReportInputs(plan, tuple(traces.items()), tuple(profiles[:many]), tuple(profiles[many:])), form, output)


def write(inputs: ReportInputs, form: str, output: Path) -> None:
    """Write the report on `inputs` in one of FORMS to exactly `output`."""
    if form not in FORMS:
        raise BadInput(f"`format`: expected one of {', '.join(FORMS)}, found {form!r}")
    FORMS[form](inputs, output)


def _html(inputs: ReportInputs, output: Path) -> None:
    from aurora.reports.html import page

    write_text(output, page(inputs))


def _svg(inputs: ReportInputs, output: Path) -> None:
    from aurora.reports.figures import draw

    draw(inputs, output)


def _perfetto(inputs: ReportInputs, output: Path) -> None:
    from aurora.reports.perfetto import perfetto

    write_bytes(output, perfetto(inputs, packed=output.suffix == ".gz"))


FORMS: dict[str, Callable[[ReportInputs, Path], None]] = {"html": _html, "svg": _svg, "perfetto": _perfetto}
