"""Aurora's headlines (arXiv:2410.17043 §8), the paper's and ours: `python -m bench.papers.aurora -o DIR`.

Two models of 8 experts on two data sets, on the paper's 8 equal and 8 mixed GPUs. The traffic is not public: popularity of
experts is Zipf with a drawn exponent, and each source draws its own mix around it. Times are those of Eq. 1 and of Table 2 as
printed; a range is over layers, data sets and models, the mean over SEEDS draws of the traffic. Lina gives each model half
of the GPUs. By the paper's own formulas they push the same bytes through the same ports as Aurora's pairs (Fig. 11c, 11d), so
that only the choice of partners differs. A plan for the first layer's traffic knows nothing of other layers' (Fig. 14a).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from aurora.algorithms.network.switch import timed
from aurora.algorithms.placement.assignment import bottleneck_matching
from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.algorithms.placement.cost_model import OWN, LayerCosts, layer_costs
from aurora.algorithms.placement.objective import ALWAYS, Formula, table_2
from aurora.algorithms.placement.phase_times import SIDES, exclusive_s
from aurora.algorithms.workload.traffic import group_tokens
from aurora.io import load_cluster
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Curve, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray
from bench.papers.headlines import Headline, write

EXPERTS, LAYERS, DATA_SETS, MODELS = 8, 4, 2, 2
HIDDEN, INNER, FLOPS = 768, 3072, 100e12  # a ViT-B layer in half precision, on a middling GPU
TOKEN_FLOPS = {"gate": 2 * HIDDEN * EXPERTS, "expert": 4 * HIDDEN * INNER, "aggregate": 2 * HIDDEN}
TOKENS = 8192  # of each source
SKEW, CONCENTRATION = (0.4, 1.2), 40.0  # Zipf exponents; Dirichlet: how close a source's own mix is to the popularity
SEEDS, DRAWS = 6, 16  # of the traffic; placements of a random baseline
EQUAL, MIXED = "paper-equal-8", "paper-mixed-8"
PRINTED_PATHS = (
    ("gate_b", "expert_a", "expert_b", "aggregate_a"),
    ("dispatch_a", "expert_a", "expert_b", "aggregate_a"),
    ("dispatch_ab", "expert_b", "aggregate_a"),
    ("dispatch_ab", "combine_a", "aggregate_a"),
    ("dispatch_ab", "dispatch_ab"),
)
PRINTED = Formula(table_2(nics=False), tuple((*path, *ALWAYS) for path in PRINTED_PATHS))  # Table 2 as it stands in the paper
Outcome = tuple[float, float]  # seconds of a layer; part of them that GPUs compute
Outcomes = dict[str, list[Outcome]]  # by method, of each case


def drawn_profile(rng: np.random.Generator) -> Profile:
    """Draws the traffic of one model on one data set; token counts are (LAYERS, EXPERTS, EXPERTS) by layer, source, expert."""
    tokens_LSE = []
    for _ in range(LAYERS):
        share_E = rng.permutation((1.0 + np.arange(EXPERTS)) ** -rng.uniform(*SKEW))
        tokens_LSE.append(rng.multinomial(TOKENS, rng.dirichlet(CONCENTRATION * share_E / share_E.sum(), size=EXPERTS)))
    at = np.array([1.0, 2.0])
    curves = {phase: Curve(at, at * flops / FLOPS) for phase, flops in TOKEN_FLOPS.items()}
    row_bytes, weights = 2 * HIDDEN, 2 * 2 * HIDDEN * INNER
    return Profile("model", "", np.array(tokens_LSE)[None], 1, row_bytes, row_bytes, weights, 0, {"reference": curves})


class ShardCosts(LayerCosts):
    """Costs of a layer whose source shards move with the experts: shard g sits where expert g does."""

    def phase_s(self, phase: str) -> tuple[FloatArray, FloatArray]:
        """Returns what `LayerCosts.phase_s` does; ports carry a shard's tokens for others, and others' for its expert."""
        if phase not in SIDES:
            return super().phase_s(phase)
        (tokens_SE,), token_s_G = self.own_WGE, self.port_s_XG[SIDES.index(phase)]
        far_E = tokens_SE.sum(axis=int(phase in ("send", "crecv"))) - np.diagonal(tokens_SE)
        return np.zeros((1, len(token_s_G))), (token_s_G[:, None] * far_E)[None]


def by_load(costs: LayerCosts) -> IntArray:
    """Returns the group of each GPU: the busiest on the strongest, by experts' seconds, then ports, and so on (Thm 5.1)."""
    strongest_first = np.lexsort((-np.minimum(costs.out_Bps, costs.in_Bps), costs.expert_s_WGE[0].sum(axis=1)))
    group_G = np.empty(len(strongest_first), dtype=np.int64)
    group_G[strongest_first] = np.argsort(-costs.load_WE[0], kind="stable")
    return group_G


