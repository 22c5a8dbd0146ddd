"""aurora place: loads of experts -> how many replicas each has, which GPUs hold them, and how the load splits."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

import aurora
from aurora.algorithms.replicas.failure_resilient import SURVIVE
from aurora.algorithms.replicas.registry import REPLICAS
from aurora.cli.inputs import loads_of
from aurora.cli.options import refuse_given, verb
from aurora.cli.output import show, working
from aurora.errors import BadInput
from aurora.types import FailureDomains, GpuSlots
from aurora.types.options import MOST, Limits

TARGET = 0.95  # mean / largest load that --survive adds slots for
MOST_SPARE = 8  # slots per GPU more than the fewest that --survive tries, to balance loads
FIXED = 256  # redundant experts that engines keep for failures, whatever the model; SGLang's elastic EP


@verb(method=Parameter(choices=(*REPLICAS, *SURVIVE)))
def place(
    loads: Path,
    /,
    *,
    slots: int | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    groups: Annotated[int, Limits(least=1, most=MOST)] = 1,
    method: str | None = None,
    survive: bool = False,
    failures: Annotated[int | None, Limits(least=0)] = None,
    for_failures: bool = False,
    min_replicas: int | None = None,
    as_json: bool = False,
) -> None:
    """Place experts with replicas to minimise the largest load of a GPU, and print a lower bound. With --for-failures, instead
    maximise the probability that every expert survives failures of nodes. With --survive, find the fewest slots with which
    every expert survives any failure, or any K with --failures K.

    Args:
        loads: load of each expert: .csv without header or .npy, one row per layer; .csv of layer,expert,count; or a profile.
        slots: number of experts that fit on each GPU; with --for-failures: on each node; with --survive: the fewest.
        gpus: number of GPUs; default: one per node.
        nodes: number of nodes; each has equally many GPUs.
        groups: number of expert groups of equal size; eplb keeps each group on one node.
        method: how experts are placed; default: equal-split, and aurora with --for-failures.
        survive: find the fewest slots with which any GPU, or with --nodes any node, may fail, and place experts in them.
        failures: with --survive: how many may fail at the same time; default: 1.
        for_failures: maximise the probability that every expert survives failures.
        min_replicas: with --for-failures: minimum replicas N of each expert; with aurora the experts survive any N-1 failures.
    """
    from aurora.algorithms.check.plans import check_layout, check_resilient
    from aurora.algorithms.replicas.failure_resilient import DEFAULT, fewest_slots, place_to_survive
    from aurora.reports.json_objects import placement_json, survival_json
    from aurora.reports.plan_tables import layout_table, slots_line, survival_table, survive_lines

    chosen: dict[str, Any] = {} if method is None else {"method": method}
    if survive:
        refuse_given(("method", "groups", "for_failures", "min_replicas"), "without `survive`")
        if (count := gpus if gpus is not None else nodes) is None:
            raise BadInput("place --survive: expected --gpus, or --nodes of one GPU each")
        load_LE, failures = loads_of(loads), 1 if failures is None else failures
        least = fewest_slots(load_LE.shape[1], count, failures, nodes)
        placement = place_to_survive(load_LE, count, failures, nodes, slots)
        have = GpuSlots.equal(count, least if slots is None else slots)
        check_layout(placement, load_LE, have)
        alone = aurora.place(load_LE, GpuSlots.equal(count, fewest_slots(load_LE.shape[1], count, 0)))
        more = (
            place_to_survive(load_LE, count, failures, nodes, least + spare)
            for spare in range(1, MOST_SPARE + 1 if slots is None else 1)
        )
        with working("placing with more slots"):
            lines = survive_lines(placement, alone, more, TARGET, load_LE.shape[1], failures, least, nodes, FIXED)
        show(as_json, placement_json(placement) | {"fewest_slots": least}, layout_table(placement), *lines)
        return
    refuse_given(("failures",), "with `survive`, which finds the fewest slots")
    if slots is None:
        raise BadInput("place: expected --slots")
    if for_failures:
        refuse_given(("gpus", "groups"), "without `for_failures`, which places on `nodes`")
        if nodes is None:
            raise BadInput("place --for-failures: expected --nodes")
        hosts = FailureDomains.equal(nodes, slots)
        resilient = aurora.place_for_failures(loads_of(loads), hosts, min_replicas=min_replicas, **chosen)
        check_resilient(resilient, hosts, guaranteed=resilient.method == DEFAULT)
        show(as_json, survival_json(resilient), survival_table(resilient))
        return
    refuse_given(("min_replicas",), "with `for_failures`")
    if gpus is None and nodes is None:
        raise BadInput("place: expected --gpus, or --nodes of one GPU each")
    have = GpuSlots.equal((gpus if gpus is not None else nodes) or 0, slots, 1 if nodes is None else nodes, groups)
    load_LE = loads_of(loads)
    with working("placing"):
        placement = aurora.place(load_LE, have, **chosen)
    check_layout(placement, load_LE, have)
    line = slots_line(placement, load_LE, slots) if groups == 1 else None
    show(as_json, placement_json(placement), layout_table(placement), line)
