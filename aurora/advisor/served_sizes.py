"""Sizes of a served model, read from its config, and the bytes that it takes of one GPU's memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from aurora.advisor.engines.engine import Layout
from aurora.algorithms.workload.attention import (
    AttentionLayers,
    attention_layers,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    shared_width,
    text_config,
)
from aurora.algorithms.workload.model_config import Shape, other_weight_bits
from aurora.algorithms.workload.model_structure import decoder_layers, dense_layers, number

HALF_BYTES = 2  # of a number of activations


@dataclass(frozen=True)
class ServedSizes:
    """Sizes of a model, from which a step's time is computed.

    Attributes:
        hidden: width of a token between layers.
        layers: decoder layers.
        vocabulary: number of logits.
        attention: attention layers by kind.
        dense: number of decoder layers without experts.
        dense_weights: number of feed-forward parameters of a layer without experts.
        shared_weights: number of parameters of a layer's shared experts.
        weight_bytes: bytes per parameter outside routed experts.
        streams: number of residual streams that hyper-connections mix; 1 without hyper-connections.
        moe_layers, experts, top_k, expert_weights, expert_bytes: as in Shape; zero without experts.
        dispatched: width of a token on the way to its experts.
    """

    hidden: int
    layers: int
    vocabulary: int
    attention: tuple[AttentionLayers, ...]
    dense: int
    dense_weights: int
    shared_weights: int
    weight_bytes: float
    streams: int = 1
    moe_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_weights: int = 0
    expert_bytes: int = 0
    dispatched: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the sizes from a transformers config.json's content, of a model with or without experts.

        Raises:
            BadInput: if the content does not describe a model.
        """
        flat = text_config(config)
        hidden, vocabulary = number(flat, "hidden_size", "d_model", "dim"), number(flat, "vocab_size")
        number_bytes = other_weight_bits(config) / 8
        attention, streams = attention_layers(config), flat.get("hc_mult") or 1
        if not any(flat.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
            layers = decoder_layers(flat)
            inner = 3 * hidden * number(flat, "intermediate_size", "ffn_hidden_size")
            return cls(hidden, layers, vocabulary, attention, layers, inner, 0, number_bytes, streams)
        shape = Shape.of(config)
        dense = len(dense_layers(config))
        inner = 3 * hidden * number(flat, "intermediate_size", "ffn_hidden_size") if dense else 0
        shared = 3 * hidden * shared_width(flat, shape)
        return cls(
            hidden, shape.decoder_layers, vocabulary, attention, dense, inner, shared, number_bytes, streams,
            shape.layers, shape.experts, shape.top_k, shape.expert_weights, shape.expert_bytes, shape.dispatched,
        )  # fmt: skip


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of a served model in one GPU's memory.

    Attributes:
        weights: bytes of all weights but routed experts.
        experts: bytes of routed experts.
        cache: bytes of the KV cache.
    """

    weights: float
    experts: float
    cache: float

    @property
    def total(self) -> float:
        """Bytes of weights, experts and cache together."""
        return self.weights + self.experts + self.cache


def memory_bytes(config: Mapping[str, Any], layout: Layout, kv_tokens: int, *, sequences: int = 0) -> MemoryBytes:
    """Returns the bytes of a served model in one GPU's memory, without activations and CUDA graphs.

    Args:
        config: the content of a transformers config.json.
        layout: how the model is split over GPUs.
        kv_tokens: tokens in the KV cache of one data-parallel rank.
        sequences: number of requests in the cache; each also needs fixed bytes for sliding windows and linear attention.

    Raises:
        BadInput: if the config does not describe a model.
    """
    sizes, ranks = ServedSizes.of(config), layout.copy_gpus
    split = sum(layers.layers * layers.split_weights for layers in sizes.attention)
    split += sizes.dense * sizes.dense_weights + sizes.moe_layers * sizes.shared_weights
    whole = sum(layers.layers * layers.whole_weights for layers in sizes.attention)
    ends = (1 if text_config(config).get("tie_word_embeddings") else 2) * sizes.vocabulary * sizes.hidden * HALF_BYTES
    ends += sizes.moe_layers * sizes.hidden * sizes.experts * HALF_BYTES * layout.tensor  # routers are whole on each rank
    cache = kv_tokens * kv_bytes_per_token(config, tensor=layout.tensor)
    cache += sequences * kv_bytes_per_sequence(config, tensor=layout.tensor)
    weights = (split / layout.tensor + whole) * sizes.weight_bytes + ends / layout.tensor
    return MemoryBytes(weights, sizes.moe_layers * sizes.experts * sizes.expert_bytes / ranks, cache)
