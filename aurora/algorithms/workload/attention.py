"""Reads the sizes of attention and shared experts from a model's config.json: KV cache, weights, operations by kind of layer.

A config that does not name kinds of attention is taken to have full attention in all decoder layers.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aurora.algorithms.workload.model_config import SHARED_EXPERTS, Shape
from aurora.algorithms.workload.model_structure import decoder_layers, flat_config, number
from aurora.errors import BadInput


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers of one kind and size.

    Attributes:
        kind: "full", "sliding", "mla" (latent), "sparse" (an indexer chooses latent or compressed entries) or "linear" (a state
            of fixed size: gated delta rule, Mamba, lightning attention).
        layers: number of these layers.
        split_weights: number of parameters of a layer that tensor parallelism splits over ranks.
        whole_weights: number of parameters of a layer that every rank holds.
        kv_heads: number of KV heads, over which tensor parallelism splits the cache; 1: every rank caches everything.
        cached: number of values in one cache entry, over all KV heads.
        state: number of values cached per sequence at any length, such as the state of linear attention; without windows.
        state_bits: bits of each value of `state`.
        pair_flops: operations per pair of a new token and a cache entry that it attends to, over all heads.
        prompt_pair_flops: the same in prompts, if engines compute them in another way; 0: as `pair_flops`.
        expand_flops: operations per earlier token of a prompt whose keys and values come from its cache entry, over all heads.
        query: number of values of a token's queries, over all heads, if `pairs_over` is set.
        pairs_over: most ranks over which tensor parallelism divides `pair_flops`, as kernels pad a rank's heads; 0: no limit.
        index_flops: operations per pair of a new token and a cache entry that the indexer scores.
        index_bytes: bytes of one entry of the indexer's cache.
        window: maximum number of newest entries that a token attends to; 0: no window.
        ratio: number of tokens that are compressed to one entry.
        chosen: maximum number of entries outside the window that a token attends to (sparse attention); 0: no limit.
    """

    kind: str
    layers: int
    split_weights: int
    whole_weights: int
    kv_heads: int
    cached: int
    state: int = 0
    state_bits: int = 16
    pair_flops: int = 0
    prompt_pair_flops: int = 0
    expand_flops: int = 0
    query: int = 0
    pairs_over: int = 0
    index_flops: int = 0
    index_bytes: float = 0.0
    window: int = 0
    ratio: int = 1
    chosen: int = 0

    @property
    def grows(self) -> bool:
        """True if a longer sequence always takes more cache, unlike sliding windows and linear attention."""
        return self.kind not in ("linear", "sliding") and self.ratio > 0

    def held(self, length: float) -> float:
        """Returns the number of cache entries of a sequence of `length` tokens."""
        return min(self.window, length) + (length / self.ratio if self.grows else 0.0)

    def attended(self, length: float) -> float:
        """Returns the number of cache entries that a token attends to if `length` tokens precede it."""
        beyond = length / self.ratio if self.grows else 0.0
        return min(self.window, length) + min(beyond, self.chosen or beyond)


SHARED = "sparse without an indexer"  # a layer that attends to what an earlier layer's indexer chose (GLM-5.2, HY-V4)
KV_BITS = 16  # of a cached number, unless the engine is told otherwise
PADDED_HEADS = 64  # of a rank at least, in FlashMLA's kernels of sparse attention (vLLM 0.20.1, deepseek_v4_attention.py)
INDEX_BYTES = 132  # of an indexer's cached key of 128 numbers: fp8, and a scale of 4 bytes (DeepSeek-V3.2's vLLM recipe)


def kv_bytes_per_token(config: Mapping[str, Any], *, tensor: int = 1) -> float:
    """Returns the bytes of KV cache that each further token of a long sequence takes on one GPU.

    Caches of sliding windows and linear attention do not grow; `kv_bytes_per_sequence` counts them.

    Args:
        config: the content of a transformers config.json.
        tensor: number of ranks of tensor parallelism. They divide the KV heads, up to one head per rank; latent and shared
            heads are on all ranks.

    Raises:
        BadInput: if the config does not tell its attention.

    Example:
        >>> mixtral = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
        >>> kv_bytes_per_token(mixtral), kv_bytes_per_token(mixtral, tensor=16)
        (131072.0, 16384.0)
    """
    grow = [group for group in attention_layers(config) if group.grows]
    return sum((entry_bytes(group, tensor) / group.ratio * group.layers for group in grow), start=0.0)


