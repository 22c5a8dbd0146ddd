"""A model on GPUs and the requests that it serves: sizes of steps, memory of a GPU, rates and latencies, all computed.

A data-parallel rank has L requests in flight, each with a prompt of `isl` and an answer of `osl` tokens; in a cycle of osl
decode steps and L prompts it serves each request once. With P pipeline stages a step has L / P requests, and P steps are under
way, each in another stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import Layout, ServingWay
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.gpu_memory import MemoryFit, memory_fit
from aurora.advisor.served_sizes import ServedSizes
from aurora.advisor.step_constants import DEFAULT
from aurora.advisor.step_time import SchedulerStep, StepSeconds, step_seconds
from aurora.types import GpuKind, RequestLoad

BATCHED_TOKENS = 8192  # of a rank in a step of prompts, engines' default or near it
MEDIAN = 1  # of the paces of an exchange
PERFECT = 1.0, 1.0  # ratios of perfect balance, of prompts and of answers


@dataclass(frozen=True)
class Service:
    """Rates and latencies of requests in the steady state.

    Attributes:
        tokens_per_s: generated tokens per second, of all GPUs together.
        ttft_s: time to first token in seconds, of a request that does not queue.
        tpot_s: time per output token in seconds, including steps that compute other requests' prompts.
    """

    tokens_per_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class ServingCase:
    """A model on GPUs, and the requests that it serves; computes step sizes, memory and rates.

    Args:
        config: the content of the model's config.json.
        kind: the GPUs' datasheet.
        load: the requests.
        nic_Bps: bytes per second of a GPU's NIC, or of its share of one, to other servers; None: there is one server.
        per_server: GPUs of a server.
        domain_gpus: GPUs of an NVLink domain, which can span servers; None: a server's.
        eplb_stall_s: measured seconds for which serving waits in a rearrangement of EPLB; None: they are computed.
    """

    config: Mapping[str, Any]
    kind: GpuKind
    load: RequestLoad
    nic_Bps: float | None
    per_server: int
    domain_gpus: int | None = None
    eplb_stall_s: float | None = None

    def requests(self, layout: Layout) -> int:
        """Returns the requests in flight on a data-parallel rank."""
        return max(1, self.load.concurrency * layout.copy_gpus // layout.data)

    def batch(self, layout: Layout) -> int:
        """Returns the requests of a data-parallel rank in one step."""
        return ceil(self.requests(layout) / layout.pipeline)

    def prompts(self, layout: Layout, most: int = BATCHED_TOKENS) -> int:
        """Returns the number of prompts that a rank computes in one step of at most `most` tokens."""
        return max(1, min(self.batch(layout), most // self.load.isl))

    def step_tokens(self, layout: Layout, most: int = BATCHED_TOKENS) -> tuple[int, int]:
        """Returns (prefill, decode): the tokens of all ranks of a copy in a step of each kind, at most `most` of each rank."""
        chunk = min(self.load.isl, most)
        return self.prompts(layout, most) * chunk * layout.data, self.batch(layout) * layout.data

    def fit(self, way: ServingWay, name: str = "") -> MemoryFit:
        """Returns the memory of a GPU in a way of serving, with the KV cache of the requests in flight."""
        context = self.load.isl + self.load.osl
        return memory_fit(self.config, self.kind, way, self.requests(way.layout), context, BATCHED_TOKENS, name)

    def transfer_Bps(self, gpus: int) -> float:
        """Returns the bytes per second that large transfers among so many GPUs reach: by links, or beyond a domain by NICs."""
        links_Bps = self.kind.port_Bps * DEFAULT.link_share
        if self.nic_Bps is None or gpus <= (self.domain_gpus or self.per_server):
            return links_Bps
        return min(links_Bps, self.nic_Bps * DEFAULT.nic_share)

    def steps(self, way: ServingWay) -> float:
        """Returns the steps of a rank in which it serves each of its requests once: of prompts and of answers."""
        most = way.batched_tokens or BATCHED_TOKENS
        chunks = ceil(self.load.isl / most)
        return self.load.osl + self.requests(way.layout) / self.prompts(way.layout, most) * chunks

    def service(
        self, way: ServingWay, ratios: tuple[float, float] = PERFECT, stall_s: float = 0.0, pace: int = MEDIAN
    ) -> Service:
        """Returns the predicted rates and latencies of a way of serving.

        Args:
            way: the way.
            ratios: (prefill, decode): seconds of the slowest GPU's experts / seconds with perfect balance, by kind of step.
            stall_s: seconds for which serving waits in each interval of the engine's balancer.
            pace: of the exchange's published ones: 0: the least, 1: the median, 2: the most.
        """
        layout, load, most = way.layout, self.load, way.batched_tokens or BATCHED_TOKENS
        requests, together = self.requests(layout), self.prompts(layout, most)
        prompt_s, decode_s = self.prompt_s(way, ratios[0], pace), self.decode_s(way, ratios[1], None, pace)
        cycle_s = load.osl * decode_s + requests / together * prompt_s
        cycle_s += stall_s * self.steps(way) / way.eplb.interval if way.eplb else 0.0
        tokens_per_s = layout.copies * layout.data * requests * load.osl / cycle_s
        return Service(tokens_per_s, prompt_s + decode_s / 2, cycle_s / load.osl)

    def prompt_s(self, way: ServingWay, ratio: float = 1.0, pace: int = MEDIAN) -> float:
        """Returns the seconds in which a rank computes the `prompts` of a step, in several steps if they are longer than one.

        With P pipeline stages, C such chunks follow one another through them, and take (C + P - 1) / P times as long as one.

        Args:
            way: the way.
            ratio: seconds of the slowest GPU's experts / seconds with perfect balance.
            pace: as for `service`.
        """
        most, total = way.batched_tokens or BATCHED_TOKENS, 0.0
        together = self.prompts(way.layout, most)
        for begin in range(0, self.load.isl, most):
            tokens, before = min(most, self.load.isl - begin) * together, begin * together
            total += self._step_s(way, SchedulerStep(tokens, 0, before, before, together), ratio, 0, pace)
        chunks, stages = ceil(self.load.isl / most), way.layout.pipeline
        return total * (chunks + stages - 1) / (chunks * stages)

    def prompt_period_s(self, way: ServingWay, ratio: float = 1.0) -> float:
        """Returns the seconds from one step's prompts to the next's, if prompts wait, so that all pipeline stages compute some.

        Args:
            way: the way.
            ratio: as for `prompt_s`.
        """
        layout, most = way.layout, way.batched_tokens or BATCHED_TOKENS
        chunks = ceil(self.load.isl / most)
        least = chunks / (chunks + layout.pipeline - 1)  # of which all stages compute
        return self.prompt_s(way, ratio) * max(least, self.prompts(layout, most) / self.requests(layout))

    def decode_s(self, way: ServingWay, ratio: float = 1.0, requests: int | None = None, pace: int = MEDIAN) -> float:
        """Returns the seconds in which all requests get a token: of a step, or with pipeline stages of one for each stage.

        Args:
            way: the way.
            ratio: seconds of the slowest GPU's experts / seconds with perfect balance.
            requests: requests of a data-parallel rank; None: all that are in flight.
            pace: as for `service`.
        """
        many = ceil((self.requests(way.layout) if requests is None else requests) / way.layout.pipeline)
        kv_tokens = many * (self.load.isl + self.load.osl // 2)
        return self._step_s(way, SchedulerStep(decode_requests=many, kv_tokens=kv_tokens), ratio, 1, pace)

    def _step_s(self, way: ServingWay, step: SchedulerStep, ratio: float, phase: int, pace: int) -> float:
        """Seconds of a step of prompts (phase 0) or answers (1), in all stages, each as long as that with the most layers."""
        stages = way.layout.pipeline
        return self.step_parts(way, step, ratio, phase, pace).total * self._sizes.largest_stage(stages) * stages

    def step_parts(
        self, way: ServingWay, step: SchedulerStep, ratio: float = 1.0, phase: int = 1, pace: int = MEDIAN
    ) -> StepSeconds:
        """Returns the seconds of a step, divided into its parts.

        Args:
            way: the way.
            step: the work of a data-parallel rank.
            ratio: seconds of the slowest GPU's experts / seconds with perfect balance.
            phase: 0: a step of prompts; 1: of answers.
            pace: as for `service`.
        """
        cut = way.overlap and step.tokens >= SERVING_ENGINES[way.engine].halves_from[phase]
        sent = EXCHANGES[way.exchange]
        sent = EXCHANGES[sent.decode] if phase and sent.decode else sent
        return step_seconds(
            self._sizes, self.kind, way.layout, step, overlap=cut,
            nic_Bps=self.nic_Bps, per_server=self.domain_gpus or self.per_server, ratio=ratio,
            pace=sent.paces[phase][pace], **way.exchanging,
        )  # fmt: skip

    @cached_property
    def _sizes(self) -> ServedSizes:
        """The model's sizes."""
        return ServedSizes.of(self.config)
