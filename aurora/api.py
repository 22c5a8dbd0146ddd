"""The public functions, the main subcommands of the command line. Heavy packages are imported when a function needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import aurora.io as io
from aurora.errors import BadInput
from aurora.types import (
    Cluster,
    ComputeCurves,
    ControlOptions,
    DriftOptions,
    FailureDomains,
    GpuKind,
    GpuSlots,
    Order,
    Placement,
    Plan,
    Profile,
    ProfileOptions,
    Rebalanced,
    ReplicaPlacement,
    RequestOptions,
    Requests,
    ResilientPlacement,
    RunOptions,
    Schedule,
    SyntheticOptions,
    Trace,
    TrainOptions,
)
from aurora.types.options import GATHERED, SIMULATED_ORDERS
from aurora.types.run_options import INTERLEAVE

SYNTHETIC_SKEW = "zipf:0.8"  # of the traffic that `recommend` draws if there is no profile

__all__ = [
    "all_to_all",
    "drift",
    "evaluate",
    "follow",
    "load",
    "migrate",
    "order",
    "place",
    "place_for_failures",
    "plan",
    "price",
    "profile",
    "rebalance",
    "recommend",
    "register",
    "report",
    "run",
    "save",
    "simulate",
    "simulate_requests",
    "synthetic_profile",
    "train",
]

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

    from aurora.advisor.recommend import Recommendation
    from aurora.planner.alltoall.registry import OrderStrategy
    from aurora.planner.evaluate import Drift, Evaluation
    from aurora.planner.migrate import migrate
    from aurora.planner.plan import plan, price
    from aurora.planner.resolve_options import register
    from aurora.runtime.result import RunResult
    from aurora.simulator.changing_traffic import FollowedTraffic
    from aurora.simulator.interpreter import OrderBatch
    from aurora.simulator.requests import RequestSimulation
    from aurora.training.training_run import TrainResult

    _Kind = TypeVar("_Kind", Cluster, Profile, Plan, Trace, ComputeCurves)
    Progress = Callable[[str, int, int], None]  # told of what is done, how much of it, and how much there is in all

else:
    _DEFINED_IN = {
        "migrate": "aurora.planner.migrate",
        "plan": "aurora.planner.plan",
        "price": "aurora.planner.plan",
        "register": "aurora.planner.resolve_options",
    }

    def __getattr__(name: str) -> Any:
        if name in _DEFINED_IN:
            return getattr(importlib.import_module(_DEFINED_IN[name]), name)
        raise AttributeError(f"module 'aurora.api' has no attribute {name!r}")


@overload
def load(path: str | Path) -> Cluster | Profile | Plan | Trace | ComputeCurves: ...
@overload
def load(path: str | Path, kind: type[_Kind]) -> _Kind: ...
def load(path: str | Path, kind: type[Any] | None = None) -> Any:
    """Read what `save` or a command wrote, or a cluster that people write.

    Args:
        path: a cluster (.toml), a plan (.json), or a profile, a trace or compute curves (.npz). A name without a suffix is one
            of the clusters that come with the package, such as "demo-4" or "paper-mixed-8".
        kind: the class that the value must have, such as `aurora.Profile`, which type checkers then know; None: any class.

    Returns:
        The value, checked; plans are replayed by the checker.

    Raises:
        BadInput: if the file is missing, damaged, or of another kind, format or schema.
        BrokenPlan: if a plan does not do what it claims.

    Example:
        >>> import aurora
        >>> aurora.load("demo-4", aurora.Cluster).gpus[0].out_Bps
        3000000.0
    """
    value = io.load(path)
    if kind is not None and not isinstance(value, kind):
        raise BadInput(f"{path}: expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def save(value: Cluster | Plan | Profile | Trace | ComputeCurves, path: str | Path) -> None:
    """Write a value so that `load` gives an equal one back. The file is written whole or not at all.

    Args:
        value: a Cluster becomes TOML, a Plan JSON, anything else npz.
        path: exact path of the file, which is replaced if it exists.

    Raises:
        BadInput: if `value` has no file format or the file cannot be written.

    Example:
        >>> import aurora, tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.toml"
        >>> aurora.save(aurora.load("demo-4"), file)
        >>> aurora.load(file) == aurora.load("demo-4")
        True
    """
    io.save(value, path)


def profile(
    model: str | Path,
    text: Sequence[str | Path],
    options: ProfileOptions | None = None,
    *,
    partial: str | Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure how a model routes tokens, and how long its gate, experts and aggregation take on this machine.

    Args:
        model: the folder of a transformers MoE model.
        text: files of text, prompts or chats (.txt, .jsonl) that are served through it.
        options: how many source ranks the prompts are divided over, their length, when to stop.
        partial: a file that keeps the counts so far; if it exists already, counting goes on from it.
        progress: called with (what is being done, how much of it is done, how much there is in all).

    Returns:
        The Profile: (token, expert) pairs by window, layer, source rank and expert, and compute curves of this GPU kind.

    Raises:
        BadInput: if the folder holds no MoE model, or there is less than one prompt for each source rank.
        MissingDependency: if torch or transformers is not installed.

    Example:
        >>> import aurora
        >>> from aurora.io import shipped
        >>> options = aurora.ProfileOptions(sources=2, prompt_tokens=16, limit=4)
        >>> aurora.profile(shipped("models/mixtral-topics"), [shipped("models/train.py")], options).tokens_TLSE.shape[1:]
        (4, 2, 8)
    """
    from aurora.profiler.profile_model import profile_model

    options, progress = options or ProfileOptions(), progress or (lambda _what, _done, _total: None)
    return profile_model(model, text, options, progress, None if partial is None else Path(partial))


