"""Compares ways of serving one model on equal GPUs: tokens per second, time to first token and time per output token.

Steps are computed from datasheets (`step_seconds`). The seconds of experts, and of exchanges that depend on the placement, are
multiplied by (seconds of the slowest GPU / seconds with perfect balance) on held-out traffic (`reach`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from aurora.advisor.balancers import MethodReach, reach
from aurora.advisor.ceiling import (
    BLOCKS,
    FEWEST_WINDOWS,
    MOST_GROUPS,
    TOKENS,
    ImbalanceSplit,
    RankCurve,
    imbalance_split,
    linear_map,
    map_seconds,
    perfect_seconds,
)
from aurora.advisor.engines import described
from aurora.advisor.engines.engine import EplbSettings, Layout, ServingWay
from aurora.advisor.engines.exchanges import EXCHANGES, LOW_LATENCY, EngineExchange
from aurora.advisor.eplb_pays import SPREAD, EplbAnswer, rearrangement_s
from aurora.advisor.gpu_memory import MemoryFit
from aurora.advisor.ratio_errors import differences, ratio_error
from aurora.advisor.serving_case import BATCHED_TOKENS, MEDIAN, PERFECT, Service, ServingCase
from aurora.advisor.step_constants import borrowed, computed_error
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.model_structure import flat_config
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.choice import TIE
from aurora.types import Gpu, Profile, RequestLoad
from aurora.types.arrays import evenly_spaced

SHARED_OUT = 1.02  # gain of perfect balance from which shares of it are told: of less they are noise
COMPARED_LAYERS = 16  # at most, evenly spaced, on which methods are compared
METHODS = {  # names of balancing methods in tables
    "linear": "experts in sequence",
    "static": "planned placement",
    "eplb": "EPLB's placement",
    "eplb-every": "EPLB",
    "lplb": "LPLB",
    "exact": "perfect balance",
}
AT_START = ("", "linear", "exact")  # methods that know no past traffic


@dataclass(frozen=True)
class ComparedWay:
    """A way of serving, compared with the engine's default.

    Attributes:
        changes: the differences from the engine's default, as phrases.
        method: the balancing method's name in BALANCERS; "" if each expert is cut over GPUs.
        way: the engine's settings; None for perfect balance, which no setting brings.
        service: predicted rates and latencies.
        gain: tokens per second / tokens per second of the default.
        low, high: ends of the gain's interval. It covers balance (95 %, over blocks of held-out traffic) and, if layout or
            exchange differ from the default's, the error of such ratios (`ratio_error`), and an exchange's paces.
        share: time saved / time that perfect balance would save in the default's layout; None for other layouts or exchanges,
            and if perfect balance would gain less than SHARED_OUT.
        memory_bytes: bytes of replicas on a GPU.
        moved_bytes: mean bytes of weights that all GPUs together fetch in a decode step.
        worst: seconds of the slowest GPU's experts / seconds with perfect balance, in the worst window of prefill or decode.
        ratios: the same in all windows, (prefill, decode) each: the mean, and the better and the worse end of its interval.
    """

    changes: tuple[str, ...]
    method: str
    way: ServingWay | None
    service: Service
    gain: float
    low: float
    high: float
    share: float | None
    memory_bytes: int
    moved_bytes: float
    worst: float
    ratios: tuple[tuple[float, float], ...]

    @property
    def starts(self) -> str:
        """Start of the method's effect: "at once", "with a record" of past traffic, or "after N steps" of EPLB."""
        if self.method in AT_START:
            return "at once"
        return f"after {self.way.eplb.interval} steps" if self.way and self.way.eplb else "with a record"

    @property
    def name(self) -> str:
        """The differences from the engine's default as one phrase."""
        return ", ".join(self.changes) or "the engine's default"


