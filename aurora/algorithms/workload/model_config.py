"""Reads a model's sizes from its transformers config.json, and makes a Profile with compute times computed from the sizes."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from aurora.algorithms.workload.model_structure import (
    DISPATCHED,
    LAYER_KINDS,
    LAYER_RULES,
    MOST_EXPERTS,
    _others,
    check_counts,
    decoder_layers,
    dense_layers,
    entries_by_layer,
    expert_count,
    expert_groups,
    flat_config,
    moe_layers,
    number,
    top_k,
)
from aurora.errors import BadInput, shown
from aurora.types import OVERHEAD, Curve, GpuKind, Profile, TokenRouting
from aurora.types.arrays import IntArray
from aurora.types.read_numbers import whole_number

REFERENCE_FLOPS = 100e12  # a middling GPU at half precision, about a third of an H100's dense peak
REFERENCE_BPS = 1e12  # bytes per second of its memory, also about a third of an H100's
MOST_WIDTH = 1 << 24  # of a model that a config describes
AT_TOKENS, OVERHEAD_S = (1.0, 16.0, 256.0, 4096.0, 65536.0), 5e-6  # of curves; seconds that every call adds


@dataclass(frozen=True)
class Shape:
    """Sizes of a MoE model.

    Attributes:
        model: the model's name.
        layers: number of MoE layers.
        dense_layers: indices, among all decoder layers, of the layers without experts, ascending.
        experts: number of experts of a layer.
        top_k: experts per token.
        hidden: width of a token between layers.
        inner: width of an expert.
        dispatched: width of a token on the way to its experts; `hidden` unless experts work on a projection of it.
        expert_weights: number of parameters of an expert.
        groups: number of groups of equally many consecutive experts, for group-limited routing.
        token_groups: maximum number of groups that a token's experts are in.
        weight_bits: bits per parameter of an expert, scales included.
        remarks: sentences on assumptions about entries that the config lacks.
        mtp_layers: number of layers of multi-token prediction after the decoder layers; plans ignore them.
        shared_experts: number of shared experts of a layer, which compute every token; plans ignore them.

    Example:
        >>> mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32, "hidden_size": 4096}
        >>> shape = Shape.of(mixtral | {"intermediate_size": 14336})
        >>> shape.layers, shape.expert_bytes
        (32, 352321536)
    """

    model: str
    layers: int
    dense_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    inner: int
    dispatched: int
    expert_weights: int
    groups: int = 1
    token_groups: int = 1
    weight_bits: float = 16.0
    remarks: tuple[str, ...] = ()
    mtp_layers: int = 0
    shared_experts: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Returns the Shape of the model that a config describes.

        Args:
            config: the content of a transformers config.json.

        Raises:
            BadInput: if the config does not describe a MoE model.
        """
        if not isinstance(config.get("model_type"), str | None):
            raise BadInput(f"config: model_type must be text, found {shown(config['model_type'])}")
        check_counts(config)
        dense, remarks = dense_layers(config), []
        entries = entries_by_layer(flat_config(config))
        _check_equal(config, entries)
        flat = entries[0]
        experts, layers = expert_count(flat), decoder_layers(flat) - len(dense)
        if flat.get("expert_retrieval_size"):  # as Doge's
            raise BadInput("config: expected experts with matrices of their own, found rows of an embedding")
        hidden, inner = number(flat, *_HIDDEN), _expert_width(flat)
        dispatched, weights = _dispatched(flat), _expert_weights(flat)
        if not any(flat.get(name) is not None for name in (*LAYER_RULES, *LAYER_KINDS)):
            remarks.append(f"all {layers} layers are taken to have experts, as the config names none without")
        chosen, bits = top_k(flat), weight_bits(config)
        if not 1 <= chosen <= experts or layers < 1:
            raise BadInput(f"config: expected 1 <= top-k <= experts and a MoE layer, found {chosen}, {experts} and {layers}")
        if experts > MOST_EXPERTS:
            raise BadInput(f"config: expected at most {MOST_EXPERTS} experts, found {experts}")
        if max(hidden, inner, dispatched) > MOST_WIDTH:
            raise BadInput(f"config: expected a width of at most {MOST_WIDTH}, found {max(hidden, inner, dispatched)}")
        if bits is None:
            bits, said = 16.0, (_quantisation(config) or {}).get("quant_method")
            remarks.append(f"experts' weights are taken to have 16 bits: quantisation {said} is not known")
        name = str(config.get("_name_or_path") or flat.get("_name_or_path") or config.get("model_type") or "synthetic")
        groups = expert_groups(flat)
        mtp = [value for key, value in flat.items() if _MTP.search(key) and type(value) is int]
        return cls(
            name, layers, dense, experts, chosen, hidden, inner, dispatched, weights, *groups, bits, tuple(remarks),
            max(mtp, default=0), next((flat[key] for key in SHARED_EXPERTS if type(flat.get(key)) is int), 0),
        )  # fmt: skip

    @property
    def expert_bytes(self) -> int:
        """The bytes of an expert's matrices."""
        return round(self.expert_weights * self.weight_bits / 8)

    @property
    def decoder_layers(self) -> int:
        """The number of decoder layers, with and without experts."""
        return self.layers + len(self.dense_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices, among all decoder layers, of the layers with experts."""
        return moe_layers(self.layers, self.dense_layers)

    def profile(
        self,
        tokens_TLSE: IntArray,
        provenance: Mapping[str, str],
        routing: TokenRouting | None = None,
        kinds: Sequence[GpuKind] = (),
        recorded: Sequence[int] | None = None,
        kv_bytes: float | None = None,
    ) -> Profile:
        """Makes a Profile at half precision. Its compute times are not measured, but computed from reference rates.

        Args:
            tokens_TLSE: (T, L, S, E) int64, tokens by window, layer, source rank and expert.
            provenance: notes by name on the source of the traffic.
            routing: token-level routing; None if unknown.
            recorded: indices, among all decoder layers, of the L layers of tokens_TLSE; None: all layers with experts.
            kinds: GPU kinds for which curves are added, from the peak rates of their datasheets.
            kv_bytes: bytes of the KV cache that a token takes; None if unknown.
        """
        expert_bytes, row_bytes = self.expert_bytes, 2 * self.dispatched
        gate = 4 * self.hidden * self.hidden + self.hidden * self.experts  # weights: attention's and the router's
        gate += 2 * self.hidden * self.dispatched if self.dispatched != self.hidden else 0  # and experts' projections
        work = {  # of a phase: floating-point operations a token, bytes per token, bytes independent of tokens
            "gate": (2 * gate, 2 * row_bytes, 2 * gate),
            "expert": (2 * self.expert_weights, 2 * row_bytes, expert_bytes),
            "aggregate": (2 * self.top_k * self.dispatched, (self.top_k + 1) * row_bytes, 0),
        }
        weights_only = {phase: (flops, 0, fixed_bytes) for phase, (flops, _, fixed_bytes) in work.items()}
        curves = {"reference": _rooflines(weights_only, REFERENCE_FLOPS, REFERENCE_BPS)}
        curves |= {kind.kind: _rooflines(work, kind.half_flops, kind.memory_Bps) for kind in kinds}
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
                "compute": f"arithmetic at {REFERENCE_FLOPS:.0e} FLOPS, {REFERENCE_BPS:.0e} B/s, half precision, not measured",
                **({"config": "; ".join(self.remarks)} if self.remarks else {}),
                **{f"curves of {kind.kind}": f"peaks of its datasheet, not measured: {kind.source}" for kind in kinds},
            },
            routing=routing,
            dense_layers=self.dense_layers if recorded is None else _others(recorded, self.decoder_layers),
            expert_groups=(self.groups, self.token_groups),
            kv_bytes=kv_bytes,
        )


def _rooflines(work: Mapping[str, tuple[int, int, int]], peak_flops: float, memory_Bps: float) -> dict[str, Curve]:
    """The roofline bound of each phase: the longer of computing and of moving bytes, and OVERHEAD_S of every call.

    A rank's experts are one call, whose OVERHEAD_S is the kernel's; each active expert takes the bound of its own tokens.
    Source: Williams, Waterman and Patterson, CACM 52(4), 2009.

    Args:
        work: of each phase, floating-point operations a token, bytes per token, and bytes independent of tokens.
        peak_flops, memory_Bps: of the GPU.
    """
    curves = {OVERHEAD: Curve(np.ones(1), np.full(1, OVERHEAD_S))}
    for phase, (flops, token_bytes, fixed_bytes) in work.items():
        compute_s, move_s, fixed_s = flops / peak_flops, token_bytes / memory_Bps, fixed_bytes / memory_Bps
        crossing = fixed_s / (compute_s - move_s) if compute_s > move_s else 0.0
        at = np.unique([*AT_TOKENS, *([crossing] if AT_TOKENS[0] < crossing < AT_TOKENS[-1] else [])])
        call_s = 0.0 if phase == "expert" else OVERHEAD_S
        curves[phase] = Curve(at, call_s + np.maximum(at * compute_s, fixed_s + at * move_s))
    return curves


def _expert_width(flat: Mapping[str, Any]) -> int:
    """The width of an expert, which is the feed-forward layers' only where the config gives experts none of their own."""
    names = [name for name in flat if _EXPERT_WIDTH.search(name) and "shared" not in name and flat[name] is not None]
    return number(flat, *names) if names else number(flat, "intermediate_size", "ffn_hidden_size", "hidden_dim")


def _dispatched(flat: Mapping[str, Any]) -> int:
    """The width of a token on the way to its experts."""
    return number(flat, *DISPATCHED) if any(flat.get(name) for name in DISPATCHED) else number(flat, *_HIDDEN)


def _expert_weights(flat: Mapping[str, Any]) -> int:
    """The number of parameters of an expert without biases."""
    return (2 if flat.get("mlp_hidden_act") in _UNGATED else 3) * _dispatched(flat) * _expert_width(flat)


def _check_equal(config: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadInput, with the sizes, unless all layers have equally many experts of one width, and one top-k."""
    sizes = Counter((expert_count(flat), _expert_width(flat), top_k(flat)) for flat in entries)
    if len(sizes) > 1:
        said = [
            f"{many} of {experts} experts of width {inner}, top-{chosen}" for (experts, inner, chosen), many in sizes.items()
        ]
        total = sum(expert_count(flat) * _expert_weights(flat) for flat in entries) * (weight_bits(config) or 16.0) / 8
        raise BadInput(
            f"config: layers have unequal experts: {'; '.join(said[:4])}{'; ...' * (len(said) > 4)}: "
            f"{sum(map(expert_count, entries))} experts in all, {total / 1e9:.1f} GB; only equal layers can be planned"
        )


_HIDDEN = ("hidden_size", "d_model", "dim")
_EXPERT_WIDTH = re.compile(r"(moe|expert).*(intermediate|inner|inter_dim|ffn|hidden_dim)")
_MTP = re.compile(r"(nextn|mtp).*(layers|modules|depth)")  # number of layers of multi-token prediction
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")  # their number
_UNGATED = ("relu2",)  # activations of experts with two matrices

SCALE_BITS = 16  # of a group's scale, where the config does not say


def weight_bits(config: Mapping[str, Any]) -> float | None:
    """Returns the bits per parameter of an expert, scales and zero points included; None if the format is not known.

    Known methods of `quantization_config`: fp8 under all its names, int8, mxfp4, nvfp4, GPTQ, AWQ, AutoRound,
    compressed-tensors, ModelOpt, Quark, bitsandbytes.

    Args:
        config: the content of a transformers config.json.

    Example:
        >>> weight_bits({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
        4.15625
    """
    quantised = _quantisation(config)
    if flat_config(config).get("expert_dtype") == "fp4":  # DeepSeek-V4: MXFP4 beside other weights of fp8
        return _form_bits("mxfp4")
    if quantised is None or _leaves_experts(quantised):
        return 16.0
    method = str(quantised.get("quant_method")).lower().replace("-", "_")
    try:
        return _BITS[method](quantised) if method in _BITS else None
    except (BadInput, TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError):
        return None


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config's part about quantised weights."""
    quantised = flat_config(config).get("quantization_config") or config.get("quantization_config")
    return quantised if isinstance(quantised, dict) and quantised else None


def other_weight_bits(config: Mapping[str, Any]) -> float:
    """Returns the bits per parameter of attention, dense layers and shared experts.

    It is 16 if nothing is quantised, if the method is MXFP4 (for experts only), or if the config exempts attention.

    Args:
        config: the content of a transformers config.json.
    """
    quantised = _quantisation(config)
    if quantised is None or quantised.get("quant_method") == "mxfp4" or any("attn" in str(name) for name in _left(quantised)):
        return 16.0
    return 8.0 if quantised.get("quant_method") == "fp8" else weight_bits(config) or 16.0


def activation_bits(config: Mapping[str, Any]) -> float:
    """Returns the bits of a number of a token that enters its experts, with its part of the scales.

    It is 16 unless the config quantises activations, too: 8 at FP8, and if weights have blocks a scale of 32 bits for as many
    numbers; 4 and a scale of 8 bits for each 16 numbers at NVFP4.

    Args:
        config: the content of a transformers config.json.

    Source: vLLM 0.32, model_executor/layers/fused_moe: all exchanges of tokens quantise first.

    Example:
        >>> activation_bits({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
        8.25
    """
    quantised = _quantisation(config)
    if quantised is None or _leaves_experts(quantised) or config.get("expert_dtype") == "fp4":
        return 16.0
    groups = _part(quantised, "config_groups").values()
    inputs = [_part(group, "input_activations").get("num_bits") for group in groups if isinstance(group, Mapping)]
    algorithm = str({**_part(quantised, "quantization"), **quantised}.get("quant_algo", "")).upper()
    if "NVFP4" in algorithm or quantised.get("quant_method") in ("nvfp4", "modelopt_fp4") or 4 in inputs:
        return 4 + 8 / 16
    if quantised.get("quant_method") == "fp8" or algorithm.startswith("FP8") or 8 in inputs:
        block = quantised.get("weight_block_size")
        return 8 + 32 / block[-1] if isinstance(block, list | tuple) and block else 8.0
    return 16.0


def _leaves_experts(quantised: Mapping[str, Any]) -> bool:
    """Returns whether routed experts are among the modules that stay as they are."""
    return any(_of_experts(name) for name in _left(quantised))


def _left(quantised: Mapping[str, Any]) -> list[Any]:
    """The modules that stay as they are."""
    names = ("modules_to_not_convert", "ignore", "exclude", "exclude_modules", "ignored_layers")
    said = {**_part(quantised, "quantization"), **quantised}
    return [module for name in names for module in said.get(name) or ()]


def _of_experts(module: Any) -> bool:
    """Returns whether a name of modules, or a pattern of names, is of routed experts."""
    return "experts" in str(module) and not re.search(r"shared_?experts|gate|router", str(module))


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an entry that is a mapping; an empty one for any other."""
    entry = config.get(name)
    return entry if isinstance(entry, Mapping) else {}


def _form_bits(form: Any, group: Any = None) -> float:
    """Bits of a number by the name of its form, such as "NVFP4", "W4A16_AWQ", "int8" or "float8_e4m3fn".

    Args:
        form: the first number after a kind of numbers is that of its bits.
        group: numbers that share a scale; None: as is usual for the form.

    Raises:
        BadInput: if the name has no such number.
    """
    form = str(form).lower()
    bits = whole_number("".join(re.findall("(?:int|float|fp|w)([0-9]+)", form)[:1]))
    if "nvfp" in form or "mx" in form:
        return _grouped(bits, group or (16 if "nvfp" in form else 32), 8)
    return _grouped(bits, group or (128 if bits < 8 else None))


def _grouped(bits: float, group: Any, scale_bits: float = SCALE_BITS, zero_bits: float = 0.0) -> float:
    """Bits of a number with its part of the scale and zero point of a group; no group: one for a channel, which is nothing."""
    return float(bits) + ((scale_bits + zero_bits) / group if group and group > 0 else 0.0)


def _tensors(weights: Mapping[str, Any], scheme: str) -> float:
    """Bits by a scheme of compressed-tensors or ModelOpt: number of bits, type and size of a group."""
    bits, group = weights["num_bits"], weights.get("group_size")
    if bits == 4 and weights.get("type") == "float":
        return 4 + 8 / (16 if "nvfp4" in scheme else 32) if not group else _grouped(4, group, 8)
    zero = 0 if weights.get("symmetric", True) else bits
    return _grouped(bits, group if weights.get("strategy", "group") == "group" else None, SCALE_BITS, zero)


def _compressed(quantised: Mapping[str, Any]) -> float:
    groups = list(quantised["config_groups"].values())
    of_experts = [group for group in groups if any("expert" in str(target) for target in group.get("targets", ()))]
    return _tensors((of_experts or groups)[0]["weights"], str(quantised.get("format", "")).replace("_", ""))


def _modelopt(quantised: Mapping[str, Any]) -> float:
    if quantised.get("config_groups"):
        return _compressed(quantised)
    inner = _part(quantised, "quantization") or quantised
    mixed = _part(inner, "quantized_layers")  # by module
    inner = next((said for module, said in mixed.items() if _of_experts(module)), inner)
    name = inner["quant_algo"]
    return _form_bits(name, None if "_PB_" in name else inner.get("group_size"))


def _quark(quantised: Mapping[str, Any]) -> float:
    weight = quantised["global_quant_config"]["weight"]
    weight = weight[0] if isinstance(weight, list) else weight
    name, group = str(weight["dtype"]), weight.get("group_size")
    bits = whole_number(re.findall("[0-9]+", name)[0])
    return _grouped(bits, group if bits < 8 else None, 8 if name.startswith("fp") else SCALE_BITS)


def _bitsandbytes(quantised: Mapping[str, Any]) -> float:
    if quantised.get("load_in_4bit") or quantised.get("_load_in_4bit"):
        return 4 + (8 / 64 + 32 / (64 * 256) if quantised.get("bnb_4bit_use_double_quant") else 32 / 64)
    return 8.0


def _packed(quantised: Mapping[str, Any]) -> float:
    """GPTQ, AWQ and their like: a scale and a zero point for each group."""
    bits = quantised.get("bits", quantised.get("w_bit", quantised.get("weight_bits")))
    return _grouped(bits, quantised.get("group_size", quantised.get("q_group_size", 128)), SCALE_BITS, bits)


_BITS: dict[str, Callable[[Mapping[str, Any]], float]] = {  # by quant_method
    **dict.fromkeys(("fp8", "fbgemm_fp8", "finegrained_fp8", "deepspeedfp", "ptpc_fp8"), lambda quantised: 8.0),
    **dict.fromkeys(("experts_int8", "w8a8_int8"), lambda quantised: 8.0),
    **dict.fromkeys(("gptq", "gptq_marlin", "awq", "awq_marlin", "auto_round", "autoround", "intel/auto_round"), _packed),
    "compressed_tensors": _compressed,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_fp8"), _modelopt),
    **dict.fromkeys(("mxfp4", "mxfp8", "nvfp4"), lambda quantised: _form_bits(quantised["quant_method"])),
    "quark": _quark,
    "bitsandbytes": _bitsandbytes,
}
