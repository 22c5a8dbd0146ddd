"""The `aurora` command: registers the subcommands, and turns each AuroraError into one sentence and exit code 2."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from aurora.cli import demo, engines, measure, order, place, plan, profile, recommend, report, run, simulate, train, vllm
from aurora.cli.options import Subcommand, with_options
from aurora.errors import AuroraError

SUBCOMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile,
    "synthetic": profile.synthetic,
    "record": profile.record,
    "import": engines.import_,
    "recommend": recommend.recommend,
    "plan": plan.plan,
    "evaluate": plan.evaluate,
    "simulate": simulate.simulate,
    "run": run.run,
    "train": train.train,
    "report": report.report,
    "vllm": vllm.vllm,
    "order": order.order,
    "place": place.place,
    "export": engines.export,
    "demo": demo.demo,
    "doctor": measure.doctor,
    "measure links": measure.links,
    "measure compute": measure.compute,
    "measure devices": measure.devices,
}
HELP = "Measure hardware without traffic: links, compute, devices."

PASSED_ON = ("vllm",)  # subcommands that hand options that they do not know to another command

INTERRUPTED = 130  # exit code of a command that Ctrl-C ended
UsageError: Any = typer.BadParameter.__base__  # of typer's click, wherever typer keeps it

app = typer.Typer(
    name="aurora",
    help="Fast Mixture-of-Experts inference: which GPU holds which experts, and in which order tokens travel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_measure = typer.Typer(help=HELP, no_args_is_help=True)
for _name, _function in SUBCOMMANDS.items():
    _group = _measure if _name.startswith("measure ") else app
    _passed = {"ignore_unknown_options": _name in PASSED_ON}
    _group.command(_name.removeprefix("measure "), cls=Subcommand, context_settings=_passed)(with_options(_function))
app.add_typer(_measure, name="measure")


def _version(requested: bool) -> None:
    if requested:
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
    """Run the `aurora` command with the arguments of this process; its entry point."""
    try:
        code = app(prog_name="aurora", standalone_mode=False)
        sys.stdout.flush()
    except AuroraError as error:
        _refuse(str(error))
    except UsageError as error:
        _refuse_usage(error)
    except MemoryError:
        _refuse("not enough memory for this")
    except SystemExit as ended:  # typer and rich end with 1 when nobody reads the output to its end, as `| head`
        sys.exit(0 if ended.code == 1 else ended.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # a full disk behind the output, which cannot take what is left either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _refuse(f"{error.filename or 'output'}: cannot be written or read: {error.strerror}")
    else:
        if code == INTERRUPTED:
            print("aurora: interrupted", file=sys.stderr)
        sys.exit(code)


def _refuse(message: str) -> None:
    """Print why the command ends, on one line without control characters, and end with exit code 2."""
    line = "".join(letter if letter.isprintable() else " " if letter == "\n" else repr(letter)[1:-1] for letter in message)
    print(f"aurora: {line}", file=sys.stderr)
    sys.exit(2)


def _refuse_usage(error: Any) -> None:
    """The same for options and arguments that the subcommand does not have, or lacks; without any, its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(2)
    command = "aurora" if error.ctx is None else error.ctx.command_path
    _refuse(f"{error.format_message().rstrip('.')}; see {command} --help")


if __name__ == "__main__":
    main()
