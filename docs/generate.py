"""Pages that mkdocs makes from the code: the command line, and texts that live elsewhere in the repository."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from aurora.cli.choices import filled
from aurora.cli.main import app

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"how-to/vllm.md": "integrations/README.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site; called by mkdocs."""
    pages = {page: (ROOT / source).read_text().replace("](docs/", "](") for page, source in ELSEWHERE.items()}
    for page, text in (pages | {"reference/cli.md": command_line()}).items():
        files.append(File.generated(config, page, content=text))
    return files


def command_line() -> str:
    """Returns the reference of all subcommands as Markdown, from the command line's own definitions."""
    root: Any = get_command(app)
    parts = ["# Command line", "`aurora --install-completion` completes subcommands, options and names in your shell."]
    for name, command in root.commands.items():
        parts += _described(f"aurora {name}", command)
    return "\n\n".join(parts) + "\n"


def _described(name: str, command: Any) -> list[str]:
    """Returns the paragraphs on one subcommand, and on those below it."""
    parts = [f"## {name}", (command.help or "").replace("\b", "")]
    if rows := [_row(param) for param in command.params if param.name != "help" and not getattr(param, "hidden", False)]:
        parts.append("| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows))
    for below, each in getattr(command, "commands", {}).items():
        parts += _described(f"{name} {below}", each)
    return parts


def _row(param: Any) -> str:
    """Returns the table row of one option or argument."""
    flags = param.opts if param.opts[0].startswith("-") else [param.name.upper()]
    default = "required" if param.required else param.default
    shown = "" if default in (None, False, [], ()) or callable(default) else f"{default}" if param.required else f"`{default}`"
    meaning = filled(getattr(param, "help", None) or "").replace("|", "\\|")
    return f"| {', '.join(f'`{flag}`' for flag in flags)} | {meaning} | {shown} |"
