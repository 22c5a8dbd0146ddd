"""Reads from a model's config.json the number of its layers, and the layers that have experts, by the names of its entries.

Tests compare what is read with the modules of every MoE model type of transformers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aurora.errors import BadInput, shown
from aurora.types.arrays import MOST_LAYERS, BoolArray, IntArray
from aurora.types.read_numbers import whole_number

MOST_EXPERTS = 1 << 16  # of a layer that a config describes
DISPATCHED = (
    "routed_expert_hidden_size",
    "moe_latent_size",
    "moe_hidden_size",
)  # entries on the width in which tokens travel to experts


def check_counts(config: Mapping[str, Any]) -> None:
    """Raises BadInput for numbers of layers or experts, in any part, that no model has."""
    for name, value in config.items():
        most = MOST_LAYERS if "layers" in str(name) else MOST_EXPERTS if "experts" in str(name) else None
        if isinstance(value, Mapping):
            check_counts(value)
        elif most is not None and isinstance(value, int) and value > most:
            raise BadInput(f"config: {name} must be at most {most}, found {value}")
        elif name in LAYER_RULES and type(value) is int and value < -(name == "moe_layer_end_index"):
            raise BadInput(f"config: {name} must be zero or more, found {value}")


def decoder_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of decoder layers that a transformers config.json states. Raises BadInput if it states none."""
    flat = flat_config(config)
    for name in LAYER_KINDS:
        if (kinds := flat.get(name)) and isinstance(kinds, list | str):
            return len(kinds)
    return number(flat, "num_hidden_layers", "n_layers", "num_layers")


def expert_count(config: Mapping[str, Any]) -> int:
    """Returns the number of experts of a layer that a transformers config.json states. Raises BadInput if it states none."""
    return number(flat_config(config), *_EXPERT_COUNTS)


