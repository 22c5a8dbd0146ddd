"""Computes the seconds of a served model's scheduler step from datasheets: a roofline on one GPU, collectives, host launches.

A part of a step takes the time to read its bytes or the time of its arithmetic, whichever is longer, plus a fixed time per
kernel. A step outside CUDA graphs takes at least the host's time to launch its kernels. All data-parallel ranks are assumed to
have equally many tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from scipy.special import ndtri

from aurora.advisor.collectives import collectives_of, stage_transfers
from aurora.advisor.engines.engine import Layout
from aurora.advisor.engines.exchanges import EXCHANGES, EngineExchange
from aurora.advisor.served_sizes import HALF_BYTES, ServedSizes
from aurora.advisor.step_constants import StepConstants
from aurora.algorithms.workload.attention import (
    AttentionLayers,
    entry_bytes,
)
from aurora.errors import BadInput, check_one_of
from aurora.types import GpuKind


@dataclass(frozen=True)
class SchedulerStep:
    """Work of one data-parallel rank in a step of its scheduler.

    Attributes:
        prefill_tokens: number of prompt tokens in the step.
        decode_requests: number of requests that generate, with one token each.
        kv_tokens: tokens in the KV cache before the step, over all requests of the step.
        prefill_kv_tokens: the part of `kv_tokens` from earlier chunks of the prompts.
        prefill_requests: number of requests to which the prompt tokens belong.

    Example:
        >>> SchedulerStep(decode_requests=32, kv_tokens=32 * 2000).tokens
        32
    """

    prefill_tokens: int = 0
    decode_requests: int = 0
    kv_tokens: int = 0
    prefill_kv_tokens: int = 0
    prefill_requests: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | np.integer) or value < 0:
                raise BadInput(f"step: {field.name} must be a whole number, at least zero, found {value!r}")
        if not self.tokens:
            raise BadInput("step: expected tokens of prompts or requests that decode, found neither")

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.prefill_tokens + self.decode_requests

    @property
    def half(self) -> Self:
        """The larger half of this step, as engines cut it to overlap compute and exchanges; a single prompt can be cut, too."""
        return replace(self, **{field.name: -(-getattr(self, field.name) // 2) for field in fields(self)})


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, divided into its parts.

    Attributes:
        attention_s: seconds of attention with its projections, or of linear attention.
        dense_s: seconds of the feed-forward part of layers without experts, and of shared experts.
        experts_s: seconds of routers and routed experts.
        collectives_s: seconds of transfers between GPUs.
        head_s: seconds of the logits.
        host_s: seconds that the host adds: a fixed time, plus the time by which kernel launches exceed all other parts.
    """

    attention_s: float
    dense_s: float
    experts_s: float
    collectives_s: float
    head_s: float
    host_s: float

    @property
    def total(self) -> float:
        """Seconds of the step, the sum of all parts."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


SHARP = 1.5  # reading and arithmetic of a product overlap in part: their seconds add up with this exponent, as 2 in a triangle
GRAPH_TOKENS = 512  # largest step of vLLM's CUDA graphs
GRAPH_SIZES = np.array([1, 2, 4, *range(8, 256, 8), *range(256, GRAPH_TOKENS + 1, 16)])  # which it pads to
KERNELS = {"full": 9, "sliding": 9, "mla": 14, "sparse": 32, "linear": 13, "dense": 4, "shared": 4, "routed": 9}  # of a layer
BROKEN = {"full": 4, "sliding": 4, "mla": 8, "sparse": 36, "linear": 24}  # launches of attention, where prompts break graphs
PASSES = {"full": 4, "sliding": 4, "mla": 4, "sparse": 4, "linear": 10}  # over what projections read and write, in prefill
HYPER_LAUNCHES = 6  # of the host for a layer's hyper-connections: after and, in two kernels, before each half
COLLECTIVE_LAUNCHES = 3  # of the host for a collective: its operator, its buffer, its call of the library
QUANTISED = {"full": 2, "sliding": 2, "linear": 2}  # products of attention whose inputs become fp8; others' kernels count them
NVFP4_BYTES = 4.5 / 8  # of a number, with a scale of 8 bits for 16
QUANTISE_PASSES = 1.5  # numbers of two bytes: read in two, written in one
TILE = 32  # rows by half of which a grouped product is rounded up, for each active expert


def active_experts(experts: float, top_k: int, total: int, tokens: float, evenness: float = np.inf) -> float:
    """Returns the mean number of a rank's experts that get at least one token.

    Args:
        experts: number of experts of the rank.
        top_k: experts per token.
        total: number of experts of the layer.
        tokens: tokens of all ranks.
        evenness: 1 / variance of (an expert's popularity / its mean), which is gamma-distributed; infinite: all experts are
            equally popular.

    Example:
        >>> active_experts(16, 2, 16, 1), active_experts(16, 2, 16, 2)
        (2.0, 3.75)
    """
    share = top_k / total
    if np.isinf(evenness):
        return float(experts * (1 - (1 - share) ** tokens))
    mean = -np.log1p(-share) * tokens if share < 1 else np.inf  # of an even Poisson law with the same chance
    return float(experts * (1 - (1 + mean / evenness) ** -evenness))


@dataclass(frozen=True)
class _Gpu:
    """Rates of a GPU that kernels reach."""

    kind: GpuKind
    constants: StepConstants

    def quantises(self, number_bytes: float) -> bool:
        """Returns whether products of such numbers run at fp8, on inputs that a kernel each makes of halves.

        Weights with fewer bits than NVFP4's, with scales, are widened to 16 bits.
        """
        return NVFP4_BYTES <= number_bytes < HALF_BYTES and self.kind.fp8_flops is not None

    def seconds(
        self, read_bytes: float, flops: float, weight_bytes: float, share: float, kernels: float = 0.0, passed: float = 0.0,
        overlaps: bool = False,
    ) -> float:  # fmt: skip
        """The roofline of a part with its kernels, and the time of those that pass over activations between its products.

        Args:
            read_bytes: of weights or of a cache.
            flops: operations, at the rate of the weights' type.
            weight_bytes: of a number of the weights.
            share: of that rate that they reach.
            kernels: how many.
            passed: numbers of activations that they read and write.
            overlaps: whether reading and arithmetic overlap as a whole, as in attention over a cache.
        """
        low = self.kind.fp8_flops if self.quantises(weight_bytes) else None
        peak = (low or self.kind.half_flops) * share
        memory_Bps = self.kind.memory_Bps * self.constants.memory_share
        moved_s = passed * HALF_BYTES / memory_Bps + kernels * self.constants.kernel_s
        read_s, flops_s = read_bytes / memory_Bps, flops / peak
        return moved_s + (max(read_s, flops_s) if overlaps else (read_s**SHARP + flops_s**SHARP) ** (1 / SHARP))


def step_seconds(
    config: Mapping[str, Any] | ServedSizes,
    kind: GpuKind,
    layout: Layout,
    step: SchedulerStep,
    *,
    imbalance: float = 1.0,
    exchange: str = "allgather",
    overlap: bool = False,
    constants: StepConstants | None = None,
    nic_Bps: float | None = None,
    per_server: int = 8,
    ratio: float | None = None,
    quantised: bool = True,
    fused: bool = True,
    pace: float | None = None,
) -> StepSeconds:
    """Returns the seconds of one scheduler step of a served model, divided into its parts.

    Args:
        config: the content of a transformers config.json, or the sizes that `ServedSizes.of` reads from it.
        kind: the GPUs' datasheet.
        layout: how the model is split over GPUs.
        step: the work of one data-parallel rank.
        imbalance: expected load of the busiest expert-parallel rank / mean load; chance comes on top.
        exchange: name of the exchange, one of EXCHANGES.
        overlap: whether the step is cut in halves, so that one computes during the other's exchanges.
        constants: constants of the engine on its host; None: those of the kind of GPU.
        nic_Bps: bytes per second of a GPU's NIC, or of its share of a NIC of several GPUs, each way; None: all GPUs are in one
            server.
        per_server: GPUs of a server.
        ratio: seconds of the slowest rank's experts / seconds with perfect balance, used instead of `imbalance` and chance.
            None: not used.
        pace: published seconds of the exchange / those that are computed without it; None: the median, in EXCHANGES.
        quantised: whether tokens travel to their experts in the experts' number format, as `ServedSizes.row_bytes` has it.
        fused: whether experts at fp8 run in Triton's fused kernels, and not in DeepGEMM's or the like.

    Raises:
        BadInput: if the layout spans servers and `nic_Bps` is None, or an argument is out of range.

    Source: the roofline, Williams, Waterman and Patterson, CACM 52(4), 2009; the overlap, vLLM's docs/design/dbo.md.

    Example:
        >>> from aurora.advisor.engines.engine import Layout
        >>>         >>> step = SchedulerStep(decode_requests=32, kv_tokens=64_000)
        >>> seconds = step_seconds(config, load_gpus()["NVIDIA H200"], Layout(tensor=8, expert=8), step)  # doctest: +SKIP
    """
    sizes = config if isinstance(config, ServedSizes) else ServedSizes.of(config)
    constants = StepConstants.of(kind) if constants is None else constants
    check_one_of("exchange", exchange, EXCHANGES)
    if not imbalance >= 1:
        raise BadInput(f"imbalance: expected at least 1, found {imbalance}")
    if layout.copy_gpus > per_server and nic_Bps is None:
        raise BadInput(f"nic_Bps: expected a rate for {layout.copy_gpus} GPUs on servers of {per_server}, found none")
    halves, part = (2, step.half) if overlap else (1, step)
    sent = EXCHANGES[EXCHANGES[exchange].decode or exchange if not step.prefill_tokens else exchange]
    rates = constants.beside(sent) if overlap else constants
    gpu, tokens, slower = (
        _Gpu(kind, rates),
        _padded(part, sent),
        sent.paces[not step.prefill_tokens][1] if pace is None else pace,
    )
    attention_s = sum(_attention_s(sizes, kind_layers, gpu, layout, part, tokens) for kind_layers in sizes.attention)
    dense_s = _dense_s(sizes, gpu, layout, tokens)
    experts_s = _experts_s(sizes, gpu, layout, tokens, imbalance, ratio is None, fused) * (ratio or 1.0)
    head_weights = sizes.vocabulary * sizes.hidden / layout.tensor
    rows = step.decode_requests + (step.prefill_requests if step.prefill_tokens else 0)
    head_s = gpu.seconds(HALF_BYTES * head_weights, 2 * head_weights * rows, HALF_BYTES, constants.flops_share, 4)
    uneven = imbalance if ratio is None else ratio if sent.follows_placement else 1.0
    reduces, travels = collectives_of(sizes, layout, tokens, sent, uneven, per_server, quantised)
    reduces += stage_transfers(sizes, layout, tokens, per_server)
    reduce_s, there_s, back_s = (
        sum(call.seconds(constants, kind, nic_Bps, per_server) for call in calls) * times
        for calls, times in ((reduces, 1.0), (travels[:1], slower), (travels[1:], slower))
    )
    computed_s = attention_s + dense_s + experts_s
    between_s = reduce_s + there_s + back_s
    if overlap:  # of layers with experts: attention and a dispatch, experts and a dispatch, experts and a combine, and again
        around_s = attention_s * sizes.moe_layers / sizes.layers + reduce_s
        stages = (around_s, there_s), (experts_s, there_s), (experts_s + dense_s, back_s), (around_s + dense_s, back_s)
        between_s = reduce_s + sum(max(0.0, travel_s - compute_s) for compute_s, travel_s in stages) / 2
    busy_s = halves * (computed_s + between_s) + head_s
    broken, eager = _launches(sizes, part, tokens, sent, sum(call.many * call.arrays for call in (*reduces, *travels)))
    host_s = layout.pipeline * constants.step_s + (constants.coordination_s if layout.data > 1 else 0.0)
    host_s += max(0.0, halves * (broken * constants.launch_s + eager * constants.eager_s) - busy_s)
    return StepSeconds(halves * attention_s, halves * dense_s, halves * experts_s, halves * between_s, head_s, host_s)


def _stream_numbers(streams: int) -> int:
    """Numbers that norms and residuals of a layer read and write for each one of a token: of both its halves.

    Hyper-connections add a half's result to all streams (read n + 1, write n), multiply all by a small matrix (n), and collapse
    them for the next half (read n, write 1) before its norm (2): 4 n + 4. Source: vLLM 0.20.1, model_executor/layers/mhc.py.
    """
    return 8 if streams == 1 else 2 * (4 * streams + 4)


def _padded(step: SchedulerStep, sent: EngineExchange) -> int:
    """Tokens with those that pad the step to the size of a CUDA graph."""
    if step.tokens > GRAPH_TOKENS or not sent.graphs:
        return step.tokens
    return int(GRAPH_SIZES[np.searchsorted(GRAPH_SIZES, step.tokens)])


def _attention_s(
    sizes: ServedSizes, layers: AttentionLayers, gpu: _Gpu, layout: Layout, step: SchedulerStep, tokens: int
) -> float:
    """Seconds of all layers of a kind: their projections, and the cache or state."""
    tensor = layout.tensor
    weights = layers.split_weights / tensor + layers.whole_weights
    share = gpu.constants.flops_share
    reduced = 0 if tensor == 1 else 1 if layout.data > 1 and sizes.moe_layers else 2  # all-reduces of a layer
    kernels = KERNELS[layers.kind] - (reduced if tokens <= GRAPH_TOKENS else 0)  # small ones have the norm after them
    passed = tokens * (PASSES[layers.kind] * weights / sizes.hidden + _stream_numbers(sizes.streams) * sizes.hidden)
    pairs_over = min(tensor, layers.pairs_over or tensor)
    passed += 3 * tokens * layers.query * (1 / pairs_over - 1 / tensor)  # of added heads: queries written, read, and results
    quantised = QUANTISED.get(layers.kind, 0) * gpu.quantises(sizes.weight_bytes)
    kernels, passed = kernels + quantised, passed + QUANTISE_PASSES * quantised * tokens * sizes.hidden
    products_s = gpu.seconds(weights * sizes.weight_bytes, 2 * weights * tokens, sizes.weight_bytes, share, kernels, passed)
    products_s += 2 * gpu.constants.hyper_s * (sizes.streams > 1)
    flops = index_flops = cache_bytes = 0.0
    earlier = min(step.prefill_kv_tokens, step.kv_tokens) if step.decode_requests else step.kv_tokens
    requests = (
        (step.decode_requests, 1.0, step.kv_tokens - earlier, layers.pair_flops, 0),
        (step.prefill_requests, step.prefill_tokens / max(step.prefill_requests, 1), earlier,
         layers.prompt_pair_flops or layers.pair_flops, layers.expand_flops),
    )  # fmt: skip
    for many, new, kv_tokens, pair_flops, expand_flops in requests:
        if not many or not new:
            continue
        before = kv_tokens / many
        if layers.kind == "linear":
            cache_bytes += 2 * many * layers.state * layers.state_bits / 8 / tensor
            flops += many * new * layers.pair_flops / tensor
            continue
        attended, entries = layers.attended(before + new / 2), layers.held(before + new)
        flops += many * new * attended * pair_flops / pairs_over + kv_tokens * expand_flops / tensor
        index_flops += many * new * (before + new / 2) / max(layers.ratio, 1) * layers.index_flops
        plain = entry_bytes(layers, tensor) - layers.index_bytes
        cache_bytes += many * (min(entries, attended * new) * plain + entries * layers.index_bytes)
    pair_share = gpu.constants.linear_share if layers.kind == "linear" else gpu.constants.attention_share
    cache_s = gpu.seconds(cache_bytes, flops, HALF_BYTES, pair_share, overlaps=True)
    index_s = gpu.seconds(0.0, index_flops, HALF_BYTES, gpu.constants.index_share)
    index_s += gpu.constants.choice_s * step.prefill_tokens * bool(layers.index_flops)
    return layers.layers * (products_s + cache_s + index_s)


def _dense_s(sizes: ServedSizes, gpu: _Gpu, layout: Layout, tokens: int) -> float:
    """Seconds of feed-forward layers without experts, and of shared experts, both split by tensor parallelism."""
    total = 0.0
    for layers, weights, kernels in (
        (sizes.dense, sizes.dense_weights, KERNELS["dense"]),
        (sizes.moe_layers if sizes.shared_weights else 0, sizes.shared_weights, KERNELS["shared"]),
    ):
        part, share = weights / layout.tensor, gpu.constants.flops_share
        passed = tokens * (2 * part / sizes.hidden + 2 * sizes.hidden)  # six times the width of three matrices
        if gpu.quantises(sizes.weight_bytes):
            kernels, passed = kernels + 2, passed + QUANTISE_PASSES * tokens * (sizes.hidden + part / sizes.hidden / 3)
        total += layers * gpu.seconds(part * sizes.weight_bytes, 2 * part * tokens, sizes.weight_bytes, share, kernels, passed)
    return total


def _experts_s(
    sizes: ServedSizes, gpu: _Gpu, layout: Layout, tokens: int, imbalance: float, chance: bool, fused: bool
) -> float:
    """Seconds of routers and routed experts on the busiest rank."""
    if not sizes.moe_layers:
        return 0.0
    ranks = layout.stage_gpus
    spread = layout.expert  # ranks among which experts are spread whole; each of them is split among the others
    local, width = sizes.experts / spread, spread / ranks
    everywhere = tokens * layout.data
    rows = everywhere * sizes.top_k / spread * imbalance
    evenness = gpu.constants.evenness
    active = min(active_experts(local, sizes.top_k, sizes.experts, everywhere * imbalance, evenness), local)
    if spread > 1 and chance:  # the busiest of ranks on which chance does not do the same (Blom, 1958)
        spared = active / local
        active = min(local, active + float(ndtri((spread - 0.375) / (spread + 0.25)) * np.sqrt(local * spared * (1 - spared))))
    passed = rows * (2 * sizes.expert_weights * width / sizes.dispatched + 3 * sizes.dispatched)
    flops = 2 * sizes.expert_weights * width * (rows + active * TILE / 2)
    number_bytes = sizes.row_bytes  # products run in the activations' format: 4-bit weights are widened to 16
    read_bytes, share, kernels = active * sizes.expert_bytes * width, gpu.constants.grouped_share, KERNELS["routed"]
    if sizes.expert_bytes < HALF_BYTES * sizes.expert_weights:
        read_bytes *= gpu.constants.memory_share / gpu.constants.quantised_share
    if gpu.quantises(number_bytes):
        share = gpu.constants.fused_fp8_share if fused else gpu.constants.grouped_fp8_share
        kernels += 2
        passed += QUANTISE_PASSES * (tokens * sizes.dispatched + rows * sizes.expert_weights * width / sizes.dispatched / 3)
    grouped_s = gpu.seconds(read_bytes, flops, number_bytes, share, kernels, passed)
    router = sizes.hidden * sizes.experts
    router_s = gpu.seconds(router * HALF_BYTES, 2 * router * tokens, HALF_BYTES, gpu.constants.flops_share)
    return sizes.moe_layers * (grouped_s + router_s)


def _launches(
    sizes: ServedSizes, step: SchedulerStep, tokens: int, sent: EngineExchange, collectives: int
) -> tuple[float, float]:
    """Launches of attention where prompts break CUDA graphs, and further ones where a step has none or is too large for any."""
    captured = tokens <= GRAPH_TOKENS and sent.graphs
    if not step.prefill_tokens and captured:
        return 0.0, 0.0
    broken = float(sum(layers.layers * (BROKEN[layers.kind] + 1) for layers in sizes.attention))  # and a graph after each
    if captured:
        return broken, 0.0
    eager = sum(layers.layers * (KERNELS[layers.kind] // 2) for layers in sizes.attention)  # projections and norms
    eager += HYPER_LAUNCHES * sizes.layers * (sizes.streams > 1)
    eager += sizes.dense * KERNELS["dense"] + sizes.moe_layers * KERNELS["routed"]
    eager += sizes.moe_layers * KERNELS["shared"] * bool(sizes.shared_weights)
    return broken, eager + COLLECTIVE_LAUNCHES * collectives
