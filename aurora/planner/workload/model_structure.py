"""Layers with experts of a model that transformers knows, read from its modules, which are built without weights."""

import importlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aurora.errors import BadInput
from aurora.types.arrays import MOST_LAYERS

MOST_EXPERTS = 1 << 16  # of a layer that a config describes

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = re.compile(r"(?<!shared_)experts$")


@dataclass(frozen=True)
class ModelStructure:
    """Decoder layers with experts, and the sizes of an expert, by the shapes of its weights.

    Attributes:
        decoder_layers: number of decoder layers, with and without experts.
        moe_layers: numbers of the decoder layers with experts, ascending from 0.
        experts: experts of a layer, without those that compute nothing.
        expert_weights: numbers in an expert's weights, biases included.
        hidden: width of a token between layers.
        dispatched: width of a token on the way to its experts; `hidden` unless experts work on a projection of it.
        inner: width between an expert's matrices.
        text: entries of the config of the language model, defaults of the type included.
    """

    decoder_layers: int
    moe_layers: tuple[int, ...]
    experts: int
    expert_weights: int
    hidden: int
    dispatched: int
    inner: int
    text: Mapping[str, Any]


def model_structure(config: Mapping[str, Any]) -> ModelStructure | None:
    """Returns the structure of a model, or None if transformers is absent, does not know its type or cannot build it.

    Takes 0.1 to 2 s after the import of transformers; no weights are made.

    Args:
        config: the content of a transformers config.json, with all its parts.

    Raises:
        BadInput: if it has more than MOST_LAYERS layers or MOST_EXPERTS experts.
    """
    installed = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
    if not installed or not isinstance(config.get("model_type"), str):
        return None
    _check_counts(config)
    found = _structure(json.dumps(config, sort_keys=True, default=str))
    parts = (part for part in config.values() if isinstance(part, Mapping))
    return found or next(filter(None, map(model_structure, parts)), None)  # a part of a type that is not known


def _check_counts(config: Mapping[str, Any]) -> None:
    """Raises BadInput for numbers of layers or experts, in any part, that no model has: modules would be built for hours."""
    for name, value in config.items():
        most = MOST_LAYERS if "layers" in str(name) else MOST_EXPERTS if "experts" in str(name) else None
        if isinstance(value, Mapping):
            _check_counts(value)
        elif most is not None and isinstance(value, int) and value > most:
            raise BadInput(f"config: {name} must be at most {most}, found {value}")


@lru_cache(maxsize=16)
def _structure(config_json: str) -> ModelStructure | None:
    import torch
    from transformers import CONFIG_MAPPING

    config = json.loads(config_json)
    if config["model_type"] not in CONFIG_MAPPING:
        return None
    try:
        with warnings.catch_warnings(), _silent_transformers():
            warnings.simplefilter("ignore")
            config.pop("quantization_config", None)  # its scales are no weights
            text = CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config()
            with torch.device("meta"):
                model = _model_class(type(text))._from_config(text)
    except Exception:  # classes check little of what they are given: their errors are of every kind
        return None
    layers: dict[int, tuple[int, int, int, int]] = {}
    for path, module in model.named_modules():
        if (
            (at := _LAYER.search(f"{path}."))
            and "mtp" not in path
            and _EXPERTS.search(path)
            and (sizes := _expert_sizes(module))
        ):
            layers.setdefault(int(at[1]), sizes)
    hidden = getattr(text, "hidden_size", None)
    if not layers or len(set(layers.values())) > 1 or not isinstance(hidden, int):
        return None
    experts, weights, *widths = next(iter(layers.values()))
    dispatched = hidden if hidden in widths else max(widths)
    inner = widths[0] if widths[1] == dispatched else widths[1]
    count = 1 + max(int(at[1]) for path, _ in model.named_modules() if (at := _LAYER.search(f"{path}.")))
    return ModelStructure(count, tuple(sorted(layers)), experts, weights, hidden, dispatched, inner, text.to_dict())


def _expert_sizes(module: Any) -> tuple[int, int, int, int] | None:
    """Returns experts, numbers in the weights of one, and both widths of its last matrix; None if the module holds none."""
    if not hasattr(module, "down_proj") or getattr(module.down_proj, "ndim", 0) != 3:
        return None
    experts, *widths = module.down_proj.shape
    weights = sum(parameter[0].numel() for parameter in module.parameters(recurse=False) if parameter.shape[0] >= experts)
    return experts, weights, widths[0], widths[1]


def _model_class(config_class: type) -> Any:
    """Returns the decoder of a config's class: the one that AutoModel knows, or the one beside the config."""
    from transformers import MODEL_MAPPING, PreTrainedModel

    if config_class in MODEL_MAPPING:
        return MODEL_MAPPING[config_class]
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, PreTrainedModel) and getattr(each, "config_class", None) is config_class
    ]
    return min(found, key=lambda each: (not each.__name__.endswith("Model"), len(each.__name__)))


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Context manager that keeps transformers' log quiet."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
