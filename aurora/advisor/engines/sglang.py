"""SGLang: tensor parallelism by default; data-parallel attention and EP are set within it, and a placement is a file.

Settings that matter for MoE models: flag or subject | default | effect, and what it goes with | source.

--tp-size | 1 | all GPUs of a copy, whatever else divides them | srt/arg_groups/fields/parallel.py
--pp-size | 1 | stages of layers, each with --tp-size GPUs; a prompt's chunks follow one another through them. With data-
  parallel attention it crashed (issue 9805, open) | docs/advanced_features/pipeline_parallelism.md
--attn-dp-size | 1 | data-parallel attention inside them; before 0.5.22, and deprecated now: --dp-size N
  --enable-dp-attention. --dp-size alone starts copies of the whole model | srt/arg_groups/fields/parallel.py,
  srt/arg_groups/parallel_hook.py
--ep-size | 1: every expert is cut over all GPUs | whole experts over that many GPUs; all-to-alls set it to --tp-size by
  themselves | srt/arg_groups/overrides.py (_a2a_ep_size)
--moe-a2a-backend | none | none: an all-reduce, or with --attn-dp-size all tokens gathered on all GPUs. Not described here:
  NCCL EP (pull request 32329, open), pplx (whose limit of 128 tokens must be raised to a prefill chunk), mooncake, megamoe,
  flashinfer_megamoe, ascend_fuseep | srt/arg_groups/fields/exec_.py (ExecMoe)
--deepep-mode | auto | low_latency for decode, normal for prefill; normal alone turns CUDA graphs off |
  srt/arg_groups/moe_hook.py
padding | without an all-to-all | decode: to the most tokens of a rank by allgather, or not at all in an all-reduce, whichever
  moves less; prefill of several ranks: not at all | srt/layers/dp_attention.py (DpPaddingMode)
--enable-two-batch-overlap | off | halves of a batch overlap; DeepEP, NIXL, MoRI or pplx, and models with such stages (DeepSeek,
  Qwen3-MoE, MiMo-V2; DeepSeek-V4 in prefill, there without an all-to-all too). Prefill leaves DeepEP 20 multiprocessors |
  srt/batch_overlap/operations_strategy.py, srt/batch_overlap/two_batch_overlap.py, srt/arg_groups/validation_hook.py
--init-expert-location | trivial: in sequence, replicas of the first experts last | a file with a placement, or with loads
  from which the balancer makes one | srt/eplb/expert_location.py
--ep-dispatch-algorithm | with a placement: static with an all-to-all, dynamic without | replica of a token: by the GPU's
  table, at random, or lp: by a linear program a batch and layer (LPLB, since 0.5.14; DeepSeek-V2/V3 and GLM models) |
  srt/arg_groups/parallel_hook.py, srt/eplb/lplb_solver.py
--enable-eplb | off | moves experts every --eplb-rebalance-num-iterations (1000) steps by the load of as many; serving waits,
  for all layers at once or --eplb-rebalance-layers-per-chunk of them a step | srt/eplb/eplb_manager.py
--chunked-prefill-size | by memory, 8192 on H100 and H200 | tokens of a prompt's chunk, divided among data-parallel ranks; low-
  latency buffers have slots for SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK (128) tokens | srt/server_args.py
--enable-waterfill | off | the shared expert of a token goes to the least busy GPU; DeepSeek-V3 and R1, DeepEP or MegaMoE;
  since 0.5.17. Not described here | srt/arg_groups/fields/exec_.py (ExecMoe)
--load-balance-method | auto: round_robin, but for prefill and decode apart | total_tokens: to the rank with the fewest tokens;
  minimum_tokens in older versions. --prefill-decode-interval and --enable-prefill-delayer, which let prompts wait on all
  ranks, are not described here | srt/arg_groups/fields/parallel.py, srt/arg_groups/fields/schedule.py
--disaggregation-mode | null | prefill: a pool computes prompts, decode: another generates; caches travel by
  --disaggregation-transfer-backend (mooncake, or nixl), and a prefill server needs a --disaggregation-bootstrap-port (8998) of
  its own on its host | docs/advanced_features/pd_disaggregation.md, docs/advanced_features/server_arguments.md
several servers | one | --nnodes, --node-rank, --dist-init-addr | srt/arg_groups/fields/parallel.py
"""

import shlex
from pathlib import Path

from aurora.advisor.engines.engine import (
    DispatchFlag,
    EplbSettings,
    LaunchPlace,
    ServingEngine,
    ServingWay,
    launch_lines,
)
from aurora.advisor.engines.exchanges import EXCHANGES

