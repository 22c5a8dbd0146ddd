"""Decisions of control loops over time, as a chart and tables."""

import numpy as np

from aurora.reports.charts import Chart, Frame, Section, Selector, Sheet, sheet
from aurora.reports.formatting import seconds
from aurora.reports.numbers import ReportNumbers
from aurora.reports.trace_tables import control_line, control_table
from aurora.types import ControlReport

MARKS = ("experts move", "a change is undone", "a change that was not performed", "traffic has changed")
TRAFFIC = 3  # of MARKS
SERIES = (("balancedness", "now"), ("expected", "expected"))


def decisions_section(found: ReportNumbers) -> Section | None:
    """Returns the section on how placements followed their traffic; None if no trace tells of it."""
    reports = found.control
    if not reports:
        return None
    text = (
        "How placements followed their traffic, window by window. Balancedness is the mean over the largest load of the GPUs, "
        "1 if all are equal; expected is that of the placement wanted, in the next window. Marks stand where a change was "
        "decided on, and where traffic was found to have changed."
    )
    tables = tuple(sheet(table) for report in reports.values() if (table := control_table(report)) is not None)
    shown = {name: report for name, report in reports.items() if report.series}
    if not shown:
        return Section("decisions", "Decisions over time", text, sheets=tables, missing="No window had tokens.")
    heads = ("model", "until", "windows", *(name for name, _ in SERIES), "age of the placement", "changes of traffic")
    rows = tuple(
        (
            name, seconds(each.at_s), str(each.windows), f"{each.balancedness:.3f}", f"{each.expected_balancedness:.3f}",
            seconds(each.age_s), str(each.traffic),
        )
        for name, report in shown.items() for each in report.series
    )  # fmt: skip
    about = {
        "axis": "since the run began",
        "series": [list(each) for each in SERIES],
        "more": [["age of the placement", "age", "s"], ["changes of traffic", "traffic", ""], ["windows", "windows", ""]],
        "marks": list(MARKS),
    }
    choices, frames = (Selector("model", tuple(shown)),), [_frame(report) for report in shown.values()]
    chart = Chart("decisions-chart", "lines", "Balancedness", choices, frames, about, (Sheet("Windows", heads, rows),))
    return Section("decisions", "Decisions over time", text, (chart,), tables)


def _frame(report: ControlReport) -> Frame:
    """The series of a report's windows, and its marks."""
    marks = [(each.at_s, 2 if each.took_s is None else int(each.action == "undo")) for each in report.changes]
    traffic = [0] + [each.traffic for each in report.series]
    marks += [(each.at_s, TRAFFIC) for before, each in zip(traffic, report.series, strict=False) if each.traffic > before]
    columns = {
        "at": np.array([each.at_s for each in report.series], dtype=np.float32),
        "now": np.array([each.balancedness for each in report.series], dtype=np.float32),
        "expected": np.array([each.expected_balancedness for each in report.series], dtype=np.float32),
        "age": np.array([each.age_s for each in report.series], dtype=np.float32),
        "traffic": np.array([each.traffic for each in report.series]),
        "windows": np.array([each.windows for each in report.series]),
        "mark": np.array([at_s for at_s, _ in sorted(marks)], dtype=np.float32),
        "kind": np.array([kind for _, kind in sorted(marks)], dtype=np.int64),
    }
    return Frame(control_line(report), columns)
