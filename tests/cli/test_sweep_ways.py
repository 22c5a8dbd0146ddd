"""aurora sweep --ways: its tables, and what is refused."""

import json

import pytest

from aurora.advisor.sharing import WAYS
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import save
from aurora.types import SyntheticOptions
from tests.cli.refusal import refused
from tests.cli.test_subcommands import CONFIG

pytestmark = pytest.mark.full


@pytest.fixture
def profile(tmp_path):
    save(draw_profile("zipf:1", CONFIG, SyntheticOptions(window_tokens=50)), tmp_path / "a.npz")
    return tmp_path / "a.npz"


def test_tables_of_all_ways_and_a_map_in_the_terminal(aurora, profile, tmp_path):
    given = ("--profile", profile, "--cluster", "demo-4", "--step-tokens", 8, "--bandwidth", 100)
    code, out, err = aurora("sweep", "--ways", *given, "--steps", 2, "-o", tmp_path / "won")
    assert code == 0, err
    told = " ".join(out.split())
    assert "experts equally popular" in told
    assert "skew as in the profiles" in told
    text = (tmp_path / "won" / "colocate.txt").read_text()
    assert text.count(" x 100 ") == 2  # maps
    assert all(text.count(f" {way} ") >= 2 for way in WAYS)  # the table of all ways
    found = json.loads((tmp_path / "won" / "colocate.json").read_text())
    assert len(found["cells"]) == 2
    for cell in found["cells"]:
        assert {way["way"] for way in cell["ways"]} == set(WAYS)
        assert cell["winner"] in WAYS
    assert {file.name for file in (tmp_path / "won").iterdir()} == {"colocate.json", "colocate.txt"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--profile", "PROFILE", "--step-tokens", 4, "--step-tokens", 4), "--step-tokens: expected different values"),
        (("--profile", "PROFILE", "--skew", -1), "--skew: expected different values from 0 to 99, found -1"),
        (("--profile", "PROFILE", "--seed", -1), "--seed: expected"),
        (("--profile", "PROFILE", "--steps", 1), "--steps: expected 2 or more"),
        (("--profile", "PROFILE") * 4, "--profile: expected from 1 to 3 models"),
    ],
)
def test_what_cannot_be_is_refused(aurora, profile, more, said):
    refused(aurora("sweep", "--ways", *(profile if each == "PROFILE" else each for each in more)), said)
