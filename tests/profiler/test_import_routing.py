"""Engines' records become profiles: files as engines write them, several domains, and files that lie."""

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from aurora.errors import BadInput
from aurora.profiler.import_routing import import_profile

CONFIG = {
    "model_type": "tiny", "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "hidden_size": 8, "moe_intermediate_size": 16,
}  # fmt: skip
LOADS = np.array([[10, 1, 5, 4], [2, 8, 7, 3]])
RECORDS = Path(os.environ.get("AURORA_DATA", "../shared/data"))


def imported(path, form, sources=2, **options):
    return import_profile([path] if isinstance(path, Path) else path, form, CONFIG, sources, **options)


def saved(tmp_path, name, write):
    write(tmp_path / name)
    return tmp_path / name


def test_sglang_recorder(tmp_path):
    """Dense layers' rows are empty, and steps that were not recorded yet."""
    counts = torch.zeros((5, 3, 4), dtype=torch.int32)
    counts[0, 1:], counts[3, 1:] = torch.tensor(LOADS), torch.tensor(2 * LOADS)
    record = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    path = saved(tmp_path, "r.pt", lambda file: torch.save(record, file))
    made = imported(path, "sglang-recorder")
    assert made.tokens_TLSE.sum(axis=2).tolist() == [LOADS.tolist(), (2 * LOADS).tolist()]
    assert made.tokens_TLSE.sum(axis=3).tolist() == [[[10, 10]] * 2, [[20, 20]] * 2]
    assert (made.stage_T, made.top_k, made.dispatch_bytes) == (None, 2, 16)
    assert "not measured" in made.provenance["compute"]


def test_vllm_lines_count_physical_experts(tmp_path):
    """Slots 4 and 5 are replicas of experts 0 and 1."""
    record = {
        "record_type": "eplb_load_stats", "version": 1, "step": 7, "num_ranks": 2,
        "expert_load": [[4, 1, 5, 4, 6, 0], [2, 8, 7, 3, 0, 0]], "p2l_map": [[0, 1, 2, 3, 0, 1]] * 2,
    }  # fmt: skip
    path = tmp_path / "v.jsonl"
    path.write_text(json.dumps({"record_type": "eplb_initial_mapping"} | {"expert_load": 3}) + "\n" + json.dumps(record) + "\n")
    assert imported(path, "vllm").load_LE.tolist() == LOADS.tolist()


def test_bare_arrays_of_loads(tmp_path):
    (tmp_path / "w.csv").write_text("10,1,5,4\n2,8,7,3\n")
    assert imported(tmp_path / "w.csv", "eplb-load").load_LE.tolist() == LOADS.tolist()
    for array in (LOADS, LOADS[None].astype(np.uint32)):
        path = saved(tmp_path, "w.npy", lambda file, array=array: np.save(file, array))
        assert imported(path, "eplb-load").load_LE.tolist() == LOADS.tolist()


