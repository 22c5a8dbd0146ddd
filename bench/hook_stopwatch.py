"""CPU time of the plugin's hooks in a worker of vLLM, without what vLLM does inside of them: bench/vllm.py --hooks.

A function that vLLM calls of the plugin runs the stopwatch, one that the plugin calls of vLLM halts it. It reads the CPU time
of the thread, which other work on the machine does not prolong. Every second step goes past the plugin, with the stopwatch at
the same places: what it shows there is its own cost, in caches as cold as those of the hooks.
"""

import functools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = ("aurora-watchdog", "aurora-records")
METHODS = ("dispatch", "combine")
PASSES = ("execute_model", "execute_dummy_batch", "sample_tokens")


class Stopwatch:
    """CPU time of one thread, by hook and by whether it ran."""

    def __init__(self) -> None:
        self.spent_ns, self.steps, self.hooked = Counter[tuple[str, bool]](), Counter[bool](), True
        self._running, self._since_ns = "", 0  # the hook that runs; empty: none

    def switch(self, name: str) -> str:
        """Runs for a hook, or halts if its name is empty. Returns for which one it has run."""
        now_ns, before = time.thread_time_ns(), self._running
        if before:
            self.spent_ns[before, self.hooked] += now_ns - self._since_ns
        self._running, self._since_ns = name, time.thread_time_ns()
        return before

    def timed(self, name: str, function: Callable[..., Any], past: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns the function, for whose calls the stopwatch runs, or halts if the name is empty.

        Args:
            name: of the hook.
            function: the hook, or what it calls of vLLM.
            past: called in place of the hook in every second step.
        """

        @functools.wraps(function)
        def switched(*args: Any, **named: Any) -> Any:
            before = self.switch(name)
            try:
                return (function if past is None or self.hooked else past)(*args, **named)
            finally:
                self.switch(before)

        return switched


WATCH = Stopwatch()
BEGAN: dict[str, float] = {}


def install(sampled: int) -> None:
    """Runs the stopwatch for all that vLLM calls of the plugin, which is to time one pass of `sampled` (0: as it does).

    Called before vLLM's engine is made.
    """
    import aurora_vllm.traffic_recorder as recorder

    recorder.SAMPLED = sampled or recorder.SAMPLED  # before others import it
    import aurora_vllm.vllm_internals.worker as worker
    from aurora_vllm.vllm_internals.api_checks import find, needed
    from aurora_vllm.vllm_internals.patches import MANAGER
    from aurora_vllm.vllm_internals.worker_startup import WorkerStartup
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    start, bind = WorkerStartup.start, BaseRouter.set_capture_fn
    steps = [(find(f"{module}:"), name) for module, _, name in (check.where.partition(":") for check in needed("steps"))]

    def around(ours: Any, methods: tuple[str, ...]) -> None:
        theirs = ours.__mro__[1]
        for method in methods:
            engine = WATCH.timed("", getattr(theirs, method))
            setattr(theirs, method, engine)
            setattr(ours, method, WATCH.timed(method, getattr(ours, method), engine))

    def start_timed(self: Any) -> bool:
        around(op_registry_oot["RoutedExperts"], ("forward_modular",))
        around(find(MANAGER), METHODS)
        engines = [(holder, name, WATCH.timed("", getattr(holder, name))) for holder, name in steps]
        for holder, name, engine in engines:
            setattr(holder, name, engine)
        started = start(self)
        for holder, name, engine in engines:
            setattr(holder, name, WATCH.timed(name, getattr(holder, name), engine))
        BaseRouter.set_capture_fn = lambda self, capture: bind(
            self, WATCH.timed("capture", capture, WATCH.timed("", lambda _: None))
        )
        return started

    around(worker.CpuWorker, PASSES)
    execute = worker.CpuWorker.execute_model

    @functools.wraps(execute)
    def execute_model(*args: Any, **named: Any) -> Any:
        WATCH.hooked = not WATCH.hooked
        WATCH.steps[WATCH.hooked] += 1
        return execute(*args, **named)

    worker.CpuWorker.execute_model, WorkerStartup.start = execute_model, start_timed


def begin() -> None:
    """Forgets what was measured before."""
    WATCH.spent_ns.clear()
    WATCH.steps.clear()
    BEGAN.update({name: _thread_s(name) for name in THREADS}, wall=time.perf_counter(), cpu=time.process_time())


def save(path: str) -> None:
    """Writes what was measured since `begin`, for bench/vllm.py: hooks and stopwatch in seconds of a step."""
    steps, spent_s = WATCH.steps, {key: spent / 1e9 for key, spent in WATCH.spent_ns.items()}
    names = sorted({name for name, _ in spent_s})
    found = {
        "steps": sum(steps.values()),
        "wall_s": time.perf_counter() - BEGAN["wall"], "cpu_s": time.process_time() - BEGAN["cpu"],
        "threads_s": sum(_thread_s(name) - BEGAN[name] for name in THREADS),
        "hooks_s": {name: spent_s[name, True] / steps[True] for name in names},
        "stopwatch_s": {name: spent_s[name, False] / steps[False] for name in names},
    }  # fmt: skip
    Path(f"{path}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def _thread_s(name: str) -> float:
    """CPU seconds of a thread of this process; 0 if there is none."""
    idents = [each.ident for each in threading.enumerate() if each.name == name]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)
