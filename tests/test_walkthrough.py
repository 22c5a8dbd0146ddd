"""The page that walks through one plan shows what the code returns today."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_walkthrough_is_what_the_code_returns():
    spec = importlib.util.spec_from_file_location("walkthrough", ROOT / "docs" / "walkthrough.py")
    walkthrough = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walkthrough)
    assert walkthrough.PAGE.read_text() == walkthrough.page(), "run `python docs/walkthrough.py`"
