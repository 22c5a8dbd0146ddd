"""Layers with experts of a model that transformers knows, read from its modules, which are built without weights."""

import importlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aurora.errors import BadInput
from aurora.types.arrays import MOST_LAYERS

MOST_EXPERTS = 1 << 16  # of a layer that a config describes

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = re.compile(r"(?<!shared_)experts$")
_SHARED = re.compile(r"shared_(experts?|mlp)$")
_ELSEWHERE = re.compile(r"mtp|attention|attn")  # modules whose experts are not those of feed-forward layers


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
        shared_weights: numbers in the weights of a layer's shared experts.
        text: entries of the config of the language model, defaults of the type included.
    """

    decoder_layers: int
    moe_layers: tuple[int, ...]
    experts: int
    expert_weights: int
    hidden: int
    dispatched: int
    inner: int
    shared_weights: int
    text: Mapping[str, Any]


def model_structure(config: Mapping[str, Any]) -> ModelStructure | None:
    """Returns the structure of a model, or None if transformers is absent, does not know its type or cannot build it.

    Takes 0.1 to 2 s after the import of transformers; no weights are made.

    Args:
        config: the content of a transformers config.json, with all its parts.

    Raises:
        BadInput: if it has more than MOST_LAYERS layers or MOST_EXPERTS experts, or says experts and is built without any in
            feed-forward layers, with some that differ, or as encoder and decoder.
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
    found, name = list(_expert_layers(model)), config["model_type"]
    if not found and not any("experts" in key and isinstance(said, int) and said > 1 for key, said in text.to_dict().items()):
        return None
    if getattr(text, "is_encoder_decoder", False):
        raise BadInput(f"config: expected a model with a decoder alone, found {name}, which has an encoder too")
    if not found:
        raise BadInput(f"config: expected experts with matrices of their own in feed-forward layers of {name}, found none")
    layers = dict(reversed(found))  # the first of a layer, which are those of text
    if len(kinds := sorted(set(layers.values()))) > 1:
        shown = " and ".join(f"{count} of {weights} weights" for count, weights, *_ in kinds[:2])
        raise BadInput(f"config: expected equally many experts of one size in all layers with experts of {name}, found {shown}")
    if not isinstance(hidden := getattr(text, "hidden_size", None), int):
        return None
    ((experts, weights, *widths),) = kinds
    dispatched = hidden if hidden in widths else max(widths)
    inner = widths[0] if widths[1] == dispatched else widths[1]
    numbered = [(int(at[1]), path, module) for path, module in model.named_modules() if (at := _LAYER.search(f"{path}."))]
    shared = [module for number, path, module in numbered if number == min(layers) and _SHARED.search(path)]
    return ModelStructure(
        1 + max(number for number, _, _ in numbered), tuple(sorted(layers)), experts, weights, hidden, dispatched, inner,
        sum(parameter.numel() for module in shared for parameter in module.parameters()), text.to_dict(),
    )  # fmt: skip


def _expert_layers(model: Any) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Yields, for each module that holds experts of a layer, the layer's number and `_expert_sizes`."""
    for path, module in model.named_modules():
        at = _LAYER.search(f"{path}.")
        if at is None or _ELSEWHERE.search(path):
            continue
        stacks = [child for child in module.children() if type(child).__name__.endswith("ParallelExperts")]
        if (stacks or _EXPERTS.search(path)) and (sizes := _expert_sizes(module, stacks or [module])):
            yield int(at[1]), sizes


def _expert_sizes(module: Any, holders: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """Returns experts, numbers in the weights of one, and both widths of its last matrix; None if there are none.

    Experts' matrices are stacked along a first axis of their own, or along that of their rows.

    Args:
        module: tells `num_experts`, where matrices are stacked along their rows.
        holders: the modules whose parameters are the experts'.
    """
    held = [each for holder in holders for each in holder.parameters() if each.ndim > 1]
    stacked = [each.shape for each in held if each.ndim == 3]
    experts = min((shape[0] for shape in stacked), default=getattr(module, "num_experts", 0))
    if not held or not experts:
        return None
    matrices = stacked or [(experts, rows // experts, width) for rows, width in (each.shape for each in held)]
    weights = sum(each.numel() // (each.shape[0] if stacked else experts) for each in held if each.shape[0] >= experts)
    return experts, weights, matrices[-1][1], matrices[-1][2]


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
