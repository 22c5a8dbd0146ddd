"""A model's sizes from its transformers config.json, and a Profile whose compute times follow from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from aurora.errors import BadInput
from aurora.types import CoActivation, Curve, GpuKind, Profile, TokenRouting
from aurora.types.arrays import MOST_LAYERS, BoolArray, IntArray

REFERENCE_FLOPS = 100e12  # a middling GPU at half precision, about a third of an H100's dense peak
MOST_EXPERTS, MOST_WIDTH = 1 << 16, 1 << 24  # of a model that a config describes
AT_TOKENS, OVERHEAD_S = (1.0, 16.0, 256.0, 4096.0, 65536.0), 5e-6  # of curves; seconds that every call adds


@dataclass(frozen=True)
class Shape:
    """Sizes of a MoE model.

    Attributes:
        model: its name.
        layers: number of MoE layers.
        dense_layers: numbers of the decoder layers without experts, ascending from 0.
        experts: experts of a layer.
        top_k: experts per token.
        hidden: width of a token.
        inner: width of an expert.
        groups: groups of experts, equally many consecutive ones each, for group-limited routing.
        token_groups: groups that a token's experts are in at most.
        weight_bits: bits of a number of an expert's weights, with its part of the scales.
    """

    model: str
    layers: int
    dense_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    inner: int
    groups: int = 1
    token_groups: int = 1
    weight_bits: float = 16.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the sizes from a config.

        Args:
            config: the content of a transformers config.json.

        Raises:
            BadInput: if the config does not describe a MoE model.
        """
        config = flat_config(config)
        experts = expert_count(config)
        dense = dense_layers(config)
        layers = decoder_layers(config) - len(dense)
        chosen = top_k(config)
        hidden = number(config, "hidden_size", "d_model")
        inner = number(config, "moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
        if not 1 <= chosen <= experts or layers < 1:
            raise BadInput(f"config: expected 1 <= top-k <= experts and a MoE layer, found {chosen}, {experts} and {layers}")
        if experts > MOST_EXPERTS:
            raise BadInput(f"config: expected at most {MOST_EXPERTS} experts, found {experts}")
        if max(hidden, inner) > MOST_WIDTH:
            raise BadInput(f"config: expected a width of at most {MOST_WIDTH}, found {max(hidden, inner)}")
        name = str(config.get("_name_or_path") or config.get("model_type") or "synthetic")
        return cls(name, layers, dense, experts, chosen, hidden, inner, *expert_groups(config), weight_bits(config))

    @property
    def expert_bytes(self) -> int:
        """The bytes of an expert's three matrices."""
        return round(3 * self.hidden * self.inner * self.weight_bits / 8)

    @property
    def decoder_layers(self) -> int:
        """The number of decoder layers, with and without experts."""
        return self.layers + len(self.dense_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the decoder layers with experts."""
        return moe_layers(self.layers, self.dense_layers)

    def profile(
        self,
        tokens_TLSE: IntArray,
        provenance: Mapping[str, str],
        routing: TokenRouting | None = None,
        pairs: CoActivation | None = None,
        kinds: Sequence[GpuKind] = (),
        recorded: Sequence[int] | None = None,
    ) -> Profile:
        """Makes a Profile at half precision whose compute times are arithmetic at REFERENCE_FLOPS, as its provenance says.

        Args:
            tokens_TLSE: (T, L, S, E) int64, tokens by window, layer, source rank and expert.
            provenance: where the traffic comes from.
            routing: token-level routing.
            pairs: co-activation counts.
            recorded: numbers of the decoder layers that the tokens are of; None: all that have experts.
            kinds: GPU kinds for which curves are added, from the peak rates of their datasheets.
        """
        expert_bytes, row_bytes = self.expert_bytes, 2 * self.hidden
        gate = 4 * self.hidden * self.hidden + self.hidden * self.experts  # weights: attention's and the router's
        work = {  # of a phase: floating-point operations a token, bytes per token, bytes independent of tokens
            "gate": (2 * gate, 2 * row_bytes, 2 * gate),
            "expert": (6 * self.hidden * self.inner, 2 * row_bytes, expert_bytes),
            "aggregate": (2 * self.top_k * self.hidden, (self.top_k + 1) * row_bytes, 0),
        }
        curves = {"reference": {phase: _roofline(flops, 0, 0, REFERENCE_FLOPS, 1.0) for phase, (flops, _, _) in work.items()}}
        curves |= {
            kind.kind: {phase: _roofline(*amounts, kind.half_flops, kind.memory_Bps) for phase, amounts in work.items()}
            for kind in kinds
        }
        return Profile(
            model=self.model,
            fingerprint="",
            tokens_TLSE=tokens_TLSE,
            top_k=self.top_k,
            dispatch_bytes=row_bytes,
            combine_bytes=row_bytes,
            expert_bytes=expert_bytes,
            other_bytes=2 * 4 * self.hidden * self.hidden * self.decoder_layers,
            curves=curves,
            provenance={
                **provenance,
                "compute": f"arithmetic at {REFERENCE_FLOPS:.0e} FLOPS, half precision, not measured",
                **{f"curves of {kind.kind}": f"peaks of its datasheet, not measured: {kind.source}" for kind in kinds},
            },
            routing=routing,
            coactivation=pairs,
            dense_layers=self.dense_layers if recorded is None else _others(recorded, self.decoder_layers),
            expert_groups=(self.groups, self.token_groups),
        )


def _roofline(flops: int, token_bytes: int, fixed_bytes: int, peak_flops: float, memory_Bps: float) -> Curve:
    """The roofline bound: OVERHEAD_S plus the longer of computing and of moving bytes.

    Source: Williams, Waterman and Patterson, CACM 52(4), 2009.
    """
    compute_s, move_s, fixed_s = flops / peak_flops, token_bytes / memory_Bps, fixed_bytes / memory_Bps
    crossing = fixed_s / (compute_s - move_s) if compute_s > move_s else 0.0
    at = np.unique([*AT_TOKENS, *([crossing] if AT_TOKENS[0] < crossing < AT_TOKENS[-1] else [])])
    return Curve(at, OVERHEAD_S + np.maximum(at * compute_s, fixed_s + at * move_s))


def decoder_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of decoder layers by a transformers config.json's content. Raises BadInput if there is none."""
    flat = flat_config(config)
    kinds = flat.get("layers_block_type")  # of each layer, in place of their number
    return len(kinds) if isinstance(kinds, list) and kinds else number(flat, "num_hidden_layers", "n_layers")


def expert_count(config: Mapping[str, Any]) -> int:
    """Returns the number of experts of a layer by a transformers config.json's content. Raises BadInput if there is none."""
    return number(flat_config(config), "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def top_k(config: Mapping[str, Any]) -> int:
    """Returns the experts of a token by a transformers config.json's content. Raises BadInput if there is no such number."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
    return number(flat_config(config), *names)


def expert_groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the groups of experts that a router chooses among, and how many of them a token's experts are in at most.

    (1, 1) for a router without groups.

    Args:
        config: the content of a transformers config.json.

    Raises:
        BadInput: if the groups do not divide the experts, or a token's groups hold fewer experts than it chooses.
    """
    flat = flat_config(config)
    if flat.get("topk_method") == "greedy" or not flat.get("n_group") or not flat.get("topk_group"):
        return 1, 1
    groups, token_groups = number(flat, "n_group"), number(flat, "topk_group")
    experts = expert_count(flat)
    if experts % groups or token_groups > groups or token_groups * (experts // groups) < top_k(flat):
        raise BadInput(
            f"config: expected an n_group that divides {experts} experts and a topk_group with {top_k(flat)} experts or more, "
            f"found {groups} and {token_groups}"
        )
    return (groups, token_groups) if token_groups < groups else (1, 1)


def dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the numbers, ascending from 0, of the decoder layers without experts.

    A layer has experts if everything that the config says of layers agrees: `mlp_layer_types`, `moe_layers`, `mlp_only_layers`,
    `moe_layer_freq`, `first_k_dense_replace`, `decoder_sparse_step`, `interleave_moe_layer_step`, `moe_layer_interval`.

    Args:
        config: the content of a transformers config.json.

    Raises:
        BadInput: if one of them is not what transformers reads.
    """
    config = flat_config(config)
    layers = decoder_layers(config)
    if layers > MOST_LAYERS:
        raise BadInput(f"config: num_hidden_layers must be at most {MOST_LAYERS}, found {layers}")
    moe = np.ones(layers, dtype=bool)
    number_L = np.arange(layers)
    for name, has_experts in _LAYER_RULES.items():
        value = config.get(name)
        if value is None:
            continue
        try:
            moe &= has_experts(number_L, value)
        except (TypeError, ValueError, ZeroDivisionError):
            raise BadInput(f"config: {name} does not say which of {layers} layers have experts: {str(value)[:80]}") from None
    return _others(np.flatnonzero(moe).tolist(), layers)


def _every(number_L: IntArray, step: Any) -> BoolArray:
    """Marks the last layer of each `step`."""
    if type(step) is not int or step < 1:
        raise ValueError(step)
    return np.asarray((number_L + 1) % step == 0)


def _listed(number_L: IntArray, listed: Any) -> BoolArray:
    """Marks the layers that a list names."""
    if not isinstance(listed, list) or any(type(number) is not int for number in listed):
        raise ValueError(listed)
    return np.isin(number_L, listed)


def _from(number_L: IntArray, first: Any) -> BoolArray:
    """The layers from `first` on."""
    if type(first) is not int:
        raise ValueError(first)
    return np.asarray(number_L >= first)


def _types(number_L: IntArray, types: Any) -> BoolArray:
    """Marks the layers that are "sparse", or 1, by a list with one entry per layer; a number is a step that layer 0 begins."""
    if type(types) is int and types > 0:
        return np.asarray(number_L % types == 0)
    found = np.array([each in ("sparse", 1) for each in types])
    if found.shape != number_L.shape:
        raise ValueError(types)
    return found


_LAYER_RULES: dict[str, Callable[[IntArray, Any], BoolArray]] = {
    "mlp_layer_types": _types,
    "moe_layer_freq": _types,
    "moe_layers": _listed,
    "mlp_only_layers": lambda number_L, listed: ~_listed(number_L, listed),
    "first_k_dense_replace": _from,
    "moe_layer_start_index": _from,
    "moe_layer_end_index": lambda number_L, last: ~_from(number_L, last + 1) if last != -1 else number_L >= 0,
    "decoder_sparse_step": _every,
    "interleave_moe_layer_step": _every,
    "moe_layer_interval": _every,
}


_WEIGHT_BITS = {
    "bfloat16": 16.0,
    "fp8": 8.0,
    "fp8_block": 8.0,
    "w4a16_mxfp4": 4.25,
}  # by weight_format; MXFP4 has a scale for 32


def weight_format(config: Mapping[str, Any]) -> str:
    """Returns the type of an expert's weights by a transformers config.json's content, as aiconfigurator names it.

    "bfloat16" without `quantization_config`; "fp8", with scales for blocks "fp8_block"; "w4a16_mxfp4"; of others the name of
    their method.

    Args:
        config: the content of a transformers config.json.
    """
    quantised = flat_config(config).get("quantization_config") or config.get("quantization_config")
    if not isinstance(quantised, dict):
        return "bfloat16"
    method = str(quantised.get("quant_method"))
    block = "_block" if quantised.get("weight_block_size") else ""
    return {"fp8": f"fp8{block}", "mxfp4": "w4a16_mxfp4"}.get(method, method)


def weight_bits(config: Mapping[str, Any]) -> float:
    """Returns the bits of a number of an expert's weights, with its part of the scales; 16 for types that are not known."""
    return _WEIGHT_BITS.get(weight_format(config), 16.0)


def one_moe_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config.json's content for a model with one decoder layer, which has experts."""
    return {key: value for key, value in flat_config(config).items() if key not in _LAYER_RULES} | {"num_hidden_layers": 1}


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the entries of its text part, for a model that also sees or hears, and of its feed-forward part."""
    flat = dict(config)
    for part in ("text_config", "ffn_config"):
        nested = flat.pop(part, None)
        flat |= nested if isinstance(nested, dict) else {}
    return flat


def moe_layers(layers: int, dense_layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of `layers` decoder layers with experts, between those of `dense_layers`."""
    return _others(dense_layers, layers + len(dense_layers))


def _others(numbers: Sequence[int], layers: int) -> tuple[int, ...]:
    """The numbers below `layers` that are not among `numbers`, ascending."""
    return tuple(sorted(set(range(layers)) - set(numbers)))


def number(config: Mapping[str, Any], *names: str) -> int:
    """Returns the first of `names` that the config gives a whole number above zero, or such a number for each layer, all alike.

    Raises:
        BadInput: if it gives none of them such a number.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    raise BadInput(f"config: expected a whole number above zero under {' or '.join(names)}, found none: not a MoE model?")