@dataclass(frozen=True)
class WaysOfServing:
    """Result of `compare_ways_of_serving`.

    Attributes:
        load: the requests.
        step_tokens: tokens of all GPUs in a prefill step and in a decode step.
        splits: the parts of the default's imbalance, in a prefill step and in a decode step.
        default: the engine's default.
        ceiling: the default's layout and exchange with perfect balance in every step and layer.
        others: all other compared ways, most tokens per second first.
        left_out: ways that were not compared, each with the reason.
        layers: number of layers on which methods were compared.
        eplb: answer to whether EPLB pays; None: the engine has none in the default's layout and exchange.
        error: factor of error of computed steps, within which ways are taken as equally fast.
        borrowed: kinds of GPUs whose shares of peak are taken, since those of this kind are not known.
        memory: memory of a GPU in the default, in the fastest way of each layout, exchange and number of slots, and in those
            that do not fit.
    """

    load: RequestLoad
    step_tokens: tuple[int, int]
    splits: tuple[ImbalanceSplit, ImbalanceSplit]
    default: ComparedWay
    ceiling: ComparedWay
    others: tuple[ComparedWay, ...]
    left_out: Mapping[str, str]
    layers: int
    eplb: EplbAnswer | None
    error: float
    borrowed: tuple[str, ...]
    memory: tuple[MemoryFit, ...]


def method_of(way: ServingWay, replicate: str) -> str:
    """Returns the name in BALANCERS of a way's balancing method; "" if each expert is cut over all GPUs.

    Args:
        way: the way.
        replicate: the method of REPLICAS whose placements the engine supports.
    """
    if way.layout.expert == 1:
        return ""
    if EXCHANGES[way.exchange].sends == "balance":
        return "exact"
    if way.balance:
        return way.balance
    if way.eplb is not None:
        return "eplb-every"
    if way.placement == "plan":
        return "eplb" if way.redundant and replicate == "eplb" else "static"
    return "linear"


def priced_by(way: ServingWay) -> EngineExchange:
    """Returns a way's exchange without the fields that predictions do not read; ways with equal results take equally long."""
    sent = EXCHANGES[way.exchange]
    per = "gpu" if way.stage_hosts == 1 and sent.once_per != "expert" else sent.once_per  # servers are between servers
    return replace(sent, once_per=per, about="", nvlink="", needs="", maker="", source="", measured="")


def changes(way: ServingWay, default: ServingWay) -> tuple[str, ...]:
    """Returns the differences of a way from the default, as phrases.

    Example:
        >>> from aurora.advisor.engines import SERVING_ENGINES
        >>> default = SERVING_ENGINES["sglang"].default(8, 8, 64)
        >>> changes(replace(default, placement="plan", redundant=8), default)
        ('planned placement', '+1 slot')
    """
    layout = way.layout
    words = [str(layout)] * (layout != default.layout)
    if way.exchange != default.exchange and EXCHANGES[way.exchange].sends != "reduce":
        words.append(f"exchange {way.exchange}")
    words += ["halves of a batch overlap"] * (way.overlap and not default.overlap)
    words += [f"steps of {way.batched_tokens} tokens"] * (way.batched_tokens not in (0, default.batched_tokens))
    words += ["planned placement"] * (way.placement == "plan")
    if way.eplb is not None and way.eplb != default.eplb:
        words.append(f"EPLB every {way.eplb.interval} steps")
    if way.redundant != default.redundant:
        more, least = way.redundant // layout.expert, f"{way.redundant} redundant experts"
        words.append(f"+{more} slot{'s' * (more > 1)}" if more else least)
    return (*words, *([f"{way.balance} in every step"] if way.balance else []))


