"""Checks whether a serving engine can serve by a plan."""

from collections.abc import Callable

from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import Plan


def check_engine(plan: Plan, engine: str) -> None:
    """Checks that an engine, a name in ENGINES, can serve with a plan.

    Raises:
        InfeasiblePlan: if the engine cannot serve by the plan.
        BadInput: if the engine is not in ENGINES.
    """
    if engine not in ENGINES:
        raise BadInput(f"`engine`: expected one of {', '.join(ENGINES)}, found {engine!r}")
    ENGINES[engine](plan)


def check_vllm(plan: Plan) -> None:
    """Checks that vLLM can serve with the plan: it has one model.

    Ranks and layers may hold any number of experts. With vLLM's EPLB, which replicas need, free slots are filled by replicas.

    Raises:
        InfeasiblePlan: if it has more.
    """
    if len(plan.models) != 1:
        raise InfeasiblePlan(f"vllm: serves one model by a plan, this one is for {len(plan.models)}; plan each by itself")


ENGINES: dict[str, Callable[[Plan], None]] = {"vllm": check_vllm}
