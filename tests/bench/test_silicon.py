"""Silicon measurements: read from an installed package's tables, and refused by name where there are none."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.io import load_cluster, load_curves
from tests.silicon_package import ATTENTION, CONFIG, MOE, install, nccl, write, write_all

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import silicon
import silicon_database as database
from silicon import LATENT, system_cluster, system_curves, weight_format
from silicon_database import MODEL, deep_ep_points

sys.path.pop()  # that folder has a vllm.py, which is not vLLM


@pytest.fixture
def tables(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch)


def test_the_newest_table_counts_and_buffers_become_what_ports_send(tables):
    write(tables / "comm" / "nccl" / "2.9", "nccl_perf", [nccl("alltoall", "half", 2, 1, 1.0)])
    rows = [("alltoall", "half", 2, 100), ("alltoall", "int8", 4, 400), ("all_gather", "half", 2, 9), ("alltoall", "odd", 2, 9)]
    write(tables / "comm" / "nccl" / "2.10", "nccl_perf", [nccl(*row, 5.0) for row in rows])
    points = database.all_to_all_points("one")
    assert {partners: (sent.tolist(), took.tolist()) for partners, (sent, took) in points.items()} == {
        1: ([100.0], [0.005]),
        3: ([300.0], [0.005]),
    }


def test_a_system_becomes_a_cluster_whose_ports_are_no_slower_than_measured(tables):
    write_all(tables)
    made = system_cluster("one", 4)
    assert [gpu.kind for gpu in made.gpus] == ["NVIDIA One"] * 4
    assert made.out_Bps_G.tolist() == [1000.0] * 4  # 1000 bytes in a second beside 500 of the datasheet
    assert [curve.partners for curve in made.link_curves] == [1]
    with pytest.raises(BadInput, match="`gpus`: expected from 2 to 4, the GPUs of a node of one, found 8"):
        system_cluster("one", 8)


def test_deepep_becomes_one_curve_of_both_ways(tables):
    """Four GPUs: of eight experts' rows 3/4 leave; a GPU with 64 of 256 experts has one of eight with probability 0.9."""
    write_all(tables)
    about = MODEL | {"node_num": 1, "num_token": 2}
    took = {"dispatch_avg_t_us": 10.0, "combine_avg_t_us": 30.0}
    write(tables / "comm" / "sglang" / "0.1", "wideep_deepep_ll_perf", [about | took, about | took | {"hidden_size": 8}])
    took = {"dispatch_transmit_us": 5.0, "dispatch_notify_us": 1.0, "combine_transmit_us": 6.0, "combine_notify_us": 0.0}
    slower = {**took, "dispatch_transmit_us": 9.0, "dispatch_sms": 4}
    write(tables / "comm" / "sglang" / "0.2", "wideep_deepep_normal_perf", [about | took | {"dispatch_sms": 2}, about | slower])
    points = deep_ep_points("one", True, *MODEL.values())
    assert points.partners == 3
    assert points.dispatch_bytes_X == pytest.approx([2 * 6 * 7168 * (1 + 1 / 32)])
    assert points.combine_bytes_X == pytest.approx([2 * 6 * 7168 * 2])
    assert (points.dispatch_s_X, points.combine_s_X) == (pytest.approx([10e-6]), pytest.approx([30e-6]))
    curve = points.curve()
    assert curve.bytes_X.tolist() == [points.dispatch_bytes_X[0], points.combine_bytes_X[0]]
    longer = 64 / 33  # combined rows over dispatched ones
    assert curve.seconds_X == pytest.approx([np.sqrt(10e-6 * 30e-6), np.sqrt(10e-6 * longer * 30e-6)])
    normal = deep_ep_points("one", False, *MODEL.values())
    none = np.prod([(192 - index) / (256 - index) for index in range(8)])
    assert normal.combine_bytes_X == pytest.approx([2 * 3 * (1 - none) * 7168 * 2])
    assert normal.dispatch_s_X == pytest.approx([6e-6])
    made = system_cluster("one", 4, "deepep-low-latency")
    assert made.link_curves == (curve,)
    assert system_cluster("one", 4, "deepep").link_curves[0].seconds_X[0] == pytest.approx(6e-6)
    with pytest.raises(BadInput, match="expected one of nccl, deepep, deepep-low-latency, found 'mpi'"):
        system_cluster("one", 4, "mpi")
    with pytest.raises(BadInput, match="hidden size 9, top-1 of 2 experts on one node, found none"):
        deep_ep_points("one", True, 9, 1, 2)


