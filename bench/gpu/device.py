"""CUDA as far as these benchmarks use it, and its twin on a CPU, with which `--dry` runs the same host code.

`python -m bench.gpu.device` prints how many GPUs there are, and what they are as JSON. All calls of CUDA are in `Cuda`: a test
looks each of them up in the installed torch. The twin takes over where Triton's interpreter is on (TRITON_INTERPRET=1).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aurora.runtime.transports.symmetric_memory import SymmetricMemory, shared_memory

SKIPPED = 77  # exit code
NEWER = 580  # driver for CUDA 13
FIELDS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,power.default_limit,temperature.gpu"
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # operators that wait for a GPU
MakeMemory = Callable[[int], SymmetricMemory]


class Cuda:
    """A GPU by its number, the current one from now on.

    Attributes:
        name: as torch names it.
        processors: number of its multiprocessors.
        dry: whether it is the twin.
    """

    dry = False

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        torch.cuda.set_device(number)
        self.processors = torch.cuda.get_device_properties(number).multi_processor_count
        self._streams: list[Any] = []

    def about(self) -> dict[str, Any]:
        """Returns what results depend on: GPUs, driver, clocks, power limits, versions."""
        asked = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"]
        gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
        said = [dict(zip(FIELDS.split(","), map(str.strip, line.split(",")), strict=True)) for line in gpus]
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, self.nccl()))}
        return {"gpus": said, **versions}

    def nccl(self) -> tuple[int, ...]:
        """Returns the version of NCCL."""
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits for all that is queued."""
        torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], repeats: int = 30) -> float:
        """Returns the median time of a call by events, after five calls."""
        for _ in range(5):
            call()
        took = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end))
        return float(statistics.median(took))

    def side_by_side(self, calls: Sequence[Callable[[], object]]) -> None:
        """Queues calls that may wait for each other, each on a stream of its own; the current stream waits for all."""
        while len(self._streams) < len(calls):
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        here, streams = torch.cuda.current_stream(), self._streams[: len(calls)]
        for stream in streams:
            stream.wait_stream(here)
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call()
        for stream in streams:
            here.wait_stream(stream)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Captures a call as a graph; it runs once before. Returns what replays it."""
        self.side_by_side([call])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    @contextmanager
    def no_syncs(self) -> Iterator[None]:
        """Context manager in which an operator of torch that waits for the GPU raises RuntimeError."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def launches(self, call: Callable[[], object]) -> int:
        """Returns how many kernels, copies and fills of a call torch's profiler sees on the GPU."""
        activity = torch.profiler.ProfilerActivity
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        return sum(each.device_type.name == "CUDA" and not each.is_user_annotation for each in seen.events())

    def memories(self, ranks: int) -> list[MakeMemory]:
        """Returns for each of so many ranks what makes its buffer, a part of one tensor."""
        from bench.local_layer import local_memory

        return local_memory(ranks, self.name)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of this thread that are no views; what Triton interprets is one launch each.

    Args:
        refuses: whether operators that would wait for a GPU raise RuntimeError.
    """

    def __init__(self, refuses: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self._refuses, self._interprets = 0, refuses, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts an operator, or refuses it."""
        name = func._opname
        if not self._interprets:
            if self._refuses and name in WAITING:
                raise RuntimeError(f"{name} waits for the GPU")
            self.launches += not (func.is_view or "empty" in name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        """Context manager in which it counts."""
        from triton.runtime.interpreter import GridExecutor

        interpret = GridExecutor.__call__

        def unseen(*args: Any, **named: Any) -> None:
            self.launches, self._interprets = self.launches + 1, True
            interpret(*args, **named)
            self._interprets = False

        with patch.object(GridExecutor, "__call__", unseen), self:
            yield self


class Emulated(Cuda):
    """The twin: a CPU, Triton's interpreter, and a process for each stream."""

    dry = True

    def __init__(self) -> None:
        from tests.runtime.transports.drawn_pushes import in_interpreter

        in_interpreter()
        self.name, self.processors = "cpu", 132
        self._folders: list[Any] = []

    def about(self) -> dict[str, Any]:
        """Returns the same keys as `Cuda.about`."""
        return {"gpus": [], "torch": torch.__version__, "cuda": None, "nccl": "emulated"}

    def nccl(self) -> tuple[int, ...]:
        """Returns the version with all that is asked for."""
        return 2, 30, 7

    def synchronize(self) -> None:
        """Returns at once."""

    def milliseconds(self, call: Callable[[], object], repeats: int = 30) -> float:
        """Returns the time of one call."""
        began_s = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began_s)

    def side_by_side(self, calls: Sequence[Callable[[], object]]) -> None:
        """Runs each of several calls in a process; what it writes outside of shared memory is lost."""
        if len(calls) == 1:
            calls[0]()
            return
        children = []
        for call in calls:
            if (child := os.fork()) == 0:
                code = 1
                try:
                    call()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise RuntimeError("a call of a stream failed")

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Runs the call as before a capture; a replay runs it again."""
        call()
        return call

    @contextmanager
    def no_syncs(self) -> Iterator[None]:
        """Context manager in which operators that would wait raise RuntimeError."""
        with Watch(refuses=True).watching():
            yield

    def launches(self, call: Callable[[], object]) -> int:
        """Counts operators that are no views."""
        with Watch(refuses=False).watching() as watch:
            call()
        return watch.launches

    def memories(self, ranks: int) -> list[MakeMemory]:
        """Returns makers of files in memory, which processes share."""
        self._folders.append(tempfile.TemporaryDirectory(dir="/dev/shm"))
        return [partial(shared_memory, Path(self._folders[-1].name), rank, ranks) for rank in range(ranks)]


def chosen(number: int = 0) -> Cuda:
    """Returns the GPU of a number, or the twin where Triton's interpreter is on. Ends the process where there is neither."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Emulated()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # or kernels that wait for each other share a queue
    if torch.version.cuda is None or not torch.cuda.is_available():
        found = "a CPU build" if torch.version.cuda is None else old_driver() or "no GPU"
        sys.stderr.write(f"bench/gpu: expected a CUDA build of torch and a GPU, found {found}; --dry needs neither\n")
        sys.exit(2)
    return Cuda(number)