def synthetic_profile(
    skew: str,
    config: str | Path | Mapping[str, Any],
    options: SyntheticOptions | None = None,
    *,
    gpu_kinds: Sequence[str | GpuKind] = (),
    system: str | None = None,
    engine: str = "vllm",
) -> Profile:
    """Draw a profile for planning before there is traffic: invented routing, and compute times by arithmetic.

    Args:
        skew: "uniform" or "zipf:S", the exponent of the experts' popularity, shuffled for each layer.
        config: path of a model's transformers config.json or of its folder, the name of a shipped model, or the content of a
            config.json.
        options: source ranks, tokens, windows, correlation and seed.
        gpu_kinds: kinds of GPUs that get compute curves of their own: names of shipped datasheets, or kinds with figures of
            your own (`aurora.io.load_gpus` reads them from a file).
        system: a GPU system of the optional package aiconfigurator-core, such as "h200_sxm", whose measured compute curves are
            added.
        engine: the engine whose kernels were measured there: "sglang", "trtllm" or "vllm".

    Returns:
        A Profile whose provenance says that its routing was not measured.

    Raises:
        BadInput: if the skew, the config, a kind or the system is not known, or the system was not measured with such a model.

    Example:
        >>> import aurora
        >>> aurora.synthetic_profile("zipf:0.8", "mixtral-topics", aurora.SyntheticOptions(sources=8)).tokens_TLSE.shape
        (1, 4, 8, 8)
    """
    from aurora.io.silicon_database import check_engine
    from aurora.planner.workload.synthetic import synthetic_profile as drawn

    check_engine(engine)
    known = io.load_gpus()
    if unknown := [kind for kind in gpu_kinds if isinstance(kind, str) and kind not in known]:
        raise BadInput(f"`gpu_kinds`: expected one of {', '.join(known)}, found {unknown[0]!r}")
    shape = config if isinstance(config, Mapping) else io.load_model_config(config)
    options = options or SyntheticOptions()
    made = drawn(skew, shape, options, [known[kind] if isinstance(kind, str) else kind for kind in gpu_kinds])
    if system is None:
        return made
    from aurora.io.silicon_systems import system_curves

    return system_curves(shape, system, engine, options.sources).into(made)


