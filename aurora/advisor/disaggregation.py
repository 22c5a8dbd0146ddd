"""Disaggregated prefill: one pool of GPUs computes prompts, another generates answers, and KV caches travel between them.

In the steady state both pools serve equally many requests per second: at most what the prefill pool can compute, what the links
between the pools can carry, and what the decode pool can generate with the requests in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from aurora.advisor.best_way import WORTH, published, simplest
from aurora.advisor.engines import described
from aurora.advisor.engines.engine import Layout, ServingWay
from aurora.advisor.gpu_memory import most
from aurora.advisor.ratio_errors import ratio_error
from aurora.advisor.served_ways import ComparedWay, compare_ways_of_serving
from aurora.advisor.serving_case import BATCHED_TOKENS, Service, ServingCase
from aurora.advisor.step_time import SchedulerStep
from aurora.advisor.without_records import without_records
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.attention import kv_bytes_per_sequence, kv_bytes_per_token
from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import STAGES, Profile

AUTO = "auto"  # in place of a number of GPUs: the split with the most tokens per second


class PoolRates(NamedTuple):
    """Requests per second of pools, and what they follow from.

    Attributes:
        prefill_per_s: prompts per second that the prefill pool can compute.
        transfer_per_s: prompts per second whose KV caches the links between the pools can carry.
        decode_per_s: answers per second that the decode pool can generate with the requests in flight.
        requests: requests that a rank of the decode pool generates at a time.
        kv_bytes: bytes of a prompt's KV cache that travel.
        transfer_s: seconds in which the caches of a step's prompts travel.
        service: rates and latencies of both pools together.
    """

    prefill_per_s: float
    transfer_per_s: float
    decode_per_s: float
    requests: int
    kv_bytes: float
    transfer_s: float
    service: Service

    @property
    def per_s(self) -> float:
        """Requests per second of both pools together."""
        return min(self.prefill_per_s, self.transfer_per_s, self.decode_per_s)

    @property
    def limit(self) -> str:
        """The slowest of the three: "prefill", "decode" or "transfer"."""
        rates = {"decode": self.decode_per_s, "prefill": self.prefill_per_s, "transfer": self.transfer_per_s}
        return min(rates, key=lambda name: rates[name])


@dataclass(frozen=True)
class Disaggregation:
    """Prefill and decode on GPUs of their own, compared with the best way of serving together on all of them.

    Attributes:
        together: the best way of serving together.
        pools: the way of serving of each pool, by STAGES.
        rates: rates at the mean balance.
        gain: tokens per second apart / together.
        attention: result of `attention_apart` on all GPUs, by the engine's default.
        low, high: ends of the gain's interval, which covers the balance of experts and the error of computed steps.
    """

    together: ComparedWay
    pools: Mapping[str, ComparedWay]
    rates: PoolRates
    gain: float
    low: float
    high: float
    attention: tuple[int, float] = (0, 1.0)

    @property
    def at_most(self) -> str:
        """The bound on attention and experts on GPUs of their own, in words."""
        return f"attention on {self.attention[0]} GPUs, experts on the others: {self.attention[1]:.2f}x in answers at most"

    @property
    def worth(self) -> bool:
        """True if the gain is above WORTH even at the lower end of its interval."""
        return self.low > WORTH


def splits_of(gpus: int, prefill_gpus: int | str | None, decode_gpus: int | None) -> list[tuple[int, int]]:
    """Returns the (prefill, decode) numbers of GPUs to compare: one pair, or with AUTO all that leave a GPU to each.

    Args:
        gpus: number of all GPUs.
        prefill_gpus: GPUs that compute prompts, or AUTO; None: those that `decode_gpus` leaves.
        decode_gpus: GPUs that generate answers; None: those that `prefill_gpus` leaves.

    Raises:
        BadInput: if the numbers are not of two pools that together have all GPUs.
    """
    if isinstance(prefill_gpus, str) and prefill_gpus != AUTO:
        raise BadInput(f"`prefill_gpus`: expected a number of GPUs or {AUTO}, found {prefill_gpus!r}")
    if gpus < 2:
        raise BadInput(f"`prefill_gpus`: expected two GPUs or more, for prompts and for answers, found {gpus}")
    if prefill_gpus == AUTO and decode_gpus is None:
        return [(number, gpus - number) for number in range(1, gpus)]
    first = prefill_gpus if isinstance(prefill_gpus, int) else gpus - (decode_gpus or 0)
    second = gpus - first if decode_gpus is None else decode_gpus
    if min(first, second) < 1 or first + second != gpus:
        raise BadInput(
            f"`prefill_gpus`, `decode_gpus`: expected one GPU or more each, and all {gpus} together, found {first} and {second}"
        )
    return [(first, second)]


def pool_cases(case: ServingCase, prefill_gpus: int, decode: ServingWay) -> tuple[ServingCase, ServingCase]:
    """Returns what each pool serves of the requests that are in flight on all GPUs.

    A GPU of the prefill pool holds the prompts of a step, and as many whose caches travel. Of all requests as many generate as
    fit the decode pool's memory.

    Args:
        case: the model and the requests on all GPUs.
        prefill_gpus: GPUs that compute prompts.
        decode: a way of serving of the decode pool.
    """

    def generating(concurrency: int) -> ServingCase:
        return replace(case, load=replace(case.load, concurrency=concurrency))

    flying = case.load.concurrency * (prefill_gpus + decode.layout.gpus)
    held = most(lambda each: not generating(each).fit(decode).why, flying // decode.layout.gpus)
    prompts = min(flying // prefill_gpus, 2 * max(1, BATCHED_TOKENS // case.load.isl))
    return replace(case, load=replace(case.load, osl=1, concurrency=prompts)), generating(max(1, held))


def prompt_kv_bytes(config: Mapping[str, Any], isl: int, layout: Layout) -> float:
    """Returns the bytes of a prompt's KV cache that all GPUs of a data-parallel rank hold together.

    Args:
        config: the content of the model's config.json.
        isl: tokens of the prompt.
        layout: the rank's layout; its GPUs divide the KV heads, and all hold what cannot be divided.
    """
    tensor = layout.tensor
    return tensor * (isl * kv_bytes_per_token(config, tensor=tensor) + kv_bytes_per_sequence(config, tensor=tensor))


def pool_rates(
    case: ServingCase, prefill: ServingWay, decode: ServingWay, ratios: tuple[float, float] = (1.0, 1.0)
) -> PoolRates:
    """Returns the rates and latencies of two pools.

    A decode rank reads its part of a prompt's KV cache when the prompt's step has ended; the caches of a step's prompts leave
    their rank together. Requests that are computed or travel do not generate.

    Args:
        case: the model and the requests on all GPUs.
        prefill, decode: the pools' ways of serving.
        ratios: (prefill, decode): seconds of the slowest GPU's experts / seconds with perfect balance.
    """
    first, second, osl = prefill.layout, decode.layout, case.load.osl
    prompts_case, answers_case = pool_cases(case, first.gpus, decode)
    together = prompts_case.prompts(first, prefill.batched_tokens or BATCHED_TOKENS)
    prompt_s = prompts_case.prompt_s(prefill, ratios[0])
    kv_bytes, link_Bps = prompt_kv_bytes(case.config, case.load.isl, second), case.transfer_Bps(first.gpus + second.gpus)
    holders, readers = first.tensor * first.pipeline, second.tensor * second.pipeline
    transfer_s = kv_bytes * max(together / holders, 1 / readers) / link_Bps
    flying, ranks, waits_s = (
        case.load.concurrency * (first.gpus + second.gpus),
        second.copies * second.data,
        prompt_s + transfer_s,
    )

    def answers_per_s(requests: int) -> float:
        return ranks * requests / (osl * answers_case.decode_s(decode, ratios[1], requests))

    fit = most(lambda each: ranks * each + answers_per_s(each) * waits_s <= flying, answers_case.requests(second))
    fit = max(1, fit)
    decode_per_s = min(answers_per_s(fit), flying / (waits_s + osl * answers_case.decode_s(decode, ratios[1], fit)))
    prefill_per_s = first.copies * first.data * together / prompts_case.prompt_period_s(prefill, ratios[0])
    transfer_per_s = min(first.gpus, second.gpus) * link_Bps / kv_bytes
    rate = min(prefill_per_s, transfer_per_s, decode_per_s)
    requests = max(1, most(lambda each: answers_per_s(each) <= rate, fit))
    decode_s = answers_case.decode_s(decode, ratios[1], requests)
    service = Service(rate * osl, waits_s + decode_s / 2, decode_s)
    return PoolRates(prefill_per_s, transfer_per_s, decode_per_s, requests, kv_bytes, transfer_s, service)


def attention_apart(case: ServingCase, way: ServingWay) -> tuple[int, float]:
    """Returns the GPUs for attention that balance those for experts in steps of answers, and a bound on the gain that brings.

    All requests stay in flight, attention's on fewer GPUs and experts on the others, in two batches that take turns; exchanges,
    logits and the host are counted as nothing. So no way of serving attention and experts apart gains more.

    Args:
        case: the model and the requests on all GPUs.
        way: a way of serving with data-parallel attention on every GPU.

    Source: MegaScale-Infer, arXiv:2504.02263; the balance, of the computed seconds here.
    """
    gpus, requests = way.layout.data, case.requests(way.layout)
    kv, best = case.load.isl + case.load.osl // 2, (0, 1.0)
    whole = case.step_parts(way, SchedulerStep(decode_requests=requests, kv_tokens=requests * kv))
    for attention in range(1, gpus):
        many = requests * gpus // attention
        layers = case.step_parts(way, SchedulerStep(decode_requests=many, kv_tokens=many * kv))
        took_s = max(layers.attention_s + layers.dense_s, whole.experts_s * gpus / (gpus - attention))
        best = max(best, (attention, whole.total / took_s), key=lambda each: each[1])
    return best


def compare_disaggregated(
    profile: Profile,
    case: ServingCase,
    engine: str,
    splits: Sequence[tuple[int, int]],
    together: ComparedWay,
    drawn: tuple[float, float] | None,
    nvlink: bool = True,
    progress: Progress = no_progress,
) -> Disaggregation:
    """Returns prefill and decode apart, with the split of the GPUs that serves the most tokens per second.

    A pool is served by the `simplest` of its fastest ways, by the worse end of its balance, without the engine's own balancer.
    Where the record tells stages, each pool's placement is of its own stage's traffic. Several splits are compared first, on
    the record's first layer.

    Args:
        profile: the traffic.
        case: the model and the requests on all GPUs.
        engine: one of SERVING_ENGINES.
        splits: (prefill, decode) numbers of GPUs to compare.
        together: the best way of serving on all GPUs together.
        drawn: least and most seconds of the slowest GPU's experts / seconds with perfect balance, over recorded models, if the
            traffic was drawn; None: it was recorded.
        nvlink: whether NVLink connects the GPUs of a server.
        progress: called with (name of the work, amount done, amount in all).

    Raises:
        InfeasiblePlan: if the engine cannot serve any of the splits.
    """

    def pools(split: tuple[int, int], layers: int) -> list[ComparedWay]:
        ways = []
        default = described(engine)[0].default(split[1], case.per_server, profile.experts, nvlink)
        for phase, (stage, part) in enumerate(zip(STAGES, pool_cases(case, split[0], default), strict=True)):
            traffic = of_stage(profile, stage).at_layers(range(layers))
            served = compare_ways_of_serving(traffic, part, engine, split[phase], nvlink)
            served = served if drawn is None else without_records(served, part, drawn)

            def rate(other: ComparedWay, phase: int = phase, part: ServingCase = part) -> float:
                """Returns the pool's requests per second with one way, relative to those of others."""
                assert other.way is not None
                layout, worse = other.way.layout, other.ratios[2][phase]
                if phase == 1:
                    return layout.copies * layout.data * part.requests(layout) / part.decode_s(other.way, worse)
                prompts = part.prompts(layout, other.way.batched_tokens or BATCHED_TOKENS)
                return layout.copies * layout.data * prompts / part.prompt_period_s(other.way, worse)

            fixed = [other for other in (served.default, *served.others) if other.way and not other.way.eplb]
            fixed = [other for other in fixed if published(served, other)]
            ways.append(simplest(served, fixed, rate))
        return ways

    def rates(ways: Sequence[ComparedWay], end: int) -> PoolRates:
        prefill, decode = (other.way for other in ways)
        assert prefill is not None
        assert decode is not None
        return pool_rates(case, prefill, decode, (ways[0].ratios[end][0], ways[1].ratios[end][1]))

    found, whys = dict[tuple[int, int], float](), dict[tuple[int, int], str]()
    for number, split in enumerate(splits):
        progress("comparing splits", number, len(splits) + 1)
        try:
            found[split] = rates(pools(split, 1), 0).service.tokens_per_s if len(splits) > 1 else 1.0
        except (BadInput, InfeasiblePlan) as error:
            whys[split] = str(error)
    if not found:
        even = max(whys, key=min)
        raise InfeasiblePlan(f"prefill on {even[0]} and decode on {even[1]} GPUs: {whys[even]}")
    ways = pools(max(found, key=lambda split: found[split]), profile.layers)
    progress("comparing splits", len(splits) + 1, len(splits) + 1)
    gains = []
    for end in range(3):
        base = together.service
        if drawn is not None and together.way is not None:
            base = case.service(together.way, together.ratios[end])
        gains.append(rates(ways, end).service.tokens_per_s / base.tokens_per_s)
    factor, of_pools = ratio_error(case.kind, frozenset({"attention"})), dict(zip(STAGES, ways, strict=True))
    bound = attention_apart(case, described(engine)[0].default(sum(splits[0]), case.per_server, profile.experts, nvlink))
    return Disaggregation(together, of_pools, rates(ways, 0), gains[0], min(gains) / factor, max(gains) * factor, bound)


def of_stage(profile: Profile, stage: str) -> Profile:
    """Returns the windows of one of STAGES; the whole profile if it does not tell stages, or has no such window."""
    windows = [] if profile.stage_T is None else np.flatnonzero(np.array(profile.stage_T) == stage).tolist()
    return profile.at_windows(windows) if windows else profile