def test_compute_curves_are_of_one_expert_and_of_a_ranks_tokens(tables):
    """Kernels of four experts on two ranks: two experts each; a token has two. Products take m n k milliseconds."""
    write_all(tables)
    made = system_curves(CONFIG, "one", "vllm", 3)
    phases = made.kinds["NVIDIA One"]
    assert phases["expert"]([1.0, 4.0]) == pytest.approx([2 / 2 / 2, 8 / 2 / 2])
    products = (16 * 8 + 8 * 8 + 4 * 8) / 1e3
    assert phases["gate"]([1.0, 64.0]) == pytest.approx([products + 7e-3, 64 * (products + 7e-3)])
    assert (made.top_k, made.row_bytes, made.expert_bytes) == (2, 16, 6 * 8 * 16)
    assert "k on 2 expert-parallel ranks for balanced tokens" in made.provenance["curves of NVIDIA One"]


def test_kernels_with_few_rows_tell_their_overhead(tables):
    """On two ranks, two experts each: 3 ms and 2 ms for an expert that has rows."""
    sizes = {"hidden_size": 8, "inter_size": 16, "moe_ep_size": 2}
    took = ((1, 5.0), (1, 5.0), (2, 7.0), (8, 7.0))  # tokens of two rows each, over four experts
    rows = [MOE | sizes | {"num_tokens": tokens, "latency": milliseconds} for tokens, milliseconds in took]
    write_all(tables)
    write(tables / "moe" / "vllm" / "0.11", "moe_perf", rows)
    phases = system_curves(CONFIG, "one", "vllm", 4).kinds["NVIDIA One"]
    assert phases["overhead"]([1.0, 99.0]) == pytest.approx([3e-3] * 2)
    assert phases["expert"]([1.0, 4.0]) == pytest.approx([2e-3] * 2)