def place(
    loads: ArrayLike,
    slots: GpuSlots,
    method: str = "equal-split",
    *,
    replicas: Sequence[int] | None = None,
    seed: int = 0,
) -> ReplicaPlacement:
    """Place experts and their replicas by load alone, as EPLB does.

    This decides how many replicas each expert has, on which GPUs they are, and which part of its load each takes.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        slots: how many experts fit on each GPU; `GpuSlots.equal(gpus, slots)` for equal GPUs.
        method: "equal-split", "free-split" or "eplb".
        replicas: (E,) number of replicas of each expert; None: the method decides.
        seed: for strategies that draw at random.

    Returns:
        The placement with its largest load and a lower bound for every layer.

    Raises:
        BadInput: if an argument is out of range.
        InfeasiblePlan: if the slots do not suffice.

    Example:
        >>> import aurora
        >>> placed = aurora.place([600, 560, 120, 120, 20, 10, 10, 10], aurora.GpuSlots.equal(gpus=8, slots=2))
        >>> round(float(placed.max_load_L[0]), 2)
        196.67
    """
    from aurora.planner.replication.registry import place as placed

    return placed(loads, slots, method, replicas, seed)


def rebalance(
    loads: ArrayLike,
    held: Placement | ArrayLike,
    slots: GpuSlots | None = None,
    *,
    max_moves: int | None = None,
    worth: float = 0.0,
    enough: float = 0.01,
    min_replicas: int = 1,
    domain_G: ArrayLike | None = None,
) -> Rebalanced:
    """Change few slots of a placement in force, so that it suits new loads: milliseconds, for live systems.

    Replicas share their expert's load evenly, as engines do. A layer's slots change until its largest load is `enough`, or no
    change lowers it; the next placement is never worse than the one in force.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        held: the placement in force: a Placement, or (L, G, P) whole numbers, the expert in each slot and -1 for none.
        slots: how many experts fit on each GPU, and what load costs there; None: as many as `held` has, on equal GPUs.
        max_moves: how many experts the GPUs may fetch in a layer; None: no limit.
        worth: from zero to below one; a layer whose largest load would fall by less than this part of it stays as it is.
        enough: from zero to below one; a layer is good enough if its largest load is above the mean by this part of it or less.
        min_replicas: GPUs, and failure domains, that each expert stays on; on as many as in `held`, if that is fewer.
        domain_G: (G,) whole numbers of zero or more: the failure domain of each GPU; None: each is its own.

    Returns:
        The next placement, with the moves and the largest loads before and after in every layer.

    Raises:
        BadInput: if an argument is out of range, or `held` does not fit the loads or the slots.

    Example:
        >>> import aurora
        >>> after = aurora.rebalance([600, 560, 120, 120, 20, 10], [[[0, 1], [2, 3], [4, 5]]])
        >>> after.held_LGP.tolist(), after.moves_L.tolist(), after.max_load_L.tolist()
        ([[[4, 1], [2, 3], [0, 5]]], [2], [610.0])
    """
    from aurora.planner.replication.rebalance import rebalance as rebalanced

    return rebalanced(loads, held, slots, max_moves, worth, enough, min_replicas, domain_G)


def place_for_failures(
    loads: ArrayLike,
    failure_domains: FailureDomains,
    method: str = "aurora",
    *,
    min_replicas: int | None = None,
    replicas: Sequence[int] | None = None,
    alive: int | None = None,
    seed: int = 0,
) -> ResilientPlacement:
    """Place replicas on nodes that may fail, so that every expert is as likely as possible to be still held after failures.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        failure_domains: the nodes' slots and which nodes fail together; `FailureDomains.equal(nodes, slots)` for equal nodes.
        method: "aurora", or the baselines "mro" (Lazarus), "spread" and "compact".
        min_replicas: replicas of each expert at least, each on another node; None: two, or one if two do not fit.
        replicas: (E,) number of replicas of each expert; None: in proportion to load.
        alive: the number of failure domains left to optimise for first; None: the fewest failures come first.
        seed: for strategies that draw at random.

    Returns:
        The placement with the probability that every expert survives 1, 2, ... failures.

    Raises:
        BadInput: if an argument is out of range.
        InfeasiblePlan: if the slots do not suffice.

    Source:
        Lazarus (arXiv:2407.04656) §4.1, whose placement is "mro".

    Example:
        >>> import aurora
        >>> domains = aurora.FailureDomains.equal(nodes=4, slots=3)
        >>> aurora.place_for_failures([1, 1, 1, 1], domains, replicas=[3, 3, 3, 3]).survival_L[0].p_K.tolist()
        [1.0, 1.0, 0.0]
    """
    from aurora.planner.replication.failure_resilient import survive

    return survive(loads, failure_domains, method, min_replicas, replicas, alive, seed)


