"""Every subcommand refuses bad inputs: one sentence, exit code 2, at once, and no file changed, half-written or left behind.

The inputs follow from each subcommand's own parameters, so that a new subcommand needs only a line in LINES that it would accept.
Each case is that line with one thing wrong.
"""

import hashlib
import json
import signal
import sys
import zlib

import numpy as np
import psutil
import pytest

import aurora
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.cli import main
from aurora.io import save
from aurora.types import SyntheticOptions
from tests.cli.test_subcommands import CONFIG, LINES, commands

pytestmark = pytest.mark.full

LIMIT_S = 30  # of one case, on a busy machine: what hangs takes longer
FEWEST, MOST = 30, 90  # cases of a subcommand
ELSEWHERE = {
    "vllm": "MIXTRAL",
    "run": "p.json --model MIXTRAL --prompts prompts.txt --max-new-tokens 1",
    "measure links": "--ranks 2 -o links.toml",
    "measure devices": "-o devices.toml",
}
ODD = (
    "", "-", "no such name", "\x1b[31mred", "a\tb\nc", "naïve-日本", "$\\x{$", "[bold]",
    "x" * 5000, "../../etc", "{0}", "%s", "'", "--",
)  # fmt: skip
NUMBERS = {"int": ("x", "", "-7", "1.5", "nan", str(10**30)), "float": ("x", "", "-1", "nan", "inf", "1e400")}
OUTPUTS = {"output", "trace"}  # of these parameters, those that are options
FOLDERS = {"recommend", "demo", "train"}  # whose output is a folder
ANY_TEXT = {("profile", "text"), ("run", "prompts"), ("train", "text")}  # with any contents
EMPTY_FOLDER = {("record", "folder")}  # that need not exist


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of every kind that subcommands read, and bad ones."""
    made = tmp_path_factory.mktemp("inputs")
    (made / "config.json").write_text(json.dumps(CONFIG))
    for seed, name in enumerate(("a.npz", "b.npz")):
        save(draw_profile("zipf:1", CONFIG, SyntheticOptions(window_tokens=50, seed=seed)), made / name)
    save(aurora.plan(aurora.load("demo-4"), aurora.load(made / "a.npz"), profile_paths=["a.npz"]), made / "p.json")
    (made / "loads.csv").write_text("6,5,1,1\n")
    (made / "m.csv").write_text("0,4\n5,0\n")
    (made / "t.csv").write_text("time_ms,event,node\n" + "".join(f"0,add,n{i}\n" for i in range(4)))
    (made / "prompts.txt").write_text("import os\n")
    (made / "text.txt").write_text("def f(x): return x\n" * 100)
    np.save(made / "loads.npy", np.ones((6, 4), dtype=np.int64))
    (made / "a-file").write_text("no folder")
    (made / "a-folder").mkdir()
    return made


def bad_files(folder, good):
    """Files by what is wrong with them, with the suffix of the good one."""
    suffix, content = good.suffix, good.read_bytes() if good.is_file() else b"{}"
    contents = {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "binary": bytes(range(256)) * 8,
        "compressed": zlib.compress(b"x" * 1000),
        "schema": b'{"schema": 99, "format": "aurora plan"}',
        "list": b"[1, 2, 3]",
        "huge": b'{"schema": 1, "num_local_experts": 1' + b"0" * 400 + b"}",
        "negative": b"-1,-2\n-3,-4\n",
        "nan": b"nan,nan\nnan,nan\n",
        "deep": b"[" * 100_000,
        "odd": "\x1b[31m\x00\u202e\ufeff,日本\n".encode(),
    }
    if suffix == ".csv":
        del contents["truncated"], contents["empty"]  # fewer rows are rows
    for what, bad in contents.items():
        path = folder / f"bad-{what}{suffix}"
        path.write_bytes(bad)
        yield path.name
    yield from ("missing" + suffix, "a-folder", "a-file/below" + suffix, "x" * 300 + suffix)


def kind_of(option):
    """The plain type of an option's values."""
    return next((kind for kind in ("Path", "bool", "float", "int") if kind in str(option.hint)), "str")


def is_flag(option):
    return option.name.startswith("--")


def words_of(name, mixtral):
    line = {**LINES, **ELSEWHERE}[name].replace("MIXTRAL", str(mixtral)).replace("TEXT", "text.txt")
    return line.split()