@pytest.mark.parametrize(
    ("change", "engine", "said"),
    [
        ({"hidden_size": 24}, "vllm", r"one of 8 x 16 x 2 x 4; 64 x 16 x 2 x 4, found 24 x 16 x 2 x 4"),
        ({"kv_lora_rank": 4}, "vllm", "expected latent attention with kv_lora_rank 512, .*, found 4, None, None, None"),
        (LATENT, "vllm", "expected latent attention of 2 heads, hidden size 8 and bfloat16, found none"),
        (
            {"num_attention_heads": "2"},
            "vllm",
            "config: expected a whole number above zero under num_attention_heads or n_heads",
        ),
        ({"num_key_value_heads": [1]}, "vllm", r"heads for keys and values, and their width, above zero, found \[1\], 4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "vllm", "grouped kernels of fp8 for balanced tokens, found none"),
        ({"quantization_config": {"quant_method": "awq"}}, "vllm", "grouped kernels of awq for balanced tokens, found none"),
        ({"num_key_value_heads": 2}, "vllm", "expected attention of 2 heads, 2 for keys and values, of width 4, found none"),
        ({}, "trtllm", r"expected moe/trtllm/\*/moe_perf.parquet, found none"),
        ({}, "other", "`engine`: expected one of sglang, trtllm, vllm, found 'other'"),
    ],
)
def test_models_that_were_not_measured_are_refused(tables, change, engine, said):
    write_all(tables)
    with pytest.raises(BadInput, match=said):
        system_curves(CONFIG | change, "one", engine, 3)


def test_latent_attention_is_a_module_or_a_kernel_with_its_projections(tables):
    """Products take m n k milliseconds: 10 of width 8 for queries' and keys' low ranks, then 384, 256 x 512 and 8 x 256."""
    write_all(tables)
    about = {"num_heads": 2, "batch_size": 1, "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "step": 0, "tp_size": 1}
    rows = [about | {"isl": tokens, "latency": 5.0 * tokens} for tokens in (1, 64)]
    write(tables / "mla" / "vllm" / "0.9", "context_mla_perf", rows)
    plain = system_curves(CONFIG | LATENT, "one", "vllm", 3).kinds["NVIDIA One"]["gate"]
    router, capped = 4 * 8, 32 * 8  # products are measured up to widths of 32
    assert plain([1.0]) == pytest.approx([(router + capped + 32 * 32 + 8 * 32 + 5) / 1e3])
    ranks = system_curves(CONFIG | LATENT | {"q_lora_rank": 16}, "one", "vllm", 3).kinds["NVIDIA One"]["gate"]
    assert ranks([1.0]) == pytest.approx([(router + capped + 32 * 16 + 32 * 32 + 8 * 32 + 5) / 1e3])
    module = [row | {"gemm_type": "bfloat16", "latency": 9.0 * row["isl"]} for row in rows]
    write(tables / "mla" / "vllm" / "0.8", "mla_context_module_perf", module)
    moe = MOE | {"hidden_size": 7168, "inter_size": 16, "moe_ep_size": 2}
    write(tables / "moe" / "vllm" / "0.11", "moe_perf", [moe | {"num_tokens": tokens, "latency": 1.0} for tokens in (2, 8)])
    deepseek = system_curves(CONFIG | LATENT | {"hidden_size": 7168, "q_lora_rank": 1536}, "one", "vllm", 3)
    assert deepseek.kinds["NVIDIA One"]["gate"]([1.0]) == pytest.approx([(4 * 32 + 9) / 1e3])


def test_weights_have_the_configs_type(tables):
    """FP8 experts and projections; the router stays at bfloat16."""
    write_all(tables)
    sizes = {"hidden_size": 8, "inter_size": 16, "moe_ep_size": 2, "moe_dtype": "fp8_block"}
    rows = [MOE | sizes | {"num_tokens": tokens, "latency": tokens * 1.0} for tokens in (2, 4, 8)]
    write(tables / "moe" / "vllm" / "0.11", "moe_perf", rows)
    products = [("bfloat16", 1.0), ("fp8_block", 0.5)]
    gemm = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": m * n * k * part}
        for dtype, part in products for m in (1, 64) for n in (4, 32) for k in (4, 32)
    ]  # fmt: skip
    write(tables / "gemm" / "vllm" / "0.11", "gemm_perf", gemm)
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    made = system_curves(CONFIG | quantised, "one", "vllm", 3)
    phases = made.kinds["NVIDIA One"]
    assert phases["expert"]([1.0]) == pytest.approx([2e-3 / 2])
    assert phases["gate"]([1.0]) == pytest.approx([((16 * 8 + 8 * 8) / 2 + 4 * 8 + 7) / 1e3])
    assert made.expert_bytes == 3 * 8 * 16
    assert "fp8_block: k on 2" in made.provenance["curves of NVIDIA One"]


def test_sliding_windows_count_as_many_times_as_layers_have_them(tables):
    write_all(tables)
    window = [ATTENTION | {"isl": tokens, "window_size": 4, "latency": 1.0 * tokens} for tokens in (1, 64)]
    full = [ATTENTION | {"isl": tokens, "latency": 7.0 * tokens} for tokens in (1, 64)]
    write(tables / "attention" / "vllm" / "0.10", "context_attention_perf", window + full)
    layers = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 4}
    before, after = (system_curves(CONFIG | each, "one", "vllm", 3).kinds["NVIDIA One"]["gate"]([1.0]) for each in ({}, layers))
    assert before - after == pytest.approx([(7 - (3 * 1 + 7) / 4) / 1e3])


@pytest.mark.parametrize("shared", [{"n_shared_experts": 2}, {"shared_expert_intermediate_size": 32}])
def test_shared_experts_are_products_of_all_tokens(tables, shared):
    """Two of width 16 together: 64 x 8, measured up to widths of 32, and 8 x 32."""
    write_all(tables)
    without, found = (
        system_curves(CONFIG | each, "one", "vllm", 3).kinds["NVIDIA One"]["gate"]([1.0]) for each in ({}, shared)
    )
    assert found - without == pytest.approx([(32 * 8 + 8 * 32) / 1e3])


def test_a_models_text_part_counts(tables):
    write_all(tables)
    nested = {"model_type": "seeing", "text_config": CONFIG, "vision_config": {"hidden_size": 2}}
    whole, part = (system_curves(each, "one", "vllm", 3).kinds for each in (CONFIG, nested))
    assert whole == part