def order(
    bytes_GG: ArrayLike,
    cluster: Cluster | None = None,
    method: str | Order | OrderStrategy = "openshop",
    seed: int = 0,
    startup_s: float | None = None,
) -> Schedule:
    """Order one all-to-all: its schedule on the cluster's network, checked, with lower bounds.

    Args:
        bytes_GG: (G, G) integers, the bytes that rank i sends to rank j; the diagonal does not travel.
        cluster: the network; None: equal ports of 100 Gbit/s.
        method: the name of an order, or "auto", the shorter of two orders.
        seed: for orders that draw at random.
        startup_s: fixed seconds of a message, in place of the cluster's; None: the cluster's.

    Returns:
        The Schedule, with the fluid bound and the one-to-one bound.

    Raises:
        BadInput: if the matrix is not square, whole and non-negative, or does not fit the cluster.

    Source:
        Aurora (arXiv:2410.17043) Thm 4.2; Gonzalez & Sahni 1976.

    Example:
        >>> import aurora
        >>> schedule = aurora.order([[0, 4, 6], [5, 0, 2], [3, 7, 0]])
        >>> round(schedule.makespan_s / schedule.fluid_bound_s, 3)
        1.0
    """
    from aurora.planner.alltoall.schedule import order as scheduled

    return scheduled(bytes_GG, cluster, method, seed, startup_s)


def recommend(
    gpus: str | Cluster,
    engine: str,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    profile: Profile | None = None,
    nic_Bps: float = 50e9,
    per_server: int = 8,
) -> Recommendation:
    """Says what to do with a model on given GPUs: which plan to serve by, and its gain over the engine's default; or nothing.

    Args:
        gpus: kinds and numbers, such as "h20:8,a100:8", by words of their datasheets' names; or a Cluster.
        engine: "vllm", "sglang", "trtllm" or "vllm-ascend".
        model: config.json, folder or shipped name of the model; without `profile` its traffic is synthetic (Zipf, 0.8). With
            `profile` it supplies datasheet compute times of the GPU kinds that the profile has none of.
        profile: the model's traffic, with one source rank per GPU.
        nic_Bps: with `gpus` as text: bytes per second of a GPU's NIC to other servers.
        per_server: with `gpus` as text: GPUs of a server.

    Returns:
        The Recommendation: simulated seconds of the engine's default, and of plans, each with its gain. The gain is measured on
        traffic that the plan was not made for, with an interval, if the profile has four windows or more.

    Raises:
        BadInput: if an argument is unknown, or neither `model` nor `profile` is given.
        InfeasiblePlan: if the model does not fit in the GPUs' memory.

    Example:
        >>> import aurora
        >>> found = aurora.recommend("h20:4", "sglang", model="mixtral-topics")
        >>> found.cluster.gpus[0].kind, found.candidates[0].gain >= 1
        ('NVIDIA H20', True)
    """
    from aurora.advisor.recommend import cluster_of, with_datasheet_curves
    from aurora.advisor.recommend import recommend as recommended
    from aurora.planner.workload.synthetic import synthetic_profile as drawn

    known = io.load_gpus()
    cluster = gpus if isinstance(gpus, Cluster) else cluster_of(gpus, known, nic_Bps, per_server)
    config = model if model is None or isinstance(model, Mapping) else io.load_model_config(model)
    if config is None and profile is None:
        raise BadInput("`model`: expected a config.json or folder, or `profile`, found neither")
    kinds = [known[kind] for kind in {gpu.kind: None for gpu in cluster.gpus} if kind in known]
    if profile is None:
        assert config is not None, "checked above"
        traffic = drawn(SYNTHETIC_SKEW, config, SyntheticOptions(sources=len(cluster)), kinds)
    else:
        traffic = profile if config is None else with_datasheet_curves(profile, config, kinds)
    return recommended(cluster, traffic, engine)


