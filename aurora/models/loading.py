"""Loads transformers MoE models and finds their experts."""

import copy
import importlib.util
import inspect
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aurora.algorithms.workload.model_structure import expert_groups, top_k
from aurora.errors import BadInput, MissingDependency, first_line, need
from aurora.models.hub import ROUTER, model_folder, router_fingerprint
from aurora.types.model_identity import ModelIdentity

LOADING = threading.RLock()  # transformers changes itself while it loads a model, for all threads
QUANTISED = ("fp8", "mxfp4")  # by quant_method, which transformers dequantises while it loads
# Model types of transformers whose experts cannot be placed, and why.
NOT_PLACED = {
    "dbrx": "rows of all its experts lie in one matrix",
    "doge": "an expert is one row of an embedding, which is looked up and not sent to",
    "jetmoe": "its attention layers have experts too, and plans place experts of feed-forward layers only",
    **dict.fromkeys(("llama4", "llama4_text"), "each expert is given all tokens, and not those that chose it"),
    "longcat_flash": "tokens choose experts that compute nothing, so that the number of their experts varies",
    "zaya": "tokens may choose no expert, so that the number of their experts varies",
}


@dataclass(frozen=True)
class MoeLayer:
    """Location of one MoE layer in a transformers model."""

    number: int  # the number of its decoder layer, from 0
    block: nn.Module  # the module that holds the router and the experts
    name: str  # the attribute of `block` that is the experts module

    @property
    def count(self) -> int:
        """Number of experts of the layer, including those whose weights are still in the model's files."""
        reader = getattr(self.experts, "reader", None)
        return int(self.experts.num_experts if reader is None else reader.count)

    @property
    def experts(self) -> Any:
        """The experts module; called with tokens (N, H), expert indices (N, K) and weights (N, K)."""
        return getattr(self.block, self.name)

    @property
    def router_weight(self) -> torch.Tensor:
        """The router's weights, (E, hidden); more than E rows if the router also weights shared experts.

        Raises:
            BadInput: if the block has no such weights.
        """
        for name, parameter in self.block.named_parameters():
            if ROUTER.search(name) and parameter.ndim == 2 and parameter.shape[0] >= self.count:
                return parameter
        raise BadInput(f"{type(self.block).__name__}: expected router weights with {self.count} rows, found none")


