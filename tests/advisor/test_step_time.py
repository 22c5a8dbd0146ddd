"""Seconds of a step and bytes of a GPU, from first principles."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.advisor.collectives import ring_nic_bytes
from aurora.advisor.engines.engine import Layout
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.served_sizes import ServedSizes
from aurora.advisor.step_constants import DEFAULT, StepConstants, borrowed, computed_error, nearest
from aurora.advisor.step_time import SchedulerStep, active_experts, step_seconds
from aurora.errors import BadInput
from aurora.io.clusters import load_gpus

CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
SIZES = ServedSizes.of(CONFIG)
KIND = load_gpus()["NVIDIA H100 80GB HBM3"]
QUIET = replace(
    DEFAULT, reduce_s=0.0, collective_s=0.0, collective_rank_s=0.0, link_share=1.0, small_share=1e-9, large_s=0.0, nic_share=1.0
)  # bytes alone
SPLITS = [Layout(), Layout(4), Layout(4, expert=4), Layout(data=4, expert=4), Layout(2, 4, 8)]


def test_dense_models_have_no_experts():
    config = {key: value for key, value in CONFIG.items() if "expert" not in key} | {"intermediate_size": 128}
    seconds = step_seconds(config, KIND, Layout(2), SchedulerStep(decode_requests=3, kv_tokens=30))
    assert seconds.experts_s == 0
    assert seconds.dense_s > 0


def test_active_experts_are_those_that_chance_touches():
    assert active_experts(16, 2, 16, 1) == pytest.approx(2)  # of one token: its choices
    assert active_experts(16, 2, 16, 2) == pytest.approx(2 + 2 * 14 / 16)  # a second one adds those that the first left
    assert active_experts(4, 2, 16, 1e6) == pytest.approx(4)


@given(
    st.sampled_from(SPLITS), st.integers(0, 9000), st.integers(0, 300), st.integers(0, 10**6), st.integers(1, 300),
    st.sampled_from(sorted(EXCHANGES)),
)  # fmt: skip
def test_more_never_takes_less(split, prefill, decode, kv_tokens, more, exchange):
    if not prefill + decode:
        decode = 1
    step = SchedulerStep(prefill, decode, kv_tokens)

    def seconds(step, **how):
        return step_seconds(SIZES, KIND, split, step, exchange=exchange, **how).total

    least = seconds(step) * (1 - 1e-9)
    assert seconds(replace(step, kv_tokens=kv_tokens + more * 1000)) >= least
    assert seconds(step, imbalance=1.0 + more / 100) >= least
    if prefill + decode > 512 or not prefill:  # else a step without prompts may leave a CUDA graph
        assert seconds(replace(step, decode_requests=decode + more, kv_tokens=kv_tokens)) >= least
    assert seconds(replace(step, prefill_tokens=prefill + more)) >= least


def test_a_layer_exchanges_what_its_layout_needs():
    step = SchedulerStep(prefill_tokens=600)
    assert step_seconds(SIZES, KIND, Layout(), step).collectives_s == 0
    message = 600 * 64 * 2
    reduced = step_seconds(SIZES, KIND, Layout(4), step, constants=QUIET).collectives_s
    assert reduced == pytest.approx((2 * 4 + 1) * 1.5 * message / KIND.link_Bps)  # twice a layer, and embeddings
    gathered = step_seconds(SIZES, KIND, Layout(data=4, expert=4), step, constants=QUIET).collectives_s
    assert gathered == pytest.approx(4 * 3 * (2 * message + 600 * 2 * 8) / KIND.link_Bps)  # tokens, choices, and results
    routed = step_seconds(
        SIZES, KIND, Layout(data=4, expert=4), step, exchange="nvlink-one-sided", constants=QUIET, pace=1.0
    ).collectives_s
    ranks = 4 * (1 - (3 / 4) ** 2)  # of a token's two experts
    assert routed == pytest.approx(4 * 2 * ranks * 3 / 4 * message / KIND.link_Bps)


@pytest.mark.parametrize(
    ("exchange", "links", "nics"),
    [
        ("nvlink-one-sided", 16 * (1 - (15 / 16) ** 2) * 15 / 16, 16 * (1 - (15 / 16) ** 2) / 2),  # once per GPU
        ("deepep-ll", 2 * 15 / 16, 2 / 2),  # per expert, of two
        ("deepep-ht", 16 * (1 - (15 / 16) ** 2) * 15 / 16, 2 * (1 - (1 / 2) ** 2) / 2),  # per server, of two
        ("mori-ll", 16 * (1 - (15 / 16) ** 2) * 15 / 16, 1),  # every token to the other server
    ],
)
def test_a_token_travels_once_to_what_its_exchange_says(exchange, links, nics):
    step, split, message = SchedulerStep(prefill_tokens=600), Layout(data=16, expert=16), 600 * 64 * 2
    for nic_Bps in (KIND.port_Bps * 1e-3, KIND.port_Bps * 1e3):
        how = {"exchange": exchange, "constants": QUIET, "nic_Bps": nic_Bps, "pace": 1.0}
        took_s = step_seconds(SIZES, KIND, split, step, **how).collectives_s
        assert took_s == pytest.approx(4 * 2 * message * max(links / KIND.port_Bps, nics / nic_Bps))


def test_steps_without_prompts_take_the_exchange_that_is_named_for_them():
    split, step = Layout(data=4, expert=4), SchedulerStep(decode_requests=100, kv_tokens=1000)
    fixed, mixed, eager = (
        step_seconds(SIZES, KIND, split, step, exchange=name) for name in ("deepep-ll", "deepep", "deepep-ht")
    )
    assert mixed == fixed
    assert eager.host_s > fixed.host_s  # outside CUDA graphs
    prompts = replace(step, prefill_tokens=900)
    assert step_seconds(SIZES, KIND, split, prompts, exchange="deepep") == step_seconds(
        SIZES, KIND, split, prompts, exchange="deepep-ht"
    )


@pytest.mark.parametrize("link_Bps", [1e6, 1e9, 1e15])
def test_halves_hide_what_travels_beside_what_computes(link_Bps):
    """Two halves compute as they would alone; of what travels as much is left as does not fit beside a stage of the other."""
    quick = replace(DEFAULT, launch_s=0.0, eager_s=0.0)
    kind = replace(KIND, link_Bps=link_Bps)
    split, step = Layout(data=4, expert=4), SchedulerStep(prefill_tokens=1200)
    whole, half, cut = (
        step_seconds(SIZES, kind, split, each, exchange="nvlink-one-sided", constants=quick, overlap=overlap)
        for each, overlap in ((step, False), (step.half, False), (step, True))
    )
    assert (cut.attention_s, cut.experts_s) == (2 * half.attention_s, 2 * half.experts_s)
    assert cut.head_s == whole.head_s
    assert cut.host_s == whole.host_s  # without launches
    travel_s, around_s = half.collectives_s / 2, half.attention_s  # all layers of SIZES have experts
    stages = [around_s, half.experts_s, half.experts_s + half.dense_s, around_s + half.dense_s]
    assert cut.collectives_s == pytest.approx(sum(max(0.0, travel_s - stage) for stage in stages))
    assert (cut.collectives_s == 0) == (link_Bps == 1e15)


def test_halves_launch_twice_and_leave_multiprocessors_to_the_exchange():
    split, step = Layout(data=4, expert=4), SchedulerStep(prefill_tokens=1200)
    slow = replace(DEFAULT, launch_s=1.0)
    host_s = [
        step_seconds(SIZES, KIND, split, step, exchange="nixl", constants=slow, overlap=on).host_s for on in (False, True)
    ]
    assert host_s[1] == pytest.approx(2 * host_s[0], rel=1e-2)
    large = replace(step, prefill_tokens=10**6)
    with_all, with_less = (
        step_seconds(SIZES, KIND, split, large, exchange=name, overlap=True).attention_s for name in ("nixl", "deepep-ht")
    )
    assert with_all < with_less <= with_all / (1 - 20 / 132) * (1 + 1e-9)


def collectives_s(layout, nic_Bps, tokens=600, **how):
    """Seconds of all collectives of a step of prompts, without latencies."""
    step = SchedulerStep(prefill_tokens=tokens)
    return step_seconds(SIZES, KIND, layout, step, constants=QUIET, nic_Bps=nic_Bps, **how).collectives_s


@pytest.mark.parametrize(
    ("layout", "gathered_tokens"),
    [
        # 2 servers of 8: a ring of 16 ranks crosses a server's border with what 15 ranks hold, 600 tokens each; the server's
        # 8 NICs carry 15 x 600 / 8. (8 ranks are elsewhere, so at least 8 x 600 / 8 tokens must come in.)
        (Layout(data=16, expert=16), 15 * 600 / 8),
        # 4 servers of 8: what 31 ranks hold, over 8 NICs: 31 x 600 / 8. (24 ranks are elsewhere: at least 24 x 600 / 8.)
        (Layout(data=32, expert=32), 31 * 600 / 8),
        # 2 servers of 8, 2 data-parallel ranks of 8 GPUs: each of the 16 GPUs holds 600 / 8 tokens of its rank's: 15 x 75 / 8.
        (Layout(8, 2, 16), 15 * 75 / 8),
    ],
)
def test_a_gather_between_servers_uses_all_of_their_nics(layout, gathered_tokens):
    """Hand values of vLLM's default exchange over NCCL's rings, and of the reduce-scatter that brings results back."""
    there_bytes = 64 * 2 + 2 * 8  # a token, and its two choices with 8 bytes each
    back_bytes = 64 * 2
    nic_Bps = 1e6  # slow enough to decide
    expected_s = 4 * gathered_tokens * (there_bytes + back_bytes) / nic_Bps  # four layers
    if layout.tensor > 1:  # all-reduces inside the servers: embeddings and one a layer, then the gathers of tensor parallelism
        expected_s += ((4 + 0 + 1) * 2 + 4) * 600 * back_bytes * 7 / 8 / KIND.port_Bps
    assert collectives_s(layout, nic_Bps) == pytest.approx(expected_s)


@pytest.mark.parametrize(("ranks", "crossing"), [(16, 2 * 15 / 16 / 8), (32, 2 * 31 / 32 / 8), (12, 2 * 11 / 12 / 4)])
def test_an_all_reduce_between_servers_uses_all_of_their_nics(ranks, crossing):
    """Tensor parallelism over servers of 8: a rank's 2 (R - 1) / R of the message cross over 8 NICs, 4 where 4 ranks are left."""
    reduced_s = (2 * 4 + 1) * 600 * 64 * 2 * crossing / 1e6  # twice in each of four layers, and embeddings
    assert collectives_s(Layout(ranks), 1e6) == pytest.approx(reduced_s)


