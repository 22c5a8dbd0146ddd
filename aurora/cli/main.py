"""`aurora`: collects the verbs and turns every AuroraError into one sentence and exit code 2."""

import re
import sys

import typer

from aurora.cli import demo, doctor, drift, engines, order, place, plan, profile, report, reproduce, run, simulate
from aurora.errors import AuroraError

app = typer.Typer(
    name="aurora",
    help="Fast Mixture-of-Experts inference: where experts sit and in which order tokens travel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("order")(order.order)
app.command("place")(place.place)
app.command("export")(engines.export)
app.command("import")(engines.import_)
app.command("drift")(drift.drift)
app.command("simulate")(simulate.simulate)
app.command("run")(run.run)
app.command("report")(report.report)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(reproduce.app, name="reproduce")


def main() -> None:
    """The `aurora` command."""
    try:
        app()
    except AuroraError as error:
        print(f"aurora: {as_options(str(error))}", file=sys.stderr)
        sys.exit(2)


def as_options(message: str) -> str:
    """`message` with every parameter that it names in backticks as the option that sets it, where there is one."""
    flags: dict[str, str] = {}
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        flags |= {each.name: each.opts[0] for each in command.params if each.name and each.opts[0].startswith("--")}

    def option(found: re.Match[str]) -> str:
        return flags.get(found[1]) or flags.get(found[1].removesuffix("_s")) or found[0]

    return re.sub(r"`([a-z_]+)`", option, message)


if __name__ == "__main__":
    main()
