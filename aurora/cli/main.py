"""The `aurora` command: registers the subcommands, and turns each AuroraError into one sentence and exit code 2."""

import os
import sys
from difflib import get_close_matches
from importlib.metadata import version
from itertools import takewhile

from cyclopts import App, CoercionError, CycloptsError, MissingArgumentError, Parameter, UnknownCommandError

from aurora.cli.options import RUNNING, Running, as_options
from aurora.errors import AuroraError

VERBS = {  # by the words that call them: where each is defined, and what `aurora --help` says of it
    "profile": ("profile:profile", "a model and text: which experts the tokens choose"),
    "synthetic": ("profile:synthetic", "a skew and a model's sizes: drawn traffic"),
    "record": ("profile:record", "a running vLLM server: its traffic"),
    "import": ("engines:import_", "an engine's placement, or the routing that it recorded"),
    "recommend": ("recommend:recommend", "a model, GPUs and an engine: how to serve, and what it gains"),
    "plan": ("plan:plan", "a cluster and traffic: which GPU holds which experts, and in which order tokens travel"),
    "evaluate": ("plan:evaluate", "a plan on other traffic"),
    "simulate": ("simulate:simulate", "predict the time of a plan, or how it serves requests"),
    "run": ("run:run", "serve prompts by a plan, and measure it"),
    "train": ("train:train", "train a model on text"),
    "report": ("report:report", "a page on a plan and its traces"),
    "vllm": ("vllm:vllm", "serve in vLLM with the plugin"),
    "order": ("order:order", "order one all-to-all"),
    "place": ("place:place", "place experts with replicas, by their loads or for failures"),
    "export": ("engines:export", "a plan's placement in an engine's format"),
    "demo": ("demo:demo", "the whole way on two shipped models"),
    "doctor": ("measure:doctor", "check this installation, or a vLLM server"),
    "measure links": ("measure:links", "links between ranks: a cluster file"),
    "measure compute": ("measure:compute", "compute times of a model on this machine"),
    "measure devices": ("measure:devices", "this machine's GPUs: a cluster file"),
}


def _flag(name: str) -> str:
    """Returns the option of a parameter: words with dashes, without the unit of seconds."""
    return name.removesuffix("_s").replace("_", "-").lower()


OPTIONS = Parameter(negative=(), name_transform=_flag)
app = App(
    name="aurora",
    help="Fast Mixture-of-Experts inference: which GPU holds which experts, and in which order tokens travel.",
    version=lambda: f"aurora {version('aurora-moe')}",
    default_parameter=OPTIONS,
    help_format="plaintext",
    exit_on_error=False,
    print_error=False,
)
app.register_install_completion_command()
app.command(App(name="measure", help="measure hardware without traffic: links, compute, devices"))
for _number, (_name, (_path, _help)) in enumerate(VERBS.items()):
    _group = app["measure"] if _name.startswith("measure ") else app
    _group.command(
        f"aurora.cli.{_path}", name=_name.removeprefix("measure "), help=_help, sort_key=_number, default_parameter=OPTIONS
    )


def main() -> None:
    """Run the `aurora` command with the arguments of this process; its entry point."""
    if not os.environ.get("COLUMNS", "1").strip("0"):  # of which rich would print no column
        del os.environ["COLUMNS"]
    words = sys.argv[1:]
    try:
        code = run_words(words)
        sys.stdout.flush()
    except CycloptsError as error:
        command = " ".join(["aurora", *(error.command_chain or ())])
        _refuse(f"{_said(error)}; see {command} --help")
    except AuroraError as error:
        _refuse(as_options(str(error)))
    except MemoryError:
        _refuse("not enough memory for this")
    except SystemExit as ended:  # rich ends with 1 when nobody reads the output to its end, as `| head`
        sys.exit(0 if ended.code == 1 else ended.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # a full disk behind the output, which cannot take what is left either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _refuse(f"{error.filename or 'output'}: cannot be written or read: {error.strerror}")
    else:
        sys.exit(code)


def run_words(words: list[str]) -> int | None:
    """Runs a command line and returns its exit code; without a subcommand, prints help and returns 2."""
    command = app.parse_commands(list(takewhile(lambda word: not word.startswith("-"), words)))[1][-1]
    if command.default_command is not None:
        command.help = None  # that of its docstring, in place of the line that lists it
    RUNNING.set(Running(command, {}))
    function, bound, _ = app.parse_args(words)
    RUNNING.set(Running(command, dict(bound.arguments)))
    code: int | None = function(*bound.args, **bound.kwargs)
    return 2 if words in ([], ["measure"]) else code


def _said(error: CycloptsError) -> str:
    """Returns why an option or argument cannot be read."""
    match error:
        case MissingArgumentError(argument=argument) if argument is not None:
            return f"{argument.name}: expected a value, found none"
        case CoercionError(argument=argument, token=token) if argument is not None and token is not None:
            names = argument.get_choices(force=True)
            expected = f"one of {', '.join(names)}" if names else "another value"
            return f"{argument.name}: {error.__cause__ or f'expected {expected}, found {token.value!r}'}"
        case UnknownCommandError(unused_tokens=[word, *_]):
            known = get_close_matches(word, VERBS) or list(VERBS)
            return f"expected a subcommand such as {', '.join(known)}, found {word!r}"
    return str(error).rstrip(".")


def _refuse(message: str) -> None:
    """Print why the command ends, on one line without control characters, and end with exit code 2."""
    line = "".join(letter if letter.isprintable() else " " if letter == "\n" else repr(letter)[1:-1] for letter in message)
    print(f"aurora: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