def compare_ways_of_serving(
    profile: Profile,
    model: ServingCase,
    engine: str,
    gpus: int,
    nvlink: bool = True,
    progress: Progress = no_progress,
) -> WaysOfServing:
    """Compares an engine's ways of serving a model on equal GPUs, and balancing methods that it lacks, by computed steps.

    Args:
        profile: recorded or drawn traffic, of any number of source ranks, with compute curves of the GPUs' kind.
        model: the model, its GPUs and its requests.
        engine: one of SERVING_ENGINES, as "vllm", or with a version, as "vllm==0.33".
        gpus: number of GPUs.
        nvlink: whether NVLink connects the GPUs of a server.
        progress: called with (name of the work, amount done, amount in all).

    Raises:
        BadInput: if the model or the traffic cannot be read.
        InfeasiblePlan: if the engine's default does not fit the GPUs' memory.
    """
    return _Comparison(profile, model, engine, gpus, nvlink).compared(progress)


class _Comparison:
    """Ratios of methods, measured once for each layout, number of slots and size of step; and the ways that use them."""

    def __init__(self, profile: Profile, model: ServingCase, engine: str, gpus: int, nvlink: bool) -> None:
        self.whole, self.model, self.use = profile, model, described(engine)[0]
        self.few = profile.at_layers(evenly_spaced(profile.layers, COMPARED_LAYERS))
        self.left_out: dict[str, str] = {}
        self.fits: dict[ServingWay, MemoryFit] = {}
        self.short: list[MemoryFit] = []
        default = self.use.default(gpus, model.per_server, profile.experts, nvlink)
        if why := self._short(default):
            raise InfeasiblePlan(f"{engine}'s default on {gpus} GPU{'s' * (gpus > 1)}: {why}")
        self.default = self._sized(default)
        ways = self.use.ways(gpus, model.per_server, profile.experts, nvlink)
        self.ways = list(self._distinct(way for way in ways if way != default))
        self.reached: dict[tuple[int, int, int, int, str], tuple[MethodReach, MethodReach]] = {}
        unit = -(-self.few.windows // MOST_GROUPS)  # windows that are told apart
        longest = max(unit, self.few.windows // BLOCKS)
        self.intervals = tuple(every for every in (unit, 2 * unit, 4 * unit, 8 * unit) if every <= longest)
        self.every: dict[ServingWay, int] = {}
        self.unstalled: dict[ServingWay, float] = {}  # most tokens per second of a way with EPLB, if moves took no time

    def _slots(self, way: ServingWay) -> int:
        """Slots of a GPU in a way."""
        return -(-(self.whole.experts + way.redundant) // way.layout.expert)

    def _short(self, way: ServingWay) -> str:
        """Why a way does not fit; empty if it does."""
        heads = flat_config(self.model.config).get("num_attention_heads")
        if isinstance(heads, int) and heads % way.layout.tensor:
            return f"{heads} attention heads cannot be cut over {way.layout.tensor} GPUs"
        if way not in self.fits:
            self.fits[way] = self.model.fit(way)
        return self.fits[way].why

    def _sized(self, way: ServingWay) -> ServingWay:
        """A way that fits, with the tokens of a step if they must be set: for low-latency buffers, or as memory holds fewer."""
        fit = self.fits[way]
        tokens = min(BATCHED_TOKENS, fit.most_tokens)
        if tokens == BATCHED_TOKENS and way.exchange not in LOW_LATENCY:
            return way
        sized = replace(way, batched_tokens=tokens)
        self.fits[sized] = fit
        return sized

    def _distinct(self, ways: Iterable[ServingWay]) -> Iterator[ServingWay]:
        """Yields ways that fit and are priced apart: of exchanges that are priced alike, the first."""
        seen: dict[tuple[EngineExchange, ServingWay], ServingWay] = {}
        seen[priced_by(self.default), self.default] = self.default
        for way in ways:
            if not self.model.kind.kind.startswith(maker := EXCHANGES[way.exchange].maker):
                self.left_out[f"exchange {way.exchange}"] = f"needs GPUs of {maker}"
                continue
            if why := self._short(way):
                name = ", ".join(changes(way, self.default))
                self.left_out[name] = why
                self.short += [replace(self.fits[way], name=name)] if way in self.fits else []
                continue
            sized = self._sized(way)
            kind = priced_by(sized), replace(sized, exchange=self.default.exchange)
            if kind in seen:
                self.left_out.setdefault(f"exchange {way.exchange}", f"priced like {seen[kind].exchange}")
            else:
                seen[kind] = sized
                yield sized

    def _memory(self, others: Iterable[ComparedWay]) -> tuple[MemoryFit, ...]:
        """Memory in the default, in the fastest way of each layout, exchange and number of slots, and where it does not fit."""
        rows, seen = [replace(self.fits[self.default], name="")], {self.default.layout, self.default.exchange, (0, False)}
        for other in others:
            assert other.way is not None
            fit = self.fits[other.way]
            kinds = {other.way.layout, other.way.exchange, (fit.more_slots, fit.parts.eplb > 0)}
            if not kinds <= seen:
                seen |= kinds
                rows.append(replace(fit, name=other.name))
        return (*rows, *self.short)

    def _measure(self, layout: Layout, slots: int, most: int, methods: Iterable[str]) -> None:
        """Measures methods at the steps of prompts and of answers, of at most so many tokens, on the GPUs of one copy."""
        key = layout.data, layout.expert, slots, most
        missing = [method for method in dict.fromkeys(methods) if (*key, method) not in self.reached]
        for every in self.intervals if "eplb-every" in missing else (1,):
            asked = [method for method in missing if every == 1 or method == "eplb-every"]
            both = [
                reach(self.few, layout.expert, slots, asked, tokens, self._curve(tokens), every=every, lag=1)
                for tokens in (self.model.step_tokens(layout, most) if asked else ())
            ]
            for prompts, answers in zip(*both, strict=True):
                name = f"{prompts.name}:{every}" if prompts.name == "eplb-every" else prompts.name
                self.reached[(*key, name)] = prompts, answers

    def _curve(self, tokens: int) -> RankCurve:
        """Seconds of a rank's experts about steps of so many tokens."""
        kind = self.model.kind
        gpu = Gpu("gpu", kind.kind, 0, kind.port_Bps, kind.port_Bps, kind.memory_bytes)
        return RankCurve.of(self.few, gpu, tokens, self.few.experts)

    def compared(self, progress: Progress) -> WaysOfServing:
        """Returns all ways beside the default."""
        fewest = self._slots(self.default)
        first = self.default.layout, fewest, self._most(self.default)
        settings: dict[tuple[Layout, int, int], list[str]] = {first: ["linear", "exact"]}
        for way in (self.default, *self.ways):
            if method := method_of(way, self.use.replicate):
                settings.setdefault((replace(way.layout, copies=1), self._slots(way), self._most(way)), []).append(method)
        for number, ((layout, slots, most), methods) in enumerate(settings.items()):
            progress("comparing ways of serving", number, len(settings))
            self._measure(layout, slots, most, methods)
        progress("comparing ways of serving", len(settings), len(settings))
        self.ways = [self._at_best_interval(way) if way.eplb else way for way in self.ways]
        linear = self._ratios(self.default, fewest, "linear")[0]
        base, perfect = (self.model.service(self.default, ratios).tokens_per_s for ratios in (linear, PERFECT))

        def priced(way: ServingWay | None, slots: int, method: str) -> ComparedWay:
            return self._priced(way, slots, method, base, perfect)

        others = [priced(way, self._slots(way), method_of(way, self.use.replicate)) for way in self.ways]
        tokens = self.model.step_tokens(self.default.layout, self._most(self.default))
        others.sort(key=lambda other: -other.service.tokens_per_s)
        prompts, answers = (
            imbalance_split(self.few, self.default.layout.expert, count, curve=self._curve(count)) for count in tokens
        )
        ceiling = priced(None, fewest, "exact")
        return WaysOfServing(
            self.model.load,
            tokens,
            (prompts, answers),
            priced(self.default, fewest, "linear"),
            ceiling,
            tuple(others),
            self.left_out,
            self.few.layers,
            self._eplb(others, ceiling.gain, base),
            computed_error(self.model.kind),
            tuple(borrowed(self.model.kind)),
            self._memory(others),
        )

    def _stall_s(self, way: ServingWay, waits: bool | None = None) -> float:
        """Seconds for which serving waits in a rearrangement of EPLB, as measured or as the engine moves experts."""
        if waits is None and self.model.eplb_stall_s is not None:
            return self.model.eplb_stall_s
        slots, link_Bps = self._slots(way), self.model.transfer_Bps(way.layout.copy_gpus)
        waits = self.use.moves_wait if waits is None else waits
        return rearrangement_s(slots, self.whole.layers, self.whole.expert_bytes, self.model.kind, link_Bps, waits)

    def _at_best_interval(self, way: ServingWay) -> ServingWay:
        """A way with EPLB, at the recorded interval with the most tokens per second; the longest of those that are as fast.

        Experts that travel beside serving need a part of the interval, SPREAD times as long as computed, and a step a layer.
        """
        found, load, few = list[tuple[float, int, ServingWay]](), self.model.load, self.few
        unstalled, least_s = 0.0, 0.0 if self.use.moves_wait else SPREAD * self._stall_s(way, waits=True)
        window_tokens = few.load_LE.sum() / few.layers / few.top_k / few.windows
        for every in self.intervals:
            self.every[way] = every
            ratios = self._ratios(way, self._slots(way), "eplb-every")[0]
            service = self.model.service(way, ratios)
            unstalled = max(unstalled, service.tokens_per_s)
            interval_s = every * window_tokens / (service.tokens_per_s * (1 + load.isl / load.osl))
            interval = max(1, round(interval_s * self.model.steps(way) / (service.tpot_s * load.osl)))
            timed = way
            with suppress(BadInput):  # of an engine whose interval is fixed
                if few.windows >= FEWEST_WINDOWS and interval_s >= least_s and interval >= self.whole.layers:
                    self.use.check(known := replace(way, eplb=EplbSettings(min(self.use.eplb.window, interval), interval)))
                    timed = known
            rate = self.model.service(timed, ratios, self._stall_s(way)).tokens_per_s
            found.append((rate, every, timed))
        fastest = max(rate for rate, _, _ in found)
        _, every, best = [each for each in found if each[0] * TIE >= fastest][-1]
        self.every[best], self.fits[best], self.unstalled[best] = every, self.fits[way], unstalled
        return best

    def _eplb(self, others: Iterable[ComparedWay], ceiling: float, base: float) -> EplbAnswer | None:
        """Answer to whether EPLB pays in the default's layout and exchange, without replicas or with."""
        alike = [other for other in others if other.way and not self._apart(other.way) and not other.way.balance]
        moving = max((other for other in alike if other.method == "eplb-every"), key=lambda other: other.gain, default=None)
        if moving is None or (way := moving.way) is None or way.eplb is None:
            return None
        known = self.whole.load_LE[None].astype(np.float64)
        plans = [(other.gain, other.low) for other in alike if other.way and other.way.placement == "plan"]
        placed, least = max(plans, default=(1.0, 1.0))
        stall_s, drift, layout = self._stall_s(way), self.few.windows >= FEWEST_WINDOWS, way.layout
        linear = linear_map(self.whole.layers, self.whole.experts, layout.expert)
        balanced = perfect_seconds(known, layout.expert, TOKENS).sum() / map_seconds(known, linear, TOKENS).sum()
        better = drift and moving.low > SHARED_OUT and moving.gain > TIE * placed
        return EplbAnswer(
            stall_s,
            self.use.moves_wait,
            self.model.eplb_stall_s is not None,
            float(balanced),
            1 - 1 / ceiling if not drift else 1 - base / self.unstalled[way],
            drift,
            moving.service.tpot_s * self.model.load.osl / self.model.steps(way) - stall_s / way.eplb.interval,
            way.eplb.interval,
            moving.gain if drift else None,
            placed,
            "eplb" if better else "map" if least > SHARED_OUT else "off",
        )

    @staticmethod
    def _most(way: ServingWay) -> int:
        """The most tokens of a rank in a step."""
        return way.batched_tokens or BATCHED_TOKENS

    def _reach(self, way: ServingWay, slots: int, method: str) -> tuple[MethodReach, MethodReach]:
        """What was measured of a method in a way's layout and steps, of prompts and of answers."""
        name = f"{method}:{self.every[way]}" if method == "eplb-every" else method
        return self.reached[way.layout.data, way.layout.expert, slots, self._most(way), name]

    def _ratios(self, way: ServingWay, slots: int, method: str) -> tuple[tuple[float, float], ...]:
        """Ratios of prompts and of answers: the mean, and the better and the worse end of their intervals."""
        if not method:
            return PERFECT, PERFECT, PERFECT
        prompts, answers = self._reach(way, slots, method)

        def at(end: str) -> tuple[float, float]:
            """Returns that end of both, or the means where there is no interval."""
            ends = [getattr(of, end) for of in (prompts, answers)]
            of_prompts, of_answers = (
                max(1.0, e if isfinite(e) else m.ratio) for e, m in zip(ends, (prompts, answers), strict=True)
            )
            return of_prompts, of_answers

        return at("ratio"), at("low"), at("high")

    def _priced(self, way: ServingWay | None, slots: int, method: str, base: float, perfect: float) -> ComparedWay:
        """A way beside the default's and perfect tokens per second; without one, a method in the default's layout."""
        used = way or self.default
        layout, apart = used.layout, self._apart(used)
        mean, better, worse = self._ratios(used, slots, method)
        moved = self._moved_bytes(used, slots, method)
        stall_s = self._stall_s(used) if method == "eplb-every" else 0.0
        most_s = stall_s * (SPREAD if self.model.eplb_stall_s is None else 1.0)
        service = self.model.service(used, mean, stall_s)
        error = ratio_error(self.model.kind, differences(used, self.default)) if apart else 1.0
        least, most = (0, 2) if used.exchange != self.default.exchange else (MEDIAN, MEDIAN)
        low = self.model.service(used, worse, most_s, most).tokens_per_s / base
        high = self.model.service(used, better, stall_s, least).tokens_per_s / base
        saves, possible = 1 / base - 1 / service.tokens_per_s, 1 / base - 1 / perfect
        more = max(0, slots - -(-self.whole.experts // layout.expert)) if layout.expert > 1 else 0
        return ComparedWay(
            (METHODS[method],) if way is None else changes(way, self.default),
            method,
            way,
            service,
            service.tokens_per_s / base,
            low / error,
            high * error,
            None if apart or perfect < SHARED_OUT * base else saves / possible,
            more * self.whole.layers * self.whole.expert_bytes,
            moved[1],
            max(of.worst for of in self._reach(used, slots, method)) if method else 1.0,
            (mean, better, worse),
        )

    def _apart(self, way: ServingWay) -> bool:
        """True if more than the balance differs from the default."""
        return (way.layout, way.overlap, way.batched_tokens, priced_by(way)) != (
            self.default.layout, self.default.overlap, self.default.batched_tokens, priced_by(self.default)
        )  # fmt: skip

    def _moved_bytes(self, way: ServingWay, slots: int, method: str) -> tuple[float, float]:
        """Bytes of weights that all GPUs fetch in a step of prompts and in one of answers, in the mean."""
        if not method:
            return 0.0, 0.0
        window_tokens = self.few.load_LE.sum() / self.few.layers / self.few.top_k / self.few.windows
        both, tokens = self._reach(way, slots, method), self.model.step_tokens(way.layout, self._most(way))
        times = self.whole.layers / self.few.layers / window_tokens
        prompts, answers = (of.moved_bytes * times * step for of, step in zip(both, tokens, strict=True))
        return prompts, answers
