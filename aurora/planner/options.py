"""Resolves PlanOptions: registers users' strategies, replaces "auto" by names, and rejects contradictory options."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.alltoall.schedule import auto_orders
from aurora.algorithms.check.fit import check_traffic
from aurora.algorithms.placement.assignment import ASSIGN
from aurora.algorithms.placement.colocation import COLOCATE, JOINT
from aurora.algorithms.placement.cost_model import AIMS, OWN, layer_costs
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.failure_resilient import DEFAULT, SURVIVE
from aurora.algorithms.replicas.registry import REGISTERED, REPLICAS, of_groups
from aurora.errors import BadInput, InfeasiblePlan, check_one_of
from aurora.planner.scenarios.exclusive import SWAP_SEARCH
from aurora.types import PRIORITIES, TIME_SLICES, Cluster, Plan, PlanOptions, Profile
from aurora.types.options import ALL_TO_ALLS, STRATEGIES, know

GIVEN = "given"  # the place of a plan whose placement somebody else made


def remade(options: PlanOptions) -> PlanOptions:
    """Returns a plan's options to plan anew: if its placement was GIVEN by the user, placement strategies become "auto"."""
    return replace(options, place="auto", assign="auto", colocate="auto") if options.place == GIVEN else options


def choices(options: PlanOptions, models: int) -> dict[str, tuple[str, ...]]:
    """Returns the names that each strategy option accepts besides "auto"; the command line's help lists the same names.

    Args:
        options: only `min_replicas` is read: with it, `place` accepts other names.
        models: how many models share the GPUs.

    Returns:
        A dict from fields of PlanOptions to names.
    """
    places = tuple(PLACE) if models > 1 else (*PLACE, SWAP_SEARCH, *REPLICAS)
    if options.min_replicas is not None:
        places = tuple(SURVIVE)
    return {
        "place": places,
        "assign": tuple(ASSIGN),
        "colocate": tuple(COLOCATE),
        "order": tuple(ORDER),
        "aim": tuple(AIMS),
    }


def strategies() -> dict[str, list[str]]:
    """Returns the names that each strategy field of PlanOptions accepts, for any number of models and replicas."""
    cases = ((1, None), (2, None), (1, 2))
    each = [choices(PlanOptions(min_replicas=replicas), models) for models, replicas in cases]
    return {name: list(dict.fromkeys(["auto", *(known for found in each for known in found[name])])) for name in each[0]}


STRATEGIES.update(strategies())
know({"place": GIVEN})
_REGISTRIES: dict[str, dict[str, Any]] = {"order": ORDER, "place": PLACE}
_OURS = {kind: {"auto", GIVEN, *choices(PlanOptions(), models=1)[kind]} for kind in _REGISTRIES}


def register(kind: str, name: str, method: Callable[..., Any]) -> str:
    """Registers your function as an order or placement strategy under a name that options accept in this process.

    Args:
        kind: "order": the method orders one all-to-all; it is a function (bytes_GG, network, *, rng) -> Order. "place": it
            groups the experts of one layer, one group per GPU; it is a function (load_E, slots_J, rng) -> (E,) integers, the
            group of each expert. `aurora.place` takes it, too. Several threads call it at the same time, each for another
            layer.
        name: the method's name; registering it again replaces the method. A plan loaded in another process keeps its placement
            and orders, and needs the method only to make new ones.
        method: the function.

    Returns:
        The name.

    Raises:
        BadInput: if there is no such kind, or the name is one of aurora's.

    Example:
        >>> import aurora
        >>> def rotation(bytes_GG, network, *, rng):
        ...     ranks = len(bytes_GG)
        ...     return aurora.Order("rotation", [[i, (i + step) % ranks] for step in range(1, ranks) for i in range(ranks)])
        >>> aurora.order([[0, 4, 6], [5, 0, 2], [3, 7, 0]], method=rotation).gap >= 0
        True
        >>> own = aurora.PlanOptions(order=aurora.register("order", "rotation", rotation))
        >>> from aurora.io import shipped
        >>> traffic = aurora.synthetic_profile("zipf:1", shipped("models/mixtral-topics/config.json"))
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic, own)
        >>> plan.models[0].dispatch_L[0].method, aurora.simulate(plan, traffic, orders="batch").kind
        ('rotation', 'predicted')
    """
    check_one_of("kind", kind, _REGISTRIES)
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name) or name in _OURS[kind]:
        raise BadInput(f"`name`: expected lower-case letters, digits and dashes, and none of aurora's, found {name!r}")
    if not callable(method):
        raise BadInput(f"`method`: expected a function, found {type(method).__name__}")
    _REGISTRIES[kind][name] = method
    know({kind: name})
    if kind == "place":
        REGISTERED[name] = of_groups(name, method)
    return name


