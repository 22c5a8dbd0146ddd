"""Compiles a Plan to a Program: the operations of each rank, in order."""

from aurora.types import (
    PREEMPTION_INTERVAL_S,
    PRIORITIES,
    Barrier,
    Compute,
    Exchange,
    Op,
    Order,
    Plan,
    PlanOptions,
    Program,
    SlicePolicy,
)


def compile_plan(plan: Plan, gathered: bool = False, overlap: int = 1) -> Program:
    """Compiles a plan to a Program.

    Each layer of each model has a gate, an exchange of counts, an ordered dispatch, experts, an ordered combine and an
    aggregation. Each micro-batch of a model is a model of the program, with the same placement and orders.

    Args:
        plan: the plan.
        gathered: whether an allgather and a reduce-scatter replace the plan's all-to-alls.
        overlap: number of groups of each rank's experts, see `Exchange.groups`.
    """
    ops_ML = []
    time_slice = plan.options.time_slice
    policies_M = policies(plan)
    for model, policy in zip(plan.models, policies_M, strict=True):
        holding = () if policy.yields else ("layer", "step")
        orders_L, hierarchy = tuple(zip(model.dispatch_L, model.combine_L, strict=True)), model.hierarchy
        if gathered:
            orders_L, hierarchy = ((at_once := Order.all_at_once(len(plan.cluster)), at_once.reversed),) * len(orders_L), None
        last = len(orders_L) - 1
        layers: list[tuple[Op, ...]] = [
            (
                Compute("gate"),
                Barrier("counts"),
                Exchange("dispatch", dispatch, time_slice == "step", hierarchy, overlap),
                Compute("expert"),
                Exchange("combine", combine, time_slice in holding and layer < last, hierarchy, overlap),
                Compute("aggregate"),
            )
            for layer, (dispatch, combine) in enumerate(orders_L)
        ]
        ops_ML.append(tuple(layers))
    parts = plan.options.micro_batches
    plan_model_M = tuple(number for number in range(len(plan.models)) for _ in range(parts))
    return Program(
        len(plan.cluster),
        plan.served_names,
        tuple(plan.models[number].placement for number in plan_model_M),
        tuple(ops_ML[number] for number in plan_model_M),
        tuple(plan.models[number].deduplicated for number in plan_model_M),
        tuple(policies_M[number] for number in plan_model_M),
        plan_model_M,
        preemption_s(plan.options),
        gathered,
    )


SLICE_INTERVALS = 5  # preemption intervals in a batch model's time slice, which the interactive model's experts hide in part


def preemption_s(options: PlanOptions) -> float:
    """Returns the seconds between preemption points: `options.preemption_s`, or PREEMPTION_INTERVAL_S if that is None."""
    return PREEMPTION_INTERVAL_S if options.preemption_s is None else options.preemption_s


def policies(plan: Plan) -> tuple[SlicePolicy, ...]:
    """Returns one SlicePolicy per model of the plan, made from its `priorities`."""
    options, models = plan.options, len(plan.models)
    interactive_M = [name == PRIORITIES[0] for name in options.priorities] or [False] * models
    beside = any(interactive_M) or (models == 1 and len(options.priorities) > 0)  # a single one: beside another run's
    slice_s = SLICE_INTERVALS * preemption_s(options)
    return tuple(
        SlicePolicy(interactive, slice_s if beside and not interactive else float("inf")) for interactive in interactive_M
    )
