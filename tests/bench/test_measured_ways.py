"""The bench of measured ways of sharing GPUs: a cell is run beside its simulation."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import measured_ways

from aurora.advisor.sharing import BY_EXCHANGE, BY_LAYER, IN_SEQUENCE, MICRO_BATCHES, THREE_MODELS, TIME_SLICED
from aurora.advisor.sweep import compare_over_grid
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_cluster, load_model_config
from aurora.types import SyntheticOptions

sys.path.pop()  # that folder has a vllm.py, which is not vLLM

pytestmark = pytest.mark.full


@pytest.mark.parametrize("stage", measured_ways.STAGES)
def test_a_cell_is_run_for_real(monkeypatch, tmp_path, stage):
    """In threads of this process; only the bench itself starts processes."""
    monkeypatch.setattr(measured_ways, "STAGES", (stage,))
    monkeypatch.setattr(measured_ways, "TRANSPORT", "memory")
    cluster, drawn = load_cluster("demo-4"), SyntheticOptions(window_tokens=50)
    profiles = [draw_profile("zipf:1", load_model_config(name), drawn) for name in measured_ways.MODELS]
    for name in measured_ways.MODELS:
        (tmp_path / f"{name}.txt").write_text("import os\n" * 400)
    cells = compare_over_grid(cluster, profiles, (4,), (1.0,), (1.0,), 2)
    (cell,) = measured_ways.measure_cells(cluster, profiles, cells, tmp_path, 2, 0.001)
    assert (cell.batch, cell.bandwidth, cell.skew, cell.stage) == (4, 1, 1, stage)
    assert set(cell.gains) == set(cell.predicted) == {
        IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS,
    }  # fmt: skip
    assert cell.gains[IN_SEQUENCE] == 1
    assert all(seconds > 0 for seconds in cell.seconds.values())
    assert all(len(tpot_s_M) == 2 + (way == THREE_MODELS) for way, tpot_s_M in cell.tpot_s_M.items())
    assert cell.winner in cell.gains
    assert cell.right or cell.loss > 0
