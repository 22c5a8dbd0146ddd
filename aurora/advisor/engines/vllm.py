"""vLLM: by default an allgather and a reduce-scatter, experts in sequence; a plan comes in by aurora's plugin.

Settings that matter for MoE models: flag or subject | default | effect, and what it goes with | source.

--enable-expert-parallel | off: every expert is cut over tensor- and data-parallel ranks | experts are divided whole over all
  of them; no EP size of its own | vllm/config/parallel.py
--all2all-backend | allgather_reducescatter | the exchange of data-parallel ranks; without them (or sequence-parallel MoE)
  there is none but an all-reduce. pplx and naive are removed and mean the default; moonep since 0.31. The
  default is the same on all GPUs, to 0.33: FlashInfer's one-sided NVLink was it on the main branch for days of August 2026
  (pull request 53311, taken back by 53952), and pull request 54268, open, makes it that of GB200 and GB300. NCCL EP is in
  open ones (46889, 47948, 56241). UCCL-EP has DeepEP's interface, is installed in its place, and so has no flag of its own |
  vllm/config/parallel.py (All2AllBackend, use_all2all)
--tensor-parallel-size with --data-parallel-size | 1 | with expert parallelism each GPU brings its part of a rank's tokens
  into the exchange (sequence-parallel MoE) | vllm/config/parallel.py (use_sequence_parallel_moe)
--pipeline-parallel-size | 1 | stages of layers, with as many batches in flight; hidden states and residuals travel, each GPU a
  part; expert parallelism within a stage; not with --enable-dbo or recorded routing. A data-parallel rank's stages lie side by
  side, so the exchange of a stage's ranks crosses servers: not described here | vllm/distributed/parallel_state.py,
  vllm/config/vllm.py
padding | with CUDA graphs or two halves | all data-parallel ranks are padded to the most tokens of one; without CUDA graphs
  they are not | vllm/v1/worker/dp_utils.py
CUDA graphs | on | deepep_high_throughput with data parallelism and moonep turn them off | vllm/config/compilation.py,
  vllm/config/vllm.py
--enable-dbo | off | dual batch overlap from 32 tokens of decode or 512 with prefill on (--dbo-decode-token-threshold,
  --dbo-prefill-token-threshold), if all ranks have as many; needs DeepEP or NIXL, and model runner V1; DeepEP's
  high-throughput kernels get 20 multiprocessors | vllm/config/parallel.py (dbo_*), vllm/config/vllm.py,
  vllm/v1/worker/ubatch_utils.py; docs/design/dbo.md
--expert-placement-strategy | linear | round_robin only for models with groups of experts, without EPLB, and with
  deepep_low_latency, nixl_ep or no data parallelism; otherwise vLLM warns and stays linear. Not described here |
  vllm/model_executor/layers/fused_moe/expert_map_manager.py
--enable-eplb | off | moves experts by the load of 1000 steps every 3000 (window_size, step_interval), by default beside
  serving (use_async); needs expert parallelism and equally many slots a GPU; starts linear, without a file |
  vllm/config/parallel.py (EPLBConfig)
--eplb-config.num_redundant_experts | 0 | slots beyond one for each expert; without EPLB vLLM refuses it |
  vllm/config/parallel.py
--max-num-batched-tokens | 8192 on an API server with 70 GiB or more and no A100, 16384 from 160 GiB on, 2048 below; 256 with
  deepep_low_latency and nixl_ep | the most tokens of a rank in a step; low-latency buffers have slots for as many |
  vllm/engine/arg_utils.py (get_batch_defaults, use_batched_dp_moe)
ranks of requests | by the number of requests | a request's data_parallel_rank, or the header X-data-parallel-rank, wins |
  vllm/v1/engine/core_client.py
--prefill-schedule-interval | 1 | data-parallel ranks compute prompts in every N-th step; a rank whose prompts could not all
  begin, or that generates nothing, goes on alone | vllm/v1/engine/core.py, vllm/v1/core/sched/scheduler.py
--kv-transfer-config | none | NixlConnector: a pool computes prompts (kv_producer) and another generates (kv_consumer), behind a
  proxy; each rank has a port for handshakes, VLLM_NIXL_SIDE_CHANNEL_PORT (5600) plus its number |
  docs/features/nixl_connector_usage.md
several servers | one | --data-parallel-size-local, -address, -start-rank and --headless; a rank over servers: --nnodes,
  --node-rank | vllm/engine/arg_utils.py; docs/serving/data_parallel_deployment.md
"""

import json
import shlex
from collections.abc import Sequence
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
    "allgather": "allgather_reducescatter",
    "deepep-ht": "deepep_high_throughput",
    "deepep-ll": "deepep_low_latency",
    "uccl-ht": "deepep_high_throughput",
    "uccl-ll": "deepep_low_latency",
    "deepep-v2": "deepep_v2",
    "nixl": "nixl_ep",
    "nvlink-one-sided": "flashinfer_nvlink_one_sided",
    "nvlink-two-sided": "flashinfer_nvlink_two_sided",
    "moonep": "moonep",
    "mori-ht": "mori_high_throughput",
    "mori-ll": "mori_low_latency",
}
PORT, RPC_PORT, HANDSHAKE_PORT = 8000, 29550, 5600
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def refuses(way: ServingWay) -> dict[str, bool]:
    """Checks whether vLLM can serve in a way; returns a dict from each possible reason against it to whether it applies."""
    layout = way.layout
    return {
        f"`expert`: vLLM divides experts over all {layout.stage_gpus} GPUs of a stage or over none": layout.expert
        not in (1, layout.stage_gpus),
        "stages of data-parallel ranks lie side by side, so that exchanges cross servers": layout.pipeline > 1
        and layout.data > 1,
        f"a rank of {layout.tensor} GPUs must fit a server, or servers be filled": layout.tensor > way.per_server
        and layout.data > 1,
    }