def evaluate(plan: Plan, profiles: Profile | Sequence[Profile]) -> Evaluation:
    """Price a plan on traffic that it was not made for, beside a plan made for that traffic.

    Args:
        plan: the plan to price.
        profiles: the traffic, one profile per model.

    Returns:
        The Evaluation: seconds of each layer, the loss against a plan made for this traffic, and each layer's dispatch.

    Raises:
        BadInput: if a profile is not of the plan's model, or comes from another number of source ranks.

    Example:
        >>> import aurora
        >>> config, cluster = "mixtral-topics", aurora.load("demo-4")
        >>> now, later = (aurora.synthetic_profile("zipf:1", config, aurora.SyntheticOptions(seed=s)) for s in (0, 1))
        >>> plan = aurora.plan(cluster, now)
        >>> aurora.evaluate(plan, now).loss, aurora.evaluate(plan, later).loss > 0
        (0.0, True)
    """
    from aurora.planner.evaluate import evaluate as evaluated

    return evaluated(plan, _each(profiles))


def drift(before: Profile, after: Profile, plan: Plan | None = None, options: DriftOptions | None = None) -> Drift:
    """Measure whether traffic has moved by more than chance explains, and whether planning again pays.

    Args:
        before: the traffic that was planned for.
        after: the traffic now, of the same model.
        plan: the plan made for `before`; None: the loss is computed for groups of experts balanced for `before`.
        options: the loss above which planning again pays, the number of hot experts, and the seed.

    Returns:
        The Drift: distance by layer beside what chance explains, and the loss.

    Raises:
        BadInput: if the profiles are of different models, or the plan was not made for `before`.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> aurora.drift(traffic, traffic).replan
        False
    """
    from aurora.planner.evaluate import drift as measured

    return measured(before, after, plan, options or DriftOptions())


def simulate(
    plan: Plan,
    profiles: Profile | Sequence[Profile],
    *,
    barriers: str = "gpu",
    orders: str = "plan",
    interleave: str = "on",
    staged: bool = False,
) -> Trace:
    """Predict how long serving the profiles under a plan takes, event by event, one step per window.

    Args:
        plan: the plan.
        profiles: the traffic, one profile per model, which is cut where the plan has micro-batches; or one per micro-batch.
        barriers: what a GPU waits for: "gpu": its own transfers, and the token counts of all ranks; "none": its own transfers
            only; "global": all ranks, after every phase.
        orders: "plan": the plan's orders; "batch": a new order for each all-to-all, made from its bytes; "allgather": none, but
            an allgather of all tokens and a reduce-scatter instead of all-to-alls, as in vLLM without aurora.
        interleave: "on": models run side by side; "off": one after the other.
        staged: whether transfers run in stages, as NCCL's grouped calls do; see `Order.stage_X`.

    Returns:
        The predicted Trace.

    Raises:
        BadInput: if a profile is not of the plan's model or ranks, or an argument is unknown.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> aurora.simulate(plan, traffic).kind
        'predicted'
    """
    from aurora.simulator.interpreter import simulate_plan

    if interleave not in INTERLEAVE:
        raise BadInput(f"`interleave`: expected one of {', '.join(INTERLEAVE)}, found {interleave!r}")
    if interleave == "processes":
        raise BadInput("`interleave`: expected on or off, as other processes are not simulated")
    ordered = _simulated_orders(plan, orders)
    return simulate_plan(plan, _each(profiles), barriers, ordered, interleave == "on", staged, orders == GATHERED)


