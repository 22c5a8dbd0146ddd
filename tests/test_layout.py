"""What keeps the code findable: one class for a name, one vocabulary, packages that import downward (pyproject's contracts)."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from tests.house import BUDGETS, Counts, code_by_budget, exceeded

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


def test_identifiers_are_in_the_fields_words():
    names = {
        f"{file.relative_to(ROOT)}: {token.string}: say {PLAIN[part]}"
        for file in SOURCES
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        if token.type == tokenize.NAME
        for part in token.string.lower().split("_")
        if part in PLAIN
    }
    assert sorted(names) == []


def test_modules_and_public_names_have_docstrings():
    bare = []
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        kinds = (ast.ClassDef, ast.FunctionDef)
        public = {node.name: node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}
        definitions = {"module": tree, **public}  # of overloads the last
        bare += [f"{file.relative_to(ROOT)}: {name}" for name, node in definitions.items() if not ast.get_docstring(node)]
    assert bare == []


def test_budgets_count_packages_with_those_in_them_and_name_what_exceeds_them():
    budget = BUDGETS["aurora/io"][0]
    rows = {
        "aurora/io": Counts(code=budget),
        "aurora/io/inner": Counts(code=2),
        "tests": Counts(code=7),
        "aurora/new": Counts(code=1),
    }
    code = code_by_budget(rows)
    assert code == {"aurora/io": budget + 2, "product": budget + 3, "tests": 7, "aurora/new": 1}
    assert exceeded(code) == [f"aurora/io: {budget + 2} code lines, 2 above {budget}", "aurora/new: no budget"]
    assert exceeded({name: budget for name, (budget, _) in BUDGETS.items()}) == []