def test_tokens(tmp_path):
    """Sequences of 3, 1 and 2 tokens go to sources 0, 1, 0."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((6, 2, 4)), axis=2)[:, :, :2].astype(np.uint8)
    path = saved(tmp_path, "t.npz", lambda file: np.savez(file, experts=experts, seq_len=np.array([3, 1, 2], dtype=np.int32)))
    made = imported(path, "tokens")
    assert made.routing.experts_ULK.dtype == np.uint8
    assert made.routing.source_U.tolist() == [0, 0, 0, 0, 0, 1]
    assert made.routing.sequence_U.tolist() == [0, 0, 0, 2, 2, 1]
    assert made.routing.lengths_Q.tolist() == [3, 1, 2]


def test_csv_by_columns(tmp_path):
    """Layers 1 and 2 were recorded, in any sequence; the config has one dense layer before two."""
    path = tmp_path / "c.csv"
    rows = [f"b,{layer},{expert},{LOADS[layer - 1, expert]}\n" for layer in (2, 1) for expert in range(4)]
    path.write_text("domain,layer,expert,count\n" + "".join(rows))
    assert imported(path, "csv").load_LE.tolist() == LOADS.tolist()


def test_files_are_domains(tmp_path):
    paths = [saved(tmp_path, f"{n}.npy", lambda file, n=n: np.save(file, LOADS * 10**n)) for n in range(3)]
    more = imported(paths, "eplb-load", sources=5).tokens_TLSE.sum(axis=(0, 3))[0]
    assert more.tolist() == [10, 100, 2000, 10, 100]
    assert imported(paths, "eplb-load", sources=2).tokens_TLSE.sum(axis=(0, 3))[0].tolist() == [2020, 200]


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


def zipped(**members):
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return found.getvalue()


def npy_header(shape):
    found = io.BytesIO()
    np.lib.format.write_array_header_1_0(found, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return found.getvalue()


def torch_bytes(value, **options):
    found = io.BytesIO()
    torch.save(value, found, **options)
    return found.getvalue()


def npy_bytes(value):
    found = io.BytesIO()
    np.save(found, value, allow_pickle=True)
    return found.getvalue()


@pytest.mark.parametrize(
    ("form", "name", "content", "message"),
    [
        ("sglang-recorder", "r.pt", torch_bytes({"logical_count": Evil()}), "which could run code: not loaded"),
        ("sglang-recorder", "r.pt", torch_bytes({"logical_count": torch.zeros(2)}, _use_new_zipfile_serialization=False), "expected the zip format"),
        ("sglang-recorder", "r.pt", torch_bytes({"logical_count": torch.rand(1, 2, 4)}), r"step 0, row 0, expert 0: expected a count of tokens, found 0\."),
        ("sglang-recorder", "r.pt", torch_bytes({"logical_count": torch.ones(1, 2, 5, dtype=torch.int64)}), "expected 4 experts as in the config, found 5"),
        ("sglang-recorder", "r.pt", torch_bytes({"logical_count": torch.zeros(1, 2, 4, dtype=torch.int64)}), "expected tokens, found none"),
        ("eplb-load", "w.npy", npy_bytes(-LOADS), "step 0, row 0, expert 0: expected a count of tokens, found -10"),
        ("eplb-load", "w.csv", b"1,2\n3", "expected rows of whole numbers: the number of columns changed from 2 to 1 at row 2$"),
        ("eplb-load", "w.csv", b"1,2.5", "expected rows of whole numbers: could not convert string '2.5' to int64 at row 1, column 2"),
        ("vllm", "v.jsonl", b"", "expected lines of record_type eplb_load_stats, found none"),
        ("vllm", "v.jsonl", b'{"record_type": "eplb_load_stats", "expert_load": [[1]], "p2l_map": [[4]]}', r"line 1: expected for each of \(1, 1\) loads one of 4 experts"),
        ("vllm", "v.jsonl", b'{"record_type": "eplb_load_stats", "expert_load": [[1.5]], "p2l_map": [[0]]}', r"line 1: expert_load\[0\]\[0\]: expected a whole number, found 1\.5"),
        ("tokens", "t.npz", zipped(experts=npy_bytes(np.zeros((1, 2, 2), dtype=np.uint8))), "expected arrays seq_len, found experts"),
        ("tokens", "t.npz", zipped(experts=npy_bytes(np.zeros((2, 2, 3), dtype=np.uint8)), seq_len=npy_bytes(np.array([2]))), "expected 2 choices a token as in the config, found 3"),
        ("tokens", "t.npz", zipped(experts=npy_bytes(np.full((2, 2, 2), 4, dtype=np.uint8)), seq_len=npy_bytes(np.array([2]))), r"token 0, row 0: expected experts from 0 to 3, found \[4, 4\]; 2 of 2 tokens have others"),
        ("tokens", "t.npz", zipped(experts=npy_bytes(np.zeros((2, 2, 2), dtype=np.uint8)), seq_len=npy_bytes(np.array([3]))), "expected sequences of 2 tokens in all, found seq_len of 3"),
        ("csv", "c.csv", b"layer,expert,count\n", "expected rows of counts, found none"),
        ("csv", "c.csv", b"layer,expert,count\n0,0,-1\n", "line 2: count: expected a whole number >= 0, found '-1'"),
        ("csv", "c.csv", b"layer,expert\n1,0\n", "expected columns count, found layer, expert"),
        ("csv", "c.csv", b"of,layer,expert,count\na,1,0,1\nb,1,0,1\n", "line 3: expected one row of expert 0 of layer 1, found two"),
        ("csv", "c.csv", b"layer,expert,count\n1,0,1,2\n", "line 2: expected 3 fields, found more"),
        ("csv", "c.csv", b"layer,expert,count\n1,4,1\n", r"expected experts below 4 and layers 1 to 2 \(2\) as in the config, found expert 4"),
    ],
)  # fmt: skip
def test_files_that_lie(tmp_path, capsys, form, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=f"{name}: {message}" if not message.startswith("which") else message) as found:
        imported(tmp_path / name, form)
    assert "\n" not in str(found.value)
    assert "ran" not in capsys.readouterr().out


def test_what_does_not_go_together(tmp_path):
    path = saved(tmp_path, "w.npy", lambda file: np.save(file, LOADS))
    with pytest.raises(BadInput, match="none: no such file"):
        imported(tmp_path / "none", "eplb-load")
    with pytest.raises(BadInput, match="`sources`: expected more than zero, found 0"):
        imported(path, "eplb-load", sources=0)
    for name, layers in (("one.csv", (1,)), ("two.csv", (1, 2))):
        (tmp_path / name).write_text("layer,expert,count\n" + "".join(f"{layer},{e},9\n" for layer in layers for e in (0, 1)))
    with pytest.raises(BadInput, match=r"expected the same layers in every file, found layer 1 and layer 1, 2"):
        imported([tmp_path / "one.csv", tmp_path / "two.csv"], "csv")


WIDTHS = {"hidden_size": 2048, "intermediate_size": 1024}
RECORDED = pytest.mark.skipif(not (RECORDS / "olmoe_mixtral_domains").is_dir(), reason="no recorded data here")


def selected(tmp_path, path, **of):
    """The rows of a recorded file that have these values, in a file of their own."""
    header, *rows = path.read_text().splitlines()
    kept = [row for row in rows if of.items() <= dict(zip(header.split(","), row.split(","), strict=True)).items()]
    target = tmp_path / f"{'-'.join(of.values())}.csv"
    target.write_text("\n".join([header, *kept]))
    return target


@RECORDED
def test_recorded_domains_of_olmoe(tmp_path):
    """208,896 tokens a domain, top-8 of 64; layers 0, 7 and 15 were recorded."""
    shape = {**WIDTHS, "num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8}
    counts, olmoe = RECORDS / "olmoe_mixtral_domains" / "counts_dev.csv", {"model": "olmoe-1b-7b-0924", "selection": "topk"}
    made = import_profile([selected(tmp_path, counts, **olmoe, domain=of) for of in ("arxiv", "book")], "csv", shape, 4)
    assert made.tokens_TLSE.shape == (1, 3, 4, 64)
    assert (made.tokens_TLSE.sum(axis=3) == 208896 * 8 // 2).all()


@RECORDED
def test_recorded_subjects_of_mixtral(tmp_path):
    """A subject's first row has 1911 tokens of expert 0 in layer 0."""
    shape = {**WIDTHS, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    path = RECORDS / "mixtral_fiddler" / "counts_original.csv"
    made = import_profile([selected(tmp_path, path, subject="college_computer_science")], "csv", shape, 8)
    assert made.load_LE.shape == (32, 8)
    assert made.load_LE[0, 0] == 1911


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([[1000, 3, 2, 2], [504, 503, 0, 0]], r"MoE layer 0: expected at most one for each of the 504 tokens .* found 1000"),
        ([[5, 5, 5, 5], [5000, 5000, 5000, 5000]], r"as many choices in every layer.* found 20 in MoE layer 0 and 20000 in 1"),
        ([[5, 5, 5, 5], [0, 0, 0, 0]], "as many choices in every layer"),
    ],
)
def test_routing_that_no_router_makes(tmp_path, loads, message):
    with pytest.raises(BadInput, match=message):
        imported(saved(tmp_path, "w.npy", lambda file: np.save(file, np.array(loads))), "eplb-load")


@pytest.mark.parametrize(("form", "name"), [("csv", "s.csv"), ("eplb-load", "s.csv"), ("vllm", "s.jsonl"), ("tokens", "s.npz")])
def test_huge_sparse_files_are_refused_at_once(tmp_path, form, name):
    with (tmp_path / name).open("wb") as file:
        file.write(b"layer,expert,count\n")
        file.truncate(1 << 40)
    with pytest.raises(BadInput):
        imported(tmp_path / name, form)
