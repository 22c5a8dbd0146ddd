"""Each row of docs/measured.md names a script and a dated result, and both exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_rows_name_a_script_and_a_result_that_exist():
    rows = [line for line in (ROOT / "docs" / "measured.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.endswith("| script, result |")]
    assert len(rows) > 20
    for row in rows:
        script, *results = re.findall(r"`([^`]+)`", row.rsplit(" | ", 1)[1])
        assert (ROOT / "bench" / script).is_file(), row
        assert results, row
        for result in results:
            assert re.search(r"-\d{4}-\d\d-\d\d\.(md|json)$", result), row
            assert (ROOT / "bench" / "results" / result).is_file(), row
