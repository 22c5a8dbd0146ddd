"""Sizes of the models that transformers builds of configurations, without weights: what names of entries are compared with."""

import json
import re
import warnings
from dataclasses import dataclass

import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
EXPERTS, SHARED = re.compile(r"(?<!shared_)experts$"), re.compile(r"shared_(experts?|mlp)$|share_expert$")
ATTENTION = re.compile(r"\.(self_attn(_mlp)?|attn|attention|self_attention|linear_attn|mamba|mixer|norm_attn_norm)$")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's modules; numbers of parameters have biases."""

    decoder_layers: int
    moe_layers: tuple[int, ...]
    experts: int
    expert_weights: int
    widths: tuple[int, int]  # of an expert's last matrix
    shared_weights: int  # of a layer
    attention_weights: int  # of all layers


def sizes_of(config):
    """Builds the decoder of a configuration on the meta device; None without equal experts, or a decoder that AutoModel knows."""
    config = json.loads(json.dumps(config, default=str))
    config.pop("quantization_config", None)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        text = CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config()
        if type(text) not in MODEL_MAPPING:
            return None
        model = MODEL_MAPPING[type(text)]._from_config(text)
    numbered = [(int(at[1]), path, module) for path, module in model.named_modules() if (at := LAYER.search(f"{path}."))]
    layers = {}
    for number, path, module in numbered:
        stacks = [child for child in module.children() if type(child).__name__.endswith("ParallelExperts")]
        if (stacks or EXPERTS.search(path)) and not re.search("mtp|attention|attn", path):
            layers.setdefault(number, expert_sizes(module, stacks or [module]))
    layers = {number: found for number, found in layers.items() if found}
    if len(set(layers.values())) != 1:
        return None
    ((experts, weights, widths),) = set(layers.values())
    shared = [module for number, path, module in numbered if number == min(layers) and SHARED.search(path)]
    attention = [
        module
        for _, path, module in numbered
        if ATTENTION.search(path) and "mtp" not in path and not hasattr(module, "experts")
    ]
    count = 1 + max(number for number, _, _ in numbered)
    return Sizes(count, tuple(sorted(layers)), experts, weights, widths, weights_of(*shared), weights_of(*attention))


def weights_of(*modules):
    """Parameters of modules, each counted once."""
    return sum({id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}.values())


def expert_sizes(module, holders):
    """(Experts, parameters of one, widths of its last matrix): matrices are stacked along an axis of their own, or their rows."""
    arrays = [array for holder in holders for array in holder.parameters() if array.ndim > 1]
    stacked = [tuple(array.shape) for array in arrays if array.ndim == 3]
    experts = min((shape[0] for shape in stacked), default=getattr(module, "num_experts", 0))
    if not arrays or not experts:
        return None
    matrices = stacked or [(experts, array.shape[0] // experts, array.shape[1]) for array in arrays]
    weights = sum(array.numel() // (array.shape[0] if stacked else experts) for array in arrays if array.shape[0] >= experts)
    return experts, weights, matrices[-1][1:]