def simulate_requests(
    plan: Plan,
    profile: Profile,
    requests: Requests | None = None,
    options: RequestOptions | None = None,
    *,
    barriers: str = "gpu",
    orders: str = "plan",
    staged: bool = False,
    progress: Progress | None = None,
) -> RequestSimulation:
    """Predict tokens per second, time to first token and time per output token of requests that are served under a plan.

    Every GPU is a data-parallel rank with a scheduler as vLLM's: continuous batching, chunked prefill. All ranks step together.
    A step's seconds are those of `aurora.simulate` for the tokens that each rank has in it, whose experts are drawn from the
    profile; they are simulated for a grid of tokens and interpolated between.

    Args:
        plan: the plan of one model.
        profile: the traffic that tokens' experts are drawn from.
        requests: when requests arrive, and their tokens; None: drawn by `options`.
        options: requests to draw, or the part of the given ones that counts, and the engine's limits.
        barriers, orders, staged: as in `simulate`.
        progress: called with (what is being done, requests served, requests in all).

    Returns:
        The RequestSimulation: when each request got its first and its last token, how far interpolated steps are from
        simulated ones, and what the seconds leave out.

    Raises:
        BadInput: if the plan is of several models, the profile does not fit it, or there are no requests.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> options = aurora.RequestOptions(rate=2, isl=64, osl=4, duration_s=10, max_num_batched_tokens=256)
        >>> found = aurora.simulate_requests(plan, traffic, options=options)
        >>> bool((found.served.ttft_s_Q > 0).all()), found.served.queue_grows
        (True, False)
    """
    from aurora.simulator.requests import drawn_requests
    from aurora.simulator.requests import simulate_requests as simulated

    options = options or RequestOptions()
    if requests is None:
        requests = drawn_requests(options)
    elif options.duration_s is not None:
        requests = requests.until(options.duration_s)
    ordered = _simulated_orders(plan, orders)
    return simulated(
        plan,
        profile,
        requests,
        options,
        barriers,
        ordered,
        staged,
        progress or (lambda _what, _done, _total: None),
        orders == GATHERED,
    )


def _simulated_orders(plan: Plan, orders: str) -> OrderBatch | None:
    """What makes an all-to-all's order from its bytes; None for the plan's orders."""
    from aurora.planner.alltoall.schedule import batch_order

    if orders not in SIMULATED_ORDERS:
        raise BadInput(f"`orders`: expected one of {', '.join(SIMULATED_ORDERS)}, found {orders!r}")
    return batch_order(plan.cluster.network, plan.options.order, plan.options.seed) if orders == "batch" else None


def follow(
    plan: Plan,
    profiles: Profile | Sequence[Profile],
    change: str,
    *,
    windows: int = 120,
    lasting: int = 10,
    tokens: int | None = None,
    seed: int = 0,
    options: ControlOptions | None = None,
) -> FollowedTraffic:
    """Replay traffic that changes, and compare ways to follow it: none, one plan, EPLB, the controller, and a clairvoyant.

    EPLB stops serving while experts move, as vLLM's does; the controller's moves run beside serving.

    Args:
        plan: its first model's placement is in force at first. Its GPUs' speeds and ports count.
        profiles: one for each domain of traffic, of that model.
        change: how traffic changes between them: "alternating", "steps", "drift", "diurnal" or "flash-crowd"; "recorded": their
            windows one after the other.
        windows: how many windows of traffic.
        lasting: windows that a domain, a drift, a day or a crowd lasts.
        tokens: (token, expert) pairs of each layer in a window; None: as in the largest recorded one.
        seed: for the draws.
        options: of the controller.

    Returns:
        FollowedTraffic, with load, bytes and stalls of each way.

    Raises:
        BadInput: if the change is unknown, a number is out of range, the profiles are of another model, or there is one alone,
            unless its own windows are replayed.

    Example:
        >>> import aurora
        >>> one, other = (
        ...     aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(seed=seed)) for seed in (0, 1)
        ... )
        >>> plan = aurora.plan(aurora.load("demo-4"), one)
        >>> [way.name for way in aurora.follow(plan, [one, other], "alternating", windows=30).ways][-3:]
        ['controller', 'mean known', 'clairvoyant']
    """
    from aurora.simulator.changing_traffic import follow as followed

    return followed(plan, _each(profiles), change, windows, lasting, tokens, seed, options or ControlOptions())


