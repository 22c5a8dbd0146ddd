"""Recordings of one file per rank become profiles with those source ranks: files as SGLang and TensorRT-LLM write them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aurora.errors import BadInput
from aurora.profiler.import_routing import import_profile

CONFIG = {
    "model_type": "tiny", "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "hidden_size": 8, "moe_intermediate_size": 16,
}  # fmt: skip
SLOTS = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2], [0, 1, 2, 3, 2, 3]])  # of three decoder layers


def imported(paths, form, **options):
    return import_profile(paths, form, CONFIG, **options)


def choices(rng, tokens):
    """(U, L, K) physical experts of two MoE layers, whose logical experts differ."""
    found = np.zeros((tokens, 2, 2), dtype=np.int32)
    for token in range(tokens):
        for layer in range(2):
            logical = rng.permutation(4)[:2]
            found[token, layer] = [rng.choice(np.flatnonzero(SLOTS[layer + 1].numpy() == expert)) for expert in logical]
    return found


def sglang_pass(number, rank, slots_ULK, per_token):
    """A record of _DetailAccumulator.append; dense layers' rows are empty, as are the last choices, of eight."""
    counts = torch.zeros((3, 6), dtype=torch.int32)
    for layer in range(2):
        counts[layer + 1] = torch.bincount(torch.tensor(slots_ULK[:, layer].ravel(), dtype=torch.int64), minlength=6)
    record = {"forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "global_physical_count": counts}
    if not per_token:
        return record
    topk = torch.full((3, len(slots_ULK), 8), -1, dtype=torch.int32)
    topk[1:, :, :2] = torch.tensor(slots_ULK.transpose(1, 0, 2))
    tokens = list(range(len(slots_ULK)))
    more = {"input_ids": tokens, "positions": tokens, "extend_seq_lens": None, "forward_mode": 2, "misc_objects": []}
    return record | more | {"topk_ids_of_layer": topk}


def sglang_dumps(tmp_path, per_token, ranks=2, alike=False):
    """A file per rank and the tokens in them, (pass, rank) -> (U, L, K); rank 1 has no token in pass 7."""
    paths, chosen = [], {}
    for rank in range(ranks):
        rng = np.random.default_rng(0 if alike else rank)
        for number, tokens in ((5, 6), (7, 0 if rank == 1 and not alike else 3), (8, 4)):
            chosen[number, rank] = choices(rng, tokens)
        records = [sglang_pass(number, rank, chosen[number, rank], per_token) for number in (5, 7, 8)]
        paths.append(tmp_path / f"expert_distribution_recorder_17.5_{rank}.pt")
        torch.save({"records": records, "last_physical_to_logical_map": SLOTS}, paths[-1])
    return paths, chosen


def expected(chosen):
    tokens_TLSE = np.zeros((3, 2, 2, 4), dtype=np.int64)
    for (number, rank), slots_ULK in chosen.items():
        for layer in range(2):
            logical = SLOTS[layer + 1].numpy()[slots_ULK[:, layer].ravel()]
            tokens_TLSE[(5, 7, 8).index(number), layer, rank] += np.bincount(logical, minlength=4)
    return tokens_TLSE


@pytest.mark.parametrize("per_token", [False, True])
def test_passes_of_sglang_keep_their_rank(tmp_path, per_token):
    paths, chosen = sglang_dumps(tmp_path, per_token)
    made = imported(paths[::-1], "sglang-recorder")
    assert np.array_equal(made.tokens_TLSE, expected(chosen))
    assert made.provenance["sources"] == "2 ranks, as recorded"
    assert made.dense_layers == (0,)
    assert (made.routing is not None) == per_token
    alone = imported(paths[:1], "sglang-recorder", sources=3)
    assert alone.sources == 3
    assert np.array_equal(alone.load_LE, expected(chosen)[:, :, 0].sum(axis=0))


def test_passes_that_do_not_tell_their_source(tmp_path):
    paths, chosen = sglang_dumps(tmp_path, per_token=False, alike=True)
    with pytest.raises(BadInput, match="all ranks recorded the same tokens, as without data parallelism"):
        imported(paths, "sglang-recorder")
    paths, _ = sglang_dumps(tmp_path, per_token=False)
    with pytest.raises(BadInput, match="expected one file of each rank from 0 on, found ranks 0, 0"):
        imported([paths[0]] * 2, "sglang-recorder")
    with pytest.raises(BadInput, match="`sources`: expected 2, the ranks that were recorded, found 3"):
        imported(paths, "sglang-recorder", sources=3)
    local = sglang_pass(5, 1, chosen[5, 1], per_token=False)
    local["global_physical_count"][:, :3] = 0
    torch.save({"records": [local], "last_physical_to_logical_map": SLOTS}, paths[1])
    with pytest.raises(BadInput, match="rank 1 counted tokens that it received"):
        imported(paths, "sglang-recorder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": -1}, r"expected the passes of one rank, found ranks \[-1\]"),
        ({"rank": "x"}, "expected a whole number, found 'x'"),
        ({"rank": torch.ones((2, 2, 2, 2))}, r"expected a whole number, found tensor\(.*\[1\., 1\.\]\]"),
        ({"global_physical_count": torch.ones((2, 5), dtype=torch.int32)}, "expected for each of .* loads one of 4 experts"),
        ({"global_physical_count": torch.ones((5, 6), dtype=torch.int32)}, "expected 2 MoE layers, or 3 with the dense ones"),
        ({"topk_ids_of_layer": torch.full((3, 6, 8), 6)}, "topk_ids_of_layer: expected physical experts below 6"),
        ({"topk_ids_of_layer": torch.zeros((3, 6, 8), dtype=torch.int32)}, "expected 2 choices of each token in every layer"),
    ],
)
def test_passes_that_lie(tmp_path, change, message):
    record = sglang_pass(5, 0, choices(np.random.default_rng(0), 6), per_token=True) | change
    torch.save({"records": [record], "last_physical_to_logical_map": SLOTS}, tmp_path / "r.pt")
    with pytest.raises(BadInput, match=message):
        imported([tmp_path / "r.pt"], "sglang-recorder")


