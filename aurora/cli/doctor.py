"""aurora doctor: what works here, and what to install for the rest."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from aurora.cli.common import terminal

SERVING = ("torch", "transformers", "ranks over gloo")  # beside what planning needs


def doctor(as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False) -> None:
    """Look at Python, libraries, GPUs and the network between ranks; exit code 0 when planning works, 1 when it does not."""
    from aurora.profiler.doctor import BROKEN, WORKS, examine, healthy

    findings = examine()
    fine = healthy(findings)
    if as_json:
        print(json.dumps({"schema": 1, "works": fine, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        from rich.table import Table

        table = Table(title="what is here")
        for column in ("part", "state", "found", "what to do"):
            table.add_column(column)
        for finding in findings:
            style = {WORKS: "green", BROKEN: "red"}.get(finding.state, "yellow")
            table.add_row(finding.name, finding.state, finding.found, finding.mend, style=style)
        console = terminal()
        console.print(table)
        serving = all(finding.state == WORKS for finding in findings if finding.name in SERVING)
        for what, well in (("planning", fine), ("serving with aurora run", serving)):
            console.print(f"{what} {'works' if well else 'does not work'}")
    raise typer.Exit(0 if fine else 1)