def test_older_tables_lack_columns_and_broken_ones_are_refused(tables):
    """A table without windows has none; a table without seconds, or of another format, is named."""
    write_all(tables)
    rows = [{key: value for key, value in ATTENTION.items() if key != "window_size"} | {"isl": 1, "latency": 7.0}]
    write(tables / "attention" / "vllm" / "0.10", "context_attention_perf", rows)
    assert system_curves(CONFIG, "one", "vllm", 3).kinds["NVIDIA One"]["gate"]([1.0]) == pytest.approx(
        [(16 * 8 + 96 + 7) / 1e3]
    )
    write(tables / "attention" / "vllm" / "0.11", "context_attention_perf", [ATTENTION | {"isl": 1}])
    with pytest.raises(BadInput, match=r"0\.11/context_attention_perf\.parquet: expected a column latency, found attn_dtype, "):
        system_curves(CONFIG, "one", "vllm", 3)
    (tables / "gemm" / "vllm" / "0.9" / "gemm_perf.parquet").write_text("gemm")
    with pytest.raises(BadInput, match=r"0\.9/gemm_perf\.parquet: expected a Parquet table, found "):
        system_curves(CONFIG, "one", "vllm", 3)


def test_what_is_missing_is_named(tables, monkeypatch):
    assert database.systems() == ["one"]
    with pytest.raises(BadInput, match="`system`: expected one of one, found 'unmeasured'"):
        database.all_to_all_points("unmeasured")
    with pytest.raises(BadInput, match=r"of one: expected comm/nccl/\*/nccl_perf.parquet, found none"):
        database.all_to_all_points("one")
    (tables / "comm" / "nccl" / "2.9").mkdir(parents=True)
    (tables / "comm" / "nccl" / "2.9" / "nccl_perf.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match="expected the package pyarrow"):
        database.all_to_all_points("one")


def test_without_the_package_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(database, "find_spec", lambda name: None)
    with pytest.raises(
        BadInput, match=r"expected the package aiconfigurator-core \(pip install aiconfigurator-core pyarrow\) or"
    ):
        database.systems()


def test_the_successor_s_tables_come_first(tmp_path, monkeypatch):
    for name in ("aiconfigurator_core", "aisimulate_core"):  # as the newer one is installed beside the older
        install(tmp_path, monkeypatch, name)
        assert database.systems_folder() == tmp_path / name / "systems"
        assert database.package() == name.replace("_", "-")


def test_newer_tables_of_other_operations_and_sizes_are_passed_over(tmp_path, monkeypatch):
    tables = install(tmp_path, monkeypatch)
    write_all(tables)
    clusters = [system_cluster("one")]
    reduced = nccl("all_reduce", "half", 2, 10, 1.0)
    write(tables / "comm" / "nccl" / "2.30", "nccl_perf", [{key: reduced[key] for key in reduced if key != "device"}])
    assert [*clusters, system_cluster("one")] == 2 * clusters


def test_the_command_writes_a_cluster_and_curves(tmp_path, monkeypatch, capsys):
    write_all(install(tmp_path, monkeypatch))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["silicon.py", *args])
        silicon.main()
        return capsys.readouterr().out

    assert run("one", "--gpus", "2", "--shape", "config.json", "-o", "one.toml") == "wrote one.toml\nwrote curves.npz\n"
    assert [len(load_cluster("one.toml")), len(load_cluster("one.toml").link_curves)] == [2, 1]
    assert set(load_curves("curves.npz").kinds["NVIDIA One"]) == {"gate", "expert", "aggregate", "overhead"}
    with pytest.raises(SystemExit, match="silicon: `system`: expected one of one, found 'two'"):
        run("two")
    with pytest.raises(SystemExit, match="`engine`: expected one of sglang, trtllm, vllm, found 'tgi'"):
        run("one", "--shape", "config.json", "--engine", "tgi")


@pytest.mark.parametrize(
    ("quantised", "named"),
    [
        (None, "bfloat16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "mxfp4"}, "w4a16_mxfp4"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_weights_have_the_type_of_the_config(quantised, named):
    for config in ({"num_experts": 4}, {"text_config": {"num_experts": 4}}):
        assert weight_format({**config, "quantization_config": quantised}) == named