def test_a_server_of_eight_gpus_gathers_over_links():
    assert ring_nic_bytes(7.0, 8, 8) == 0
    assert collectives_s(Layout(data=8, expert=8), 1.0) == collectives_s(Layout(data=8, expert=8), None)


@pytest.mark.parametrize(
    ("split", "how", "message"),
    [
        (Layout(), {"exchange": "carrier"}, "expected one of all-reduce"),
        (Layout(), {"imbalance": 0.5}, "at least 1"),
        (Layout(data=16, expert=16), {}, "nic_Bps: expected a rate for 16 GPUs on servers of 8"),
    ],
)
def test_bad_arguments(split, how, message):
    with pytest.raises(BadInput, match=message):
        step_seconds(SIZES, KIND, split, SchedulerStep(decode_requests=1), **how)


def test_steps_are_of_something():
    with pytest.raises(BadInput, match="neither"):
        SchedulerStep()
    with pytest.raises(BadInput, match="kv_tokens"):
        SchedulerStep(1, kv_tokens=-1)


def test_a_collective_between_servers_by_hand():
    """One layer of DeepSeek-V3 in FP8, 128 tokens on each of 16 H100 in two servers, NICs of 50 GB/s; DeepEP's low-latency kernels.

    A token of 7,168 numbers travels to eight experts in 8.25 bits each, with scales: 7,392 B; back in 16: 14,336 B. Half of the
    experts are on the other server: 128 x 8 / 2 x 7,392 B = 3.785 MB over the NIC at 0.85 of its rate, 89.0 us, and 172.7 us back;
    twice 5.5 + 8 x 1.3 us until the first byte: 120.8 + 204.5 us.
    """
    took_s = collectives_of_deepep("deepep-ll", 128, 2)
    assert took_s == pytest.approx(2 * 2 * 15.9e-6 + 128 * 4 * (7392 + 14336) / 50e9 / 0.85)
    assert took_s == pytest.approx(325.3e-6, rel=1e-3)