BACKENDS = {
    "all-reduce": "",
    "allgather": "",
    "deepep": "--moe-a2a-backend deepep",
    "deepep-ht": "--moe-a2a-backend deepep --deepep-mode normal",
    "deepep-ll": "--moe-a2a-backend deepep --deepep-mode low_latency",
    "uccl-ht": "--moe-a2a-backend deepep --deepep-mode normal",
    "uccl-ll": "--moe-a2a-backend deepep --deepep-mode low_latency",
    "deepep-v2": "--moe-a2a-backend deepep_v2",
    "nixl": "--moe-a2a-backend nixl",
    "mori-ht": "--moe-a2a-backend mori",
    "nvlink-one-sided": "--moe-a2a-backend flashinfer --moe-runner-backend flashinfer_cutlass",
}
PORT, DIST_PORT, BOOTSTRAP_PORT = 30000, 5000, 8998


def refuses(way: ServingWay) -> dict[str, bool]:
    """Checks whether SGLang can serve in a way; returns a dict from each possible reason against it to whether it applies."""
    layout, routes = way.layout, EXCHANGES[way.exchange].sends == "route"
    return {
        "nvlink-one-sided needs data-parallel attention on every GPU": way.exchange == "nvlink-one-sided" and layout.tensor > 1,
        "stages do not go with data-parallel attention (issue 9805)": layout.pipeline > 1 and layout.data > 1,
        "lplb needs an all-to-all and replicas": way.balance == "lplb" and not (routes and way.redundant),
        "its balancer looks at no more steps than lie between two changes": way.eplb is not None
        and way.eplb.window > way.eplb.interval,
    }


def launch(way: ServingWay, model: str, file: Path) -> str:
    """Returns the shell commands that start SGLang with the settings of a way of serving.

    Args:
        way: the way of serving.
        model: the model's name or path.
        file: the placement file.
    """
    layout = way.layout
    words = ["python -m sglang.launch_server", f"--model-path {shlex.quote(model)}", f"--tp-size {layout.stage_gpus}"]
    words += [f"--pp-size {layout.pipeline}"] * (layout.pipeline > 1)
    words += [f"--attn-dp-size {layout.data}"] * (layout.data > 1)
    words += [f"--ep-size {layout.expert}"] * (layout.expert > 1)
    words += [BACKENDS[way.exchange]] * bool(BACKENDS[way.exchange])
    words += ["--deepep-v2-mode hybrid"] * (way.exchange == "deepep-v2" and way.stage_hosts > 1)
    words += [f"--ep-num-redundant-experts {way.redundant}"] * (way.redundant > 0)
    words += [f"--init-expert-location {shlex.quote(str(file))}"] * (way.placement == "plan")
    if way.eplb:
        words += [f"--enable-eplb --eplb-rebalance-num-iterations {way.eplb.interval}"]
        words += [f"--expert-distribution-recorder-buffer-size {way.eplb.window}"]
    words += ["--ep-dispatch-algorithm lp"] * (way.balance == "lplb")
    words += ["--enable-two-batch-overlap"] * way.overlap
    words += [f"--chunked-prefill-size {way.batched_tokens * layout.data}"] * (way.batched_tokens > 0)
    dispatched = way.batched_tokens > 0 and way.exchange == "deepep-ll"
    words = [f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={way.batched_tokens}"] * dispatched + words

    def at(place: LaunchPlace) -> list[str]:
        several = f"--nnodes {way.hosts} --node-rank {place.node} --dist-init-addr {place.head}:{DIST_PORT}"
        bootstrap = f" --disaggregation-bootstrap-port {BOOTSTRAP_PORT + place.copy}" * (way.stage == "prefill")
        apart = f"--disaggregation-mode {way.stage} --disaggregation-transfer-backend nixl{bootstrap}"
        return words + [several] * (way.hosts > 1) + [apart] * bool(way.stage)

    return launch_lines(way, at, PORT)


def default_exchange(way: ServingWay) -> str:
    """Returns the name of the exchange that SGLang uses without `--moe-a2a-backend`."""
    return "allgather"


SGLANG = ServingEngine(
    "sglang",
    ("0.5.22", "0.5.23"),
    BACKENDS,
    launch,
    refuses,
    EplbSettings(1000, 1000),
    default_exchange,
    balances=("lplb",),
    overlaps=("deepep", "deepep-ht", "deepep-ll", "nixl", "mori-ht"),
    scatters=True,
    moves_wait=True,
    pools="nixl, and a router: python -m sglang_router.launch_router --pd-disaggregation --prefill http://HOST:PORT BOOTSTRAP "
    "--decode http://HOST:PORT (SGLang's docs/advanced_features/pd_disaggregation.md)",
    form="sglang",
    dispatch="round-robin",
    dispatch_flags=[DispatchFlag("--load-balance-method total_tokens", "tokens")],
)
