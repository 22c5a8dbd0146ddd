"""Reads routing that serving engines recorded, without trusting the file.

Nothing is unpickled freely: `.pt` files are loaded with `weights_only`, from torch's zip format. Declared sizes are checked
before anything of that size is read.

Sources: SGLang's expert distribution recorder, v0.5 `srt/eplb/expert_distribution.py` (modes stat, per_pass, per_token) and its
older CSV, v0.4.4 `srt/managers/expert_distribution.py`; TensorRT-LLM's expert statistics, v1.2 `_torch/expert_statistic.py`;
vLLM's `expert_load_stats_path` JSON lines (`eplb_load_stats`, its pull request 41141); EPLB's `weight` [layers, experts].
"""

import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput, check_one_of, need
from aurora.io.files import check_archive, check_size, json_lines, load_csv, load_json, load_npy, naming, read_npz
from aurora.io.matrices import expert_counts
from aurora.io.schema import FileTable, converted
from aurora.types.arrays import BoolArray, IntArray, as_array, counts
from aurora.types.profile import check_counts
from aurora.types.read_numbers import whole_number


@dataclass(frozen=True)
class RecordedRouting:
    """Routing that an engine recorded in one file.

    A token-level file says which experts each token chose; other files only count tokens.

    Attributes:
        counts_TLE: (T, L, E) int64, the tokens of every expert in each recorded step. A token-level file without steps counts
            as one step.
        experts_ULK: (U, L, K) integers, the experts that each token chose; None if the file is not token-level.
        lengths_Q: (Q,) int64, number of tokens of each sequence or, if `pass_T` is given, of each step. None if the file is not
            token-level.
        layers: decoder numbers of the recorded layers; None: every layer with experts was recorded.
        rank: the source rank whose tokens the file has; None: the file has the tokens of all ranks.
        pass_T: (T,) int64, ascending, the number of each step's forward pass. A pass has the same number on all ranks, so their
            files can be joined. None if unknown.
        left_out: description for users of parts of the file that were not read; empty: all were read.
    """

    counts_TLE: IntArray
    experts_ULK: NDArray[Any] | None = None
    lengths_Q: IntArray | None = None
    layers: tuple[int, ...] | None = None
    rank: int | None = None
    pass_T: IntArray | None = None
    left_out: str = ""

    @property
    def which(self) -> str:
        """The recorded layers in words: "layer 3, 7", or "26 layers" if all were recorded."""
        return f"{self.counts_TLE.shape[1]} layers" if self.layers is None else f"layer {', '.join(map(str, self.layers))}"


@dataclass(frozen=True)
class RoutingFormat:
    """A file format of recorded routing, with its reader.

    Attributes:
        read: function (file, the model's Shape) -> RecordedRouting.
        files: description of the files, by suffix or contents, for help texts.
    """

    read: Callable[[Path, Shape], RecordedRouting]
    files: str


def read_dump(path: Path, form: str, shape: Shape) -> RecordedRouting:
    """Read the routing that an engine recorded.

    Args:
        path: the file.
        form: its format, one of ROUTING_FORMATS.
        shape: the model's shape, which the file must have.

    Raises:
        BadInput: if the file has another format, is from a model of another shape, or holds no token.
    """
    check_one_of("format", form, ROUTING_FORMATS)
    with naming(path, f"routing of {form}"):
        routing = ROUTING_FORMATS[form].read(path, shape)
        if routing.rank is None and not routing.counts_TLE.any():
            raise BadInput("expected tokens, found none")
        check_counts(routing.counts_TLE.sum(axis=0), shape.top_k)
    return routing


def _sglang(path: Path, shape: Shape) -> RecordedRouting:
    """SGLang's expert distribution recorder: counts of all ranks (mode stat), or one rank's passes (per_pass, per_token)."""
    match load_sglang(path):
        case {"logical_count": loads}:
            return RecordedRouting(_steps(_tensor("logical_count", loads), shape))
        case {"records": [*records], "last_physical_to_logical_map": slots} if records:
            return _sglang_passes(records, slots, shape)
    raise BadInput("expected logical_count (mode stat) or records (modes per_pass and per_token) of SGLang's recorder")


