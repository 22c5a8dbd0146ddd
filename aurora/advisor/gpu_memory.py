"""Computes the bytes of a GPU's memory that a served model takes, part by part, and how much more fits.

The rule is each engine's own. vLLM: weights, activations, buffers and KV cache must fit in `gpu_memory_utilization` of the
memory. SGLang: weights and KV cache must fit in what its rule leaves (`mem_fraction_static`). No part was measured here.
Sources: vLLM 0.32.0 (v1/worker/gpu_worker.py, config/cache.py, distributed/eplb/eplb_state.py,
distributed/device_communicators/all2all.py, workspace_shapes in model_executor/layers/fused_moe/experts), SGLang
(srt/eplb/expert_location_updater.py), DeepEP dd758ca (csrc/legacy/config.hpp and buffer.hpp, csrc/elastic/buffer.hpp),
TensorRT-LLM (_torch/modules/fused_moe/communication/nvlink_one_sided.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from aurora.advisor.engines.engine import Layout, ServingWay
from aurora.advisor.engines.exchanges import EXCHANGES, LOW_LATENCY
from aurora.advisor.served_sizes import HALF_BYTES, ServedSizes
from aurora.algorithms.workload.attention import kv_bytes_per_sequence, kv_bytes_per_token
from aurora.algorithms.workload.model_structure import flat_config
from aurora.types import GpuKind

GIB = 1 << 30
LOW_LATENCY_LIMIT = (1 << 35) - 16  # bytes: DeepEP asserts that a buffer's 16-byte words are fewer than 2^31 - 1 (buffer.hpp)
DISPATCHED = 128  # tokens of a rank for which low-latency buffers that only decode uses are made at least (SGLang's default)
PADDED = ("nvlink-one-sided", "nvlink-two-sided")  # exchanges whose experts work on slots for the most tokens of all ranks
DEEPEP_BYTES = GIB  # of a DeepEP buffer for each path, NVLink and RDMA: vLLM's VLLM_DEEPEP_BUFFER_SIZE_MB
NCCL_BYTES = 0.96e9  # of a communicator: 1.79 GiB more with the two of tensor parallelism over 2 GPUs, log in vLLM's pull 10511
LOGIT_ROWS, LOGIT_BYTES = 1024, 6  # requests whose logits vLLM's profile run samples, as halves and as floats
TABLE_REPLICAS = 1024  # of an expert, in vLLM's table from experts to slots (MAX_EXPERT_REDUNDANCY + 1), 8 bytes each
MOST_TOKENS = 1 << 17  # of a rank in a step, in a search for the most


@dataclass(frozen=True)
class EngineMemory:
    """An engine's use of memory.

    Attributes:
        share: part of a GPU's memory that it fills; 0: all but what `reserved_bytes` says, for weights and cache alone.
        graph_bytes: bytes of its CUDA graphs.
        eplb_table: whether its balancer has vLLM's load window and table of replicas.
        eplb_buffer: whether its balancer has a second copy of one layer's slots while it moves them.
    """

    share: float
    graph_bytes: float
    eplb_table: bool = False
    eplb_buffer: bool = True


ENGINE_MEMORY = {
    # gpu_memory_utilization of vLLM 0.32.0; graphs of 51 sizes, 24-28 MiB each by a log in its pull request 22897
    "vllm": EngineMemory(0.92, 1.4 * GIB, eplb_table=True),
    # graphs by a log in SGLang's issue 8538 (Llama 4 Maverick, TP 8)
    "sglang": EngineMemory(0.0, 6.19 * GIB),
    # free_gpu_memory_fraction of TensorRT-LLM 1.2, here of all memory; graphs as vLLM's; experts that move wait on the hosts
    "trtllm": EngineMemory(0.9, 1.4 * GIB, eplb_buffer=False),
    # as vLLM's
    "vllm-ascend": EngineMemory(0.92, 1.4 * GIB),
}


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of a served model in one GPU's memory.

    Attributes:
        weights: bytes of all weights but routed experts.
        experts: bytes of routed experts in all slots, replicas included.
        cache: bytes of the KV cache.
        activations: bytes of a step's activations at their peak.
        buffers: bytes of NCCL's communicators and of the exchange's buffers.
        eplb: bytes of the engine's balancer: a second copy of one layer's slots while they move, its load window and tables.
        graphs: bytes of CUDA graphs.
    """

    weights: float
    experts: float
    cache: float
    activations: float = 0.0
    buffers: float = 0.0
    eplb: float = 0.0
    graphs: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def reserved_bytes(kind: GpuKind, layout: Layout) -> float:
    """Returns the bytes of a GPU that SGLang leaves to activations, buffers and CUDA graphs, if its share is not set.

    In MiB: 512; 1.5 for each token of a chunk of prompts; 2 for each request of the largest graph; 128 for each GPU; of large
    GPUs 10 GiB at least. Data-parallel attention: 4.5 more for each request of the largest graph on each rank, 3 if a graph has
    at most 300.

    Args:
        kind: the GPU's datasheet.
        layout: how the model is split over GPUs.

    Source: SGLang 0.5.6, srt/server_args.py (_handle_gpu_memory_settings).

    Example:
        >>> from aurora.io.clusters import load_gpus
        >>> round(reserved_bytes(load_gpus()["NVIDIA H200"], Layout(tensor=8)) / GIB, 1)
        14.5
    """
    gib, ranks = kind.memory_bytes / GIB, layout.copy_gpus
    chunk = 16384 if gib >= 160 else 8192 if gib >= 60 else 4096 if gib >= 35 else 2048
    graph = 512 if gib >= 160 or (gib >= 60 and ranks >= 4) else 256 if gib >= 60 else 160 if ranks >= 4 else 32
    mib = 512 + 1.5 * chunk + 2 * graph + 128 * ranks
    if layout.data > 1:
        mib += graph * layout.data * (4.5 if graph > 300 else 3)
    return max(mib, 10 * 1024 if gib >= 60 else 0) * (1 << 20)