def resolve(
    options: PlanOptions, cluster: Cluster, profiles: Sequence[Profile], domains: Sequence[Profile] = ()
) -> PlanOptions:
    """Returns the options with the name of a strategy in place of every "auto" that has an effect.

    `order` stays "auto" if ports differ or the cluster has servers: each layer then takes the shorter of two orders.
    `time_slice` stays "auto" for a single model without micro-batches. `all_to_all` and `slots_per_gpu` are chosen by
    simulation elsewhere; here "auto" becomes "flat", and as many slots as memory holds. Resolving twice gives the same options.

    Args:
        options: strategies by name or "auto".
        cluster: the GPUs.
        profiles: one profile per model.
        domains: further profiles of a single model.

    Raises:
        BadInput: if a name is unknown, or options contradict each other or the number of models.
        InfeasiblePlan: if the cluster has fewer nodes, or GPUs of its one node, than `min_replicas`.
    """
    colocated, equal, gpus = len(profiles) > 1, cluster.equal, len(cluster.gpus)
    _check_scenario(options, len(profiles))
    _check_min_replicas(options, cluster)
    alike = equal and len(_servers(cluster)) > 1
    by_index = alike and options.place == "contiguous"  # neighbours stay on one server
    if options.colocate in JOINT and options.assign not in ("auto", "exact"):
        raise BadInput(f"`assign`: {options.assign} has no effect with `colocate` {options.colocate}, which decides both")
    place = options.place if options.place != "auto" else _place(options, cluster, profiles[0], colocated)
    searches = (not equal or len(profiles) > 2) and options.assign == "auto"
    plain = equal and cluster.servers is None  # where one partner at a time is the best
    known = choices(options, len(profiles))
    meant = {
        "place": place,
        "colocate": "contiguous" if by_index or options.assign == "contiguous" else "local-search" if searches else "matching",
        "assign": "contiguous" if by_index else "exact",
        "aim": OWN if colocated else "mean",
        "time_slice": TIME_SLICES[0] if colocated or options.micro_batches > 1 else "auto",
        "all_to_all": ALL_TO_ALLS[0],
        "order": auto_orders(gpus)[0] if plain else "auto",
    }
    named: dict[str, Any] = {name: default for name, default in meant.items() if getattr(options, name) == "auto"}
    resolved = replace(options, slots_per_gpu=options.slots_per_gpu or None, **named)
    for name, names in known.items():
        if (choice := getattr(resolved, name)) not in (*names, "auto"):
            raise BadInput(f"`{name}`: expected one of auto, {', '.join(names)}, found {choice!r}")
    if resolved.all_to_all != ALL_TO_ALLS[0] and (reason := flat_reason(cluster, domains)):
        raise BadInput(f"`all_to_all` {resolved.all_to_all}: {reason}")
    return resolved


def flat_reason(cluster: Cluster, domains: Sequence[Profile] = ()) -> str | None:
    """Returns the reason why all-to-alls cannot be hierarchical, as text for an error message; None if they can.

    Args:
        cluster: the GPUs.
        domains: further profiles of a single model.
    """
    if len(servers := _servers(cluster)) < 2:
        count = f"{len(servers)} servers" if servers else "no servers"
        return f"expected a cluster whose [fabric] has two servers or more, found {count} in {cluster.name!r}"
    if domains:
        return "expected no `domain`, as servers are chosen for one profile"
    return None


def _servers(cluster: Cluster) -> set[int]:
    """The servers of the cluster; empty on a big switch."""
    return set() if cluster.servers is None else set(cluster.servers.server_G)


def _place(options: PlanOptions, cluster: Cluster, profile: Profile, colocated: bool) -> str:
    """Replicas if slots are left for them; else the swap search, unless whole groups of experts are asked for."""
    if options.min_replicas is not None:
        return DEFAULT
    if (options.slots_per_gpu or 0) * len(cluster.gpus) > profile.experts:
        return "equal-split"
    return "balanced" if colocated or options.assign != "auto" else SWAP_SEARCH