def _sglang_passes(records: list[dict[str, Any]], slots: Any, shape: Shape) -> RecordedRouting:
    """One rank's forward passes: counts of physical experts, and in mode per_token those that each token chose."""
    logical_LP = _moe_rows(counts("last_physical_to_logical_map", _tensor("last_physical_to_logical_map", slots), 2), shape)
    ranks = {whole_number(record["rank"]) for record in records}
    if len(ranks) > 1 or min(ranks) < 0:
        raise BadInput(f"expected the passes of one rank, found ranks {sorted(ranks)}")
    pass_T, at_X = np.unique([whole_number(record["forward_pass_id"]) for record in records], return_inverse=True)
    check_size("the counts", 8 * len(pass_T) * shape.layers * shape.experts)
    counts_TLE = np.zeros((len(pass_T), shape.layers, shape.experts), dtype=np.int64)
    used_P = np.zeros(logical_LP.shape[1], dtype=bool)
    for at, record in zip(at_X, records, strict=True):
        load_LP = counts("counts", _tensor("global_physical_count", record["global_physical_count"]), 2)
        load_LP = _moe_rows(load_LP, shape, 0, load_LP.sum(axis=1))
        counts_TLE[at] += _folded(logical_LP, load_LP, shape.experts)
        used_P |= load_LP.any(axis=0)
    rank = ranks.pop()
    if "topk_ids_of_layer" not in records[0]:
        _check_sent(used_P, rank)
        return RecordedRouting(counts_TLE, rank=rank, pass_T=pass_T)
    chosen = [_sglang_choices(records[at], logical_LP, shape) for at in np.argsort(at_X, kind="stable")]
    lengths_T = np.bincount(np.sort(at_X), weights=[len(choices_ULK) for choices_ULK in chosen]).astype(np.int64)
    return RecordedRouting(counts_TLE, np.concatenate(chosen), lengths_T, rank=rank, pass_T=pass_T)


def _sglang_choices(record: dict[str, Any], logical_LP: IntArray, shape: Shape) -> IntArray:
    """(U, L, K): the experts of a pass's tokens. The engine fills with -1 what is no choice, and rows that are no token's."""
    slots_LUK = _moe_rows(_tensor("topk_ids_of_layer", record["topk_ids_of_layer"]), shape)
    if slots_LUK.ndim != 3 or slots_LUK.dtype.kind not in "iu" or slots_LUK.max(initial=-1) >= logical_LP.shape[1]:
        raise BadInput(f"topk_ids_of_layer: expected physical experts below {logical_LP.shape[1]} by layer, token and choice")
    found_LU = (slots_LUK >= 0).sum(axis=2)
    real_U = found_LU.any(axis=0)
    if (found_LU[:, real_U] != shape.top_k).any() or (slots_LUK[:, real_U, : shape.top_k] < 0).any():
        raise BadInput(
            f"expected {shape.top_k} choices of each token in every layer as in the config, found {np.unique(found_LU)}"
        )
    slots_LUK = slots_LUK[:, real_U, : shape.top_k]
    chosen_ULK: IntArray = logical_LP[np.arange(shape.layers)[:, None, None], slots_LUK].transpose(1, 0, 2)
    return chosen_ULK


def _check_sent(used_P: BoolArray, rank: int) -> None:
    """Raise BadInput if a rank counted only its own physical experts: then it counted what it received, from any rank."""
    slots, used = len(used_P), np.flatnonzero(used_P)
    for ranks in range(max(2, rank + 1), slots + 1):
        per_rank = slots // ranks
        if slots % ranks == 0 and len(used) and rank * per_rank <= used[0] and used[-1] < (rank + 1) * per_rank:
            raise BadInput(
                f"rank {rank} counted tokens that it received (DeepEP's low-latency mode), not those that it sent; record in "
                "mode per_token, or import mode stat"
            )


def _sglang_csv(path: Path, shape: Shape) -> RecordedRouting:
    """SGLang's older recorder: expert_distribution_rank<R>_timestamp<T>.csv, the model's layer numbers."""
    routing = _csv(path, shape, ("layer_id", "expert_id", "count"))
    return replace(routing, rank=_rank(path, "expert_distribution_rank<R>_timestamp<T>.csv"))


