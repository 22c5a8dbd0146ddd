"""API checks: lists vLLM's internal functions and classes that the plugin needs, and checks that this vLLM has them."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aurora.errors import BadInput

OLDEST = (0, 30)
MOE = "vllm.model_executor.layers.fused_moe"
ALL2ALL = "vllm.distributed.device_communicators.all2all"
EPLB_STATE = "vllm.distributed.eplb.eplb_state:EplbState"
MANAGER = f"{ALL2ALL}:AgRsAll2AllManager"
CAPTURER = f"{MOE}.routed_experts_capturer:RoutedExpertsCapturer"
BIND_CAPTURER = f"{MOE}.routed_experts_capturer:bind_routed_experts_capturer"
LAYER_INDEX = "vllm.model_executor.models.utils:extract_layer_index"
CREATE_CONFIG = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
RUNNERS = {"V1": "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "V2": "vllm.v1.worker.gpu.model_runner:GPUModelRunner"}
GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
PROCESS = "vllm.v1.executor.multiproc_executor:WorkerProc"  # runs one worker of a server
EXECUTOR = "vllm.v1.executor.abstract:Executor"
COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator"
WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"


@dataclass(frozen=True)
class ApiCheck:
    """Requirement that vLLM has a function, class or property."""

    what: str  # the purpose that needs it, for messages
    where: str  # "module:name.name"
    needs: tuple[str, ...] = ()  # parameters that the function or class must take, or names that the property's code must use
    called_by: str | None = None  # "module:name.name" of the function that must call it while serving; None: not checked

    def missing(self) -> str | None:
        """Returns part of a sentence that tells what vLLM lacks; None if it meets the requirement."""
        try:
            found = find(self.where)
        except (ImportError, AttributeError):
            return f"{self.what}: there is no {self.where}"
        if isinstance(found, property):
            has: tuple[str, ...] = found.fget.__code__.co_names if found.fget is not None else ()
        else:
            has = tuple(inspect.signature(found).parameters)
        lacks = [name for name in self.needs if name not in has]
        if lacks:
            return f"{self.what}: {self.where} has no {', '.join(lacks)}"
        return None if self._is_called() else f"{self.what}: {self.called_by} does not call {self.name}"

    @property
    def name(self) -> str:
        """The last name in `where`: "init" for "module:Class.init"."""
        return re.split("[:.]", self.where)[-1]

    def _is_called(self) -> bool:
        """Returns whether `called_by` calls it, by its source; True if there is no source to look at."""
        if self.called_by is None:
            return True
        try:
            source = inspect.getsource(find(self.called_by))
        except (ImportError, AttributeError):
            return False
        except (OSError, TypeError):
            return True
        return calls(ast.parse(textwrap.dedent(source)), self.name)


def calls(node: ast.AST, name: str) -> bool:
    """Returns whether code calls a function or method named `name`, or passes the name as a string to a call."""
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if name == called or any(isinstance(each, ast.Constant) and each.value == name for each in call.args):
            return True
    return False


def _runner_checks(runner: str, steps: str, registers: str) -> tuple[tuple[ApiCheck, ...], tuple[ApiCheck, ...]]:
    """The checks of a model runner, and those of its load balancer, stepped and told of models in these functions."""
    passes = {"execute_model": ".execute_model", "_dummy_run": ".execute_dummy_batch", "sample_tokens": ".sample_tokens"}
    passes |= {"capture_model": ""}
    wrapped = tuple(
        ApiCheck(
            "forward passes",
            f"{runner}.{name}",
            ("scheduler_output",) if name == "execute_model" else (),
            f"{GPU_WORKER}{caller}",
        )
        for name, caller in passes.items()
    )
    balanced = (
        ApiCheck("placement by EPLB", f"{EPLB_STATE}.step", ("is_dummy", "is_profile"), steps),
        ApiCheck("placement by EPLB", f"{EPLB_STATE}.add_model", ("model", "model_config"), registers),
    )
    return wrapped, balanced


HOOK_API_CHECKS = (ApiCheck("loading", WORKER),)
API_CHECKS = (
    ApiCheck("loading", WORKER, (), f"{PROCESS}.__init__"),
    ApiCheck(
        "configuration",
        "vllm.config:VllmConfig",
        ("model_config", "parallel_config", "compilation_config", "additional_config"),
    ),
    ApiCheck(
        "configuration", "vllm.config:ParallelConfig", ("data_parallel_size", "data_parallel_rank", "enable_expert_parallel")
    ),
    ApiCheck("configuration", "vllm.config:ModelConfig", ("model", "served_model_name", "dtype")),
    ApiCheck("configuration", "vllm.config:VllmConfig.use_v2_model_runner"),
    ApiCheck("loading", f"{GPU_WORKER}.load_model", (), f"{PROCESS}.__init__"),
    ApiCheck("warm-up", f"{GPU_WORKER}.compile_or_warm_up_model", (), f"{EXECUTOR}.compile_or_warm_up_model"),
    ApiCheck("the end of a worker", "vllm.v1.worker.worker_base:WorkerBase.shutdown", (), f"{PROCESS}.shutdown"),
    ApiCheck("placement", f"{MOE}.routed_experts:RoutedExperts.__init__", ("layer_name", "moe_config", "expert_map_manager")),
    ApiCheck("placement", f"{MOE}.routed_experts:RoutedExperts.register_oot", ("name",)),
    ApiCheck("placement", "vllm.model_executor.custom_op:op_registry_oot.get"),
    ApiCheck("placement", f"{MOE}.expert_map_manager:ExpertMapManager.expert_map", ("_expert_map",)),
    ApiCheck("placement", f"{MOE}.expert_map_manager:ExpertMapManager.local_num_experts", ("_local_num_experts",)),
    ApiCheck(
        "recording",
        f"{MOE}.routed_experts:RoutedExperts.forward_modular",
        ("x", "topk_weights", "topk_ids"),
        f"{MOE}.runner.moe_runner:MoERunner._apply_quant_method",
    ),
    ApiCheck("all-to-all", f"{MANAGER}.__init__", ("cpu_group",)),
    ApiCheck(
        "all-to-all",
        f"{MANAGER}.dispatch",
        ("hidden_states", "topk_weights", "topk_ids", "is_sequence_parallel", "extra_tensors"),
        f"{COMMUNICATOR}.dispatch",
    ),
    ApiCheck("all-to-all", f"{MANAGER}.combine", ("hidden_states", "is_sequence_parallel"), f"{COMMUNICATOR}.combine"),
    ApiCheck("all-to-all", f"{MANAGER}._get_comm_group", ("is_sequence_parallel",)),
    ApiCheck("all-to-all", f"{MANAGER}._get_sizes", ("num_local_tokens", "comm_group"), f"{MANAGER}.dispatch"),
    ApiCheck("all-to-all", "vllm.distributed.parallel_state:get_ep_group"),
    ApiCheck("all-to-all", "vllm.distributed.parallel_state:get_tp_group"),
    ApiCheck("all-to-all", "vllm.config.compilation:CUDAGraphMode.__init__"),
    ApiCheck("placement", LAYER_INDEX, ("layer_name",)),
    ApiCheck("platform", "vllm.platforms:current_platform.is_cpu"),
)
V1_API_CHECKS, V1_EPLB_API_CHECKS = _runner_checks(RUNNERS["V1"], f"{RUNNERS['V1']}.eplb_step", f"{RUNNERS['V1']}.load_model")
CONTROLLER = "vllm.v1.worker.gpu.eplb_utils:EPLBController"
V2_API_CHECKS, V2_EPLB_API_CHECKS = _runner_checks(RUNNERS["V2"], f"{CONTROLLER}.step", f"{CONTROLLER}.maybe_register_model")
SETTINGS_API_CHECK = ApiCheck("checking settings", CREATE_CONFIG, ("usage_context",))
CPU_API_CHECKS = (
    ApiCheck(
        "experts on the CPU",
        f"{MOE}.experts.cpu_moe:CPUUnquantizedExperts.apply",
        ("output", "hidden_states", "topk_weights", "topk_ids", "expert_map"),
    ),
    ApiCheck(
        "collectives on the CPU",
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.all_gather",
        ("input_", "dim"),
    ),
    ApiCheck("torch.compile on the CPU", f"{MOE}.runner.moe_runner:MoERunner._select_forward"),
)
CORE = "vllm.v1.engine.core:DPEngineCoreProc"
PASSES = f"{CORE}._has_global_unfinished_reqs"
DP_API_CHECKS = (  # where data-parallel engines wait for each other: `vllm serve`, and LLM in processes of torchrun
    ApiCheck("naming a lost rank", "vllm.config:ParallelConfig.sync_dp_state", ("dp_group", "has_unfinished"), PASSES),
    ApiCheck(
        "naming a lost rank",
        "vllm.config:ParallelConfig.has_unfinished_dp",
        ("dp_group", "has_unfinished"),
        "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests_dp",
    ),
)
DP_SYNC = "vllm.v1.worker.dp_utils"
V2_SYNC = "vllm.v1.worker.gpu.dp_utils"
STEP_API_CHECKS = (  # where workers wait for each other at the beginning of a pass: model runners V1 and V2
    ApiCheck("naming a stuck rank", f"{DP_SYNC}:_synchronize_dp_ranks", (), f"{DP_SYNC}:coordinate_batch_across_dp"),
    ApiCheck("naming a stuck rank", f"{V2_SYNC}:sync_cudagraph_and_dp_padding", (), f"{V2_SYNC}:dispatch_cg_and_sync_dp"),
)
RECORD_API_CHECKS = (
    ApiCheck("recording", CAPTURER, ("max_num_batched_tokens", "vllm_config")),
    ApiCheck("recording", BIND_CAPTURER, ("model", "capturer")),
)
EPLB_API_CHECKS = (
    ApiCheck(
        "placement by EPLB",
        "vllm.distributed.eplb.policy.default:DefaultEplbPolicy.rebalance_experts",
        ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices"),
        f"{EPLB_STATE}.rearrange",
    ),
    ApiCheck("placement by EPLB", "vllm.distributed.eplb.policy:EPLB_POLICIES.get"),
    ApiCheck("placement by EPLB", f"{EPLB_STATE}.update_mapping", ("model_config", "expanded_physical_to_logical")),
    ApiCheck(
        "placement by EPLB",
        f"{MOE}.routed_experts:RoutedExperts.weight_loader",
        ("param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success"),
    ),
)
REARRANGE = "vllm.distributed.eplb.eplb_state:rearrange_expert_weights_inplace"
MIGRATION_FLOW = "vllm.distributed.eplb.migration_scheduler:MigrationFlow"
EPLB_EXECUTE = "vllm.distributed.eplb.rebalance_execute"
EPLB_ASYNC = "vllm.distributed.eplb.async_worker"
BALANCER_API_CHECKS = (
    ApiCheck("naming a stuck balancer", f"{EPLB_ASYNC}:run_rebalance_experts", (), f"{EPLB_ASYNC}:transfer_run_periodically"),
    ApiCheck("naming a stuck balancer", f"{EPLB_ASYNC}:transfer_layer", (), f"{EPLB_ASYNC}:transfer_run_periodically"),
)
SCHEDULE = ("num_local_experts", "old_indices", "new_indices")
REARRANGED = ("old_global_expert_indices", "new_global_expert_indices", "expert_weights", "expert_buffer")
ADAPT_API_CHECKS = (
    ApiCheck("following the traffic", f"{EPLB_STATE}.rearrange", ("is_profile",), f"{EPLB_STATE}.step"),
    ApiCheck("following the traffic", REARRANGE, (), f"{EPLB_STATE}.rearrange"),
    ApiCheck("following the traffic", f"{EPLB_ASYNC}:transfer_layer", (), f"{EPLB_ASYNC}:transfer_run_periodically"),
    ApiCheck("following the traffic", "vllm.distributed.parallel_state:get_eplb_group"),
)
MAP_MOVES_API_CHECKS = (ApiCheck("moves between forward passes", f"{MOE}.routed_experts:RoutedExperts.get_expert_weights"),)
MOVE_API_CHECKS = (
    ApiCheck("moves in rounds", MIGRATION_FLOW, ("src_rank", "dst_rank", "expert_ids")),
    ApiCheck("moves in rounds", f"{EPLB_ASYNC}:schedule_migration_batches_for_layers", SCHEDULE),
    ApiCheck("moves in rounds", f"{EPLB_EXECUTE}:schedule_migration_batches", SCHEDULE),
    ApiCheck("moves in rounds", f"{EPLB_EXECUTE}:move_to_buffer", ("old_indices", "new_indices", "enable_migration_batching")),
)
PIECE_API_CHECKS = (
    ApiCheck("moves in pieces", f"{EPLB_STATE}.step", ("is_dummy", "is_profile")),
    ApiCheck("moves in pieces", REARRANGE, REARRANGED),
    ApiCheck(
        "moves in pieces",
        "vllm.distributed.eplb.eplb_state:_commit_eplb_maps_for_layer",
        ("model_state", "new_physical_to_logical_map", "layer"),
    ),
)
SENTINEL = "vllm.v1.fault_tolerance.engine_core_sentinel:EngineCoreSentinel"
GOING_ON = "going on without a lost rank"
FAULT_API_CHECKS = (
    ApiCheck(GOING_ON, f"{SENTINEL}.__init__", ("engine", "parallel_config")),
    ApiCheck(GOING_ON, f"{SENTINEL}.handle_command", ("client_idx", "call_id", "ft_args")),
    ApiCheck(GOING_ON, f"{SENTINEL}._push_status"),
    ApiCheck(GOING_ON, f"{SENTINEL}.on_fault", ("exc",)),
    ApiCheck(GOING_ON, "vllm.v1.worker.sentinel.gpu_worker_sentinel:FT_BACKEND_SET.__dir__"),
    ApiCheck(GOING_ON, "vllm.v1.worker.sentinel.gpu_worker_sentinel:WorkerSentinel.__init__", ("worker",)),
    ApiCheck(GOING_ON, "vllm.v1.worker.sentinel.gpu_worker_sentinel:WorkerSentinel._clean_worker_state"),
    ApiCheck(GOING_ON, "vllm.v1.worker.gpu_worker:Worker.handle_ft_command", ("ft_request",)),
    ApiCheck(GOING_ON, "vllm.entrypoints.serve.fault_tolerance.api_router:_validate_payload", ("body",)),
    ApiCheck(GOING_ON, "vllm.v1.engine.utils:DPCoordinator.get_engine_socket_addresses"),
    ApiCheck(GOING_ON, "vllm.v1.engine.utils:DPCoordinator.get_stats_publish_address"),
    ApiCheck(
        GOING_ON,
        "vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator",
        ("engine_count", "front_publish_address", "back_output_address", "back_publish_address", "zmq_addr_pipe"),
    ),
    ApiCheck(
        GOING_ON,
        "vllm.v1.worker.gpu_worker:init_worker_distributed_environment",
        ("vllm_config", "rank", "distributed_init_method", "local_rank", "backend"),
    ),
    ApiCheck(GOING_ON, "vllm.distributed.parallel_state:_group_name_counter.__dir__"),
    ApiCheck(GOING_ON, "vllm.distributed.parallel_state:destroy_model_parallel"),
    ApiCheck(GOING_ON, "vllm.distributed.parallel_state:destroy_distributed_environment"),
    ApiCheck(
        GOING_ON,
        "vllm.distributed.eplb.eplb_state:EplbModelState",
        ("physical_to_logical_map_buffer", "expert_load_pass_buffer", "expert_load_window", "pending_result", "communicator"),
    ),
    ApiCheck(
        GOING_ON,
        "vllm.distributed.eplb.eplb_communicator:create_eplb_communicator",
        ("group_coordinator", "backend", "expert_weights", "expert_buffer"),
    ),
    ApiCheck(GOING_ON, f"{MOE}.runner.moe_runner:MoERunner._set_moe_config", ("new_moe_config",)),
    ApiCheck(GOING_ON, "vllm.utils:is_moe_layer"),
)
JOINING = "the return of a lost rank"
JOIN_API_CHECKS = (
    ApiCheck(
        JOINING,
        "vllm.v1.engine.utils:CoreEngineProcManager",
        ("handshake_address", "client_handshake_address"),
        "vllm.v1.engine.utils:launch_core_engines",
    ),
    ApiCheck(
        JOINING,
        "vllm.v1.engine.utils:wait_for_engine_startup",
        ("handshake_socket", "core_engines", "launch"),
        "vllm.v1.engine.utils:launch_core_engines",
    ),
    ApiCheck(JOINING, "vllm.v1.engine.core:EngineCoreProc.run_engine_core"),
    ApiCheck(JOINING, "vllm.config:ParallelConfig.stateless_init_dp_group", ("return_store",)),
    ApiCheck(JOINING, "vllm.distributed.utils:init_gloo_process_group", ("group_rank", "group_size", "timeout")),
    ApiCheck(JOINING, "vllm.distributed.parallel_state:in_the_same_node_as", ("pg", "source_rank")),
)
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
RELOAD_API_CHECKS = (
    ApiCheck("reading lost experts", f"{RELOAD}:initialize_layerwise_reload", ("model",)),
    ApiCheck("reading lost experts", f"{RELOAD}:finalize_layerwise_processing", ("model", "model_config")),
    ApiCheck("reading lost experts", f"{MOE}.routed_experts:RoutedExperts.load_weights", ("weights",)),
    ApiCheck("reading lost experts", "vllm.model_executor.model_loader:get_model_loader", ("load_config",)),
)
CPU_EPLB_API_CHECKS = (
    ApiCheck("EPLB on the CPU", "vllm.config.parallel:current_platform.is_cuda_alike"),
    ApiCheck("EPLB on the CPU", f"{EPLB_STATE}.__init__", ("parallel_config", "device")),
    ApiCheck("EPLB on the CPU", f"{EPLB_STATE}.start_async_loop"),
    ApiCheck("EPLB on the CPU", "vllm.model_executor.models.interfaces:get_mixture_of_experts_model"),
    ApiCheck("EPLB on the CPU", f"{MOE}.router.base_router:eplb_map_to_physical_and_record"),
)


def find(where: str) -> Any:
    """Returns the object at "module:name.name".

    Raises:
        ImportError: if the module does not exist.
        AttributeError: if the module has no such name.
    """
    module, _, names = where.partition(":")
    return functools.reduce(getattr, filter(None, names.split(".")), importlib.import_module(module))


def check_api(checks: tuple[ApiCheck, ...]) -> None:
    """Checks that the installed vLLM is new enough and passes all checks.

    Raises:
        BadInput: if it is too old or fails a check.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = str(find("vllm:__version__"))
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST:
        raise BadInput(f"vLLM {found} is older than {'.'.join(map(str, OLDEST))}, the first that the plugin knows")
    missing: dict[str, str] = {}
    for check in checks:
        if lack := check.missing():
            missing.setdefault(check.what, lack)
    if missing:
        raise BadInput(f"vLLM {found} lacks what the plugin needs: {'; '.join(missing.values())}")