def known_kv_bytes(config: Mapping[str, Any]) -> float | None:
    """Returns `kv_bytes_per_token` of a config; None if the config does not describe its attention."""
    try:
        return kv_bytes_per_token(config)
    except BadInput:
        return None


def kv_bytes_per_sequence(config: Mapping[str, Any], *, tensor: int = 1) -> float:
    """Returns the bytes of cache of fixed size that a long sequence takes on one GPU: sliding windows and linear attention.

    Args:
        config: the content of a transformers config.json.
        tensor: ranks of tensor parallelism.

    Raises:
        BadInput: if the config does not tell its attention.
    """
    total = 0.0
    for group in attention_layers(config):
        window = group.window * (entry_bytes(group, tensor) - group.index_bytes)
        total += group.layers * (window + group.state * group.state_bits / 8 / min(tensor, max(group.kv_heads, 1)))
    return total


def entry_bytes(layers: AttentionLayers, tensor: int = 1) -> float:
    """Returns the bytes of one cache entry of a layer on one GPU, its indexer's entry included.

    Args:
        layers: layers of one kind, of which it prices one.
        tensor: ranks of tensor parallelism.
    """
    return layers.cached * KV_BITS / 8 / min(tensor, max(layers.kv_heads, 1)) + layers.index_bytes


def attention_layers(config: Mapping[str, Any]) -> tuple[AttentionLayers, ...]:
    """Returns the attention layers of a model, one AttentionLayers for each kind; layers without attention are left out.

    Args:
        config: the content of a transformers config.json.

    Raises:
        BadInput: if the config does not tell heads, or has a kind of layers that is not known.
    """
    flat = flat_config(config)
    kinds, types = _kinds(flat), flat.get("indexer_types")
    if isinstance(types, list) and len(types) == len(kinds):
        kinds = [SHARED if (kind, of) == ("sparse", "shared") else kind for kind, of in zip(kinds, types, strict=True)]
    return tuple(_layers(flat, kind, count) for kind, count in Counter(kinds).items() if kind != "none")