def _trtllm(path: Path, shape: Shape) -> RecordedRouting:
    """One rank's counts of TensorRT-LLM: (E,) under "<iteration>_<layer>". Layers beyond the model's, of MTP, are left out."""
    need("safetensors")
    from safetensors import SafetensorError, safe_open

    rank = _rank(path, "rank<R>.safetensors")
    check_size("the file", path.stat().st_size)
    tokens_of: dict[tuple[int, int], IntArray] = {}
    beyond = set[int]()
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118
                number, _, layer = key.partition("_")
                if whole_number(layer) >= shape.decoder_layers:
                    beyond.add(whole_number(layer))
                    continue
                tokens_of[whole_number(number), whole_number(layer)] = counts(key, file.get_tensor(key), 1)
    except SafetensorError as error:
        raise BadInput(f"not a file of safetensors, or cut short: {error}") from None
    numbers, layers = (sorted(set(column)) for column in zip(*tokens_of, strict=True)) if tokens_of else ([], [])
    if tuple(layers) != shape.moe_layers or len(tokens_of) != len(numbers) * len(layers):
        raise BadInput(
            f"expected counts of layers {spoken_layers(shape.moe_layers)} in every iteration, found {spoken_layers(layers)}"
        )
    meta = path.with_name("meta_info.json")
    if meta.exists() and load_json(meta).get("num_experts_per_token") != shape.top_k:
        raise BadInput(f"expected {shape.top_k} choices a token as in the config, found another number in {meta.name}")
    counts_TLE = np.array([[tokens_of[number, layer] for layer in layers] for number in numbers])
    if counts_TLE.shape[2] != shape.experts:
        raise BadInput(f"expected {shape.experts} experts as in the config, found {counts_TLE.shape[2]}")
    left_out = f"layers of multi-token prediction: {spoken_layers(sorted(beyond))}" if beyond else ""
    return RecordedRouting(counts_TLE, rank=rank, pass_T=np.array(numbers, dtype=np.int64), left_out=left_out)


def _rank(path: Path, form: str) -> int:
    """The rank <R> in a file's name, which has the form, with or without a time <T>; or BadInput."""
    matched = re.fullmatch(re.escape(form).replace("<R>", "([0-9]+)").replace("<T>", ".*"), path.name)
    if not matched:
        raise BadInput(f"expected the engine's name of the file, {form}, which tells the rank R")
    return int(matched[1])


def spoken_layers(layers: Sequence[int]) -> str:
    """Returns ascending layer numbers as text for messages."""
    if len(layers) < 2:
        return str(layers[0]) if layers else "none"
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"


class Record(FileTable):
    """A line of vLLM's JSON lines."""

    record_type: str


class LoadStats(Record):
    """A line of loads: by layer, the loads of physical experts and their logical experts."""

    expert_load: list[list[int]]
    p2l_map: list[list[int]]


def _vllm(path: Path, shape: Shape) -> RecordedRouting:
    """vLLM's JSON lines."""
    steps = []
    for number, line in json_lines(path):
        with naming(f"line {number}"):
            if converted(line, Record).record_type == "eplb_load_stats":
                record = converted(line, LoadStats)
                load_LP, logical_LP = counts("expert_load", record.expert_load, 2), counts("p2l_map", record.p2l_map, 2)
                steps.append(_folded(logical_LP, load_LP, shape.experts))
    if not steps:
        raise BadInput("expected lines of record_type eplb_load_stats, found none")
    return RecordedRouting(_steps(np.array(steps), shape))


def _eplb(path: Path, shape: Shape) -> RecordedRouting:
    """A bare array of loads, as EPLB's `weight`."""
    loads = load_csv(path, np.int64) if path.suffix == ".csv" else load_npy(path)
    return RecordedRouting(_steps(loads, shape))