def with_priorities(plan: Plan, priorities: Sequence[str], shared: bool = False) -> Plan:
    """Returns the plan with other priorities of its models.

    Args:
        plan: the plan.
        priorities: "interactive" or "batch" for each of its models; empty: the plan stays as it is.
        shared: whether other runs share the GPUs; a single model may then have a priority too.

    Raises:
        BadInput: if there are not as many as models, or one is unknown.
    """
    if not priorities:
        return plan
    _check_sharing(options := replace(plan.options, priorities=tuple(priorities)), len(plan.models), shared)
    return replace(plan, options=options)


LAYER_SHARE = 1 / 10  # of an interactive model's layer, between two preemption points


def with_preemption(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Returns the plan with `preemption_s` set, if it has interactive models and its options leave that open.

    The value is LAYER_SHARE of the predicted seconds of a layer (Aurora, Eq. 1) of the fastest interactive model, in a window
    that few are smaller than: one of decoding. A note on the plan gives it.

    Args:
        plan: the plan.
        profiles: one profile per model.

    Raises:
        BadInput: if profiles are not those of the plan's models.
    """
    options = plan.options
    interactive = [model for model, name in enumerate(options.priorities) if name == PRIORITIES[0]]
    if options.preemption_s is not None or not interactive:
        return plan
    check_traffic(plan, profiles)
    layer_s, name = min((_layer_s(plan, model, profiles[model]), plan.models[model].model) for model in interactive)
    if layer_s == 0:  # without compute curves and network times nothing is known
        return plan
    preemption_s = float(f"{layer_s * LAYER_SHARE:.2g}")
    note = f"`preemption`: {preemption_s:g} s, {LAYER_SHARE:.0%} of a layer of {name}, which takes {layer_s:.3g} s alone"
    return replace(plan, options=replace(options, preemption_s=preemption_s), notes=(*plan.notes, note))


def _layer_s(plan: Plan, model: int, profile: Profile) -> float:
    """Predicted seconds of a model's mean layer alone, in the window that a quarter of its windows have fewer tokens than."""
    tokens_T = profile.tokens_TLSE.sum(axis=(1, 2, 3))
    served_T = np.flatnonzero(tokens_T)
    window = profile.at_windows([served_T[np.argsort(tokens_T[served_T], kind="stable")[len(served_T) // 4]]])
    split_EG, layers = plan.models[model].placement.split_EG, range(profile.layers)
    return float(np.mean([layer_costs(plan.cluster, window, layer).value_s(split_EG(layer)) for layer in layers]))


def _check_sharing(options: PlanOptions, models: int, shared: bool = False) -> None:
    """Raises BadInput unless priorities are given for each of several models, or not at all.

    Beside other runs (`shared`) a single model may have one.
    """
    if options.priorities and models == 1 and not shared:
        raise BadInput("`priorities`: is for models that share the GPUs, found one model")
    if options.priorities and len(options.priorities) != models:
        raise BadInput(f"`priorities`: expected one for each of {models} models, found {len(options.priorities)}")


def _check_scenario(options: PlanOptions, models: int) -> None:
    """Raises BadInput for options of a single model if there are several models, and the other way round."""
    _check_sharing(options, models)
    if models == 1:
        if options.time_slice != "auto" and options.micro_batches == 1:
            raise BadInput("`time_slice`: is for models or micro-batches that share the GPUs, found one model")
        return
    if options.micro_batches > 1:
        raise BadInput(f"`micro_batches`: cut the batches of a single model, expected 1, found {models} models")
    exclusive_only = {
        "slots_per_gpu": bool(options.slots_per_gpu),
        "aim": options.aim not in ("auto", OWN),
        "min_replicas": options.min_replicas is not None,
    }
    for name, chosen in exclusive_only.items():
        if chosen:
            raise BadInput(f"`{name}`: is for a plan of one model, found {models} models that share the GPUs")


def _check_min_replicas(options: PlanOptions, cluster: Cluster) -> None:
    """Raises InfeasiblePlan for more replicas than nodes; on a single node, than GPUs."""
    nodes = len({gpu.node for gpu in cluster.gpus})
    apart, places = (nodes, "nodes") if nodes > 1 else (len(cluster.gpus), "GPUs of one node")
    if options.min_replicas is not None and options.min_replicas > apart:
        raise InfeasiblePlan(
            f"`min_replicas` {options.min_replicas}: replicas of an expert are on different nodes, cluster {cluster.name!r} "
            f"has {apart} {places}"
        )