def serve_words(way: ServingWay, model: str, place: LaunchPlace) -> list[str]:
    """Returns the `vllm serve` command as words, with options for layout and server, which all of vLLM's platforms share."""
    layout = way.layout
    words = ["vllm serve", shlex.quote(model)]
    words += [f"--tensor-parallel-size {layout.tensor}"] * (layout.tensor > 1)
    words += [f"--pipeline-parallel-size {layout.pipeline}"] * (layout.pipeline > 1)
    words += [f"--data-parallel-size {layout.data}"] * (layout.data > 1)
    words += ["--enable-expert-parallel"] * (layout.expert > 1)
    words += [f"--max-num-batched-tokens {way.batched_tokens}"] * (way.batched_tokens > 0)
    if way.hosts > 1 and layout.data > 1:
        ranks = layout.data // way.hosts
        words += [f"--data-parallel-size-local {ranks}", f"--data-parallel-address {place.head}"]
        words += [f"--data-parallel-rpc-port {RPC_PORT}"]
        words += [f"--headless --data-parallel-start-rank {place.node * ranks}"] * (place.node > 0)
    elif way.hosts > 1:
        words += [f"--nnodes {way.hosts} --node-rank {place.node} --master-addr {place.head}"]
        words += ["--headless"] * (place.node > 0)
    return words


def launch(way: ServingWay, model: str, file: Path) -> str:
    """Returns the shell commands that start vLLM with the settings of a way of serving.

    Args:
        way: the way of serving.
        model: the model's name or path.
        file: the plan.
    """
    planned = way.placement == "plan"
    words = [f"--all2all-backend {BACKENDS[way.exchange]}"] * bool(BACKENDS[way.exchange] and way.layout.expert > 1)
    words += ["--enable-dbo"] * way.overlap
    # without it, the plugin overwrites expert maps, which other exchanges than the default ignore
    words += ["--enable-eplb"] * bool(way.eplb or way.redundant or (planned and EXCHANGES[way.exchange].sends == "route"))
    words += [f"--eplb-config.num_redundant_experts {way.redundant}"] * (way.redundant > 0)
    if way.eplb:
        words += [f"--eplb-config.window_size {way.eplb.window} --eplb-config.step_interval {way.eplb.interval}"]
    if planned:
        config = json.dumps({"aurora": {"plan": str(file)}})
        words += [f"--additional-config {shlex.quote(config)}"]
    if way.stage:
        transfer = {"kv_connector": "NixlConnector", "kv_role": ROLES[way.stage]}
        words += [f"--kv-transfer-config {shlex.quote(json.dumps(transfer))}"]

    def at(place: LaunchPlace) -> list[str]:
        """Returns the words of one server, with its end of the handshake if it serves one stage."""
        port = HANDSHAKE_PORT + min(place.devices, default=0)
        ends = [f"VLLM_NIXL_SIDE_CHANNEL_HOST={place.host} VLLM_NIXL_SIDE_CHANNEL_PORT={port}"] * bool(way.stage)
        return [*ends, *serve_words(way, model, place), *words]

    return launch_lines(way, at, PORT)


def rank_words(words: Sequence[str], rank: int, size: int, port: int, meeting: tuple[str, int]) -> list[str]:
    """Returns the words of the `vllm serve` command for one data-parallel rank, if a load balancer assigns requests to ranks.

    Args:
        words: the model and vLLM's options, the same for all ranks.
        rank: the rank.
        size: number of ranks, on all hosts.
        port: port on loopback where the rank's server listens.
        meeting: host and port of the ranks' rendezvous.
    """
    options = {"size": size, "rank": rank, "address": meeting[0], "rpc-port": meeting[1]}
    command = [*words, "--host", "127.0.0.1", "--port", str(port), "--api-server-count", "1"]
    return command + [str(word) for name, value in options.items() for word in (f"--data-parallel-{name}", value)]


def default_exchange(way: ServingWay) -> str:
    """Returns the name of the exchange that vLLM uses without `--all2all-backend`."""
    return "allgather"


VLLM = ServingEngine(
    "vllm",
    ("0.30", "0.33"),
    BACKENDS,
    launch,
    refuses,
    EplbSettings(1000, 3000),
    default_exchange,
    overlaps=("deepep-ht", "deepep-ll", "nixl"),
    halves_from=(512, 32),
    replicate="eplb",
    file="plan.json",
    dispatch_flags=[
        *(DispatchFlag(f"--prefill-schedule-interval {steps}", f"interval:{steps}", "requests") for steps in (2, 4, 8, 16, 32)),
        DispatchFlag("a router by tokens (header X-data-parallel-rank)", "tokens"),
        DispatchFlag("""--additional-config '{"aurora": {"requests": "cadence"}}'""", "cadence"),
    ],
    since={"moonep": "0.31"},
    pools="nixl, and a proxy that sends a request to a prefill server and then to a decode server "
    "(vLLM's docs/features/nixl_connector_usage.md)",
)
