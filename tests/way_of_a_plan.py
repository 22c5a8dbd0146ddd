"""Counts the ways of a plan: how it is made (`aurora.plan`), and how it is performed (`runtime/run.py:run`).

`python -m tests.way_of_a_plan` prints both; with -v it lists the files. It fails if the way through `run` is longer than LIMITS.

- Making: all calls of functions of the package. A stay is a run of consecutive calls of functions of one file. The plan holds
  every expert once; choosing slots besides (`slots_per_gpu` auto, the default) makes and simulates several such plans.
- Performing: the calls that are handed the plan or what is made of it (HANDED), on the main thread and on rank 0 with its
  threads: a memory transport, two ranks, one small model, two prompts, four tokens each. A sequence of files that follows itself
  at once, as for the next layer or the next step, counts once.
- Climbs: pairs of files of which one calls, directly or through torch, a function of the other, whose package is above its own in
  pyproject's layers; of all calls, handed the plan or not.
"""

import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import aurora
from aurora.io import shipped
from aurora.types import Barrier, Compute, Exchange, ModelPlan, Order, Placement, Plan, Program

SOURCES = str(Path(aurora.__file__).parent)
HANDED = (Plan, ModelPlan, Program, Placement, Barrier, Compute, Exchange, Order)
LIMITS = {"stays": 25, "climbs": 4}
MODEL = "models/mixtral-topics"


class Call(NamedTuple):
    """A call of a function of the package."""

    file: str
    caller: str | None  # the file of the caller in the package, directly or through others' code
    handed: bool  # whether an argument is the plan or made of it


def made() -> Callable[[], object]:
    """Returns what makes a plan of one layer with 8 experts on 4 GPUs."""
    traffic = aurora.synthetic_profile(
        "zipf:0.9", "mixtral-topics", aurora.SyntheticOptions(sources=4, windows=2, window_tokens=64)
    )
    layer, cluster = traffic.at_layers([0]), aurora.load("demo-4", aurora.Cluster)
    return lambda: aurora.plan(cluster, layer, aurora.PlanOptions(slots_per_gpu=None))


def performed() -> Callable[[], object]:
    """Returns what runs a plan of one model on two ranks."""
    model = shipped(MODEL)
    traffic = aurora.synthetic_profile("zipf:1", model / "config.json", aurora.SyntheticOptions(sources=2))
    gpus = tuple(aurora.Gpu(f"gpu-{rank}", "cpu", 0, 1e9, 1e9, 10**9) for rank in range(2))
    plan = aurora.plan(aurora.Cluster("two", gpus), traffic)
    options = aurora.RunOptions(max_new_tokens=4, transport="memory")
    return lambda: aurora.run(plan, [model], [[[76, 107, 104, 35], [1, 2, 3, 4]]], options)


@contextmanager
def thread_starters() -> Iterator[dict[threading.Thread, threading.Thread]]:
    """Yields which thread has started which."""
    starter_of: dict[threading.Thread, threading.Thread] = {}
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        starter_of[thread] = threading.current_thread()
        start(thread)

    threading.Thread.start = noted  # type: ignore[method-assign]
    try:
        yield starter_of
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def calls(work: Callable[[], object]) -> list[Call]:
    """Returns the calls of `work`, in sequence, but those of threads of other ranks than 0; it is done once before."""
    work()  # imports and compiles
    found: list[Call] = []

    def called(frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call" or not _ours(frame):
            return
        thread = threading.current_thread()
        while thread in starter_of:
            if thread.name.startswith("aurora-rank-") and thread.name != "aurora-rank-0":
                return
            thread = starter_of[thread]
        caller = frame.f_back
        while caller is not None and not _ours(caller):
            caller = caller.f_back
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        handed = any(_is_handed(frame.f_locals.get(name)) for name in arguments)
        found.append(Call(_file(frame), None if caller is None else _file(caller), handed))

    with thread_starters() as starter_of:
        threading.setprofile(called)
        sys.setprofile(called)
        work()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def stays(files: list[str]) -> list[str]:
    """Returns the files of the stays; a sequence of files that follows itself at once counts once."""
    kept = [file for file, _ in groupby(files)]
    before = 0
    while len(kept) != before:
        before = len(kept)
        for length in range(2, len(kept) // 2 + 1):
            at = 0
            while at + 2 * length <= len(kept):
                if kept[at : at + length] == kept[at + length : at + 2 * length]:
                    del kept[at : at + length]
                else:
                    at += 1
    return [file for file, _ in groupby(kept)]


def climbs(way: list[Call]) -> list[tuple[str, str]]:
    """Returns the pairs (caller, called) of files, each once, whose packages are in this sequence from below in pyproject's layers."""
    contracts = tomllib.loads((Path(SOURCES).parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    depth = {package.strip(): at for at, row in enumerate(rows) for package in row.split("|")}

    def of(file: str) -> int:
        return depth.get("aurora." + file.split("/")[0].removesuffix(".py"), -1)

    pairs = dict.fromkeys((call.caller, call.file) for call in way if call.caller is not None)
    return [(caller, file) for caller, file in pairs if 0 <= of(file) < of(caller)]


def _ours(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(SOURCES) and not code.co_name.startswith("<")


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename[len(SOURCES) + 1 :]


def _is_handed(value: object) -> bool:
    return isinstance(value, HANDED) or (isinstance(value, tuple | list) and len(value) > 0 and _is_handed(value[0]))


def main() -> int:
    """Prints both ways. Returns 1 if the way through `run` is longer than LIMITS."""
    plan = calls(made())
    making = [file for file, _ in groupby(call.file for call in plan)]
    print(f"plan: {len(making)} stays in {len(set(making))} files, {len(making) - len(set(making))} returns")
    run = calls(performed())
    performing, up = stays([call.file for call in run if call.handed]), climbs(run)
    print(f"run: {len(performing)} stays in {len(set(performing))} files, {len(up)} climbs; at most {LIMITS}")
    if "-v" in sys.argv:
        print("\n".join(f"{count:4} {file}" for file, count in Counter(making).most_common()))
        print("\n".join(performing))
        print("\n".join(f"{caller} -> {file}" for caller, file in up))
    return int(len(performing) > LIMITS["stays"] or len(up) > LIMITS["climbs"])


if __name__ == "__main__":
    sys.exit(main())