def exclusive_s_GE(costs: LayerCosts) -> FloatArray:
    """Returns (G, E) seconds of dispatch, experts and combine on each GPU if it holds one expert and no other model runs."""
    return costs.alone_s_GE(*SIDES[:2]) + costs.expert_s_WGE[0] + costs.alone_s_GE(*SIDES[2:])


def decoupled(a: LayerCosts, b: LayerCosts) -> IntArray:
    """Returns (2, G) the groups of both models: bundles of one group each first, then bundles onto GPUs (§7.2)."""
    a_XJ, b_XJ = (np.stack([costs.alone_s_GE(side).mean(axis=0) for side in SIDES[:2]]) for costs in (a, b))
    bundle_J = bottleneck_matching((a_XJ[:, :, None] + b_XJ[:, None, :]).max(axis=0))
    bundle_G = bottleneck_matching(exclusive_s_GE(a) + exclusive_s_GE(b)[:, bundle_J])
    return np.stack([bundle_G, bundle_J[bundle_G]])


@dataclass(frozen=True)
class LayerJob:
    """One layer of a model with as many experts as the cluster has GPUs; source shard g moves with expert g."""

    cluster: Cluster
    profile: Profile
    costs: LayerCosts

    @classmethod
    def of(cls, cluster: Cluster, profile: Profile, layer: int = 0) -> "LayerJob":
        """Returns the job of a layer; `costs` count the traffic of a shard and its expert wherever both are held."""
        one = replace(profile, tokens_TLSE=profile.tokens_TLSE[:, [layer]])
        groups = layer_costs(cluster, one, 0).grouped(np.arange(len(cluster)))
        return cls(cluster, one, ShardCosts(**{field.name: getattr(groups, field.name) for field in fields(groups)}))


def price(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str = "") -> Outcome:
    """Returns the outcome of one job (Eq. 1) or of two on the same GPUs (Table 2); held[j][g] is job j's expert on GPU g.

    All-to-alls take as long as their busiest port, or as an order of ORDER takes, for one job.
    """
    terms = [one.costs.times_alone(held_G) for one, held_G in zip(jobs, held, strict=True)]
    if order:
        there_G, back_G = _order_ends(jobs[0], held[0], order)
        terms = [replace(terms[0], port_4G=np.array([there_G, there_G, back_G, back_G]))]
    seconds = exclusive_s(terms[0]) if len(terms) == 1 else PRINTED.seconds(terms)
    return seconds, sum(float((t.gate_G + t.expert_G + t.aggregate_G).mean()) for t in terms) / seconds


