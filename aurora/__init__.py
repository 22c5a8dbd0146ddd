"""Fast Mixture-of-Experts models: where experts sit and in which order tokens travel.

The functions of FUNCTIONS, the value types of `aurora.types` and the errors of `aurora.errors` are the public interface:

    import aurora

    cluster = aurora.load("demo-4")
    profile = aurora.load("profile.npz")
    plan = aurora.plan(cluster, profile)

Importing aurora imports neither torch nor anything slow: each name is fetched on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

FUNCTIONS = {  # the public functions: where each is defined
    "all_to_all": "aurora.runtime.all_to_all.all_to_all",
    "drift": "aurora.planner.evaluate.drift",
    "evaluate": "aurora.planner.evaluate.evaluate",
    "load": "aurora.io.load",
    "order": "aurora.algorithms.alltoall.schedule.order",
    "place": "aurora.algorithms.replicas.registry.place",
    "place_for_failures": "aurora.algorithms.replicas.failure_resilient.place_for_failures",
    "plan": "aurora.planner.plan.plan",
    "price": "aurora.planner.plan.price",
    "profile": "aurora.profiler.profile_model.profile_model",
    "rebalance": "aurora.algorithms.replicas.rebalance.rebalance",
    "recommend": "aurora.advisor.recommend.recommend",
    "register": "aurora.planner.options.register",
    "report": "aurora.reports.report.report",
    "run": "aurora.runtime.run.run",
    "save": "aurora.io.save",
    "simulate": "aurora.simulator.interpreter.simulate_plan",
    "simulate_requests": "aurora.simulator.requests.simulate_requests",
    "synthetic_profile": "aurora.profiler.synthetic.synthetic_profile",
    "train": "aurora.training.run.train",
}
_VALUES = ("aurora.errors", "aurora.types")  # all that their __all__ name is public here

if TYPE_CHECKING:
    from aurora.advisor.recommend import recommend as recommend
    from aurora.algorithms.alltoall.schedule import order as order
    from aurora.algorithms.replicas.failure_resilient import place_for_failures as place_for_failures
    from aurora.algorithms.replicas.rebalance import rebalance as rebalance
    from aurora.algorithms.replicas.registry import place as place
    from aurora.errors import *
    from aurora.io import load as load
    from aurora.io import save as save
    from aurora.planner.evaluate import drift as drift
    from aurora.planner.evaluate import evaluate as evaluate
    from aurora.planner.options import register as register
    from aurora.planner.plan import plan as plan
    from aurora.planner.plan import price as price
    from aurora.profiler.profile_model import profile_model
    from aurora.profiler.synthetic import synthetic_profile as synthetic_profile
    from aurora.reports.report import report as report
    from aurora.runtime.all_to_all import all_to_all as all_to_all
    from aurora.runtime.run import run as run
    from aurora.simulator.interpreter import simulate_plan
    from aurora.simulator.requests import simulate_requests as simulate_requests
    from aurora.training.run import train as train
    from aurora.types import *

    profile, simulate = profile_model, simulate_plan
else:

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return _public_names()
        if name in FUNCTIONS:
            module, _, function = FUNCTIONS[name].rpartition(".")
            return globals().setdefault(name, getattr(importlib.import_module(module), function))
        if name == "PlanOptions":
            importlib.import_module("aurora.planner.options")  # tells it the names of strategies
        for module in () if name.startswith("_") else _VALUES:
            home = importlib.import_module(module)
            if name in home.__all__:
                return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module 'aurora' has no attribute {name!r}")


def _public_names() -> list[str]:
    return sorted({*FUNCTIONS, *(name for module in _VALUES for name in importlib.import_module(module).__all__)})


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})