def old_driver() -> str:
    """Returns in words that the driver is too old for this torch's CUDA; "" if that is not known."""
    with suppress(OSError, ValueError):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()[0:1]
        if driver and str(torch.version.cuda).startswith("13") and int(driver[0].partition(".")[0]) < NEWER:
            return f"driver {driver[0]}, where CUDA {torch.version.cuda} needs {NEWER} or newer"
    return ""


def lacks() -> list[str]:
    """Returns what is missing for Triton and the compiled modules, which call a C compiler."""
    compiler = any(shutil.which(os.environ.get(name, default)) for name, default in (("CC", "gcc"), ("CC", "clang")))
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return ["gcc"] * (not compiler) + [f"Python.h (python{sys.version_info[0]}.{sys.version_info[1]}-dev)"] * (not headers)


def report(**figures: Any) -> None:
    """Prints key figures as the last line of a step, and writes them for results.json."""
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
    if path := os.environ.get("FIGURES"):
        Path(path).write_text(json.dumps(rounded))
    print("; ".join(f"{name} {value}" for name, value in rounded.items() if not isinstance(value, dict | list)), flush=True)


def skip(why: str) -> NoReturn:
    """Ends a step that this machine cannot take, with the reason."""
    print(why, flush=True)
    sys.exit(SKIPPED)


if __name__ == "__main__":
    found = chosen()
    if missing := lacks():
        sys.stderr.write(f"bench/gpu: expected {' and '.join(missing)}, found none; Triton compiles its launchers with them\n")
        sys.exit(2)
    print(0 if found.dry else torch.cuda.device_count())
    print(json.dumps(found.about()))