def _tokens(path: Path, shape: Shape) -> RecordedRouting:
    """A token-level file: the experts of every token, and the lengths of sequences."""
    arrays = read_npz(path)
    if missing := [name for name in ("experts", "seq_len") if name not in arrays]:
        raise BadInput(f"expected arrays {', '.join(missing)}, found {', '.join(arrays)[:200] or 'none'}")
    experts_ULK, lengths_Q = arrays["experts"], counts("seq_len", arrays["seq_len"], 1)
    if experts_ULK.ndim != 3 or experts_ULK.dtype.kind not in "iu" or 0 in experts_ULK.shape:
        raise BadInput(f"experts: expected whole numbers, tokens by layers by choices, found shape {experts_ULK.shape}")
    if experts_ULK.shape[2] != shape.top_k:
        raise BadInput(f"expected {shape.top_k} choices a token as in the config, found {experts_ULK.shape[2]}")
    if int(lengths_Q.sum()) != len(experts_ULK):
        raise BadInput(f"expected sequences of {len(experts_ULK)} tokens in all, found seq_len of {lengths_Q.sum()}")
    chose_L = (experts_ULK != experts_ULK[:1, :, :1]).any(axis=(0, 2))  # a row that is not filled repeats one number
    experts_ULK = _moe_rows(experts_ULK, shape, 1, chose_L * len(experts_ULK))
    padding_U = (experts_ULK == -1).all(axis=(1, 2))
    experts_ULK, lengths_Q = experts_ULK[~padding_U], _kept(lengths_Q, ~padding_U)
    _check_choices(experts_ULK, shape.experts)
    per_layer = (np.bincount(each_UK.ravel(), minlength=shape.experts) for each_UK in experts_ULK.transpose(1, 0, 2))
    left_out = f"{padding_U.sum()} of {len(padding_U)} tokens, which are padding (-1)" if padding_U.any() else ""
    return RecordedRouting(np.array(list(per_layer))[None], experts_ULK, lengths_Q, left_out=left_out)


def _kept(lengths_Q: IntArray, kept_U: BoolArray) -> IntArray:
    """The lengths of sequences of which some tokens are kept, without empty sequences."""
    lengths_Q = np.bincount(np.repeat(np.arange(len(lengths_Q)), lengths_Q)[kept_U], minlength=len(lengths_Q))
    return lengths_Q[lengths_Q > 0]


def _check_choices(experts_ULK: NDArray[Any], experts: int) -> None:
    """Raises BadInput unless all choices are experts, and those of a token in a layer differ."""
    beyond_UL = np.asarray(((experts_ULK < 0) | (experts_ULK >= experts)).any(axis=2))
    sorted_ULK = np.sort(experts_ULK, axis=2)
    twice_UL = np.asarray((sorted_ULK[..., 1:] == sorted_ULK[..., :-1]).any(axis=2))
    for wrong_UL, expected in ((beyond_UL, f"experts from 0 to {experts - 1}"), (twice_UL, "different experts")):
        if wrong_UL.any():
            token, row = np.argwhere(wrong_UL)[0].tolist()
            most = np.iinfo(experts_ULK.dtype).max
            why = f": {experts_ULK.dtype} holds no expert above {most}" if most < experts - 1 else ""
            why = why or (": an array that was not filled to its end?" if wrong_UL is twice_UL else "")
            many = f"{wrong_UL.any(axis=1).sum()} of {len(wrong_UL)} tokens have others"
            raise BadInput(
                f"token {token}, row {row}: expected {expected}, found {experts_ULK[token, row].tolist()}; {many}{why}"
            )


def _csv(path: Path, shape: Shape, columns: tuple[str, str, str] = ("layer", "expert", "count")) -> RecordedRouting:
    """A CSV of counts; the layers that it names, in rising order."""
    layers, counts_LE = expert_counts(path, columns)
    expert, beyond = counts_LE.shape[1] - 1, [layer for layer in layers if layer not in shape.moe_layers]
    if expert >= shape.experts or beyond:
        expected = f"experts below {shape.experts} and layers {spoken_layers(shape.moe_layers)} as in the config"
        raise BadInput(f"expected {expected}, found {f'layer {beyond[0]}' if beyond else f'expert {expert}'}")
    return RecordedRouting(np.pad(counts_LE, ((0, 0), (0, shape.experts - 1 - expert)))[None], layers=layers)


ROUTING_FORMATS: dict[str, RoutingFormat] = {
    "sglang-recorder": RoutingFormat(_sglang, ".pt, modes per_pass and per_token one per rank"),
    "sglang-csv": RoutingFormat(_sglang_csv, ".csv, one per rank"),
    "trtllm-statistics": RoutingFormat(_trtllm, "rank*.safetensors, one per rank"),
    "vllm": RoutingFormat(_vllm, ".jsonl"),
    "eplb-load": RoutingFormat(_eplb, ".npy, .csv"),
    "tokens": RoutingFormat(_tokens, ".npz of experts and seq_len"),
    "csv": RoutingFormat(_csv, "layer,expert,count"),
}


