"""Sizes of a served model, read from its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from aurora.algorithms.workload.attention import (
    AttentionLayers,
    attention_layers,
    shared_width,
)
from aurora.algorithms.workload.model_config import Shape, activation_bits, other_weight_bits
from aurora.algorithms.workload.model_structure import decoder_layers, dense_layers, flat_config, number

HALF_BYTES = 2  # of a number of activations
DENSE_WIDTH = "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"  # of layers without experts; the first: Llama 4


def _dense_parts(flat: Mapping[str, Any], dense: int, layers: int) -> int:
    """Number of feed-forward parts without experts: none in the Mamba layers of Nemotron-H, two in each layer of LongCat."""
    pattern = flat.get("hybrid_override_pattern") or flat.get("layers_block_type") or ()
    if "E" in pattern or "moe" in pattern:
        return sum(word in ("-", "mlp") for word in pattern)
    return 2 * layers if flat.get("model_type") == "longcat_flash" else dense


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
        row_bytes: bytes of a number of that token with its part of the scales, if it is quantised as its experts ask for.
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
    row_bytes: float = HALF_BYTES

    def largest_stage(self, stages: int) -> float:
        """Returns the part of all layers that the largest of so many pipeline stages has.

        Example:
            >>> ServedSizes(8, 61, 8, (), 0, 0, 0, 1).largest_stage(4) * 61
            16.0
        """
        return -(-self.layers // stages) / self.layers

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the sizes from a transformers config.json's content, of a model with or without experts.

        Raises:
            BadInput: if the content does not describe a model.
        """
        flat = flat_config(config)
        hidden, vocabulary = number(flat, "hidden_size", "d_model", "dim"), number(flat, "vocab_size")
        number_bytes = other_weight_bits(config) / 8
        attention, streams = attention_layers(config), flat.get("hc_mult") or 1
        if not any(flat.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
            layers = decoder_layers(flat)
            inner = 3 * hidden * number(flat, *DENSE_WIDTH)
            return cls(hidden, layers, vocabulary, attention, layers, inner, 0, number_bytes, streams)
        shape = Shape.of(config)
        matrices = round(shape.expert_weights / shape.dispatched / shape.inner)  # of a feed-forward part: 2 without a gate
        dense = _dense_parts(flat, len(dense_layers(config)), shape.decoder_layers)
        inner = matrices * hidden * number(flat, *DENSE_WIDTH) if dense else 0
        shared = matrices * hidden * shared_width(flat, shape)
        return cls(
            hidden, shape.decoder_layers, vocabulary, attention, dense, inner, shared, number_bytes, streams,
            shape.layers, shape.experts, shape.top_k, shape.expert_weights, shape.expert_bytes, shape.dispatched,
            activation_bits(config) / 8,
        )  # fmt: skip
