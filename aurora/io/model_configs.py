"""Finds and reads configs of models: in a folder, in the local Hugging Face cache, or of a model of the package."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.files import load_json, shipped

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # of a model in the Hugging Face hub


def load_model_config(source: str | Path) -> dict[str, Any]:
    """Reads a model's transformers config.json, or Mistral's params.json. Raises BadInput if it is missing or not JSON.

    Where it says nothing of quantisation, a hf_quant_config.json beside it does, as ModelOpt writes one.

    Args:
        source: the file, the model's folder, its name in the local Hugging Face cache, such as "org/model", or that of a model
            that comes with the package, such as "mixtral-topics".
    """
    if not str(source):
        raise BadInput("`model`: expected a config.json or its folder, found an empty name")
    path = Path(source)
    if not path.exists() and path.name == str(source) and (named := shipped(f"models/{source}")).is_dir():
        path = named
    if not path.exists() and HUB_NAME.fullmatch(str(source)):
        path = _cached_config(str(source))
    if not path.exists():
        raise BadInput(
            f"{source}: no such file; expected a config.json, a model's folder, or a name on the hub or of a shipped model"
        )
    if path.is_dir():
        params = path / "params.json"
        path = params if params.exists() and not (path / "config.json").exists() else path / "config.json"
    config, beside = load_json(path), path.with_name("hf_quant_config.json")
    if not config.get("quantization_config") and beside.is_file():
        config["quantization_config"] = {"quant_method": "modelopt", **load_json(beside)}
    return config


def served_model(source: Path | str) -> str:
    """Returns the name or path to give to a serving engine for the model of `load_model_config(source)`.

    It is the Hugging Face name in the config, if there is one; otherwise the path as given (for a config.json its folder, for a
    shipped model the folder in the package).

    Args:
        source: as in `load_model_config`.

    Raises:
        BadInput: if there is no such model.
    """
    stated, path = str(load_model_config(source).get("_name_or_path", "")), Path(source)
    if not path.exists():
        return str(source) if HUB_NAME.fullmatch(str(source)) else str(shipped(f"models/{source}"))
    if HUB_NAME.fullmatch(stated) and not Path(stated).exists():
        return stated
    return str(path.parent.resolve() if path.name == "config.json" else path)


def _cached_config(name: str) -> Path:
    """Returns the config.json of a model in the local Hugging Face cache, or raises BadInput."""
    with suppress(ImportError, ValueError):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            return Path(cached)
    fetch = f"`hf download {name} config.json` puts it there"
    raise BadInput(f"{name}: no such file, and no model of this name in the local hub cache: {fetch}")