def top_k(config: Mapping[str, Any]) -> int:
    """Returns the experts per token that a transformers config.json states. Raises BadInput if it states none."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
    return number(flat_config(config), *names, "experts_per_token", "num_selected_experts")


def expert_groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (n, m) for group-limited routing: experts form n groups, and a token's experts lie in at most m of them.

    Returns (1, 1) for a router without groups.

    Args:
        config: the content of a transformers config.json.

    Raises:
        BadInput: if the groups do not divide the experts, or a token's groups hold fewer experts than it chooses.
    """
    flat = flat_config(config)
    if flat.get("topk_method") == "greedy" or not flat.get("n_group") or not flat.get("topk_group"):
        return 1, 1
    groups, token_groups = number(flat, "n_group"), number(flat, "topk_group")
    experts = expert_count(flat)
    if experts % groups or token_groups > groups or token_groups * (experts // groups) < top_k(flat):
        raise BadInput(
            f"config: expected an n_group that divides {experts} experts and a topk_group with {top_k(flat)} experts or more, "
            f"found {groups} and {token_groups}"
        )
    return (groups, token_groups) if token_groups < groups else (1, 1)


def dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the indices, among all decoder layers, of the layers without experts, ascending.

    A layer has experts unless a config entry on layers excludes it.

    Args:
        config: the content of a transformers config.json.

    Raises:
        BadInput: if an entry on layers cannot be read, or is not known.
    """
    config = flat_config(config)
    layers = decoder_layers(config)
    if layers > MOST_LAYERS:
        raise BadInput(f"config: num_hidden_layers must be at most {MOST_LAYERS}, found {layers}")
    moe = np.ones(layers, dtype=bool)
    number_L = np.arange(layers)
    for name, value in config.items():
        if value is None:
            continue
        rule = LAYER_RULES.get(name, LAYER_KINDS.get(name))
        if rule is None and _SAYS_OF_LAYERS.search(name) and name not in _SAYS_NOTHING and type(value) in (int, str, list):
            raise BadInput(f"config: {name} is not known, so that layers with experts cannot be told; known: {_looked_for()}")
        try:
            first = config.get("expert_layer_offset", 0) if name == "expert_layer_period" else 0
            moe &= rule(number_L - first, value) if rule is not None else True
        except (BadInput, TypeError, ValueError, ZeroDivisionError):
            raise BadInput(f"config: {name} does not say which of {layers} layers have experts: {str(value)[:80]}") from None
    return _others(np.flatnonzero(moe).tolist(), layers)


def _looked_for() -> str:
    """Returns the names by which configs say which layers have experts."""
    return ", ".join((*LAYER_RULES, *LAYER_KINDS))


def _every(number_L: IntArray, step: Any) -> BoolArray:
    """Marks the last layer of each `step`."""
    if type(step) is not int or step < 1:
        raise ValueError(step)
    return np.asarray((number_L + 1) % step == 0)


def _listed(number_L: IntArray, listed: Any) -> BoolArray:
    """Marks the layers that a list names, or a text with commas."""
    if isinstance(listed, str):
        listed = [whole_number(part) for part in listed.split(",")]
    if not isinstance(listed, list) or any(type(number) is not int for number in listed):
        raise ValueError(listed)
    return np.isin(number_L, listed)


def _from(number_L: IntArray, first: Any) -> BoolArray:
    """The layers from `first` on; of a list with a number for each kind of tokens, that of text."""
    if isinstance(first, list) and first:
        first = first[0]
    if type(first) is not int:
        raise ValueError(first)
    return np.asarray(number_L >= first)


def _types(number_L: IntArray, types: Any) -> BoolArray:
    """Marks layers by a list with an entry for each ("sparse", "moe" and 1 have experts), or by a step that layer 0 begins."""
    if type(types) is int and types > 0:
        return np.asarray(number_L % types == 0)
    sparse_L = np.array([kind in ("sparse", "moe", "hash_moe", 1) for kind in types])
    if sparse_L.shape != number_L.shape:
        raise ValueError(types)
    return sparse_L


def _kinds(number_L: IntArray, kinds: Any) -> BoolArray:
    """Marks the layers whose letter or word says experts, if any does: "E" of a pattern, "moe" of a list."""
    moe_L = np.array([kind in ("E", "moe", "sparse") for kind in kinds])
    if moe_L.shape != number_L.shape:
        raise ValueError(kinds)
    return moe_L if moe_L.any() else number_L >= 0


def _blocks(number_L: IntArray, blocks: Any) -> BoolArray:
    """Marks the layers whose table has experts: it names no other kind of block, and no number of experts as zero."""
    tables = [dict(block) for block in blocks]
    moe_L = np.array(
        [of.get("block_type", "moe") == "moe" and all(of.get(name, 1) for name in _EXPERT_COUNTS) for of in tables]
    )
    if moe_L.shape != number_L.shape:
        raise ValueError(blocks)
    return moe_L


def entries_by_layer(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a flat config's entries for each layer with experts, where `block_configs` has some by layer; else one dict."""
    blocks = flat.get("block_configs")
    if not isinstance(blocks, list):
        return [dict(flat)]
    dense = dense_layers(flat)
    return [{**flat, **block} for layer, block in enumerate(blocks) if layer not in dense] or [dict(flat)]


LAYER_RULES: dict[str, Callable[[IntArray, Any], BoolArray]] = {
    "mlp_layer_types": _types,
    "moe_layer_freq": _types,
    "moe_layers": _listed,
    "moe_layers_enum": _listed,
    "mlp_only_layers": lambda number_L, listed: ~_listed(number_L, listed),
    "first_k_dense_replace": _from,
    "num_dense_layers": _from,
    "moe_layer_num_skipped": _from,
    "moe_layer_start_index": _from,
    "moe_layer_end_index": lambda number_L, last: ~_from(number_L, last + 1) if last != -1 else number_L >= 0,
    "decoder_sparse_step": _every,
    "interleave_moe_layer_step": _every,
    "moe_layer_interval": _every,
    "moe_layer_frequency": _every,
    "moe_every_n_layer": _every,
    "moe_every_n_layers": _every,
    "route_every_n": _every,
    "expert_layer_period": lambda number_L, step: _every(number_L - 1, step),  # counted from expert_layer_offset
    "block_configs": _blocks,
}
LAYER_KINDS = {"layers_block_type": _kinds, "hybrid_override_pattern": _kinds}  # an entry or a letter for each layer
_SAYS_OF_LAYERS = re.compile(
    r"(moe|sparse|dense|expert).*(layer|every|step|interval|freq|skip)|layer.*(moe|sparse|dense|expert)"
)
_SAYS_NOTHING = ("moe_layer_offset", "moe_layer_use_mod", "expert_layer_offset")
_EXPERT_COUNTS = (  # names of the number of experts of a layer
    *("num_local_experts", "num_experts", "n_routed_experts"),
    *("moe_num_experts", "num_moe_experts", "num_routed_experts"),
)


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config as one flat dict, with the entries of its text part (in multimodal models) and its feed-forward part.

    If no part with a usual name has a number of experts, the only part that has such a number is used.

    Raises:
        BadInput: if several such parts have a number of experts.
    """
    flat, parts = dict(config), ("thinker_config", "text_config", "language_config", "llm_config", "ffn_config", "moe")
    for part in parts:
        nested = flat.pop(part, None)
        flat |= nested if isinstance(nested, dict) else {}
    if not any(flat.get(name) for name in _EXPERT_COUNTS):
        inner = {name: flat_config(part) for name, part in flat.items() if isinstance(part, dict)}
        inner = {name: part for name, part in inner.items() if any(part.get(count) for count in _EXPERT_COUNTS)}
        if len(inner) > 1:
            raise BadInput(f"config: expected one part that tells a number of experts, found {', '.join(inner)}")
        flat |= next(iter(inner.values()), {})
    return flat


def moe_layers(layers: int, dense_layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the indices, among all decoder layers, of the `layers` layers with experts, given those of `dense_layers`.

    moe_layers(3, [0, 2]) is (1, 3, 4).
    """
    return _others(dense_layers, layers + len(dense_layers))


def _others(numbers: Sequence[int], layers: int) -> tuple[int, ...]:
    """The numbers below `layers` that are not among `numbers`, ascending."""
    return tuple(sorted(set(range(layers)) - set(numbers)))


def number(config: Mapping[str, Any], *names: str) -> int:
    """Returns the value of the first of `names` under which the config has a whole number above zero.

    A list counts as a number if all of its values are equal.

    Raises:
        BadInput: if no name has such a number, or a list has different values.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                unequal = "layers have unequal experts: " if re.search("expert|moe", name) else ""
                raise BadInput(
                    f"config: {unequal}expected {name} alike for all layers and kinds of tokens, found {str(value)[:80]}"
                )
            value = value[0]
        if type(value) is int and value > 0:
            return value
    text = next((shown(config[name]) for name in names if config.get(name) is not None), "none: not a MoE model?")
    raise BadInput(f"config: expected a whole number above zero under {' or '.join(names)}, found {text}")
