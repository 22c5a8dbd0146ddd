"""Recommends a way to serve a model on given GPUs, with its gain and its launch command; or None if the default is fastest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from aurora.advisor.balancers import RecordedRange, recorded_range
from aurora.advisor.best_way import WORTH, best_way
from aurora.advisor.ceiling import planned_map
from aurora.advisor.datasheet_gpus import cluster_of, with_datasheet_curves
from aurora.advisor.disaggregation import Disaggregation, compare_disaggregated, of_stage, splits_of
from aurora.advisor.engines import SERVING_ENGINES, described
from aurora.advisor.engines.engine import ServingEngine, ServingWay
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.request_balance import BalanceOfRequests, balance_of_requests
from aurora.advisor.served_ways import ComparedWay, WaysOfServing, compare_ways_of_serving
from aurora.advisor.serving_case import ServingCase
from aurora.advisor.step_time import SchedulerStep, StepSeconds, step_seconds
from aurora.advisor.without_records import without_records
from aurora.algorithms.check.fit import ENGINES, check_engine
from aurora.algorithms.gpu_slots import redundant_experts
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL, draw_profile
from aurora.errors import BadInput, InfeasiblePlan
from aurora.io import save
from aurora.io.clusters import load_gpus
from aurora.io.engine_placements import export_placement
from aurora.io.files import make_folder, write_text
from aurora.io.model_configs import load_model_config
from aurora.planner.plan import make_plan, price
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, GpuKind, Placement, Plan, PlanOptions, Profile, RequestLoad, Requests, SyntheticOptions
from aurora.types.arrays import FloatArray
from aurora.types.options import GATHERED

SYNTHETIC_SKEW = "zipf:0.8"  # of the traffic that is drawn if there is no profile
AT_ONCE = "all-at-once"  # the order of engines' own all-to-alls
BLOCKS = 5  # parts of the traffic, of which each is priced by plans of the others
FEWEST_WINDOWS = 4  # of a profile, for an interval
CONFIDENCE = 0.9  # of the interval
SERVED = "generated, as aurora recommend computed it: "  # begin of a plan's note with the tokens per second that it promised
TRANSFERS = 2_000_000  # simulated at most to price one plan on one block


def save_recommendation(recommendation: "Recommendation", folder: Path, model: str) -> str | None:
    """Writes the files of a recommendation: cluster and profile; for a planned placement also the plan and the engine's files.

    Where prefill and decode apart is worth it, each pool's files are in a folder of its own, named by its stage.

    Args:
        found: the recommendation.
        folder: the folder to create and write to.
        model: the model's name or path, as the engine loads it.

    Returns:
        The command that starts the engine as recommended. None if nothing is recommended; then nothing is written.
    """
    apart = recommendation.disaggregation
    if apart is None or not apart.worth:
        return _save_way(recommendation, recommendation.way, recommendation.plan, folder, model)
    commands, whole, first = [], recommendation.cluster, 0
    for stage, pool in apart.pools.items():
        assert pool.way is not None
        gpus, plan = pool.way.layout.gpus, None
        cluster = whole.at_ranks(range(first, first + gpus))
        profile = of_stage(recommendation.profile, stage).at_sources(gpus)
        if pool.way.placement == "plan":
            plan = planned(cluster, profile, pool, SERVING_ENGINES[recommendation.engine].replicate)
        way = replace(pool.way, stage=stage, first_gpu=first)
        command = _save_way(replace(recommendation, cluster=cluster, profile=profile), way, plan, folder / stage, model)
        commands.append(f"# {stage}, {gpus} GPUs\n{command}")
        first += gpus
    return "\n".join(commands)


def _save_way(
    recommendation: "Recommendation", way: ServingWay | None, plan: Plan | None, folder: Path, model: str
) -> str | None:
    """Writes the files of one way on the recommendation's cluster; returns its command, None without a way."""
    if way is None:
        return None
    engine = SERVING_ENGINES[recommendation.engine]
    file = folder / engine.file
    command, texts = engine.command(way, model, file), engine.files(way, file)
    make_folder(folder)
    save(recommendation.cluster, folder / "cluster.toml")
    if not recommendation.drawn:
        save(recommendation.profile, folder / "profile.npz")
    if plan is not None:
        of_model = plan.models[0]
        if engine.form is not None:
            equal = plan.cluster.equal
            exported = export_placement(of_model.placement, engine.form, of_model.dense_layers, of_model.load_LE, equal)
            texts[engine.file] = exported.text
        save(replace(plan, models=(replace(of_model, profile_path="profile.npz"),)), folder / "plan.json")
    for name, text in texts.items():
        write_text(folder / name, text)
    return command