@dataclass(frozen=True)
class MoeModel:
    """A loaded MoE causal language model."""

    name: str  # the name of its folder
    model: Any  # the transformers model
    tokenizer: Any  # its tokenizer
    layers: tuple[MoeLayer, ...]  # its MoE layers, in forward order
    top_k: int  # experts per token

    @property
    def config(self) -> Any:
        """The model's config; for a multimodal model, the text part of it."""
        return getattr(self.model.config, "text_config", self.model.config)

    @property
    def experts(self) -> int:
        """Number of experts in each MoE layer."""
        return self.layers[0].count

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers without experts."""
        return tuple(sorted(set(range(self.config.num_hidden_layers)) - {layer.number for layer in self.layers}))

    @property
    def expert_groups(self) -> tuple[int, int]:
        """(number of expert groups, largest number of groups from which a token's experts are chosen)."""
        return expert_groups(self.config.to_dict())

    @property
    def hidden(self) -> int:
        """Number of elements of an expert's input for one token: a hidden state, or a projection of it."""
        return int(getattr(self.config, "moe_latent_size", None) or self.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """Vocabulary size: number of token ids."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of hidden states: that of the embeddings, because expert weights may be quantised."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden * self.hidden_dtype.itemsize

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert in one layer."""
        return sum(math.prod(stack.shape[1:]) * stack.element_size() for _, stack in expert_parameters(self.layers[0].experts))

    @property
    def other_bytes(self) -> int:
        """Bytes of all weights outside experts."""
        inside_bytes = sum(weight.nbytes for layer in self.layers for _, weight in expert_parameters(layer.experts))
        return int(sum(weight.nbytes for weight in self.model.parameters())) - inside_bytes

    @property
    def identity(self) -> ModelIdentity:
        """Identity of the model, by which profiles and plans are matched with it."""
        sizes = (len(self.layers), self.experts, self.top_k, self.row_bytes, self.expert_bytes)
        return ModelIdentity(self.name, self.fingerprint(), *sizes)

    def fingerprint(self) -> str:
        """Returns the `router_fingerprint` of the model's router weights."""
        return router_fingerprint([layer.router_weight.detach() for layer in self.layers])


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> MoeModel:
    """Loads a MoE model with transformers, for inference. Weights in mxfp4 (GPT-OSS) or fp8 (DeepSeek-V3) are dequantised.

    Args:
        path: a model folder, or a name in the local hub cache.
        device: device of the weights.
        dtype: dtype of the weights; None: float32 on the CPU, the dtype of the model's files on other devices.

    Raises:
        BadInput: if there is no model, weights are missing or have another quantisation, aurora does not support its experts
            modules, or MoE layers have different numbers of experts.
        MissingDependency: if transformers is not installed, or accelerate for quantised weights.
    """
    transformers = load_transformers()
    config = _from_pretrained(path, transformers.AutoConfig)
    if (reason := NOT_PLACED.get(config.model_type)) is not None:
        raise BadInput(f"{path}: experts of {config.model_type} cannot be placed: {reason}")
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        _check_quantisation(path, quantised)
        quantised["dequantize"] = True  # kernels for quantised experts are not called by index
    model_dtype = dtype or (torch.float32 if device == "cpu" else config.dtype or torch.float32)
    options = {"config": config, "dtype": model_dtype, "output_loading_info": True}
    with LOADING:
        model, report = _from_pretrained(path, transformers.AutoModelForCausalLM, **options)
    if absent := sorted(report["missing_keys"]):  # transformers would initialise them randomly, differently on every rank
        raise BadInput(f"{path}: expected all weights in its files, {len(absent)} are missing, first {absent[0]}")
    model = model.to(device).eval()
    layers = find_moe_layers(model)
    if not layers:
        raise BadInput(f"{path}: {type(model).__name__} has no MoE layers that aurora knows; expected a MoE causal LM")
    for layer in layers if quantised is not None else ():
        for _, parameter in expert_parameters(layer.experts):
            parameter.data = parameter.data.to(model_dtype)  # of mxfp4, transformers before 5.23 makes bfloat16
    sizes = {layer.count for layer in layers}
    if len(sizes) > 1:
        raise BadInput(f"{path}: expected the same number of experts in every MoE layer, found {sorted(sizes)}")
    return MoeModel(Path(path).name, model, load_tokenizer(path), layers, top_k(model.config.to_dict()))


def _check_quantisation(path: str | Path, quantised: Mapping[str, Any]) -> None:
    """Raises BadInput or MissingDependency unless weights of this quantization_config can be loaded."""
    if (method := quantised.get("quant_method")) not in QUANTISED:
        raise BadInput(f"{path}: expected weights as they are or quantised by {' or '.join(QUANTISED)}, found {method}")
    if importlib.util.find_spec("accelerate") is None:
        raise MissingDependency(f'accelerate is needed for weights in {method}: pip install "aurora-moe[run]"')


def load_config(path: str | Path) -> Any:
    """Loads the config of a model folder; for a multimodal model, the text part of it.

    Raises:
        BadInput: if the folder has no config.
    """
    config = _from_pretrained(path, load_transformers().AutoConfig)
    return getattr(config, "text_config", config)


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a model folder.

    Raises:
        BadInput: if the folder has no tokenizer.
    """
    return _from_pretrained(path, load_transformers().AutoTokenizer)


def load_transformers() -> Any:
    """Returns the module transformers, without its progress bars and warnings.

    Raises:
        MissingDependency: if it is not installed.
    """
    need("transformers")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _from_pretrained(path: str | Path, factory: Any, **options: Any) -> Any:
    """Loads `path` by a transformers class, or raises BadInput."""
    folder = model_folder(path)
    if not (folder / "config.json").exists():
        raise BadInput(f"{path}: expected a model folder with a config.json, found none")
    try:
        return factory.from_pretrained(folder, **options)
    except BadInput:
        raise  # of a reader of own weights
    except Exception as error:  # transformers raises many kinds for a path that is no model
        raise BadInput(f"{path}: not a model that transformers can load: {first_line(error)}") from None


def find_moe_layers(model: nn.Module) -> tuple[MoeLayer, ...]:
    """Returns the MoE layers in forward order."""
    layers: list[MoeLayer] = []
    for path, name in find_experts(model):
        number = next((int(part) for part in path.split(".") if part.isdigit()), len(layers))
        layers.append(MoeLayer(number, model.get_submodule(path), name))
    return tuple(layers)


def expert_parameters(experts: Any) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) of the parameters of an experts module whose first axis is the expert."""
    count = int(experts.num_experts)
    return [(name, parameter) for name, parameter in experts.named_parameters() if parameter.shape[0] == count]


def hold_experts(experts: Any, held: Sequence[int | Mapping[str, torch.Tensor]]) -> None:
    """Replaces the experts of an experts module by `held`, renumbered from 0 in that sequence.

    Args:
        experts: the module; the memory of dropped experts is freed.
        held: for each new slot, either an expert of the module, by its present number, or the weights of another expert, by
            parameter name.
    """
    for name, parameter in expert_parameters(experts):
        weights = parameter.new_empty(len(held), *parameter.shape[1:])
        for slot, expert in enumerate(held):
            weights[slot] = parameter.detach()[expert] if isinstance(expert, int) else expert[name]
        path, _, own_name = name.rpartition(".")
        setattr(experts.get_submodule(path), own_name, nn.Parameter(weights, requires_grad=False))
    experts.num_experts = len(held)


def with_same_weights(model: MoeModel) -> MoeModel:
    """Returns a copy of the model with separate module objects, which share all parameters and buffers with the original.

    The copy needs no memory for weights. Modules can be replaced in one of the two without changing the other. Both read
    experts from the model's files with the same readers.

    Args:
        model: a model whose experts modules have not been replaced.
    """
    shared = [*model.model.parameters(), *model.model.buffers()]
    shared += [reader for layer in model.layers if (reader := getattr(layer.experts, "reader", None)) is not None]
    tree = copy.deepcopy(model.model, {id(part): part for part in shared})
    return replace(model, model=tree, layers=find_moe_layers(tree))


# The first parameters of an experts module's forward that a block calls by index.
CALLED_BY_INDEX = (("hidden_states", "top_k_index", "top_k_weights"), ("hidden_states", "router_indices", "routing_weights"))


def find_experts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (path of a MoE block, name of its attribute with the experts module), in forward order; see CALLED_BY_INDEX."""
    for path, block in model.named_modules():
        for name, child in block.named_children():
            if hasattr(child, "num_experts") and tuple(inspect.signature(child.forward).parameters)[:3] in CALLED_BY_INDEX:
                yield path, name
