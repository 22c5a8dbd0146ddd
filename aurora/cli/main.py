"""The `aurora` command: collects the subcommands and turns every AuroraError into one sentence and exit code 2."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from aurora.cli import (
    demo,
    doctor,
    drift,
    engines,
    evaluate,
    measure,
    order,
    place,
    plan,
    profile,
    recommend,
    record,
    replay,
    report,
    reproduce,
    run,
    simulate,
    sweep,
    synthetic,
)
from aurora.cli.subcommand import Subcommand
from aurora.errors import AuroraError

SUBCOMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile,
    "synthetic": synthetic.synthetic,
    "record": record.record,
    "import": engines.import_,
    "recommend": recommend.recommend,
    "plan": plan.plan,
    "evaluate": evaluate.evaluate,
    "drift": drift.drift,
    "simulate": simulate.simulate,
    "sweep": sweep.sweep,
    "replay": replay.replay,
    "run": run.run,
    "report": report.report,
    "order": order.order,
    "place": place.place,
    "export": engines.export,
    "demo": demo.demo,
    "doctor": doctor.doctor,
}

app = typer.Typer(
    name="aurora",
    help="Fast Mixture-of-Experts inference: which GPU holds which experts, and in which order tokens travel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _function in SUBCOMMANDS.items():
    app.command(_name, cls=Subcommand)(_function)
app.add_typer(measure.app, name="measure")
app.add_typer(reproduce.app, name="reproduce")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"aurora {version('aurora-moe')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `aurora` command."""
    try:
        app()
    except AuroraError as error:
        print(f"aurora: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
