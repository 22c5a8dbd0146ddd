"""Conditions under which a server does what its settings ask for: one table for its first process and for its workers.

They depend on settings, vLLM's configuration and files alone, so that all processes that have the same ones agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from aurora.errors import BadInput
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals.api_checks import find, lacks

PLATFORM = "vllm.platforms:current_platform"
BACK_END = "allgather_reducescatter"  # vLLM's all-to-all that aurora replaces, and that honours every expert map
IN_SEQUENCE = {"GptOssForCausalLM"}  # whose loaders give each rank experts that follow each other, whatever the expert map
LOAD_FORMATS = (  # they hand each expert's weights to the layer; others restore what each rank once held
    "auto", "dummy", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt", "runai_streamer", "safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What is asked of a server.

    Args:
        settings: the plugin's settings.
        config: vLLM's configuration.
        served: the plan, a ServedPlan, which the first condition loads; None: conditions of the plan's content are not checked.
    """

    settings: Settings
    config: Any
    served: Any = None

    def __getattr__(self, name: str) -> Any:
        """Returns a setting, or else an attribute of vLLM's ParallelConfig; False if neither has it."""
        return getattr(self.settings, name, getattr(self.config.parallel_config, name, False))

    @property
    def runner(self) -> str:
        """Name of vLLM's model runner."""
        return "V2" if self.config.use_v2_model_runner else "V1"

    @property
    def moves(self) -> bool:
        """True if experts are not to stay where vLLM places them."""
        return self.plan is not None or (self.adapt and self.enable_eplb)

    @property
    def by_maps(self) -> bool:
        """True if expert maps are to place experts by a plan."""
        return self.plan is not None and not self.enable_eplb

    @property
    def alltoall(self) -> bool:
        """True if there is an all-to-all that aurora can perform."""
        return bool(self.enable_expert_parallel and self.data_parallel_size > 1 and self.all2all_backend == BACK_END)

    def other_kernel(self) -> str:
        """Returns what may ignore an expert map in which a rank's experts do not follow each other, as a plan needs."""
        platform, kernel = find(PLATFORM), self.config.kernel_config.moe_backend
        known = ["auto"] if platform.is_cpu() else ["triton"]
        if platform.is_cuda() and not platform.has_device_capability(100):  # vLLM prefers Triton there
            known = ["auto", "triton"]
        if self.all2all_backend != BACK_END:
            return f"--all2all-backend {self.all2all_backend}"
        if (quantization := self.config.model_config.quantization) is not None:
            return f"{quantization} experts"
        return "" if kernel in known else f"--moe-backend {kernel}"