@dataclass(frozen=True)
class Candidate:
    """A plan compared with the engine's default by simulating the MoE layers of steps.

    Attributes:
        name: description of the plan.
        way: the engine's settings, for the simulation and the launch command.
        plan: the plan, made from all of the traffic.
        seconds: simulated seconds of a step's MoE layers under the plan, mean over the profile's windows.
        gain: seconds of a whole step under the engine's default / under the plan; above 1 the plan is faster.
        low: lower end of the gain's prediction interval for further traffic; None if there are too few windows for one.
        high: upper end of the interval.
    """

    name: str
    way: ServingWay
    plan: Plan
    seconds: float
    gain: float
    low: float | None
    high: float | None

    @property
    def worth(self) -> bool:
        """True if the gain is above WORTH even at the lower end of its interval."""
        return (self.gain if self.low is None else self.low) > WORTH


@dataclass(frozen=True)
class SimulatedPlans:
    """Plans compared with the engine's default by simulated MoE layers, for GPUs of several kinds or a model without a config.

    Attributes:
        default: the engine's default way of serving (expert parallelism over data-parallel ranks).
        default_s: simulated seconds of a step's MoE layers under the default, mean over the profile's windows.
        tokens: tokens of a step, mean over the profile's windows.
        share: seconds of MoE layers / seconds of a whole step; 1 if the rest of a step is unknown.
        candidates: the plans compared with the default, best first.
    """

    default: ServingWay
    default_s: float
    tokens: float
    share: float
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The best candidate if it is `worth` taking; otherwise None."""
        return next((candidate for candidate in self.candidates if candidate.worth), None)


@dataclass(frozen=True)
class Recommendation:
    """Advice for a model on given GPUs.

    Attributes:
        engine: the engine, one of SERVING_ENGINES.
        version: the version that was asked for; empty: none.
        cluster: the GPUs.
        profile: the traffic, and compute times of every kind of GPU.
        drawn: whether the traffic was drawn rather than recorded; then no placement is recommended, and layouts and exchanges
            only if they are faster over the whole range of recorded models' imbalance.
        served: comparison of ways of serving, for equal GPUs and a known config; None in other cases.
        simulated: comparison of plans, for GPUs of several kinds or a model without a config; None if `served` is given.
        recorded: range of imbalance and of balancing results over recorded models, if the traffic was drawn; None otherwise.
        plan: the plan of the recommended way; None if the way has no planned placement, or nothing is recommended.
        requests: what balance of requests over data-parallel ranks brings; None where ways of serving are not compared, and if
            the default has a single rank.
        disaggregation: prefill and decode on GPUs of their own; None if they were not asked for.
    """

    engine: str
    version: str
    cluster: Cluster
    profile: Profile
    drawn: bool
    served: WaysOfServing | None
    simulated: SimulatedPlans | None
    recorded: RecordedRange | None
    plan: Plan | None
    requests: BalanceOfRequests | None
    disaggregation: Disaggregation | None = None

    @property
    def default(self) -> ServingWay:
        """The engine's default way of serving (expert parallelism over data-parallel ranks)."""
        if self.simulated is not None:
            return self.simulated.default
        assert self.served is not None
        assert self.served.default.way is not None
        return self.served.default.way

    @property
    def best(self) -> ComparedWay | Candidate | None:
        """The recommended way or plan; None if none is faster beyond its interval, or a plan's traffic was drawn."""
        if self.served is not None:
            return best_way(self.served)
        return None if self.simulated is None or self.drawn else self.simulated.best

    @property
    def way(self) -> ServingWay | None:
        """The recommended settings of the engine; None if its default is recommended."""
        return None if self.best is None else self.best.way


