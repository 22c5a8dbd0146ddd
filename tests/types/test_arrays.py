"""The legend of axis letters explains every letter that the code uses."""

import ast
import re
from pathlib import Path

import aurora

ROOT = Path(aurora.__file__).parents[1]
SUFFIX = re.compile(r"(?:^|[a-z0-9])_([A-Z][A-Z0-9]{0,4}|1)$")  # load_LE, pairs_X2, load_E1; neither LEVEL nor MOST_STEPS
LEGEND = dict(re.findall(r"^\| ([A-Z]) \| (\S.*) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE))


def axes_of(source):
    """The axis letters of every identifier in Python source, and where they stand: {letter: (identifier, line)}."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        name = next(
            (value for field in ("id", "attr", "arg", "name") if isinstance(value := getattr(node, field, None), str)), ""
        )
        if not name.isupper() and (match := SUFFIX.search(name)):
            for letter in re.sub(r"\d", "", match[1]):
                found.setdefault(letter, (name, getattr(node, "lineno", 0)))
    return found


def python_files():
    return [path for package in ("aurora", "integrations") for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_axis_letter_in_use_is_in_the_legend():
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name} has axis {letter}"
        for path in python_files()
        for letter, (name, line) in axes_of(path.read_text()).items()
        if letter not in LEGEND
    ]
    assert not missing, "axis letters that docs/glossary.md does not explain:\n" + "\n".join(missing)


def test_the_legend_has_no_letter_that_nobody_uses():
    used = {letter for path in python_files() for letter in axes_of(path.read_text())}
    assert set(LEGEND) <= used
