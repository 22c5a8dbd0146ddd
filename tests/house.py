"""Counts the code: lines, files, options and docstrings by package, and compares them with budgets; `python -m tests.house`.

Fails, with exit code 1, where a budget is exceeded or a file of the product is longer than LIMIT. A code line has a token outside
docstrings and comments. A noun clause is a docstring that opens with What, Who, Which, That, Those, Whether, It, How, Where, When
or Whose, in place of a verb or a definition.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 500  # lines of a file
BUDGETS = {  # code lines: the budget, and the aim, to which issues that rewrite a package bring it
    "aurora": (141, 120),
    "aurora/types": (1868, 1700),
    "aurora/io": (1750, 1250),
    "aurora/models": (525, 500),
    "aurora/profiler": (1055, 900),
    "aurora/planner": (1550, 1550),
    "aurora/algorithms": (7970, 7500),
    "aurora/simulator": (795, 750),
    "aurora/moe": (1236, 1050),
    "aurora/runtime": (3257, 3000),
    "aurora/elastic": (860, 900),
    "aurora/training": (1685, 1450),
    "aurora/advisor": (3012, 3012),
    "aurora/reports": (2031, 1440),
    "aurora/cli": (1_473, 1_100),
    "integrations/aurora_vllm": (5621, 4300),
    "product": (34_441, 31_370),
    "tests": (30_204, 25_000),
    "bench": (9340, 8900),
}
NOUN_CLAUSE = re.compile(r"(What|Who|Which|That|Those|Whether|It|How|Where|When|Whose)\b")
LAYOUT_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Counts:
    """Counts of one file or of several.

    Args:
        files: number of files.
        code: lines with a token outside docstrings and comments.
        docstrings: lines of docstrings.
        lines: all lines.
        noun_clauses: docstrings that open with a noun clause.
    """

    files: int = 0
    code: int = 0
    docstrings: int = 0
    lines: int = 0
    noun_clauses: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def sources() -> list[Path]:
    """Returns the Python files of the product: the package and the plugin."""
    return files_of("aurora", "integrations")


def files_of(*folders: str) -> list[Path]:
    """Returns the Python files of folders of the repository, sorted."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def counted(file: Path) -> Counts:
    """Returns the counts of a Python file."""
    text = file.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    documentation = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    clauses = [node for node in docstrings if NOUN_CLAUSE.match(node.value.value.lstrip())]  # type: ignore[attr-defined]
    return Counts(1, len(code - documentation), len(documentation), text.count("\n"), len(clauses))


def package_of(file: Path) -> str:
    """Returns the row of the table that counts a file: its package and the package in it; `tests` and `bench` are a row each."""
    parts = file.relative_to(ROOT).parts[:-1]
    return parts[0] if parts[0] in ("tests", "bench") else "/".join(parts[:3])


def code_by_budget(rows: Mapping[str, Counts]) -> dict[str, int]:
    """Returns the code lines that each budget counts, of the counts of packages by `package_of`."""
    code: dict[str, int] = defaultdict(int)
    for package, counts in rows.items():
        code["/".join(package.split("/")[:2])] += counts.code
        if package not in ("tests", "bench"):
            code["product"] += counts.code
    return code


def exceeded(code: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each budget that is exceeded, and for each package that has none.

    Args:
        code: code lines by budget, as `code_by_budget` returns them.
    """
    over = [
        f"{name}: {code[name]} code lines, {code[name] - BUDGETS[name][0]} above {BUDGETS[name][0]}"
        for name in code
        if name in BUDGETS and code[name] > BUDGETS[name][0]
    ]
    return over + [f"{name}: no budget" for name in code if name not in BUDGETS]


def options_of_verbs() -> dict[str, int]:
    """Returns the number of options of each verb."""
    from aurora.cli.main import VERBS, app
    from aurora.cli.options import options_of

    verbs = {name: reduce(getitem, name.split(), app) for name in sorted(VERBS)}
    return {name: sum(option.name.startswith("--") for option in options_of(verb)) for name, verb in verbs.items()}


def main() -> None:
    """Prints the tables, and fails above the budgets."""
    rows: dict[str, Counts] = defaultdict(Counts)
    by_file = {file: counted(file) for file in files_of("aurora", "integrations", "tests", "bench")}
    for file, counts in by_file.items():
        rows[package_of(file)] += counts
    print(f"{'package':42}{'files':>7}{'code':>8}{'docstrings':>12}{'lines':>8}{'noun clauses':>14}")
    for name, row in rows.items():
        print(f"{name:42}{row.files:7}{row.code:8}{row.docstrings:12}{row.lines:8}{row.noun_clauses:14}")
    code = code_by_budget(rows)
    print(f"\n{'budget':42}{'code':>7}{'budget':>8}{'aim':>8}")
    for name, (budget, aim) in BUDGETS.items():
        print(f"{name:42}{code[name]:7}{budget:8}{aim:8}{'  exceeded' if code[name] > budget else ''}")
    large = {file: counts.lines for file, counts in by_file.items() if counts.lines > LIMIT}
    print(
        f"\nfiles of more than {LIMIT} lines: {', '.join(f'{file.relative_to(ROOT)} ({large[file]})' for file in large) or 'none'}"
    )
    options = options_of_verbs()
    print(f"\n{len({name.split()[0] for name in options})} verbs; {sum(options.values())} options:")
    print(", ".join(f"{name} {count}" for name, count in options.items()))
    product = set(sources())
    too_much = exceeded(code) + [
        f"{file.relative_to(ROOT)}: {lines} lines, expected at most {LIMIT}" for file, lines in large.items() if file in product
    ]
    if too_much:
        sys.exit("\n" + "\n".join(too_much))


if __name__ == "__main__":
    main()