def replaced(words, option, value):
    """The line with an option of another value: in its place, or added."""
    flag = next((flag for flag in option.names if flag in words), None)
    if flag is None:
        return [*words, option.name, value]
    at = words.index(flag) + 1
    return [*words[:at], value, *words[at + 1 :]]


def positional(words, options):
    """Where the arguments of the line stand, before its first option."""
    until = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    arguments = [option for option in options if not is_flag(option)]
    return [(at, arguments[min(at, len(arguments) - 1)]) for at in range(until)] if arguments else []


def inputs_of(words, folder):
    """The files that the line reads, those that its plan names among them."""
    found = [word for at, word in enumerate(words) if (folder / word).is_file() and (at == 0 or words[at - 1] != "-o")]
    return [*found, *(["a.npz"] if "p.json" in found else [])]


def cases(name, options, folder, mixtral):
    """Arguments that the subcommand must refuse."""
    words = words_of(name, mixtral)
    lines = [[*words, "--no-such-option"], [*words, "-?"], [*words, "--json=maybe"]]
    spots = positional(words, options)
    for option in options:
        parameter = option.field_info.name
        kind, label = kind_of(option), (name, parameter)
        places = [at for at, each in spots if each is option]
        if parameter == "as_json":
            continue
        if parameter in OUTPUTS and is_flag(option):
            values = ["a-file/below", "a-file/below/deeper"]
            values += ["a-file"] if name in FOLDERS else ["a-folder", "none/below", "/dev/full", *inputs_of(words, folder)]
        elif kind == "Path":
            good = folder / (words[places[0]] if places else next((w for w in words if (folder / w).is_file()), "p.json"))
            values = ["missing"] if label in ANY_TEXT else list(bad_files(folder, good))
            values = [] if label in EMPTY_FOLDER else values
        elif kind in NUMBERS:
            values = NUMBERS[kind]
        elif kind == "str":
            values = ODD
        else:
            continue
        if places:
            lines += [[*words[:at], value, *words[at + 1 :]] for at in places for value in values]
        elif is_flag(option):
            lines += [replaced(words, option, value) for value in values]
    required = [at for at, option in spots if option.required]
    lines += [words[:at] + words[at + 1 :] for at in required] + ([[]] if required else [])
    if len(lines) < FEWEST:  # subcommands with few parameters
        lines += [[*words, f"--{each.strip()}", each] for each in ODD] + [[*words, each or "x", "y", "z", "w"] for each in ODD]
    step = max(1, -(-len(lines) // MOST))
    return [line for offset in range(step) for line in lines[offset::step]][:MOST]


def snapshot(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


class Hung(BaseException):
    pass


def called(monkeypatch, capsys, words):
    """What is wrong with the answer to a command line; nothing if it is refused as it should be."""

    def stop(*_):
        raise Hung

    monkeypatch.setattr(sys, "argv", ["aurora", *words])
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    code = None
    try:
        main.main()
    except SystemExit as exit_:
        code = exit_.code
    except Hung:
        return "hangs"
    except BaseException as error:
        return f"traceback: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        out, err = capsys.readouterr()
    if code != 2:
        return f"exit code {code}: {err or out[-80:]}"
    if not err.startswith("aurora: ") or err.count("\n") != 1 or not err[:-1].isprintable():
        return f"not one sentence: {err!r}"
    return "says wrote" if "wrote" in out else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(commands()))
def test_bad_inputs_are_refused(name, folder, mixtral, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("AURORA_DATA", raising=False)
    lines = cases(name, list(commands()[name].values()), folder, mixtral)
    assert len(lines) >= FEWEST
    before, family = snapshot(folder), {child.pid for child in psutil.Process().children(recursive=True)}
    wrong = []
    for words in lines:
        if said := called(monkeypatch, capsys, [*name.split(), *words]):
            wrong.append(f"{' '.join(each[:60] for each in words)!r}: {said[:300]}")
        if (after := snapshot(folder)) != before:
            changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
            wrong.append(f"{' '.join(each[:60] for each in words)!r}: changed {sorted(changed)}")
            before = after
    left = {child.pid for child in psutil.Process().children(recursive=True)} - family
    assert not wrong, f"{len(wrong)} of {len(lines)}:\n" + "\n".join(wrong)
    assert not left
