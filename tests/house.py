"""Counts the code: lines, files, options and docstrings by package, as a table; `python -m tests.house`.

A code line has a token outside docstrings and comments. A noun clause is a docstring that opens with What, Who, Which, That, Those,
Whether, It, How, Where, When or Whose, in place of a verb or a definition.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 600  # lines of a file
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
    """Returns the Python files of the package and the plugin."""
    return sorted([*(ROOT / "aurora").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])


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
    """Returns the row of the table that counts a file: its package, with the packages of the planner and the runtime apart."""
    parts = file.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:3])


def options_of_verbs() -> dict[str, tuple[int, int]]:
    """Returns the options of each verb: how many `--help` shows, and all."""
    import typer

    from aurora.cli.main import app
    from aurora.cli.options import is_further

    group = typer.main.get_command(app)
    counts = {}
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        leaves = getattr(command, "commands", None) or {"": command}
        for leaf, verb in sorted(leaves.items()):
            options = [param for param in verb.params if param.param_type_name == "option" and param.name != "help"]
            shown = [param for param in options if not is_further(param)]
            counts[f"{name} {leaf}".strip()] = (len(shown), len(options))
    return counts


def main() -> None:
    """Prints the tables."""
    rows: dict[str, Counts] = defaultdict(Counts)
    by_file = {file: counted(file) for file in sources()}
    for file, counts in by_file.items():
        rows[package_of(file)] += counts
        rows["all"] += counts
    print(f"{'package':42}{'files':>7}{'code':>8}{'docstrings':>12}{'lines':>8}{'noun clauses':>14}")
    for name, row in [*sorted((name, row) for name, row in rows.items() if name != "all"), ("all", rows["all"])]:
        print(f"{name:42}{row.files:7}{row.code:8}{row.docstrings:12}{row.lines:8}{row.noun_clauses:14}")
    total = rows["all"]
    print(f"\ndocstrings are {total.docstrings / total.lines:.0%} of the lines")
    large = [f"{file.relative_to(ROOT)} ({row.lines})" for file, row in by_file.items() if row.lines > LIMIT]
    print(f"files of more than {LIMIT} lines: {', '.join(large) or 'none'}")
    options = options_of_verbs()
    print(f"\n{len({name.split()[0] for name in options})} verbs; options that --help shows, and all:")
    print(", ".join(f"{name} {shown}/{every}" for name, (shown, every) in options.items()))


if __name__ == "__main__":
    main()
