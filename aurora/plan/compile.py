"""Plan -> Program: what each rank does, in order."""

from aurora.types import Barrier, Compute, Exchange, Op, Plan, Program


def compile_plan(plan: Plan) -> Program:
    """The Program of `plan`: per model and layer gate, counts, ordered dispatch, experts, ordered combine, aggregation."""
    ops_ML = []
    for model in plan.models:
        layers: list[tuple[Op, ...]] = [
            (
                Compute("gate"),
                Barrier("counts"),
                Exchange("dispatch", dispatch),
                Compute("expert"),
                Exchange("combine", combine),
                Compute("aggregate"),
            )
            for dispatch, combine in zip(model.dispatch_L, model.combine_L, strict=True)
        ]
        ops_ML.append(tuple(layers))
    return Program(
        len(plan.cluster),
        tuple(model.model for model in plan.models),
        tuple(model.placement for model in plan.models),
        tuple(ops_ML),
        tuple(model.once for model in plan.models),
    )