def _order_ends(one: LayerJob, held_G: IntArray, order: str) -> list[FloatArray]:
    """When each GPU's own transfers of dispatch and of combine end."""
    profile = replace(one.profile, tokens_TLSE=one.profile.tokens_TLSE[:, :, held_G][:, :, :, held_G])
    options = PlanOptions("contiguous", "contiguous", "contiguous", order, aim=OWN)
    model = make_plan(one.cluster, [profile], options).models[0]
    bytes_GG = profile.tokens_TLSE[0, 0] * (1 - np.eye(len(held_G), dtype=np.int64)) * profile.dispatch_bytes
    ends = []
    for planned, matrix_GG in ((model.dispatch_L[0], bytes_GG), (model.combine_L[0], bytes_GG.T)):
        schedule, end_G = timed(planned, matrix_GG, one.cluster.network), np.zeros(len(held_G))
        np.maximum.at(end_G, schedule.src_X, schedule.end_s_X)
        np.maximum.at(end_G, schedule.dst_X, schedule.end_s_X)
        ends.append(end_G)
    return ends


def lina_half(one: LayerJob) -> LayerJob:
    """Returns the job in Lina's packing on every second GPU: the most popular expert with the least popular, and so on."""
    half = replace(one.cluster, gpus=one.cluster.gpus[::2])
    tokens_SE = one.profile.tokens_TLSE[0, 0]
    falling_X, pair_E = np.argsort(-tokens_SE.sum(axis=0), kind="stable"), np.empty(EXPERTS, dtype=np.int64)
    pair_E[falling_X] = np.concatenate([np.arange(EXPERTS // 2), np.arange(EXPERTS // 2)[::-1]])
    tokens_JJ = group_tokens(group_tokens(tokens_SE.T, pair_E, len(half)).T, pair_E, len(half))
    return LayerJob.of(half, replace(one.profile, tokens_TLSE=tokens_JJ[None, None]))


def averaged(jobs: Sequence[LayerJob], rng: np.random.Generator, pairs: bool = False) -> Outcome:
    """Returns the mean outcome over random placements; `pairs`: random pairs of experts, which one matching assigns to GPUs."""
    outcomes = []
    for _ in range(DRAWS):
        held = [rng.permutation(len(jobs[0].cluster)) for _ in jobs]
        if pairs:
            a, b = (one.costs for one in jobs)
            group_G = bottleneck_matching(exclusive_s_GE(a) + exclusive_s_GE(b)[:, held[1]])
            held = [group_G, held[1][group_G]]
        outcomes.append(price(jobs, held))
    seconds, busy = np.mean(outcomes, axis=0).tolist()
    return seconds, busy


class PrintedProblem(ColocationProblem):
    """A layer of two models whose seconds are those of Table 2 as printed."""

    formula = PRINTED  # type: ignore[assignment]


def colocated(jobs: Sequence[LayerJob], name: str, rng: np.random.Generator) -> list[IntArray]:
    """Returns the experts on each GPU, by job, as `decoupled` or a strategy of COLOCATE places them."""
    a, b = (one.costs for one in jobs)
    if name == "decoupled":
        return list(decoupled(a, b))
    return list(COLOCATE[name](PrintedProblem((a, b), {0: np.arange(EXPERTS)}), rng))


def foreign(profile: Profile) -> Profile:
    """Returns the first layer's traffic with 75 per cent of the three other layers' in its place."""
    return replace(profile, tokens_TLSE=np.einsum("tlse,l->tse", profile.tokens_TLSE, np.array([2, 2, 2, 2]))[:, None])


def exclusive(profiles: Sequence[Profile], rng: np.random.Generator, found: Outcomes) -> None:
    """Adds the outcomes of single models: orders (Fig. 11a), assignment (11b), foreign traffic (14a)."""
    equal, mixed = load_cluster(EQUAL), load_cluster(MIXED)
    for profile in profiles:
        for layer in range(LAYERS):
            one, held_G = LayerJob.of(equal, profile, layer), rng.permutation(EXPERTS)
            for way, order in {"order Aurora": "birkhoff", "order SJF": "sjf", "order RCS": "random"}.items():
                found[way].append(price([one], [held_G], order))
            one = LayerJob.of(mixed, profile, layer)
            found["mixed Aurora"].append(price([one], [by_load(one.costs)]))
            found["mixed RGA"].append(averaged([one], rng))
        planned = LayerJob.of(mixed, profile)
        served, held_G = LayerJob.of(mixed, foreign(profile)), by_load(planned.costs)
        for level, job in (("0 %", planned), ("75 %", served)):
            found[f"foreign Aurora {level}"].append(price([job], [held_G]))
            found[f"foreign RGA {level}"].append(averaged([job], rng))


def shared(profiles: Sequence[Profile], rng: np.random.Generator, found: Outcomes) -> None:
    """Adds the outcomes of two models on the same GPUs, one outcome a model (Fig. 11c, 11d, 12, 13)."""
    for kind, cluster, method in (("equal", load_cluster(EQUAL), "matching"), ("mixed", load_cluster(MIXED), "decoupled")):
        for layer in range(LAYERS):
            jobs = [LayerJob.of(cluster, profile, layer) for profile in profiles]
            found[f"{kind}, two, Aurora"] += [price(jobs, colocated(jobs, method, rng))] * MODELS
            found[f"{kind}, two, search"] += [price(jobs, colocated(jobs, "local-search", rng))] * MODELS
            found[f"{kind}, two, random"] += [averaged(jobs, rng, pairs=kind == "equal")] * MODELS
            for one in jobs:
                found[f"{kind}, two, Lina"].append(averaged([lina_half(one)], rng))
                found[f"{kind}, two, exclusive"].append(
                    price([one], [np.arange(EXPERTS) if kind == "equal" else by_load(one.costs)])
                )


def measured() -> Iterator[Headline]:
    """Yields each headline."""
    seeds: list[Outcomes] = []
    for seed in range(SEEDS):
        rng, found = np.random.default_rng(seed), defaultdict(list)
        for _ in range(DATA_SETS):
            profiles = [drawn_profile(rng) for _ in range(MODELS)]
            exclusive(profiles, rng, found)
            shared(profiles, rng, found)
        seeds.append(found)

    def of(figure: str, what: str, paper: str, value: Callable[[Callable[[str, int], FloatArray]], FloatArray]) -> Headline:
        cases_SC = np.array([value(lambda way, part, found=found: np.array(found[way])[:, part]) for found in seeds])
        ends = [float(end.mean()) for end in (cases_SC.min(axis=1), cases_SC.mean(axis=1), cases_SC.max(axis=1))]
        return Headline(figure, what, paper, ends)

    def slower(figure: str, way: str, paper: str, over: str) -> Headline:
        return of(figure, f"{way} / {over}, seconds", paper, lambda at: at(way, 0) / at(over, 0))

    yield slower("11a", "order SJF", "up to 1.38", "order Aurora")
    yield slower("11a", "order RCS", "", "order Aurora")
    yield slower("11b", "mixed RGA", "1.36 to 1.81", "mixed Aurora")
    for figure, kind, paper in (("11c", "equal", "1.25 to 2.38"), ("11d", "mixed", "1.91 to 3.54")):
        yield slower(figure, f"{kind}, two, Lina", paper, f"{kind}, two, Aurora")
        yield slower(figure, f"{kind}, two, random", "", f"{kind}, two, Aurora")
    for figure, kind, paper in (("12a", "equal", "1.57 to 1.72"), ("12b", "mixed", "")):
        aurora, alone = f"{kind}, two, Aurora", f"{kind}, two, exclusive"
        yield of(figure, f"{aurora} / exclusive, utilisation", paper, lambda at, a=aurora, b=alone: at(a, 1) / at(b, 1))
    yield slower("13", "mixed, two, Aurora", "mean 1.07 (over the optimum)", "mixed, two, search")
    yield of(
        "14a",
        "acceleration over RGA that 75 % of foreign traffic takes away",
        "up to 0.158",
        lambda at: (
            1
            - (at("foreign RGA 75 %", 0) / at("foreign Aurora 75 %", 0))
            / (at("foreign RGA 0 %", 0) / at("foreign Aurora 0 %", 0))
        ),
    )


if __name__ == "__main__":
    write("aurora", __doc__, measured)