def recommend(
    gpus: str | Cluster,
    engine: str,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    profile: Profile | None = None,
    load: RequestLoad = RequestLoad(),
    requests: Requests | None = None,
    nic_Bps: float = 50e9,
    per_server: int | None = None,
    eplb_stall_s: float | None = None,
    prefill_gpus: int | str | None = None,
    decode_gpus: int | None = None,
    progress: Progress = no_progress,
) -> Recommendation:
    """Recommends a way to serve a model on given GPUs, with its gain over the engine's default; or no change.

    On equal GPUs, the engine's ways of serving (layouts, exchanges, placements, replicas, its own balancer) and balancing
    methods that it lacks are compared by `compare_ways_of_serving`, on held-out traffic. A way is recommended only if the lower
    end of its gain's interval is above WORTH. For drawn traffic, layouts and exchanges are compared over the range of
    recorded models' imbalance, and no placement is recommended.

    On GPUs of several kinds, or without a config, steps of MoE layers are simulated under the engine's default and under plans.
    The windows are cut into BLOCKS blocks in sequence; each is served by plans made from the other blocks. With a config, the
    rest of a step is computed for each kind, and the slowest kind counts.

    Args:
        gpus: kinds and numbers, such as "h20:8,a100:8", by words of their datasheets' names; or a Cluster.
        engine: "vllm", "sglang", "trtllm" or "vllm-ascend"; or with its version, as "vllm==0.33".
        model: config.json (its content or path), folder or shipped name of the model, from which the seconds of steps are
            computed; None: only MoE layers are simulated.
        profile: the model's traffic; its tokens are redistributed if there are more or fewer GPUs than source ranks. None:
            synthetic traffic is drawn for `model` (Zipf, 0.8).
        load: the requests.
        requests: recorded requests, on which balance over data-parallel ranks is predicted; None: lengths are drawn about those
            of `load`, and advise nothing. Only where ways of serving are compared.
        nic_Bps: with `gpus` as text: bytes per second of a GPU's NIC to other servers.
        per_server: with `gpus` as text: GPUs of a server; None: 8, or 4 of GB200 and GB300.
        eplb_stall_s: measured seconds for which serving waits in a rearrangement of EPLB; None: they are computed.
        prefill_gpus: GPUs that compute prompts apart, or "auto" for the best split; None: those that `decode_gpus` leaves, or
            prefill and decode are not compared apart.
        decode_gpus: GPUs that generate answers apart; None: those that `prefill_gpus` leaves.
        progress: called with (name of the work, amount done, amount in all).

    Returns:
        The Recommendation: ways of serving with tokens per second, time to first token and time per output token, each with its
        gain and an interval; or simulated plans.

    Raises:
        BadInput: if an argument is unknown, or neither `model` nor `profile` is given.
        InfeasiblePlan: if the model does not fit in the GPUs' memory.

    Example:
        >>> import aurora
        >>> drawn = aurora.recommend("h20:4", "sglang", model="mixtral-topics")
        >>> drawn.cluster.gpus[0].kind, drawn.best.name, drawn.plan
        ('NVIDIA H20', '4 copies, each on one GPU', None)
    """
    use, version = described(engine)
    known = load_gpus()
    cluster = gpus if isinstance(gpus, Cluster) else cluster_of(gpus, known, nic_Bps, per_server)
    config = model if model is None or isinstance(model, Mapping) else load_model_config(model)
    kinds = [known[kind] for kind in {gpu.kind: None for gpu in cluster.gpus} if kind in known]
    if profile is not None:
        profile = profile.at_sources(len(cluster))
        profile = profile if config is None else with_datasheet_curves(profile, config, kinds)
    elif config is None:
        raise BadInput("`model`: expected a config.json or folder, or `profile`, found neither")
    else:
        profile = draw_profile(SYNTHETIC_SKEW, config, SyntheticOptions(sources=len(cluster)), kinds)
    drawn = profile.provenance.get("tool") == SYNTHETIC_TOOL
    nvlink = has_nvlink(cluster)
    served = simulated = plan = recorded = spread = apart = None
    equal = config is not None and cluster.equal and bool(kinds)
    splits = [] if prefill_gpus is decode_gpus is None else splits_of(len(cluster), prefill_gpus, decode_gpus)
    if splits and not equal:
        raise BadInput("`prefill_gpus`: expected GPUs of one kind with a datasheet, and `model`, to compute pools' steps")
    if config is not None and equal:
        servers = nic_Bps_of(cluster), per_server_of(cluster), domain_of(cluster)
        case = ServingCase(config, kinds[0], load, *servers, eplb_stall_s)
        served = compare_ways_of_serving(profile, case, engine, len(cluster), nvlink, progress=progress)
        if drawn:
            recorded = recorded_range(len(cluster), served.step_tokens[1])
            served = without_records(served, case, recorded.ratios["linear"])
        best = best_way(served)
        spread = balance_of_requests(case, served, best, requests, progress)
        if best is not None and best.way is not None and best.way.placement == "plan":
            plan = planned(cluster, profile, best, use.replicate)
            part = moe_share(cluster, profile, config, kinds, best.way, load.isl)
            base_per_s, per_s = served.default.service.tokens_per_s, best.service.tokens_per_s
            told = f"{per_s:,.0f} tokens/s after {base_per_s:,.0f} ({best.gain:.2f}x of {use.name}'s default) by whole steps"
            told = f"{SERVED}{told}; MoE layers, of which this plan's times are, take {part:.0%} of a step of prompts"
            plan = replace(plan, notes=(*plan.notes, told))
        if splits:
            ratios = None if recorded is None else recorded.ratios["linear"]
            apart = compare_disaggregated(profile, case, use.name, splits, best or served.default, ratios, nvlink, progress)
    else:
        way = use.default(len(cluster), per_server_of(cluster), profile.experts, nvlink)
        share = 1.0
        if config is not None and len(kinds) == len({gpu.kind for gpu in cluster.gpus}):
            with suppress(BadInput):  # a config of experts alone
                share = moe_share(cluster, profile, config, kinds, way, load.isl)
        simulated = simulate_plans(cluster, profile, way, share, progress)
        best_plan = None if drawn else simulated.best
        plan = None if best_plan is None else best_plan.plan
        recorded = recorded_range(len(cluster)) if drawn else None
    return Recommendation(use.name, version, cluster, profile, drawn, served, simulated, recorded, plan, spread, apart)


