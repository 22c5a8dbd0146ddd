"""Plan -> Program: what each rank does, in order."""

from aurora.errors import BadInput
from aurora.types import TURNS, Barrier, Compute, Exchange, Op, Plan, Program


def compile_plan(plan: Plan) -> Program:
    """The Program of `plan`: per model and layer gate, counts, ordered dispatch, experts, ordered combine, aggregation.

    Raises BadInput for turns that are none.
    """
    ops_ML = []
    turns = plan.methods.get("turns", TURNS[0])
    if turns not in TURNS:
        raise BadInput(f"plan, methods: expected turns as one of {', '.join(TURNS)}, found {turns!r}")
    for model in plan.models:
        last = len(model.combine_L) - 1
        layers: list[tuple[Op, ...]] = [
            (
                Compute("gate"),
                Barrier("counts"),
                Exchange("dispatch", dispatch),
                Compute("expert"),
                Exchange("combine", combine, turns == "layer" and layer < last),
                Compute("aggregate"),
            )
            for layer, (dispatch, combine) in enumerate(zip(model.dispatch_L, model.combine_L, strict=True))
        ]
        ops_ML.append(tuple(layers))
    return Program(
        len(plan.cluster),
        tuple(model.model for model in plan.models),
        tuple(model.placement for model in plan.models),
        tuple(ops_ML),
        tuple(model.once for model in plan.models),
    )