def run(
    plan: Plan,
    models: Sequence[str | Path],
    prompts: Sequence[Sequence[list[int]]],
    options: RunOptions | None = None,
    *,
    profiles: Sequence[Profile] = (),
    journal: str | Path | None = None,
    resume: bool = False,
    arrivals: Sequence[Sequence[float]] = (),
) -> RunResult | None:
    """Serve prompts under a plan on real processes, one per rank, and measure what happens.

    Args:
        plan: the plan, which sets the number of ranks.
        models: folders of the plan's models, in its sequence.
        prompts: for each model its prompts, each a list of token ids; none with `options.join`.
        options: tokens to produce, transport, interleaving, survival of lost ranks, other hosts.
        profiles: the profiles that the plan was made from, one per model. With `options.survive` experts of lost ranks are
            placed anew by their traffic; empty: all experts count the same. With `options.adapt` their compute curves tell what
            load costs on each GPU; empty: the GPUs' speeds tell.
        journal: with `options.survive`, a file that tokens are appended to while the run serves; it stays when the run ends.
        resume: the journal may be there, of a run that was interrupted: what it has is not produced anew. The placement may be
            another one.
        arrivals: for each model, when each of its prompts arrives, in seconds from the beginning of serving; empty: all are
            there. A model without requests takes no time of GPUs and ports. With `resume` they are counted anew.

    Returns:
        Answers, seconds and the measured Trace; under torchrun only on rank 0, None elsewhere; with `options.join` None.

    Raises:
        BadInput: if plan, models, prompts and ranks do not fit each other.
        RankFailed: if a rank is lost, unless `options.survive` is set; with `options.join`, if the leader is.

    Example:
        >>> import aurora
        >>> from aurora.io import shipped
        >>> mixtral = shipped("models/mixtral-topics")
        >>> traffic = aurora.synthetic_profile("zipf:1", mixtral / "config.json", aurora.SyntheticOptions(sources=2))
        >>> gpus = tuple(aurora.Gpu(f"gpu-{rank}", "cpu", 0, 1e9, 1e9, 10**9) for rank in range(2))
        >>> plan = aurora.plan(aurora.Cluster("mine", gpus), traffic)
        >>> options = aurora.RunOptions(max_new_tokens=2, transport="memory")
        >>> result = aurora.run(plan, [mixtral], [[[76, 107, 104, 35]]], options)
        >>> len(result.answers_M[0].tokens[0])
        2
    """
    from aurora.planner.control.plan_controller import load_cost_MG
    from aurora.runtime.run import run as served
    from aurora.runtime.run import run_elastic

    options = options or RunOptions()
    if options.join is not None:
        from aurora.runtime.run import join_run

        if any(prompts) or journal is not None:
            raise BadInput("`join`: answers the leader's prompts, expected none and no `journal`")
        join_run(plan, models, options)
        return None
    cost_MG = load_cost_MG(plan, profiles) if options.adapt is not None and profiles else None
    if options.survive:
        loads_MLE = [each.load_LE.astype(float) for each in profiles] or None
        return run_elastic(
            plan, models, prompts, options, loads_MLE, journal=journal, resume=resume, cost_MG=cost_MG, arrivals=arrivals
        )
    if journal is not None:
        raise BadInput("`journal`: expected a run with `survive`")
    return served(plan, models, prompts, options, cost_MG, arrivals)


