"""An event-driven interpreter of Programs: what a plan will take, before anything runs.

`aurora.simulate(...)` is `interpreter.simulate_plan`.
"""

from aurora.types.callable_module import make_callable

make_callable(__name__, "aurora.simulate.interpreter", "simulate_plan")
