"""Emulated devices for vLLM on CPUs: a forward pass of a rank begins after the seconds that a device would take for it.

Python imports this first in every process whose PYTHONPATH has its folder. EMULATE is "T0,CP,CD,REAL": seconds of a pass, of a
prompt token and of a generating request, and those that this machine takes for a pass anyway, which are left out. Ranks wait
for each other in the pass's collectives: a step takes as long as the rank with the most work, however few cores there are.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

RUNNER = "vllm.v1.worker.cpu_model_runner"
IDLE_S = 0.3  # after a pass, from which on the next one begins when it is asked for


class EmulatedDevice(importlib.abc.MetaPathFinder):
    """Wraps the forward passes of vLLM's CPU model runner when it is imported."""

    def find_spec(self, name, _path, _target=None):
        if name != RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            wrap(module.CPUModelRunner, *map(float, os.environ["EMULATE"].split(",")))

        spec.loader.exec_module = exec_module
        return spec


def wrap(runner, t0, cp, cd, real):
    """Makes passes of a class of model runners take their time, from the end of the pass before: what is between is hidden."""

    def after(method, seconds_of):
        def passes(self, *args, **named):
            began, seconds = time.monotonic(), seconds_of(*args)
            if began - getattr(self, "_ended", 0.0) < IDLE_S:
                began = self._ended
            if seconds:
                time.sleep(max(0.0, began + seconds - real - time.monotonic()))
            answer = method(self, *args, **named)
            self._ended = time.monotonic()
            return answer

        return passes

    def seconds(scheduled, *_):
        new = {request.req_id for request in scheduled.scheduled_new_reqs}
        counts = scheduled.num_scheduled_tokens
        prompts = sum(tokens for name, tokens in counts.items() if tokens > 1 or name in new)
        generating = sum(tokens == 1 and name not in new for name, tokens in counts.items())
        return t0 + cp * prompts + cd * generating if counts else 0.0

    runner.execute_model = after(runner.execute_model, seconds)
    runner._dummy_run = after(runner._dummy_run, lambda *_: t0)


if "EMULATE" in os.environ:
    sys.meta_path.insert(0, EmulatedDevice())
