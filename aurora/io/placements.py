"""Placements as JSON: in plans, in the output of `aurora place --json`, and in files of their own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aurora.errors import AuroraError, BadInput
from aurora.io.files import check_schema, load_json, schema_of, write_text
from aurora.types import Placement

FORMAT = "aurora placement"


def layers_json(placement: Placement) -> list[dict[str, Any]]:
    """Returns a dict per layer: "slots" has each GPU's experts; with replicas "split" has each expert's [GPU, share] pairs."""
    layers: list[dict[str, Any]] = []
    for layer, held_G in enumerate(placement.slots_LG):
        layers.append({"slots": [list(held) for held in held_G]})
        if placement.split_LG is not None:
            split: dict[str, list[list[float]]] = {str(expert): [] for expert in range(placement.experts)}
            for gpu, (held, parts) in enumerate(zip(held_G, placement.split_LG[layer], strict=True)):
                for expert, part in zip(held, parts, strict=True):
                    split[str(expert)].append([gpu, part])
            layers[-1]["split"] = split
    return layers


def placement_from_json(layers: Sequence[Mapping[str, Any]]) -> Placement:
    """Returns the placement that `layers_json` made into dicts.

    Args:
        layers: for each layer "slots" and perhaps "split"; without "split", replicas take even parts of an expert's load.
    """
    slots = tuple(tuple(tuple(held) for held in layer["slots"]) for layer in layers)
    if not any("split" in layer for layer in layers):
        return Placement.evenly(slots)
    shares = [{(int(e), int(g)): float(part) for e, pairs in layer["split"].items() for g, part in pairs} for layer in layers]
    split = tuple(
        tuple(tuple(share[expert, gpu] for expert in held) for gpu, held in enumerate(layer))
        for layer, share in zip(slots, shares, strict=True)
    )
    return Placement(slots, split)


def load_placement(path: str | Path) -> Placement:
    """Read a placement.

    Args:
        path: a file of `save_placement`, or the output of `aurora place --json`.

    Raises:
        BadInput: if the file holds no placement.
    """
    path = Path(path)
    found = load_json(path)
    check_schema(path, found, str(found.get("format", FORMAT)))
    try:
        return placement_from_json(found["layers"])
    except AuroraError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: not a placement: {type(error).__name__}: {error}") from None


def save_placement(placement: Placement, method: str, path: Path) -> None:
    """Write a placement as JSON.

    Args:
        placement: the placement.
        method: name of the method that made it, for readers.
        path: exact path of the file.
    """
    layers = layers_json(placement)
    write_text(path, json.dumps({"schema": schema_of(FORMAT), "format": FORMAT, "method": method, "layers": layers}) + "\n")
