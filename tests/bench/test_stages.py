"""The benchmark of stages on CPU ranks: the NCCL transport's grouped calls over gloo, with real processes that wait."""

import importlib.util
from pathlib import Path

from aurora.runtime.distributed.launcher import launch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "stages.py"


def smoke(rank_info):
    spec = importlib.util.spec_from_file_location("stages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure(rank_info, smoke=True)


def test_every_way_carries_every_byte():
    """The script compares all bytes that arrive; its table has a row for each traffic and size."""
    tables = launch(smoke, 3)
    header, _, *rows = tables[0]
    assert tables[0] == tables[1] == tables[2]
    assert len(rows) == 6
    assert all(row.count("|") == header.count("|") for row in rows)