def train(
    model: str | Path, text: Sequence[str | Path], options: TrainOptions | None = None, *, output: str | Path
) -> TrainResult | None:
    """Train a model on text on real processes, with replicas of its experts.

    A global batch is a fixed set of samples, which all ranks share; the result does not depend on how many ranks there are.

    Args:
        model: folder of a transformers MoE model, or its name in the local hub cache.
        text: files of text, prompts or token ids.
        options: steps, ranks, sizes, optimizer, replicas and checkpoints.
        output: folder for the trained model, its checkpoints and the log of all steps.

    Returns:
        The steps with their losses, and where the model was written; under torchrun only on rank 0, None elsewhere.

    Raises:
        BadInput: if model, text and options do not fit each other, or the loss is no longer finite.
        InfeasiblePlan: if the replicas do not fit.
        RankFailed: if a rank is lost; with `options.elastic`, if fewer than `min_ranks` are left.

    Source:
        Lazarus (arXiv:2407.04656).

    Example:
        >>> import tempfile
        >>> import aurora
        >>> from aurora.io import shipped
        >>> mixtral, text = shipped("models/mixtral-topics"), shipped("models/mixtral-topics/recipe.json")
        >>> options = aurora.TrainOptions(steps=2, ranks=2, batch=2, length=16, transport="memory")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = aurora.train(mixtral, [text], options, output=folder)
        >>> len(result.steps)
        2
    """
    from aurora.training.run import train as trained

    return trained(model, text, options or TrainOptions(), Path(output))


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    order: Order | str | None = None,
) -> Any:
    """Exchange rows as torch.distributed.all_to_all_single does, in a planned order.

    Args:
        output: filled with the received rows, by rank.
        input: the rows to send, by rank; any dtype.
        output_split_sizes: number of rows from each rank; None: the same from each.
        input_split_sizes: number of rows to each rank; None: the same to each.
        group: a torch process group; None: the default one.
        async_op: return at once, with a handle that has wait().
        order: an Order, such as a plan's; or the name of an order, which is then made from this call's sizes; None or
            "all-at-once": torch's own collective. All ranks pass the same.

    Returns:
        A handle if async_op, else None. If `input` requires grad, gradients travel back in the reversed order.

    Raises:
        BadInput: if sizes or dtypes do not fit.
        RankFailed: if a peer is lost.

    Source:
        Aurora (arXiv:2410.17043) Thm 4.2.

    Example:
        >>> import aurora, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> output = torch.empty(4)
        >>> aurora.all_to_all(output, torch.arange(4.0), order="openshop")
        >>> output
        tensor([0., 1., 2., 3.])
        >>> dist.destroy_process_group()
    """
    from aurora.runtime.all_to_all import all_to_all as exchanged

    return exchanged(output, input, output_split_sizes, input_split_sizes, group, async_op, order)


def report(
    plan: Plan,
    traces: Mapping[str, Trace] | None = None,
    profiles: Sequence[Profile] = (),
    *,
    output: str | Path,
    format: str = "html",
) -> None:
    """Write a report on a plan: what it is worth, how long it took, what to do next.

    Args:
        plan: the plan.
        traces: predicted and measured traces of the plan, by name; all are compared with the first.
        profiles: the traffic, one profile per model; for drift as many more, of later traffic.
        output: the file to write; for Chakra a folder.
        format: "html" (one page), "perfetto" (for ui.perfetto.dev; compressed if `output` ends in .gz), or "chakra" (execution
            traces, for ASTRA-sim).

    Raises:
        BadInput: if a trace or profile is not of the plan, or the output cannot be written.
        MissingDependency: if jinja2 or protobuf is needed and not installed.

    Example:
        >>> import aurora, tempfile, pathlib
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> page = pathlib.Path(tempfile.mkdtemp()) / "report.html"
        >>> aurora.report(plan, {"predicted": aurora.simulate(plan, traffic)}, [traffic], output=page)
        >>> page.read_text()[:15]
        '<!DOCTYPE html>'
    """
    from aurora.reports.write import report as written

    written(plan, traces or {}, profiles, Path(output), format)


def _each(profiles: Profile | Sequence[Profile]) -> Sequence[Profile]:
    return [profiles] if isinstance(profiles, Profile) else profiles
