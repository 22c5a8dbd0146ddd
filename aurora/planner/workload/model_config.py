"""A model's sizes from its transformers config.json, and a Profile whose compute times follow from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from aurora.errors import BadInput
from aurora.types import CoActivation, Curve, GpuKind, Profile, TokenRouting
from aurora.types.arrays import IntArray

REFERENCE_FLOPS = 100e12  # a middling GPU at half precision, about a third of an H100's dense peak
AT_TOKENS, OVERHEAD_S = (1.0, 16.0, 256.0, 4096.0, 65536.0), 5e-6  # of curves; seconds that every call adds


@dataclass(frozen=True)
class Shape:
    """Sizes of a MoE model.

    Attributes:
        model: its name.
        layers: number of MoE layers.
        dense: number of layers without experts, which come before the MoE layers.
        experts: experts of a layer.
        top_k: experts per token.
        hidden: width of a token.
        inner: width of an expert.
    """

    model: str
    layers: int
    dense: int
    experts: int
    top_k: int
    hidden: int
    inner: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the sizes from a config.

        Args:
            config: the content of a transformers config.json.

        Raises:
            BadInput: if the config does not describe a MoE model.
        """
        experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
        dense = config.get("first_k_dense_replace") or 0
        if not isinstance(dense, int):
            raise BadInput(f"config: first_k_dense_replace must be a whole number, found {dense!r}")
        layers = _number(config, "num_hidden_layers") - dense
        top_k = _number(config, "num_experts_per_tok")
        hidden = _number(config, "hidden_size")
        inner = _number(config, "moe_intermediate_size", "intermediate_size")
        if not 1 <= top_k <= experts or layers < 1:
            raise BadInput(f"config: expected 1 <= top-k <= experts and a MoE layer, found {top_k}, {experts} and {layers}")
        name = str(config.get("_name_or_path") or config.get("model_type") or "synthetic")
        return cls(name, layers, dense, experts, top_k, hidden, inner)

    def profile(
        self,
        tokens_TLSE: IntArray,
        provenance: Mapping[str, str],
        routing: TokenRouting | None = None,
        pairs: CoActivation | None = None,
        kinds: Sequence[GpuKind] = (),
    ) -> Profile:
        """Makes a Profile at half precision whose compute times are arithmetic at REFERENCE_FLOPS, as its provenance says.

        Args:
            tokens_TLSE: (T, L, S, E) int64, tokens by window, layer, source rank and expert.
            provenance: where the traffic comes from.
            routing: token-level routing.
            pairs: co-activation counts.
            kinds: GPU kinds for which curves are added, from the peak rates of their datasheets.
        """
        expert_bytes, row_bytes = 2 * 3 * self.hidden * self.inner, 2 * self.hidden
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
            other_bytes=2 * 4 * self.hidden * self.hidden * (self.layers + self.dense),
            curves=curves,
            provenance={
                **provenance,
                "compute": f"arithmetic at {REFERENCE_FLOPS:.0e} FLOPS, half precision, not measured",
                **{f"curves of {kind.kind}": f"peaks of its datasheet, not measured: {kind.source}" for kind in kinds},
            },
            routing=routing,
            coactivation=pairs,
        )


def _roofline(flops: int, token_bytes: int, fixed_bytes: int, peak_flops: float, memory_Bps: float) -> Curve:
    """The roofline bound: OVERHEAD_S plus the longer of computing and of moving bytes.

    Source: Williams, Waterman and Patterson, CACM 52(4), 2009.
    """
    compute_s, move_s, fixed_s = flops / peak_flops, token_bytes / memory_Bps, fixed_bytes / memory_Bps
    crossing = fixed_s / (compute_s - move_s) if compute_s > move_s else 0.0
    at = np.unique([*AT_TOKENS, *([crossing] if AT_TOKENS[0] < crossing < AT_TOKENS[-1] else [])])
    return Curve(at, OVERHEAD_S + np.maximum(at * compute_s, fixed_s + at * move_s))


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that the config gives a whole number above zero."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise BadInput(f"config: expected a whole number above zero under {' or '.join(names)}, found none: not a MoE model?")
