"""Draws synthetic profiles for a model, given by name or config, and GPU kinds with datasheets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io.clusters import load_gpus, named_kind
from aurora.io.files import naming
from aurora.io.model_configs import load_model_config
from aurora.types import GpuKind, Profile, SyntheticOptions


def synthetic_profile(
    skew: str,
    config: str | Path | Mapping[str, Any],
    options: SyntheticOptions = SyntheticOptions(),
    *,
    gpu_kinds: Sequence[str | GpuKind] = (),
) -> Profile:
    """Draws a profile for planning before traffic is recorded: random routing, and computed (not measured) compute times.

    Args:
        skew: "uniform" or "zipf:S", the exponent of the experts' popularity, shuffled for each layer.
        config: path of a model's transformers config.json or of its folder, the name of a shipped model, or the content of a
            config.json.
        options: source ranks, tokens, windows, correlation and seed.
        gpu_kinds: kinds of GPUs to compute curves for: names of shipped datasheets, or your own GpuKinds (`aurora.io.load_gpus`
            reads them from a file).

    Returns:
        A Profile whose provenance says that its routing was not measured.

    Raises:
        BadInput: if the skew, the config or a kind is not known.

    Example:
        >>> import aurora
        >>> aurora.synthetic_profile("zipf:0.8", "mixtral-topics", aurora.SyntheticOptions(sources=8)).tokens_TLSE.shape
        (1, 4, 8, 8)
    """
    known = load_gpus()
    kinds = [named_kind("gpu_kinds", kind, known) if isinstance(kind, str) else kind for kind in gpu_kinds]
    if not isinstance(config, Mapping):
        path, config = config, load_model_config(config)
        with naming(path):  # also in what its contents are refused for
            Shape.of(config)
    return draw_profile(skew, config, options, kinds)