def _steps(loads: ArrayLike, shape: Shape) -> IntArray:
    """(T, L, E) int64 from an array (layers, experts) or (steps, layers, experts), without dense layers and empty steps."""
    array = as_array("loads", loads)
    array = array[None] if array.ndim == 2 else array
    if array.ndim == 3 and array.dtype.kind in "if":
        if (wrong := ~(array >= 0) | (array != np.rint(array)) | (array > 2.0**62)).any():
            step, row, expert = np.argwhere(wrong)[0].tolist()
            seen, wrapped = array[step, row, expert], ": a counter of 32 bits that wrapped?" if array.min() < -(2**30) else ""
            raise BadInput(f"step {step}, row {row}, expert {expert}: expected a count of tokens, found {seen}{wrapped}")
        array = array.astype(np.int64)
    counts_TLE = counts("loads", array, 3)
    if counts_TLE.shape[2] != shape.experts:
        raise BadInput(f"expected {shape.experts} experts as in the config, found {counts_TLE.shape[2]}")
    moe_TLE = _moe_rows(counts_TLE, shape, 1, counts_TLE.sum(axis=(0, 2)))
    return moe_TLE[moe_TLE.any(axis=(1, 2))]


def _moe_rows(array: NDArray[Any], shape: Shape, axis: int = 0, tokens_R: IntArray | None = None) -> NDArray[Any]:
    """The rows of the layers with experts along an axis that has a row for each of them, or for each decoder layer.

    tokens_R has the tokens of each row, of which layers without experts have none; None: they are not known.
    """
    rows, decoders = array.shape[axis], shape.decoder_layers
    mtp = any(0 < rows - expected_rows <= shape.mtp_layers for expected_rows in (shape.layers, decoders))
    hint = ": leave out the rows of multi-token prediction, which are the last" if mtp else ""
    if rows not in (shape.layers, decoders):
        expected = f"{shape.layers} MoE layers, or {decoders} with the dense ones"
        raise BadInput(f"expected {expected} as in the config, found {rows}{hint}")
    if rows == shape.layers:
        return array
    if tokens_R is not None and (wrong := [row for row in shape.dense_layers if tokens_R[row]]):
        said = f"expected none of layer {wrong[0]}, which has no experts by the config, found {tokens_R[wrong[0]]} tokens"
        raise BadInput(f"row {wrong[0]}: {said}{hint}")
    return np.take(array, shape.moe_layers, axis)


def _folded(logical_LP: IntArray, load_LP: IntArray, experts: int) -> IntArray:
    """(L, E) int64: the loads of physical experts, summed by logical expert."""
    if logical_LP.shape != load_LP.shape or logical_LP.max(initial=0) >= experts:
        expected = f"expected for each of {load_LP.shape} loads one of {experts} experts"
        raise BadInput(f"{expected}, found {logical_LP.shape} up to {logical_LP.max(initial=0)}")
    load_LE = np.zeros((len(load_LP), experts), dtype=np.int64)
    np.add.at(load_LE, (np.arange(len(load_LP))[:, None], logical_LP), load_LP)
    return load_LE


def _load_pt(path: Path) -> Any:
    """The contents of a .pt file, loaded with `weights_only`."""
    need("torch")
    import torch

    try:
        check_archive(path)
    except zipfile.BadZipFile:
        raise BadInput("expected the zip format of torch.save, found another file, or a damaged one") from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and its unpickler raise many kinds
        reason = " ".join(str(error).split())
        if "weights_only" in reason or "Weights only" in reason:
            raise BadInput("holds more than tensors, numbers and text, which could run code: not loaded") from None
        raise BadInput(f"not a file of torch.save: {reason[:200]}") from None


def load_sglang(path: Path) -> Any:
    """Reads a recording of SGLang, a JSON file or a file of torch.save, and returns its contents."""
    with path.open("rb") as file:
        return load_json(path) if file.read(16).lstrip(b"\xef\xbb\xbf \r\n\t").startswith((b"{", b"[")) else _load_pt(path)


def _tensor(what: str, tensor: Any) -> NDArray[Any]:
    """A dense tensor, or nested lists of JSON, as an array, or BadInput."""
    if isinstance(tensor, list):
        return as_array(what, tensor)
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
        raise BadInput(f"{what}: expected a tensor, found {type(tensor).__name__}")
    check_size(what, tensor.numel() * 8)
    return np.asarray(tensor.detach().numpy())
