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


def check_run(plan: Plan) -> None:
    """Checks that `aurora.run` can serve with the plan: it has one model or two.

    Raises:
        InfeasiblePlan: if it has more.
    """
    if len(plan.models) > 2:
        raise InfeasiblePlan(f"run: serves one model or two by a plan, this one is for {len(plan.models)}; simulate it")


def check_vllm(plan: Plan) -> None:
    """Checks that vLLM can serve with the plan: it has one model, and with replicas all ranks and layers have equal slots.

    Without replicas (vLLM's redundant experts), a rank may hold any number of experts.

    Raises:
        InfeasiblePlan: if vLLM cannot.
    """
    if len(plan.models) != 1:
        raise InfeasiblePlan(f"vllm: serves one model by a plan, this one is for {len(plan.models)}; plan each by itself")
    placement = plan.models[0].placement
    if placement.split_LG is None:
        return
    for layer, held_G in enumerate(placement.slots_LG):
        if len(slots := {len(held) for held in held_G} | {len(placement.slots_LG[0][0])}) > 1:
            raise InfeasiblePlan(
                f"vllm: replicas need as many slots on every GPU and in every layer, layer {layer} has {min(slots)} to "
                f"{max(slots)}; plan with `slots_per_gpu` and `place` eplb"
            )


ENGINES: dict[str, Callable[[Plan], None]] = {"vllm": check_vllm}