def test_a_gather_between_servers_by_hand():
    """Gathered by NCCL in BF16: 15 other ranks' tokens over 8 NICs; 42.2 us until the first byte, in turn over 16 ranks."""
    sizes, step = replace(SIZES, layers=1, moe_layers=1, dense=0), SchedulerStep(decode_requests=128)
    gathered_s = step_seconds(sizes, KIND, Layout(data=16, expert=16), step, nic_Bps=50e9).collectives_s
    nic_bytes = [15 * 128 * (64 * 2 + there) / 8 for there in (2 * 8, 0)]  # as small ones go, at 0.2 of the rate: sooner
    assert gathered_s == pytest.approx(2 * (2 * 15.9e-6 + 8 * 1.3e-6) + sum(nic_bytes) / 50e9 / 0.2)


DEEPSEEK = {
    "num_hidden_layers": 1, "hidden_size": 7168, "vocab_size": 100, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def collectives_of_deepep(exchange, tokens, servers):
    """Seconds of dispatch and combine in one layer of DeepSeek-V3 on servers of 8 H100."""
    step = SchedulerStep(decode_requests=tokens) if exchange == "deepep-ll" else SchedulerStep(tokens)
    split = Layout(data=8 * servers, expert=8 * servers)
    return step_seconds(DEEPSEEK, KIND, split, step, exchange=exchange, nic_Bps=50e9).collectives_s


def test_a_kind_without_shares_takes_those_of_the_nearest():
    """An L4 (121 TFLOPS, 403 for each byte) is nearer to an L40S (362; 419) than to an A100 (312; 153), both in peak and memory.

    ln(362 / 121) + ln(419 / 403) = 1.09 + 0.04; ln(312 / 121) + ln(403 / 153) = 0.95 + 0.97.
    """
    far = load_gpus()["NVIDIA L4"]
    assert nearest(far, "grouped_share").kind == "NVIDIA L40S"
    assert nearest(load_gpus()["NVIDIA GB200"], "grouped_fp8_share").kind == "NVIDIA B300 SXM6 AC"
    assert StepConstants.of(far).grouped_share == 0.29
    assert StepConstants.of(far).flops_share == nearest(far, "dense_share").dense_share
    assert nearest(KIND, "dense_share") == KIND
    assert (borrowed(KIND), computed_error(KIND)) == ([], 1.10)
    assert borrowed(far)[0] == nearest(far, "dense_share").kind
    assert computed_error(far) == 1.25


def test_every_part_of_a_step_by_hand():
    """Eight requests of 100 tokens decode on one H100: 3,350 GB/s at 0.83, 989 TFLOPS at shares 0.75, 0.27 and 0.6.

    Each part reads its weights in 2 bytes and takes 2 operations a weight and token; what is read and what is computed add up as
    (a^1.5 + b^1.5)^(1/1.5), a kernel takes 2.1 us, and numbers of activations are passed over in 2 bytes each.
    """
    seconds = step_seconds(SIZES, KIND, Layout(), SchedulerStep(decode_requests=8, kv_tokens=800))
    Bps, dense, grouped, pairs = 3350e9 * 0.83, 989e12 * 0.75, 989e12 * 0.27, 989e12 * 0.6

    def product(weights, flops, rate, kernels, passed):
        return ((2 * weights / Bps) ** 1.5 + (flops / rate) ** 1.5) ** (1 / 1.5) + kernels * 2.1e-6 + 2 * passed / Bps

    # 64 x 128 twice for queries and output, 64 x 32 twice for keys and values; four times over what it reads and writes, and
    # eight times over a token for norms and residuals. The cache: 100.5 tokens (half of the new one) of 2 x 2 x 16 numbers.
    projections = product(20480, 2 * 20480 * 8, dense, 9, 8 * (4 * 20480 / 64 + 8 * 64))
    assert seconds.attention_s == pytest.approx(4 * (projections + max(8 * 100.5 * 128 / Bps, 8 * 100.5 * 4 * 128 / pairs)))
    # Shared experts: 3 x 64 x 48 weights in four kernels; twice over what they read, and two tokens' widths.
    assert seconds.dense_s == pytest.approx(4 * product(9216, 2 * 9216 * 8, dense, 4, 8 * (2 * 9216 / 64 + 2 * 64)))
    # 16 experts of 3 x 64 x 32: 16 rows choose 16 (1 - (1 + 8 ln(8/7) / 1.3)^-1.3) of them, each with half a tile of 16 rows more.
    active = 16 * (1 - (1 + 8 * 0.1335314 / 1.3) ** -1.3)
    routed = product(active * 6144, 2 * 6144 * (16 + 16 * active), grouped, 9, 16 * (2 * 6144 / 64 + 3 * 64))
    assert seconds.experts_s == pytest.approx(4 * (routed + product(1024, 2 * 1024 * 8, dense, 0, 0)), rel=1e-6)
    assert seconds.head_s == pytest.approx(product(6400, 2 * 6400 * 8, dense, 4, 0))
    assert seconds.host_s == 4.6e-4  # within a CUDA graph, without other ranks
    # Prompts of 600 tokens leave graphs: 4 layers x (5 + 4) + 4 x 9 + 4 x 4 launches, the first five of a layer of 18 us, others 27.
    eager = step_seconds(SIZES, KIND, Layout(), SchedulerStep(600))
    busy_s = eager.total - eager.host_s
    assert eager.host_s == pytest.approx(4.6e-4 + 4 * 5 * 18e-6 + (4 * 4 + 4 * 9 + 4 * 4) * 27e-6 - busy_s)


def seconds_of(config, step, layout=Layout(), **how):
    """The parts of a step on one B300, whose kernels reach 0.83 of 8 TB/s."""
    return step_seconds(config, load_gpus()["NVIDIA B300 SXM6 AC"], layout, step, **how)


def test_hyper_connections_by_hand():
    """Four streams of 64 numbers in four layers: 28 us before and after each half of a layer, and all streams' numbers.

    A half's result joins 4 streams (5 read, 4 written), which are multiplied by a small matrix (4) and collapsed to one (4 read,
    1 written), with a norm (2): 20 x 64 numbers of 2 bytes, in place of 4 x 64 of a norm and a residual. 100 tokens decode.
    """
    step = SchedulerStep(decode_requests=100, kv_tokens=100)
    plain, mixed = (seconds_of(replace(SIZES, streams=many), step).attention_s for many in (1, 4))
    assert mixed - plain == pytest.approx(4 * 2 * (28e-6 + 104 * 16 * 64 * 2 / (8e12 * 0.83)))  # 104: of a CUDA graph
    prompts = SchedulerStep(600)
    waits = [seconds_of(replace(SIZES, streams=many), prompts) for many in (1, 4)]
    assert waits[1].total - waits[0].total == pytest.approx(4 * 6 * 27e-6)  # launches outside graphs hide all else


SPARSE = {
    "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100, "num_attention_heads": 128, "kv_lora_rank": 32,
    "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 64,
    "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64,
}  # fmt: skip


def test_sparse_attention_pads_the_heads_of_a_rank_by_hand():
    """128 heads on 8 GPUs are 16 each, which kernels pad to 64: half of the pairs on each GPU, not an eighth.

    1,000 tokens of one prompt attend to 64 entries each: 2 x 128 x (2 x 32 + 8) = 18,432 operations a pair. 40 numbers of a
    head's query are written, read, and the result written: three times 128 x 40 x (1/2 - 1/8) numbers a token.
    """
    sizes = ServedSizes.of(SPARSE)
    assert sizes.attention[0].pairs_over == 2
    step = SchedulerStep(1000)
    padded, split = (
        seconds_of(replace(sizes, attention=(replace(sizes.attention[0], pairs_over=over),)), step, Layout(8)).attention_s
        for over in (2, 0)
    )
    pairs_s = 1000 * 64 * 18432 / (2250e12 * 0.4)
    assert padded - split == pytest.approx((pairs_s + 3 * 1000 * 128 * 40 * 2 / (8e12 * 0.83)) * (1 / 2 - 1 / 8))


def test_an_indexer_scores_pairs_and_chooses_for_each_token_by_hand():
    """1,000 tokens of a prompt score 500 entries on average, at 2 x 4 x 128 operations and 0.22 of the peak; 0.21 us to choose."""
    sizes = ServedSizes.of(SPARSE)
    unscored = replace(sizes, attention=(replace(sizes.attention[0], index_flops=0),))
    scored_s = seconds_of(sizes, SchedulerStep(1000)).attention_s - seconds_of(unscored, SchedulerStep(1000)).attention_s
    assert scored_s == pytest.approx(1000 * 500 * 1024 / (2250e12 * 0.22) + 1000 * 2.1e-7)


def test_experts_at_fp8_by_hand():
    """One layer of DeepSeek-V3's experts, cut over 8 H100: 8,192 tokens are 65,536 rows of 256 inner numbers.

    Triton's kernels reach 0.15 of 1,979 TFLOPS at fp8, and 0.6 of 3,350 GB/s. DeepGEMM's 0.66.
    """
    layer, step = DEEPSEEK | {"num_hidden_layers": 1}, SchedulerStep(8192)
    inner, rows = 256, 65536
    flops, read_s = 2 * 3 * 7168 * inner * (rows + 256 * 16), 256 * 3 * 7168 * inner / (3350e9 * 0.6)
    passed = rows * (6 * inner + 3 * 7168) + 1.5 * (8192 * 7168 + rows * inner)  # 1.5: inputs that become fp8
    router = ((2 * 7168 * 256 / (3350e9 * 0.83)) ** 1.5 + (2 * 7168 * 256 * 8192 / (989e12 * 0.75)) ** 1.5) ** (1 / 1.5)
    for fused, share in ((True, 0.15), (False, 0.66)):
        product_s = (read_s**1.5 + (flops / (1979e12 * share)) ** 1.5) ** (1 / 1.5)
        expected_s = product_s + 11 * 2.1e-6 + 2 * passed / (3350e9 * 0.83) + router
        assert step_seconds(layer, KIND, Layout(8), step, fused=fused).experts_s == pytest.approx(expected_s, rel=1e-3)


def test_products_with_experts_of_four_bits_run_at_half_precision():
    """MXFP4 is widened to 16 bits: the rate of fp8 does not matter, that of half precision does."""
    fp4, constants = DEEPSEEK | {"expert_dtype": "fp4"}, StepConstants.of(KIND)
    assert ServedSizes.of(fp4).row_bytes == 2
    slow = [replace(constants, **{name: 1e-3}) for name in ("fused_fp8_share", "grouped_share")]
    as_is, at_fp8, at_half = (
        step_seconds(fp4, KIND, Layout(), SchedulerStep(8192), constants=each).experts_s for each in (constants, *slow)
    )
    assert as_is == at_fp8 < at_half / 100