def has_nvlink(cluster: Cluster) -> bool:
    """Returns whether NVLink connects the GPUs of a server; kinds without a datasheet are assumed to have it."""
    known = load_gpus()
    return all(known[gpu.kind].link_Bps is not None for gpu in cluster.gpus if gpu.kind in known)


def planned(cluster: Cluster, profile: Profile, best: ComparedWay, replicate: str) -> Plan:
    """Makes the plan to serve with, from all of the traffic, for a way with a planned placement.

    Args:
        cluster, profile: the GPUs, which are equal, and the traffic.
        best: the way of serving.
        replicate: a name in REPLICAS: the method that places replicas.
    """
    assert best.way is not None
    redundant = best.way.redundant > 0
    slots = -(-(profile.experts + best.way.redundant) // len(cluster)) if redundant else None
    table = planned_map(profile.load_LE.astype(np.float64), len(cluster), slots, replicate if redundant else "equal-split")
    placement = Placement.of_slots(table.held_LGP, table.part_LGP if redundant else None)
    return price(cluster, profile, placement, PlanOptions(order=AT_ONCE))


def moe_share(
    cluster: Cluster, profile: Profile, config: Mapping[str, Any], kinds: Sequence[GpuKind], way: ServingWay, isl: int
) -> float:
    """Returns the share of a prefill step that experts and exchanges take: their seconds / seconds of the whole step.

    With several kinds of GPUs, each part of the step takes its seconds on the kind that is slowest at it.

    Args:
        cluster, profile: as in `simulate_plans`; a step has as many tokens as a window.
        config: the content of the model's config.json.
        kinds: datasheets of all the cluster's GPUs.
        way: the engine's default.
        isl: tokens of a prompt.
    """
    tokens = max(1, round(_step_tokens(profile) / len(cluster)))
    nic_Bps = nic_Bps_of(cluster)
    step, servers = SchedulerStep(tokens, prefill_requests=-(-tokens // isl)), domain_of(cluster)
    parts = [
        astuple(step_seconds(config, kind, way.layout, step, nic_Bps=nic_Bps, per_server=servers, **way.exchanging))
        for kind in kinds
    ]
    slowest = StepSeconds(*map(max, zip(*parts, strict=True)))
    return (slowest.experts_s + slowest.collectives_s) / slowest.total


def _step_tokens(profile: Profile) -> float:
    """Tokens of a step, mean over the profile's windows."""
    return float(profile.tokens_TLSE.sum() / profile.top_k / profile.layers / profile.windows)


def simulate_plans(
    cluster: Cluster, profile: Profile, way: ServingWay, share: float = 1.0, progress: Progress = no_progress
) -> SimulatedPlans:
    """Simulates MoE layers under the engine's default and under plans, each on traffic that it was not made for.

    Args:
        cluster: the GPUs.
        profile: the traffic, with one source rank per GPU and curves of all kinds.
        way: the engine's default.
        share: seconds of MoE layers / seconds of a whole step, to convert gains to whole steps (Amdahl's law).
        progress: called with (name of the work, amount done, amount in all).

    Raises:
        InfeasiblePlan: if the model does not fit in the GPUs' memory.
    """
    use, default, orders = SERVING_ENGINES[way.engine], engine_default(cluster, profile), orders_of(way)
    default_T = simulated_s_W(default, profile, orders)
    candidates = []
    options_C = _candidates(cluster, profile, use)
    for number, (name, options) in enumerate(options_C):
        progress("comparing plans", number, len(options_C))
        try:
            plan = make_plan(cluster, [profile], options)
            if way.engine in ENGINES:
                check_engine(plan, way.engine)
        except InfeasiblePlan:
            continue
        seconds = float(simulated_s_W(plan, profile, orders).mean())
        layers_gain = _gain(cluster, profile, options, default, float(default_T.mean()) / seconds, orders)
        gain, low, high = (None if bare_gain is None else 1 / (1 - share * (1 - 1 / bare_gain)) for bare_gain in layers_gain)
        assert gain is not None
        by_plan = replace(way, placement="plan", redundant=_redundant(plan, use))
        candidates.append(Candidate(name, by_plan, plan, seconds, gain, low, high))
    progress("comparing plans", len(options_C), len(options_C))
    candidates.sort(key=lambda candidate: -(candidate.gain if candidate.low is None else candidate.low))
    return SimulatedPlans(way, float(default_T.mean()), _step_tokens(profile), share, tuple(candidates))


def engine_default(cluster: Cluster, profile: Profile) -> Plan:
    """Returns the Plan that models an engine's default: experts in index order, all transfers of an all-to-all at once.

    The profile has one source rank per GPU of the cluster.

    Raises:
        InfeasiblePlan: if the experts do not fit in the GPUs' memory that way.
    """
    return make_plan(cluster, [profile], PlanOptions(place="contiguous", assign="contiguous", order=AT_ONCE))


def per_server_of(cluster: Cluster) -> int:
    """Returns the number of GPUs of a server; if servers differ in size, the number of all GPUs, as if they were one server."""
    sizes = set(Counter(gpu.node for gpu in cluster.gpus).values())
    return sizes.pop() if len(sizes) == 1 else len(cluster)


def domain_of(cluster: Cluster) -> int:
    """Returns the number of GPUs of the largest NVLink domain, which can span servers; all GPUs without NICs between any."""
    return len(cluster) if cluster.servers is None else max(Counter(cluster.servers.server_G).values())


def nic_Bps_of(cluster: Cluster) -> float | None:
    """Returns a GPU's bytes per second to other servers: of its NIC, or of its share of its server's; None on one server."""
    servers = cluster.servers
    return None if servers is None else servers.nic_Bps / max(Counter(servers.nic_G).values())


def orders_of(way: ServingWay) -> str:
    """Returns the value of `orders` with which `simulate_plan` simulates a way's exchange, one of SIMULATED_ORDERS."""
    return GATHERED if EXCHANGES[way.exchange].sends == "gather" else "plan"


def _redundant(plan: Plan, use: ServingEngine) -> int:
    """Returns the slots of a layer beyond its experts; vLLM takes a plan without replicas with unequal slots."""
    placement = plan.models[0].placement
    slots = sum(map(len, placement.slots_LG[0]))
    return redundant_experts(placement) if use.form is not None or slots > placement.experts else 0


def _candidates(cluster: Cluster, profile: Profile, use: ServingEngine) -> list[tuple[str, PlanOptions]]:
    """The plans to try: with the experts as they are, and with one or two more slots per GPU than they need."""
    least = -(-profile.experts // len(cluster))
    more = {slots: PlanOptions(place=use.replicate, order=AT_ONCE, slots_per_gpu=slots) for slots in (least + 1, least + 2)}
    replicas = [(f"replicas, {slots} slots per GPU", options) for slots, options in more.items()]
    return [("placement", PlanOptions(order=AT_ONCE)), *replicas]


def _gain(
    cluster: Cluster, profile: Profile, options: PlanOptions, default: Plan, in_sample: float, orders: str
) -> tuple[float, float | None, float | None]:
    """The gain on traffic that was not planned for, and its interval; with too few windows the gain on the planned traffic."""
    if profile.windows < FEWEST_WINDOWS:
        return in_sample, None, None
    parts = np.array_split(np.arange(profile.windows), min(BLOCKS, profile.windows))
    gains = []
    for part in parts:
        rest = np.setdiff1d(np.arange(profile.windows), part)
        plan = make_plan(cluster, [profile.at_windows(rest)], options)
        block = profile.at_windows(part)
        gains.append(np.log(simulated_s_W(default, block, orders).mean() / simulated_s_W(plan, block, orders).mean()))
    return interval(np.array(gains))


def interval(log_gain_W: FloatArray) -> tuple[float, float, float]:
    """Returns (mean gain, low, high), a prediction interval: the next gain lies in it with probability CONFIDENCE.

    Args:
        log_gain_W: (W,) logarithms of measured gains, two or more, assumed to be normal and independent.
    """
    mean, spread = log_gain_W.mean(), log_gain_W.std(ddof=1)
    reach = stdtrit(len(log_gain_W) - 1, (1 + CONFIDENCE) / 2) * spread * np.sqrt(1 + 1 / len(log_gain_W))
    low, middle, high = np.exp([mean - reach, mean, mean + reach]).tolist()
    return middle, low, high


def simulated_s_W(plan: Plan, profile: Profile, orders: str = "plan") -> FloatArray:
    """Returns (W,) simulated seconds of the MoE layers in each of the first W windows, at most TRANSFERS transfers.

    Args:
        plan: the plan.
        profile: the traffic.
        orders: one of SIMULATED_ORDERS, see `simulate_plan`.
    """
    transfers = 2 * profile.layers * max(1, len(plan.cluster) * (len(plan.cluster) - 1))
    most = max(1, min(profile.windows, TRANSFERS // transfers))
    return np.array([simulate_plan(plan, [profile.at_windows([window])], orders=orders).seconds for window in range(most)])
