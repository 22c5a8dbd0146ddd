"""Checks that an engine can serve a plan, and that profiles fit a cluster or a plan."""

from collections.abc import Sequence

from aurora.errors import BadInput, InfeasiblePlan, check_one_of
from aurora.types import Cluster, Placement, Plan, PlanOptions, Profile
from aurora.types.options import MOST_GROUPS, Limits


def check_profile(cluster: Cluster, profile: Profile) -> None:
    """Checks that a profile has tokens, and one source rank for each GPU of the cluster.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.

    Raises:
        BadInput: if it has no tokens, or another number of source ranks.
    """
    if profile.sources != len(cluster.gpus):
        raise BadInput(
            f"profile of {profile.model!r}: its prompts come from {profile.sources} source ranks, but cluster "
            f"{cluster.name!r} has {len(cluster.gpus)} GPUs; deal them by `profile.at_sources({len(cluster.gpus)})`"
        )
    if not profile.tokens_TLSE.any():
        raise BadInput(f"profile of {profile.model!r}: expected tokens, found none")


def check_models(cluster: Cluster, profiles: Sequence[Profile], domains: Sequence[Profile]) -> None:
    """Checks that every profile has as many source ranks as the cluster has GPUs, and that domains are of a single model.

    Args:
        cluster: the GPUs.
        profiles: one profile per model.
        domains: further profiles of a single model.

    Raises:
        BadInput: if a check fails.
    """
    if not profiles:
        raise BadInput("plan: expected a profile for each model, found none")
    for profile in (*profiles, *domains):
        check_profile(cluster, profile)
    if domains and len(profiles) > 1:
        raise BadInput(f"`domain`: is for a plan of one model, found {len(profiles)} models that share the GPUs")
    for domain in domains:
        domain.identity.check_same(
            profiles[0].identity, f"`domain`: expected another profile of the one model {profiles[0].model!r}"
        )


def check_placements(
    cluster: Cluster, profiles: Sequence[Profile], placements: Sequence[Placement], options: PlanOptions
) -> None:
    """Checks that the user's placements fit profiles, cluster and options.

    Args:
        cluster: the GPUs.
        profiles: one profile per model.
        placements: one placement per model.
        options: options of the plan; none may ask for another placement.

    Raises:
        BadInput: if they do not fit.
    """
    if len(placements) != len(profiles) or not profiles:
        raise BadInput(f"expected one placement for each of one or more profiles, found {len(placements)} and {len(profiles)}")
    for profile, placement in zip(profiles, placements, strict=True):
        check_profile(cluster, profile)
        sizes = (len(placement.slots_LG), placement.experts, placement.gpus)
        if sizes != (expected := (profile.layers, profile.experts, len(cluster))):
            raise BadInput(f"placement of {profile.model!r}: expected (layers, experts, GPUs) {expected}, found {sizes}")
        if len(profiles) > 1 and placement.split_LG is not None:
            raise BadInput(
                f"placement of {profile.model!r}: replicas are for a plan of one model, found {len(profiles)} models"
            )
    if options.min_replicas is not None:
        raise BadInput("`min_replicas`: decides a placement, found placements that are given")


def check_traffic(plan: Plan, profiles: Sequence[Profile]) -> None:
    """Checks that profiles belong to a plan's models and have its number of ranks.

    Args:
        plan: the plan.
        profiles: one profile per model, or per micro-batch.

    Raises:
        BadInput: if the number of profiles is not that of the models; or if a profile is of another model, has another number
            of ranks, or has no tokens.
    """
    models = plan.models * len(profiles) if 1 < len(profiles) == plan.options.micro_batches else plan.models
    if len(profiles) != len(models):
        raise BadInput(f"`profile`: expected {len(plan.models)} profiles as in the plan, found {len(profiles)}")
    for model, profile in zip(models, profiles, strict=True):
        check_profile(plan.cluster, profile)
        profile.identity.check_same(model.identity, f"profile of {profile.model!r}")


def check_overlap(plan: Plan, overlap: int, orders: str = "plan", barriers: str = "gpu") -> None:
    """Checks that a plan's experts can compute while rows of other groups of experts travel.

    Args:
        plan: the plan.
        overlap: number of groups of each rank's experts; 1: nothing is overlapped.
        orders, barriers: as in `aurora.simulate`.

    Raises:
        BadInput: if `overlap` is out of range, or the plan or the simulation does not allow it.
    """
    Limits(above=0, most=MOST_GROUPS).check("overlap", overlap)
    if overlap == 1:
        return
    models, parts, hierarchy = len(plan.models), plan.options.micro_batches, plan.models[0].hierarchy
    if models > 1 or parts > 1 or hierarchy is not None:
        found = f"{models} models" if models > 1 else f"{parts} micro-batches" if parts > 1 else "hierarchical ones"
        raise BadInput(
            f"`overlap`: expected a plan of one model, without micro-batches, whose all-to-alls are flat, found {found}"
        )
    if orders != "plan" or barriers == "global":
        raise BadInput(f"`overlap`: expected `orders` plan and `barriers` gpu or none, found {orders} and {barriers}")


def without_proof(plan: Plan, profiles: Sequence[Profile]) -> str:
    """Returns a warning that names profiles without a model fingerprint, which were compared with the plan by sizes only.

    Returns an empty text if there are none.

    Args:
        plan: the plan.
        profiles: the traffic, one profile per model.
    """
    unproved = [
        repr(profile.model)
        for model, profile in zip(plan.models, profiles, strict=True)
        if not model.made_from(profile) and not profile.identity.proves(model.identity)
    ]
    if not unproved:
        return ""
    return f"{' and '.join(unproved)}: a fingerprint is missing, so that the model is known by its sizes alone"


ENGINES = ("vllm",)


def check_engine(plan: Plan, engine: str) -> None:
    """Checks that an engine can serve with a plan's placement: the plan must have a single model.

    Ranks and layers may hold different numbers of experts. vLLM serves replicas only with its EPLB, where free slots are filled
    with further replicas.

    Args:
        plan: the plan.
        engine: a name in ENGINES.

    Raises:
        InfeasiblePlan: if the plan has several models.
        BadInput: if the engine is not in ENGINES.
    """
    check_one_of("engine", engine, ENGINES)
    if len(plan.models) != 1:
        raise InfeasiblePlan(f"{engine}: serves one model by a plan, this one is for {len(plan.models)}; plan each by itself")
