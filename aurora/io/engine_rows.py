"""Rows of an engine's map of experts: checks them against the model, and divides their slots over GPUs."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.model_structure import moe_layers
from aurora.errors import BadInput, shown
from aurora.io.routing_dumps import spoken_layers

Slots = tuple[tuple[tuple[int, ...], ...], ...]  # by layer and GPU: the experts there
Row = list[Any]  # of a layer: the experts of its slots, or for each GPU a list of those of its slots
Rows = dict[int, Row]  # by layer
EVERY_LAYER = -1  # key of the one row that all layers share


def repeated_slots(slots_LG: Slots, layers: Sequence[int]) -> list[str]:
    """Returns a text for each slot whose expert has an earlier slot on the same GPU."""
    return [
        f"expert {expert} of layer {layer} on GPU {gpu}"
        for layer, held_G in zip(layers, slots_LG, strict=True)
        for gpu, held in enumerate(held_G)
        for expert, times in Counter(held).items()
        for _ in range(times - 1)
    ]


def without_shared(rows: Rows, experts: int, shared: int) -> tuple[Rows, list[str]]:
    """Returns the rows without the shared experts, numbered from `experts` on, and a sentence if there were any."""
    numbers = range(experts, experts + shared)
    kept = {
        layer: [[expert for expert in held if expert not in numbers] for held in row] if by_gpu(row) else row
        for layer, row in rows.items()
    }
    said = f"shared experts under mix placement are left out: {spoken_layers(numbers)}; every token computes them"
    return kept, [said] * (kept != rows)


def divided(
    rows: Rows, by_decoder: bool, dense_layers: Sequence[int], model: Shape | None, gpus: int | None
) -> tuple[Rows, Slots]:
    """Returns the rows of layers with experts, and the experts of their slots by layer and GPU.

    Args:
        rows: the file's rows.
        by_decoder: whether rows have the numbers of decoder layers.
        dense_layers: numbers of the decoder layers without experts.
        model: the model's sizes, which the rows must have; None: any.
        gpus: the number of GPUs; None: rows must have a list for each.

    Raises:
        BadInput: if a layer or an expert is missing or unknown, or slots cannot be divided evenly.
    """
    _check_experts(rows, model.experts if model else None)
    kept = {layer: rows[layer] for layer in _layers(rows, by_decoder, dense_layers, model)}
    return kept, _slots(kept, gpus)


def _layers(rows: Rows, by_decoder: bool, dense_layers: Sequence[int], model: Shape | None) -> Sequence[int]:
    """Returns the numbers of the rows that are of layers with experts, or raises BadInput if one is missing or too many."""
    expected: Sequence[int]
    if model is not None and by_decoder:
        expected = moe_layers(model.decoder_layers - len(dense_layers), dense_layers)
        known = model.decoder_layers + model.mtp_layers
    elif model is not None:
        expected, known = range(model.layers), model.layers
    else:
        known = 1 + max(rows, default=-1)
        without = dense_layers or {*range(known)} - {*rows} if by_decoder else ()
        expected = [layer for layer in range(known) if layer not in without]
    wrong = [f"layer {layer} is missing" for layer in expected if layer not in rows][:1]
    beyond = [layer for layer in rows if not 0 <= layer < known]
    if not expected:
        raise BadInput(f"expected rows of layers with experts, found {spoken_layers(sorted(rows))}")
    if wrong or beyond:
        mtp = model is not None and 0 < len(beyond) <= model.mtp_layers
        hint = ": rows of multi-token prediction are not read, leave them out" if mtp else "".join(f": {row}" for row in wrong)
        raise BadInput(f"expected layers {spoken_layers(expected)}, found {spoken_layers(sorted(rows))}{hint}")
    return expected


def _check_experts(rows: Rows, experts: int | None) -> None:
    """Raises BadInput unless each layer holds all experts, numbered from 0, and nothing else; None: as many as any has."""
    flat = {layer: _flat(row) for layer, row in rows.items()}
    for layer, held in flat.items():
        if wrong := [slot for slot, expert in enumerate(held) if not 0 <= expert < (experts or 1 << 62)][:1]:
            limit, expert = f"to {experts - 1}" if experts else "on", held[wrong[0]]
            found = f"{shown(expert)}{', as in an empty slot' if expert == -1 else ''}"
            raise BadInput(f"layer {layer}, slot {wrong[0]}: expected an expert from 0 {limit}, found {found}")
    experts = experts or 1 + max(map(max, filter(None, flat.values())), default=0)
    for layer, held in flat.items():
        if len(seen := set(held)) < experts:
            absent = next(expert for expert in range(experts) if expert not in seen)
            raise BadInput(f"layer {layer}: expected experts 0 to {experts - 1}, {experts - len(seen)} missing, first {absent}")


def _flat(row: Row) -> list[int]:
    """The experts of a layer's slots, GPU by GPU."""
    return [*chain.from_iterable(row)] if by_gpu(row) else row


def by_gpu(row: Row) -> bool:
    """Returns whether a layer's row is a list for each GPU."""
    return bool(row) and isinstance(row[0], list)


def _slots(rows: Rows, gpus: int | None) -> Slots:
    """Returns the experts of each layer's slots by GPU; a row of all GPUs is divided evenly."""
    if any(map(by_gpu, rows.values())):
        if len(lengths := {len(row) for row in rows.values()}) > 1 or gpus not in (None, *lengths):
            raise BadInput(f"expected {gpus or 'equally many'} GPUs in every layer, found {sorted(lengths)}")
        return tuple(tuple(map(tuple, row)) for row in rows.values())
    if gpus is None:
        raise BadInput("the file does not say the number of GPUs; give `gpus`")
    slots = {len(row) for row in rows.values()}
    if len(slots) != 1 or gpus < 1 or max(slots) % gpus:
        raise BadInput(f"expected as many slots in every layer, on {gpus} GPUs evenly, found {sorted(slots)}")
    per_gpu = max(slots) // gpus
    return tuple(tuple(tuple(row[g * per_gpu : (g + 1) * per_gpu]) for g in range(gpus)) for row in rows.values())