def test_older_tables_of_sglang_keep_their_rank(tmp_path):
    """Experts without tokens have no row, and layers have the model's numbers."""
    paths = [tmp_path / f"expert_distribution_rank{rank}_timestamp1744347750.37.csv" for rank in range(2)]
    paths[0].write_text("layer_id,expert_id,count\n1,0,4\n1,3,4\n2,0,4\n2,1,4\n")
    paths[1].write_text("layer_id,expert_id,count\n1,2,2\n1,1,2\n2,1,2\n2,0,2\n")
    made = imported(paths, "sglang-csv")
    assert made.tokens_TLSE.tolist() == [[[[4, 0, 0, 4], [0, 2, 2, 0]], [[4, 4, 0, 0], [2, 2, 0, 0]]]]
    assert made.dense_layers == (0,)
    paths[0].rename(tmp_path / "x.csv")
    with pytest.raises(BadInput, match=r"x\.csv: .*, expert_distribution_rank<R>_timestamp<T>\.csv"):
        imported([tmp_path / "x.csv"], "sglang-csv")


def trtllm_rank(tmp_path, rank, counts_TLE, first=100):
    """What _set_iter saves: int64 (E,) under "<iteration>_<layer>"; layer 3 is of MTP."""
    records = {f"{first + t}_{layer}": torch.tensor(counts_TLE[t][min(layer - 1, 1)]) for t in range(2) for layer in (1, 2, 3)}
    path = tmp_path / f"rank{rank}.safetensors"
    save_file(records, path)
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2}))
    return path


def test_statistics_of_tensorrt_llm_keep_their_rank(tmp_path):
    counts_STLE = np.random.default_rng(0).integers(0, 9, (2, 2, 2, 4))
    paths = [trtllm_rank(tmp_path, rank, counts_TLE) for rank, counts_TLE in enumerate(counts_STLE)]
    made = imported(paths, "trtllm-statistics")
    assert np.array_equal(made.tokens_TLSE, counts_STLE.transpose(1, 2, 0, 3))
    (tmp_path / "meta_info.json").write_text('{"num_experts_per_token": 8}')
    with pytest.raises(BadInput, match=r"expected 2 choices a token as in the config, found another number in meta_info\.json"):
        imported(paths, "trtllm-statistics")


def test_statistics_that_lie(tmp_path):
    path = trtllm_rank(tmp_path, 0, np.ones((2, 2, 4), dtype=np.int64))
    path.with_name("rank1.safetensors").write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"rank1\.safetensors: not a file of safetensors, or cut short"):
        imported([path.with_name("rank1.safetensors")], "trtllm-statistics")
    save_file({"1_1": torch.ones(4, dtype=torch.int64)}, path)
    with pytest.raises(BadInput, match=r"expected counts of layers 1 to 2 \(2\) in every iteration, found 1$"):
        imported([path], "trtllm-statistics")
    save_file({f"1_{layer}": torch.ones(5, dtype=torch.int64) for layer in (1, 2)}, path)
    with pytest.raises(BadInput, match="expected 4 experts as in the config, found 5"):
        imported([path], "trtllm-statistics")
