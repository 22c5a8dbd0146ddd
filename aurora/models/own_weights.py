"""Loads a model without its experts, and single experts from its files, for ranks that hold only some of the experts."""

import copy
import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aurora.errors import BadInput, MissingDependency
from aurora.models.loading import (
    LOADING,
    MoeModel,
    expert_parameters,
    find_moe_layers,
    hold_experts,
    load_model,
    load_transformers,
)

KNOWN = "5.19 to 5.23"  # versions of transformers whose loading is known
IN_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"  # an environment variable of transformers


def load_without_experts(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> MoeModel:
    """Loads a MoE model without its experts; each weight is read directly from the files to `device`.

    Its experts modules hold no experts; each has an attribute `reader`, the ExpertReader of its layer.

    transformers finds the files, builds the model without memory, and converts, ties and initialises weights as usual. Only its
    function that fills the empty model is replaced during the call, by one that skips the expert tensors.

    Args:
        path, device, dtype: as in `load_model`.

    Raises:
        BadInput, MissingDependency: as `load_model`. BadInput also if the files lack tensors of some experts; MissingDependency
            also if this version of transformers loads models differently from the versions KNOWN.
    """
    transformers = load_transformers()
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "_load_pretrained_model"):
        raise MissingDependency(f"reading single experts needs transformers as of {KNOWN}, found {transformers.__version__}")

    thread = threading.get_ident()

    def load_dense(model: Any, state: Any, files: Sequence[str], config: Any, *rest: Any) -> Any:
        if threading.get_ident() != thread:  # another thread's model, which is loaded whole
            return load(model, state, files, config, *rest)
        return _ExpertFiles(model, files, replace(config, device_map={"": torch.device(device)}), load).load_dense(model)

    with LOADING:
        load = PreTrainedModel._load_pretrained_model
        PreTrainedModel._load_pretrained_model = staticmethod(load_dense)
        try:
            return load_model(path, device, dtype)
        finally:
            PreTrainedModel._load_pretrained_model = staticmethod(load)


def release_freed_memory() -> None:
    """Returns freed memory to the operating system (malloc_trim); glibc would keep conversion buffers larger than a layer."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@dataclass(frozen=True)
class ExpertReader:
    """Reads the weights of one MoE layer's experts from a model's files."""

    count: int  # experts of the layer
    _files: "_ExpertFiles"
    _layer: int  # its number among the MoE layers

    def read(self, experts: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Reads the weights of `experts`, which must be distinct. Returns {expert: {parameter name: weights}}.

        Raises:
            BadInput: if the files cannot be read any more, or lack tensors.
        """
        return self._files.read(self._layer, experts) if experts else {}