_WORDS = {  # of layer_types, layers_block_type and the letters of patterns
    **dict.fromkeys(("full_attention", "indexed_attention", "attention", "full", "global", "*", "hybrid"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention", "hybrid_sliding", "sliding", "local"), "sliding"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "M", "recurrent", "conv"), "linear"),
    **dict.fromkeys(("moe", "mlp", "E", "-"), "none"),
}


def _kinds(flat: Mapping[str, Any]) -> list[str]:
    """The kind of attention of each decoder layer; of compressed attention "sparse:" and the tokens of an entry."""
    layers = decoder_layers(flat) * (2 if flat.get("model_type") == "longcat_flash" else 1)  # two in a layer of LongCat
    full = "sparse" if flat.get("index_topk") else "mla" if flat.get("kv_lora_rank") else "full"
    if isinstance(ratios := flat.get("compress_ratios"), list):
        return [f"sparse:{ratio}" for ratio in ratios[: number(flat, "num_hidden_layers")]]
    rates = flat.get("compress_rates")
    known = _WORDS | {word: f"sparse:{rate}" for word, rate in (rates.items() if isinstance(rates, Mapping) else ())}
    for name in ("hybrid_override_pattern", "layers_block_type", "layer_types"):
        if words := flat.get(name):
            if unknown := [str(word) for word in words if word not in known]:
                raise BadInput(f"config: expected kinds of attention among {', '.join(known)} in {name}, found {unknown[0]}")
            kinds = [known[word] for word in words]
            return [full if kind == "full" else kind for kind in kinds]
    linear = flat.get("linear_attn_config")
    if isinstance(linear, Mapping):
        return ["linear" if layer + 1 in linear.get("kda_layers", ()) else full for layer in range(layers)]
    if isinstance(types := flat.get("attn_type_list"), list):
        return [full if kind == 1 else "linear" for kind in types]
    if isinstance(step := flat.get("full_attention_interval"), int) and step > 0:
        return [full if (layer + 1) % step == 0 else "linear" for layer in range(layers)]
    if isinstance(step := flat.get("attn_layer_period"), int) and step > 0:
        return [full if layer % step == flat.get("attn_layer_offset", 0) else "linear" for layer in range(layers)]
    if isinstance(near := flat.get("no_rope_layers"), list) and flat.get("attention_chunk_size"):
        return ["sliding" if rope else full for rope in near]
    if isinstance(flat.get("sliding_window"), int) and flat.get("use_sliding_window", True):
        step = flat.get("sliding_window_pattern")
        return [full if isinstance(step, int) and (layer + 1) % step == 0 else "sliding" for layer in range(layers)]
    return [full] * layers


def _layers(flat: Mapping[str, Any], kind: str, layers: int) -> AttentionLayers:
    hidden = number(flat, "hidden_size", "d_model", "dim")
    if kind == "linear":
        return _linear(flat, hidden, layers)
    if not any(flat.get(name) for name in _HEADS):
        raise BadInput(f"config: expected heads of attention under {' or '.join(_HEADS)}, found none")
    heads = number(flat, *_HEADS)
    if kind.startswith("sparse:"):
        return _compressed(flat, hidden, heads, layers, int(kind[7:]))
    if flat.get("kv_lora_rank") and kind != "sliding":
        return _latent(flat, hidden, heads, layers, kind)
    nested = flat.get("attn_config")
    kv_heads = flat.get("num_key_value_heads") or (nested.get("kv_n_heads") if isinstance(nested, Mapping) else None) or heads
    width = flat.get("head_dim") or hidden // heads
    if any(type(count) is not int or count < 1 for count in (kv_heads, width)):
        raise BadInput(f"config: expected heads for keys and values, and their width, above zero, found {kv_heads}, {width}")
    queries = heads * width * (2 if flat.get("attn_output_gate") else 1)
    window = number(flat, "sliding_window", "sliding_window_size", "attention_chunk_size") if kind == "sliding" else 0
    weights = hidden * (queries + 2 * kv_heads * width + heads * width)
    cached = 2 * kv_heads * width
    return AttentionLayers(kind, layers, weights, 0, kv_heads, cached, pair_flops=4 * heads * width, window=window)


def _latent(flat: Mapping[str, Any], hidden: int, heads: int, layers: int, kind: str) -> AttentionLayers:
    """Latent attention: with weights absorbed into queries and outputs, but for prompts without an indexer.

    There engines expand keys and values, as each pair takes fewer operations then: 2 H (plain + rope + values) in place of
    2 H (2 latent + rope), 81,920 in place of 278,528 for DeepSeek-V3. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; vLLM
    0.32, model_executor/layers/attention/mla_attention.py (forward_mha, forward_mqa).
    """
    latent, rope = number(flat, "kv_lora_rank"), number(flat, "qk_rope_head_dim")
    plain, values, low = number(flat, "qk_nope_head_dim"), number(flat, "v_head_dim"), flat.get("q_lora_rank")
    split = heads * ((low or hidden) * (plain + rope) + latent * (plain + values) + values * hidden)
    whole = hidden * (latent + rope + (low or 0))
    sparse: dict[str, Any] = {}
    if kind in (SHARED, "sparse"):
        sparse = {"query": heads * (latent + rope), "pairs_over": max(1, heads // PADDED_HEADS), "chosen": flat["index_topk"]}
    if kind == SHARED:
        kind = "sparse"
    elif kind == "sparse":  # DeepSeek-V3.2: an index key a token
        many, wide = number(flat, "index_n_heads"), number(flat, "index_head_dim")
        whole += (low or hidden) * many * wide + hidden * (wide + many)
        sparse |= {"index_flops": 2 * many * wide, "index_bytes": INDEX_BYTES * wide / 128}
    else:
        sparse = {
            "prompt_pair_flops": 2 * heads * (plain + rope + values),
            "expand_flops": 2 * heads * latent * (plain + values),
        }
    return AttentionLayers(
        kind, layers, split, whole, 1, latent + rope, pair_flops=2 * heads * (2 * latent + rope), **sparse
    )  # fmt: skip


def _compressed(flat: Mapping[str, Any], hidden: int, heads: int, layers: int, ratio: int) -> AttentionLayers:
    """Compressed sparse attention of DeepSeek-V4: a sliding window, and an entry for each `ratio` tokens (0: none).

    Entries of ratio 4 overlap and are chosen by an indexer; all others are attended to. Keys are values, one head for all.
    """
    width, low, out = number(flat, "head_dim"), number(flat, "q_lora_rank"), number(flat, "o_lora_rank")
    split = heads * width * (low + out) + number(flat, "o_groups") * out * hidden
    whole = hidden * (low + width)
    indexed = ratio == 4
    sparse: dict[str, Any] = {}
    if ratio:
        whole += hidden * width * (4 if indexed else 2)
    if indexed:
        many, wide = number(flat, "index_n_heads"), number(flat, "index_head_dim")
        whole += low * many * wide + hidden * (4 * wide + many)
        sparse = {"index_flops": 2 * many * wide, "index_bytes": INDEX_BYTES * wide / 128, "chosen": flat["index_topk"]}
    window = number(flat, "sliding_window")
    return AttentionLayers(
        "sparse", layers, split, whole, 1, width, pair_flops=4 * heads * width, query=heads * width,
        pairs_over=max(1, heads // PADDED_HEADS), window=window, ratio=ratio, **sparse
    )  # fmt: skip


def _linear(flat: Mapping[str, Any], hidden: int, layers: int) -> AttentionLayers:
    """Layers whose memory is a state: the gated delta rule, Mamba-2, or lightning attention, by the entries that there are."""
    nested = flat.get("linear_attn_config")
    if flat.get("linear_num_value_heads"):
        keys, values = number(flat, "linear_num_key_heads"), number(flat, "linear_num_value_heads")
        key, value = number(flat, "linear_key_head_dim"), number(flat, "linear_value_head_dim")
        heads, state, channels = values, values * key * value, 2 * keys * key + values * value
        weights = hidden * (channels + 2 * values * value + 2 * values)
    elif isinstance(nested, Mapping):
        heads, wide = number(nested, "num_heads"), number(nested, "head_dim")
        state, channels = heads * wide * wide, 3 * heads * wide
        weights = hidden * (channels + heads * wide) + 4 * hidden * wide
    elif any(flat.get(name) for name in _MAMBA):
        heads, wide = number(flat, *_MAMBA), number(flat, "mamba_head_dim", "mamba_d_head")
        size = number(flat, "ssm_state_size", "mamba_d_state")
        groups = flat.get("mamba_n_groups") or flat.get("n_groups") or 1
        state, channels = heads * wide * size, heads * wide + 2 * groups * size
        weights = hidden * (channels + 2 * heads * wide + heads)
    else:
        heads = number(flat, *_HEADS)
        wide = flat.get("head_dim") or hidden // heads
        state, channels, weights = heads * wide * wide, 0, 5 * hidden * heads * wide
    kernel = next((flat[name] for name in _CONVOLUTIONS if flat.get(name)), 4)
    state_bits = 32 if channels else 16
    half = channels * (kernel - 1) // 2 if state_bits == 32 else channels * (kernel - 1)
    return AttentionLayers(
        "linear", layers, weights, 0, heads, 0, state=state + half, state_bits=state_bits, pair_flops=8 * state
    )  # fmt: skip


_HEADS = ("num_attention_heads", "n_heads")
_MAMBA = ("mamba_num_heads", "mamba_n_heads")
_CONVOLUTIONS = ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_kernel_size")


_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)


def shared_width(config: Mapping[str, Any], shape: Shape) -> int:
    """Returns the summed width of a layer's shared experts, which compute every token; zero if there are none.

    Args:
        config: the content of a transformers config.json.
        shape: the model's sizes.
    """
    flat = flat_config(config)
    width = next((flat[name] for name in _SHARED_WIDTH if flat.get(name) is not None), None)
    llama4 = str(flat.get("model_type")).startswith("llama4")  # it has one, and no entry for it
    many = next((flat[name] for name in SHARED_EXPERTS if flat.get(name) is not None), 1 if llama4 else None)
    width = width if width is not None else shape.inner * many if isinstance(many, int) else 0
    return width if isinstance(width, int) and width > 0 else 0
