"""aurora sweep --ways: the page, cells that are run for real, and what is refused."""

import json

import pytest

from aurora.advisor.sharing import BY_EXCHANGE, BY_LAYER, IN_SEQUENCE, MICRO_BATCHES, THREE_MODELS, TIME_SLICED, WAYS
from aurora.cli import demo, measured_ways
from aurora.io import load_model_config, save
from aurora.planner.workload.synthetic import draw_profile
from aurora.types import SyntheticOptions
from tests.cli.refusal import refused
from tests.cli.test_subcommands import CONFIG

pytestmark = pytest.mark.full

ONE_CELL = ("--step-tokens", 4, "--bandwidth", 1, "--skew", 1, "--steps", 2)


@pytest.fixture
def profile(tmp_path):
    save(draw_profile("zipf:1", CONFIG, SyntheticOptions(window_tokens=50)), tmp_path / "a.npz")
    return tmp_path / "a.npz"


def test_a_page_with_all_ways_and_a_map_in_the_terminal(aurora, profile, tmp_path):
    given = ("--profile", profile, "--cluster", "demo-4", "--step-tokens", 8, "--bandwidth", 100)
    code, out, err = aurora("sweep", "--ways", *given, "--steps", 2, "-o", tmp_path / "won")
    assert code == 0, err
    told = " ".join(out.split())
    assert "experts equally popular" in told
    assert "skew as in the profiles" in told
    page = (tmp_path / "won" / "colocate.md").read_text()
    assert page.count("| x 100 |") == 2  # maps
    assert all(page.count(f"| {way} | ") >= 2 for way in WAYS)
    found = json.loads((tmp_path / "won" / "colocate.json").read_text())
    assert len(found["cells"]) == 2
    for cell in found["cells"]:
        assert {way["way"] for way in cell["ways"]} == set(WAYS)
        assert cell["winner"] in WAYS
    assert {file.name for file in (tmp_path / "won").iterdir()} == {"colocate.json", "colocate.md"}


@pytest.mark.parametrize("stage", measured_ways.STAGES)
def test_a_cell_is_run_for_real(aurora, monkeypatch, stage):
    """In threads of this process; only `aurora sweep --ways` itself starts processes."""
    monkeypatch.setattr(measured_ways, "STAGES", (stage,))
    monkeypatch.setattr(measured_ways, "TRANSPORT", "memory")
    drawn = SyntheticOptions(window_tokens=50)
    monkeypatch.setattr(demo, "_profile", lambda _, name, *rest: draw_profile("zipf:1", load_model_config(name), drawn))
    code, out, err = aurora("sweep", "--ways", *ONE_CELL, "--measure", "--time-limit", 0.001, "--json")
    assert code == 0, err
    (cell,) = json.loads(out)["measured"]
    assert (cell["batch"], cell["bandwidth"], cell["skew"], cell["stage"]) == (4, 1, 1, stage)
    assert set(cell["gains"]) == set(cell["predicted"]) == {
        IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS,
    }  # fmt: skip
    assert cell["gains"][IN_SEQUENCE] == 1
    assert all(seconds > 0 for seconds in cell["seconds"].values())
    assert all(len(tpot_s_M) == 2 + (way == THREE_MODELS) for way, tpot_s_M in cell["tpot_s_M"].items())
    assert cell["winner"] in cell["gains"]
    assert cell["right"] or cell["loss"] > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--measure", "--profile", "PROFILE"), "--measure: runs the shipped models, expected no --profile"),
        (("--measure", "--skew", 0), "--skew: expected 1 among them with --measure"),
        (("--measure", "--cluster", "h100-servers-32"), "h100-servers-32: --measure holds ports"),
        (("--profile", "PROFILE", "--step-tokens", 4, "--step-tokens", 4), "--step-tokens: expected different values"),
        (("--profile", "PROFILE", "--skew", -1), "--skew: expected different values from 0 to 99, found -1"),
        (("--profile", "PROFILE", "--seed", -1), "--seed: expected"),
        (("--profile", "PROFILE", "--steps", 1), "--steps: expected 2 or more"),
        (("--profile", "PROFILE", "--time-limit", 5), "--time-limit: expected with --measure"),
        (("--measure", "--time-limit", 0), "--time-limit: expected more than zero"),
        (("--profile", "PROFILE") * 4, "--profile: expected from 1 to 3 models"),
    ],
)
def test_what_cannot_be_is_refused(aurora, profile, more, said):
    refused(aurora("sweep", "--ways", *(profile if each == "PROFILE" else each for each in more)), said)
