"""aurora doctor: what works here, and what to install for the rest."""

from dataclasses import asdict

import typer

from aurora.cli.options import Json
from aurora.cli.output import show

SERVING = ("torch", "transformers", "ranks over gloo")  # beside what planning needs


def doctor(as_json: Json = False) -> None:
    """Check Python, libraries, GPUs and the network between ranks; exit code 0 if planning works, else 1."""
    from rich.table import Table

    from aurora.profiler.doctor import BROKEN, WORKS, examine, healthy

    findings = examine()
    fine = healthy(findings)
    table = Table(title="what is here")
    for column in ("part", "state", "found", "what to do"):
        table.add_column(column)
    for finding in findings:
        style = {WORKS: "green", BROKEN: "red"}.get(finding.state, "yellow")
        table.add_row(finding.name, finding.state, finding.found, finding.mend, style=style)
    serving = all(finding.state == WORKS for finding in findings if finding.name in SERVING)
    states = {"planning": fine, "serving with aurora run": serving}
    said = [f"{what} {'works' if well else 'does not work'}" for what, well in states.items()]
    show(as_json, {"works": fine, "serves": serving, "findings": [asdict(finding) for finding in findings]}, table, *said)
    raise typer.Exit(0 if fine else 1)