def low_latency_bytes(experts: int, tokens: int, width: int) -> int:
    """Returns the bytes of DeepEP's low-latency buffer, without its signals (2 x 4 bytes an expert).

    Two send and two receive buffers have a slot for every token of a rank and every expert. A slot has a token at two bytes a
    number, and a pair of two-byte numbers for each 128 of them.

    Args:
        experts: slots of all GPUs (experts and their replicas).
        tokens: the most tokens of a rank in a step.
        width: numbers of a token.

    Source: DeepEP dd758ca, csrc/legacy/config.hpp (LowLatencyLayout).

    Example:
        >>> round(low_latency_bytes(288, 128, 7168) / GIB, 2)
        2.0
    """
    return 4 * experts * tokens * (2 * width + 4 * (width // 128))


def memory_bytes(
    config: Mapping[str, Any],
    way: ServingWay | Layout,
    kv_tokens: int,
    *,
    sequences: int = 0,
    slots: int | None = None,
    tokens: int = 0,
) -> MemoryBytes:
    """Returns the bytes of a served model in one GPU's memory.

    Weights of multi-token prediction, which engines load only for speculative decoding, are not counted, nor are buffers of
    MoRI, MoonEP, HCCL and NVLink's two-sided kernels.

    Args:
        config: the content of a transformers config.json.
        way: the way of serving; of a Layout alone, only weights, experts and cache are counted.
        kv_tokens: tokens in the KV cache of one data-parallel rank.
        sequences: number of requests in the cache; each also needs fixed bytes for sliding windows and linear attention.
        slots: experts in a GPU's slots of a layer; None: as few as hold each expert once, evenly in the mean.
        tokens: the most tokens of a data-parallel rank in a step.

    Raises:
        BadInput: if the config does not describe a model.
    """
    layout = way if isinstance(way, Layout) else way.layout
    sizes, ranks = ServedSizes.of(config), layout.stage_gpus
    split = sum(layers.layers * layers.split_weights for layers in sizes.attention)
    split += sizes.dense * sizes.dense_weights + sizes.moe_layers * sizes.shared_weights
    whole = sum(layers.layers * layers.whole_weights for layers in sizes.attention)
    tied = flat_config(config).get("tie_word_embeddings") or layout.pipeline > 1  # else both ends are on each GPU
    ends = (1 if tied else 2) * sizes.vocabulary * sizes.hidden * HALF_BYTES / layout.tensor
    routers = sizes.moe_layers * sizes.hidden * sizes.experts * HALF_BYTES  # whole on each rank
    cache = kv_tokens * kv_bytes_per_token(config, tensor=layout.tensor)
    cache += sequences * kv_bytes_per_sequence(config, tensor=layout.tensor)
    weights, part = (split / layout.tensor + whole) * sizes.weight_bytes + routers, sizes.largest_stage(layout.pipeline)
    per_gpu = sizes.experts / ranks if slots is None or layout.expert == 1 else slots * layout.expert / ranks
    counted = MemoryBytes(weights * part + ends, sizes.moe_layers * per_gpu * sizes.expert_bytes * part, cache * part)
    if isinstance(way, Layout):
        return counted
    held = -(-sizes.experts // layout.expert) if slots is None else slots
    return replace(
        counted,
        activations=activation_bytes(sizes, way, held, tokens),
        buffers=buffer_bytes(sizes, way, held, tokens, sequences),
        eplb=eplb_bytes(sizes, way, held),
        graphs=ENGINE_MEMORY[way.engine].graph_bytes * EXCHANGES[way.exchange].graphs,
    )


def activation_bytes(sizes: ServedSizes, way: ServingWay, slots: int, tokens: int) -> float:
    """Returns the bytes of a step's activations at their peak: two rows of each token, and the largest of three parts.

    The parts are logits, a dense layer's inner numbers, and the experts' two workspaces, for each row that a GPU may get: after
    an allgather all choices of all ranks' tokens, whether their expert is here or not.

    Args:
        sizes: the model's sizes.
        way: the way of serving.
        slots: experts in a GPU's slots of a layer.
        tokens: the most tokens of a data-parallel rank in a step.
    """
    layout, sent, width = way.layout, EXCHANGES[way.exchange], sizes.dispatched
    logits = min(LOGIT_ROWS, tokens) * sizes.vocabulary * LOGIT_BYTES
    inner = max(sizes.dense_weights * bool(sizes.dense), sizes.shared_weights) / sizes.hidden  # of all matrices
    dense = tokens * inner / layout.tensor * HALF_BYTES
    experts = 0.0
    if sizes.moe_layers:
        second = sizes.expert_weights / width / 3 * layout.expert / layout.stage_gpus  # width of a product's rows
        first = 2 * second
        own = tokens / layout.tensor if sent.sends in ("route", "balance") else tokens * layout.data
        if way.exchange in LOW_LATENCY:
            rows, arrived = slots * own * layout.expert, 0.0
            experts = rows * (max(width, first) + second) * HALF_BYTES
        else:
            arrived = own * layout.expert if way.exchange in PADDED else own
            given = max(second, width) * (1 if sizes.expert_bytes <= sizes.expert_weights else HALF_BYTES)  # in fp8 for fp8
            experts = arrived * (sizes.top_k * (given + max(first, width) * HALF_BYTES) + width * HALF_BYTES)
    return 2 * tokens * sizes.hidden * HALF_BYTES + max(logits, dense, experts)


def buffer_bytes(sizes: ServedSizes, way: ServingWay, slots: int, tokens: int, sequences: int) -> float:
    """Returns the bytes of NCCL's communicators and of the exchange's buffers.

    Args:
        sizes: the model's sizes.
        way: the way of serving.
        slots: experts in a GPU's slots of a layer.
        tokens: the most tokens of a data-parallel rank in a step.
        sequences: requests in flight on a data-parallel rank, for buffers that only decode uses.
    """
    layout, row = way.layout, sizes.dispatched * HALF_BYTES
    ranks, own, choices = layout.expert, -(-tokens // layout.tensor), 8 * sizes.top_k  # bytes of a token's choices
    nccl = NCCL_BYTES * ((layout.tensor > 1) + (layout.data > 1) + (layout.expert > 1) + (layout.pipeline > 1))
    paths = 1 + (way.stage_hosts > 1)
    if way.exchange in LOW_LATENCY:
        beside = DEEPEP_BYTES * (way.exchange == "deepep-ll" and way.engine == "vllm")  # NVLink's, as for high throughput
        return nccl + beside + low_latency_bytes(slots * ranks, own, sizes.dispatched)
    if way.exchange in ("deepep", "deepep-ht", "uccl-ht"):
        decode = low_latency_bytes(slots * ranks, max(DISPATCHED, -(-sequences // layout.tensor)), sizes.dispatched)
        return nccl + paths * DEEPEP_BYTES + decode * (way.exchange == "deepep")
    if way.exchange == "deepep-v2":  # a dispatch's: of all ranks' tokens; over servers also those sent, and arriving by server
        return nccl + own * (row + choices) * (ranks + (1 + way.stage_hosts if way.stage_hosts > 1 else 0))
    return nccl + own * ranks * (2 * row + choices) * (way.exchange == "nvlink-one-sided")


def eplb_bytes(sizes: ServedSizes, way: ServingWay, slots: int) -> float:
    """Returns the bytes of the engine's balancer; vLLM's plugin uses it for a planned placement with replicas, too.

    Args:
        sizes: the model's sizes.
        way: the way of serving.
        slots: experts in a GPU's slots of a layer.
    """
    engine = ENGINE_MEMORY[way.engine]
    if way.eplb is None and not (engine.eplb_table and way.redundant):
        return 0.0
    window = 1000 if way.eplb is None else way.eplb.window
    table = sizes.moe_layers * (window * slots * way.layout.expert * 4 + sizes.experts * TABLE_REPLICAS * 8)
    return slots * sizes.expert_bytes * engine.eplb_buffer + table * engine.eplb_table


@dataclass(frozen=True)
class MemoryFit:
    """Memory of one GPU in a way of serving, and how much more fits.

    Attributes:
        name: the way's name.
        parts: bytes of each part.
        usable_bytes: bytes that the engine fills.
        tokens: tokens of a data-parallel rank in a step, for which `parts` are.
        most_tokens: the most such tokens that fit; 0: none.
        more_slots: slots of a GPU beyond those that hold each expert once, which `parts` include.
        most_slots: the most such slots that fit beside as many tokens; 0 if experts are not whole.
        why: the reason why it does not fit; empty: it does.
    """

    name: str
    parts: MemoryBytes
    usable_bytes: float
    tokens: int
    most_tokens: int
    more_slots: int
    most_slots: int
    why: str


def memory_fit(
    config: Mapping[str, Any], kind: GpuKind, way: ServingWay, requests: int, context: int, tokens: int, name: str = ""
) -> MemoryFit:
    """Returns the memory that a way of serving takes of one GPU, and the most tokens and slots that fit.

    Args:
        config: the content of a transformers config.json.
        kind: the GPU's datasheet.
        way: the way of serving.
        requests: requests in flight on a data-parallel rank; a step has a token of each at least.
        context: tokens of a request in the KV cache.
        tokens: the most tokens of a data-parallel rank in a step that are asked for; fewer are taken if they do not fit.
        name: the way's name.

    Raises:
        BadInput: if the config does not describe a model.
    """
    sizes, whole = ServedSizes.of(config), way.layout.expert > 1
    least = -(-sizes.experts // way.layout.expert)
    more = -(-(sizes.experts + way.redundant) // way.layout.expert) - least if whole else 0
    share = ENGINE_MEMORY[way.engine].share
    usable = share * kind.memory_bytes if share else kind.memory_bytes - reserved_bytes(kind, way.layout)

    def parts(at: int, slots: int) -> MemoryBytes:
        return memory_bytes(config, way, requests * context, sequences=requests, slots=slots, tokens=at)

    def held(found: MemoryBytes) -> float:
        """Bytes that must fit in `usable`: all, or those without a reserve of their own."""
        return found.total if share else found.weights + found.experts + found.cache

    def addressed(at: int, slots: int) -> bool:
        """Returns whether the offsets of DeepEP's low-latency buffer reach all of it."""
        own = -(-at // way.layout.tensor)
        held = low_latency_bytes(slots * way.layout.expert, own, sizes.dispatched)
        return way.exchange not in LOW_LATENCY or held < LOW_LATENCY_LIMIT

    def fits(at: int, slots: int) -> bool:
        found = parts(at, slots)
        return addressed(at, slots) and held(found) <= usable and found.total <= kind.memory_bytes

    most_tokens = most(lambda at: fits(at, least + more), MOST_TOKENS)
    taken = max(requests, min(tokens, most_tokens))
    found, why = parts(taken, least + more), ""
    if most_tokens < requests and not addressed(taken, least + more):
        places = (least + more) * way.layout.expert
        gib = low_latency_bytes(places, -(-taken // way.layout.tensor), sizes.dispatched) / GIB
        why = (
            f"the low-latency buffer of {places} experts x {taken} tokens has {gib:.2f} GiB, and its offsets reach 32 GiB: "
            f"at most {most(lambda at: addressed(at, least + more), MOST_TOKENS)} tokens"
        )
    elif most_tokens < requests:
        largest = sorted(vars(found).items(), key=lambda part: -part[1])[:3]
        said = ", ".join(f"{part} {size / 1e9:.0f}" for part, size in largest)
        needs, has = (held(found), usable) if held(found) > usable else (found.total, kind.memory_bytes)
        why = f"a GPU needs {needs / 1e9:.0f} GB ({said}), and has {has / 1e9:.0f} GB"
    most_slots = most(lambda slots: fits(taken, least + slots), sizes.experts) if whole else 0
    return MemoryFit(name, found, usable, taken, most_tokens, more, most_slots, why)


def most(fits: Callable[[int], bool], limit: int) -> int:
    """Returns the largest number from 1 to `limit` that fits, by bisection; 0 if 1 does not.

    Args:
        fits: function that is True up to some number, and False above.
        limit: largest number that is tried.
    """
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