# conditions: a sentence for what is found, and what finds it if the condition is not met
# fmt: off
SERVER: tuple[tuple[str, Any], ...] = (  # without these no server starts
    ("fault_store: expected --enable-fault-tolerance, found none", lambda a: a.fault_store and not a.enable_fault_tolerance),
    ("fault_store: expected --enable-eplb, found none", lambda a: a.fault_store and not a.enable_eplb),
    (f"fault_store: expected --all2all-backend {BACK_END} and no pipeline parallelism, found another",
     lambda a: a.fault_store and (a.all2all_backend != BACK_END or a.pipeline_parallel_size > 1)),
    ("fault_store: expected no auto_recovery in --fault-tolerance-config, as `aurora vllm` alone decides who is lost, found it",
     lambda a: a.fault_store and getattr(a.fault_tolerance_config, "auto_recovery", False)),  # vllm-project/vllm#46370
    ("fault_store, requests 'cadence': expected --data-parallel-backend mp, found {0}, whose engines are not the plugin's",
     lambda a: (a.fault_store or a.requests == "cadence") and a.data_parallel_backend == "ray" and a.data_parallel_backend),
    ("{0}", lambda a: a.requests != "stock" and next(lacks("requests"), "")),
    ("requests: expected several data-parallel ranks, found 1", lambda a: a.requests != "stock" and a.data_parallel_size == 1),
    ("requests: expected `vllm serve`, found torchrun, whose ranks have requests of their own",
     lambda a: a.requests != "stock" and a.distributed_executor_backend == "external_launcher"),
    ("requests: expected 'tokens' where ranks may be lost (fault_store), found 'cadence', which rank 0 plans",
     lambda a: a.requests == "cadence" and a.fault_store),
    ("requests: expected a mixture of experts for 'cadence', found a dense model",
     lambda a: a.requests == "cadence" and not a.config.model_config.is_moe),
    ("requests: expected no --prefill-schedule-interval with 'cadence', which plans it, found {0}",
     lambda a: a.requests == "cadence" and a.config.scheduler_config.prefill_schedule_interval != 1
     and a.config.scheduler_config.prefill_schedule_interval),
)
EPLB: tuple[tuple[str, Any], ...] = (
    ("plan, adapt: expected no --enable-elastic-ep, found it", lambda a: a.moves and a.enable_eplb and a.enable_elastic_ep),
    ("{0}", lambda a: a.moves and a.enable_eplb and next(
        lacks("EPLB", f"EPLB-of-{a.runner}", *["adapt"] * a.adapt), "")),
)
PLUGIN: tuple[tuple[str, Any], ...] = (  # without these vLLM serves without the plugin
    ("{0}", lambda a: a.served and a.served.load()),
    ("plan, adapt: expected CUDA GPUs or CPUs, found {0}",  # ROCm appends shared experts to the routed ones
     lambda a: a.moves and not find(PLATFORM).is_cpu() and not find(PLATFORM).is_cuda() and find(PLATFORM).device_name),
    ("a plan needs weights in the checkpoint's own form, found --load-format {0}",
     lambda a: a.plan and str(a.config.load_config.load_format) not in LOAD_FORMATS and a.config.load_config.load_format),
    *EPLB,
    ("{0}", lambda a: a.served and a.plan and a.enable_eplb
     and a.served.place_physical_experts(a.eplb_config.num_redundant_experts)),
    ("the plan's replicas need --enable-eplb",
     lambda a: a.by_maps and a.served and a.served.plan and a.served.plan.models[0].placement.split_LG),
    ("a plan needs weights that are loaded expert by expert, found a model whose ranks read theirs in sequence",
     lambda a: a.by_maps and IN_SEQUENCE & set(a.config.model_config.architectures)),
    ("a plan without --enable-eplb needs all weights read, found --enable-ep-weight-filter",  # of vLLM's own map for this rank
     lambda a: a.by_maps and a.enable_ep_weight_filter),
    ("a plan without --enable-eplb needs unquantized experts and --moe-backend triton, found {0}",
     lambda a: a.by_maps and a.other_kernel()),
    ("adapt: expected no pipeline parallelism, found it", lambda a: a.adapt and a.enable_eplb and a.pipeline_parallel_size > 1),
    ("record: expected no pipeline parallelism, found it", lambda a: a.record and a.pipeline_parallel_size > 1),
    ("record: several ranks record with --enable-expert-parallel only",
     lambda a: a.record and not a.enable_expert_parallel and a.world_size * a.data_parallel_size > 1),
)
ORDER: tuple[tuple[str, Any], ...] = (
    (f"order: expected expert and data parallelism by {BACK_END}, found no all-to-all to order",
     lambda a: a.order != "stock" and not a.alltoall),
    ("order: expected no micro-batches (--enable-dbo), found them", lambda a: a.order != "stock" and a.use_ubatching),
    ("order push: expected no fault_store, found one", lambda a: a.order == "push" and a.fault_store),
    ("order push: expected GPUs of one machine that NVLink connects, each to each, found CPUs",
     lambda a: a.order == "push" and find(PLATFORM).is_cpu() and os.environ.get("TRITON_INTERPRET") != "1"),
)
RECORD: tuple[tuple[str, Any], ...] = (  # halves of a batch write their choices to the same place
    ("record: expected no micro-batches (--enable-dbo), found them", lambda a: a.record and a.use_ubatching),
)
# without these a part of the plugin is off
PART = (*ORDER, *RECORD, ("adapt: expected --enable-eplb, found none", lambda a: a.adapt and not a.enable_eplb))
# fmt: on


def unmet(asked: Asked, *conditions: tuple[str, Any]) -> Iterator[str]:
    """Yields a sentence for each condition that is not met. Later ones hold only if there are no earlier ones."""
    for sentence, find_unmet in conditions:
        if found := find_unmet(asked):
            yield sentence.format(found)


def check_platform(options: Any) -> None:
    """Checks before vLLM makes its configuration of `options` (EngineArgs) that the platform has expert parallelism.

    Raises:
        BadInput: if ranks on CPUs are to share experts, which vLLM cannot there, and nothing adds it.
    """
    ranks = options.tensor_parallel_size * options.data_parallel_size
    if not options.enable_expert_parallel or ranks == 1 or not find(PLATFORM).is_cpu():
        return
    if not hasattr(find("vllm.config.parallel:current_platform"), "aurora_tests"):
        raise BadInput(
            "--enable-expert-parallel: expected GPUs, as vLLM has no expert parallelism on CPUs; for tests, a clone of aurora "
            "adds it: export PYTHONPATH=tests/integrations/on_cpu"
        )


def check_conditions(settings: Settings, config: Any) -> None:
    """Checks in the first process of a server, before anything is loaded, what its settings ask for.

    If the plugin is not required, conditions that end no server are left to workers, which tell them and show them in metrics.

    Args:
        settings: the plugin's settings.
        config: vLLM's configuration.

    Raises:
        BadInput: if a condition is not met.
    """
    conditions, served = SERVER, None
    if settings.required:
        from aurora_vllm.served_plan import ServedPlan, read_model

        model, ranks = config.model_config, expert_parallel_ranks(config.parallel_config)
        known = (None, None) if settings.plan is None else read_model(model.model, model.revision)
        conditions, served = SERVER + PLUGIN + PART, ServedPlan(settings, 0, ranks, *known)
    for sentence in unmet(Asked(settings, config, served), *conditions):
        raise BadInput(sentence)


def expert_parallel_ranks(parallel: Any) -> int:
    """Returns the number of expert-parallel ranks in vLLM's ParallelConfig `parallel`."""
    if not parallel.enable_expert_parallel:
        return 1
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    return int(ranks * getattr(parallel, "prefill_context_parallel_size", 1))


def effective_settings(asked: Asked) -> Settings:
    """Returns the settings without what is off: orders where there is no all-to-all that has one, and records."""
    settings = asked.settings
    if any(unmet(asked, *ORDER)):
        settings = replace(settings, order="stock", all_to_all="auto")
    return replace(settings, record=None) if any(unmet(asked, *RECORD)) else settings
