"""The comparison of ways over a grid: what cannot be had is said."""

from aurora.advisor.sharing import IN_SEQUENCE, THREE_MODELS, WayOutcome, WaysCompared
from aurora.advisor.sweep import GridCell
from aurora.reports.comparisons import left_out_lines


def test_why_a_way_is_left_out_is_said_once():
    alone = WayOutcome(IN_SEQUENCE, 1.0, 1.0, 8.0, ((1.0, 1.0),), 0.5)
    cells = [GridCell(bandwidth, 1.0, WaysCompared(8, (alone,), {THREE_MODELS: "memory"})) for bandwidth in (1.0, 2.0)]
    assert left_out_lines(cells) == ["left out: three models (memory)"]
