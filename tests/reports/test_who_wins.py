"""The comparison of ways over a grid: what cannot be had is said."""

from aurora.advisor.colocation_grid import GridCell
from aurora.advisor.ways import APART, IN_SEQUENCE, WayOutcome, WaysCompared
from aurora.reports.who_wins import left_out_lines, markdown


def test_why_a_way_is_left_out_is_said_once():
    alone = WayOutcome(IN_SEQUENCE, 1.0, 1.0, 8.0, ((1.0, 1.0),), 0.5)
    cells = [GridCell(bandwidth, 1.0, WaysCompared(8, (alone,), {APART: "one GPU"})) for bandwidth in (1.0, 2.0)]
    assert left_out_lines(cells) == ["left out: attention and experts apart (one GPU)"]
    assert markdown(cells, [], []).splitlines().count("left out: attention and experts apart (one GPU)") == 1
