"""Writes docs/reference/models.md, how every MoE type of transformers is read; `python docs/models.py` renews it."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aurora.algorithms.workload.attention import shared_width
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.models.loading import NOT_PLACED, load_transformers

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
VERSION = ".".join(transformers.__version__.split(".")[:2])
MODELS = Path(transformers.__file__).parent / "models"
# Entries that published configs give and defaults leave empty or out. They are filled in where defaults alone make no model.
EMPTY: dict[str, Any] = {
    "head_dim": 128,
    "n_routed_experts": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 2,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "enable_moe_block": True,
    "is_moe": True,
    "layer_types": "full_attention",  # of each layer
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
ABSENT: dict[str, Any] = {"shared_expert_intermediate_size": 768, "rope_theta": 5e5}
TEXT = """\
# Models

<!-- Written by `python docs/models.py` from transformers {version}; a test compares it with what the code reads. -->

## What is read of a configuration

All commands that take a `config.json` read from it which layers have experts, and how large an expert is, by the names of its
entries; transformers need not know the `model_type`. What the entries do not say is told, or the configuration is
refused with the names that were looked for. Tests build every type below from its configuration, without weights, and compare
layers, experts, widths and parameters with what the names said.

The table has all types of transformers {version} whose configuration speaks of experts, each with its defaults. Bytes are those
of 16-bit weights. Bits, groups and scales of quantised ones are those of `quantization_config`, or of a `hf_quant_config.json`
beside the file. Shared experts are counted in sizes of a routed one.

{read}

Refused, or read with entries that published configurations give:

{remarks}

## What `aurora profile` and `aurora run` serve

They take every Mixture-of-Experts causal language model of transformers that this table says yes to, by its folder or by its
name in the local Hugging Face cache. A model of another type works if its experts modules are called with hidden states, expert
indices and weights.

Weights in mxfp4 (as of GPT-OSS) or block fp8 (as of DeepSeek-V3) are dequantised while they are read, each rank's own experts
only; other quantised weights are refused. Profiles and plans count the dequantised bytes. vLLM serves quantised weights by
plans as they are.

{served}

Some answers depend on how a batch is padded, by the plain model too: those of `deepseek_v4` are served in batches of prompts of
one length, and others are refused.
"""


def page() -> str:
    """Returns the page."""
    load_transformers()
    types = moe_types()
    rows = ["| model type | MoE layers | experts | top-k | shared | bytes of an expert |", "|---" * 6 + "|"]
    remarks = []
    for name in types:
        cells, remark = row(name)
        rows.append(line(name, cells))
        remarks += [f"- `{name}`: {remark}"] if remark else []
    served = ["| model type | experts placed |", "|---|---|"]
    served += [f"| `{name}` | {NOT_PLACED.get(name, 'yes')} |" for name in types if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return TEXT.format(version=VERSION, read="\n".join(rows), remarks="\n".join(remarks), served="\n".join(served))


def line(name: str, cells: list[str]) -> str:
    """Returns the line of a model type in the table."""
    return "| " + " | ".join((f"`{name}`", *cells)) + " |"


def moe_types() -> list[str]:
    """Returns the model types whose configuration class, or a part of it, has a number of experts, in the alphabet's order."""
    named = ((name, model_type_to_module_name(name)) for name in CONFIG_MAPPING)
    files = ((name, MODELS / module / f"configuration_{module}.py") for name, module in named)
    speak = [name for name, file in files if file.exists() and "expert" in file.read_text()]  # before all are imported
    return sorted(name for name in speak if _experts_named(_defaults(name)))


def _defaults(name: str) -> dict[str, Any]:
    """Returns the entries of a type's default configuration; none for a type that has no defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            defaults: dict[str, Any] = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
        except Exception:  # classes check their entries, with errors of every kind
            return {}
    return defaults


def _experts_named(config: Mapping[str, Any]) -> bool:
    return any(_experts_named(value) if isinstance(value, Mapping) else "experts" in str(key) for key, value in config.items())


def row(name: str) -> tuple[list[str], str]:
    """Returns the cells of a model type but the first, and a remark: what was filled in, or the sentence of a refusal."""
    config, shape, refusal = readable(name)
    if shape is None:
        return ["refused", *"––––"], refusal
    return [
        f"{shape.layers} of {shape.decoder_layers}",
        f"{shape.experts}",
        f"{shape.top_k}",
        f"{shared_width(config, shape) / shape.inner:.3g}",
        f"{shape.expert_bytes:,}",
    ], refusal


def readable(name: str) -> tuple[dict[str, Any], Shape | None, str]:
    """Returns a type's default configuration, with what published ones fill in, its shape if it has one, and a remark."""
    config = _defaults(name)
    shape, refusal = _read(config)
    for absent in () if shape else ({}, ABSENT):
        more: dict[str, Any] = {}
        filled = _filled(config, absent, more)
        if (shape := _read(filled)[0]) is not None:
            said = ", ".join(f"`{key}`" for key in absent or more)
            return filled, shape, f"with {said}; its defaults alone make no model with experts"
    return config, shape, refusal


def _read(config: Mapping[str, Any]) -> tuple[Shape | None, str]:
    """Returns a config's shape, or the sentence with which it is refused."""
    try:
        return Shape.of(config), ""
    except BadInput as error:
        return None, str(error)


def _filled(config: Mapping[str, Any], absent: Mapping[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with `absent` added and EMPTY filled in; the latter's entries are added to `more`."""
    filled = {**absent, **config}
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            filled[key] = _filled(value, absent, more)
        elif key in EMPTY and value in (None, False):
            filled[key] = [EMPTY[key]] * config["num_hidden_layers"] if key == "layer_types" else EMPTY[key]
            more[key] = filled[key]
    return filled


if __name__ == "__main__":
    PAGE.write_text(page())
