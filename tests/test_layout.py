"""What keeps the code findable: one class for a name, one vocabulary, packages that import downward (pyproject's contracts)."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "aurora").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])
PLAIN = {  # words of ours that nobody else uses, and what the field writes instead
    "parcels": "dispatch layout",
    "turnstile": "port arbiter",
    "moments": "timers",
    "steward": "coordinator",
    "seams": "API checks",
    "engagement": "worker integration",
    "trouble": "refusal reason",
    "room": "GPU slots",
    "standing": "member state",
}


def test_every_class_name_is_of_one_class():
    named = Counter(
        node.name for file in SOURCES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in named.items() if count > 1] == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_identifiers_are_in_the_fields_words(file):
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    words = {
        (token.string, part) for token in tokens if token.type == tokenize.NAME for part in token.string.lower().split("_")
    }
    assert [f"{name}: say {PLAIN[part]}" for name, part in sorted(words) if part in PLAIN] == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_public_names_have_docstrings(file):
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), f"{file.name} does not say what lives there"
    kinds = (ast.ClassDef, ast.FunctionDef)
    public = {
        node.name: node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    }  # overloads: the last
    assert [name for name, node in public.items() if not ast.get_docstring(node)] == []
