"""The mathematics of planning: pure functions on arrays, each with its bound. `aurora.plan(...)` is `planner.make_plan`."""

from aurora.types.callable_module import make_callable

make_callable(__name__, "aurora.plan.planner", "make_plan")