class _ExpertFiles:
    """A model's files, and which of their tensors have the weights of which experts."""

    def __init__(self, model: Any, paths: Sequence[str], config: Any, load: Callable[..., Any]) -> None:
        """model: on the meta device; config: transformers' LoadStateDictConfig; load: transformers' function that uses it."""
        self._config, self._load = config, load
        self._skeleton = copy.deepcopy(model)
        self._layers = find_moe_layers(self._skeleton)
        names = {id(parameter): name for name, parameter in self._skeleton.named_parameters()}
        self._names_L = [{names[id(weight)] for _, weight in expert_parameters(layer.experts)} for layer in self._layers]
        self._path_of = {key: path for path in paths for key in _tensors(path)}
        self._sources_L = self._find_sources()

    def _find_sources(self) -> list[list[list[str]]]:
        """For each layer, the names of the tensors that transformers makes one parameter of, in its order of the experts."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        state, mapping = self._skeleton.state_dict(), self._config.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix = self._skeleton.base_model_prefix
        layer_of = {name: layer for layer, names in enumerate(self._names_L) for name in names}
        sources_L: list[dict[Any, list[str]]] = [defaultdict(list) for _ in self._layers]
        for key in sorted(self._path_of, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name in layer_of:
                sources_L[layer_of[name]][name, pattern].append(key)
        for layer, sources in zip(self._layers, sources_L, strict=True):
            for keys in sources.values():
                if len(keys) not in (1, layer.count):
                    where = self._path_of[keys[0]]
                    raise BadInput(f"{where}: expected {layer.count} tensors like {keys[0]}, found {len(keys)}")
        return [list(sources.values()) for sources in sources_L]

    def load_dense(self, model: Any) -> tuple[Any, Any]:
        """Fills all of the model but its experts. Returns what transformers' function returns."""
        for number, layer in enumerate(find_moe_layers(model)):
            layer.experts.reader = ExpertReader(layer.count, self, number)
            hold_experts(layer.experts, [])
            layer.experts.to_empty(device=self._config.device_map[""], recurse=False)
        experts = {key for sources in self._sources_L for keys in sources for key in keys}
        report, index = self._filled(model, self._open(self._path_of.keys() - experts))
        report.missing_keys.difference_update(*self._names_L)
        return report, index

    def read(self, number: int, experts: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
        """The weights of these experts of a layer, by expert and parameter name, from files that are as they were."""
        layer, names = self._layers[number], self._names_L[number]
        state: dict[str, Any] = {}
        for keys in self._sources_L[number]:
            if len(keys) == layer.count:  # a tensor for each expert: those of the wanted ones come under the first names
                tensors = self._open([keys[expert] for expert in experts])
                state |= {key: tensors[keys[expert]] for key, expert in zip(keys, experts, strict=False)}
            else:
                (whole,) = self._open(keys).values()
                state[keys[0]] = _Rows(whole, f"{self._path_of[keys[0]]}, {keys[0]}", layer.count, experts)
        whole_experts, part = layer.experts, copy.deepcopy(layer.experts)
        hold_experts(part, [0] * len(experts))
        setattr(layer.block, layer.name, part)
        try:
            report, _ = self._filled(self._skeleton, state, list(names))
        finally:
            setattr(layer.block, layer.name, whole_experts)
        reshaped = {name for name, *_ in report.mismatched_keys}
        if wrong := (report.missing_keys & names) | report.unexpected_keys | reshaped | set(report.conversion_errors):
            where = Path(next(iter(self._path_of.values()))).parent
            raise BadInput(f"{where}: expected the weights of {layer.count} experts, found none that fit {min(wrong)}")
        weights = expert_parameters(part)
        return {expert: {name: weight.detach()[slot] for name, weight in weights} for slot, expert in enumerate(experts)}

    def _filled(self, model: Any, state: dict[str, Any], *expected: list[str]) -> Any:
        """Calls transformers' function without threads that read ahead, and keep what they free."""
        with LOADING:
            threads = IN_ONE_THREAD not in os.environ
            os.environ.setdefault(IN_ONE_THREAD, "1")
            try:
                return self._load(model, state, None, self._config, *expected)
            finally:
                if threads:
                    del os.environ[IN_ONE_THREAD]

    def _open(self, keys: Iterable[str]) -> dict[str, Any]:
        """The tensors of these names, which are read when they are indexed."""
        keys_of: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            keys_of[self._path_of[key]].append(key)
        opened = {path: _tensors(path) for path in keys_of}
        return {key: opened[path][key] for path, keys in keys_of.items() for key in keys}


class _Rows:
    """The rows of some experts of a tensor in a file, experts along its first axis; it is read when it is indexed."""

    def __init__(self, whole: Any, where: str, count: int, experts: Sequence[int]) -> None:
        self._whole, self._experts = whole, experts
        rows = (whole.shape if isinstance(whole, torch.Tensor) else whole.get_shape())[0]
        if rows % count:
            raise BadInput(f"{where}: expected rows of {count} experts, found {rows} rows")
        self._rows = rows // count

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = [self._whole[expert * self._rows : (expert + 1) * self._rows] for expert in self._experts]
        return torch.cat(parts)[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _tensors(path: str) -> dict[str, Any]:
    """A file's tensors by name; they are read when they are indexed."""
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                return {name: file.get_slice(name) for name in names}
        from transformers.modeling_utils import load_state_dict

        return dict(load_state_dict(path))
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: expected weights of the model, found none: {error}") from None
