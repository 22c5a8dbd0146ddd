"""Lists vLLM's internal functions and classes that the plugin needs, and checks that the installed vLLM has them."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aurora.errors import BadInput

OLDEST = (0, 30)
PLACE = re.compile(r"(\S+?)(?:\((.*)\))?(?: by (\S+))?")  # "module:name.name(parameter, parameter) by module:caller"
MOE = "vllm.model_executor.layers.fused_moe"
ALL2ALL = "vllm.distributed.device_communicators.all2all"
COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator"
MANAGER = f"{ALL2ALL}:AgRsAll2AllManager"
EXPERTS = f"{MOE}.routed_experts:RoutedExperts"
CAPTURER = f"{MOE}.routed_experts_capturer:RoutedExpertsCapturer"
BIND_CAPTURER = f"{MOE}.routed_experts_capturer:bind_routed_experts_capturer"
MOE_RUNNER = f"{MOE}.runner.moe_runner:MoERunner"
LAYER_INDEX = "vllm.model_executor.models.utils:extract_layer_index"
CREATE_CONFIG = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
RUNNERS = {"V1": "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "V2": "vllm.v1.worker.gpu.model_runner:GPUModelRunner"}
CONTROLLER = "vllm.v1.worker.gpu.eplb_utils:EPLBController"  # steps the load balancer of the second model runner
GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
PROCESS = "vllm.v1.executor.multiproc_executor:WorkerProc"  # runs one worker of a server
WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
GROUPS = "vllm.distributed.parallel_state"
EPLB_MODULE = "vllm.distributed.eplb.eplb_state"
EPLB_STATE = f"{EPLB_MODULE}:EplbState"
MIGRATION_FLOW = "vllm.distributed.eplb.migration_scheduler:MigrationFlow"
EPLB_EXECUTE = "vllm.distributed.eplb.rebalance_execute"
EPLB_ASYNC = "vllm.distributed.eplb.async_worker"
ENGINE = "vllm.v1.engine"
SENTINEL = "vllm.v1.fault_tolerance.engine_core_sentinel:EngineCoreSentinel"
WORKER_SENTINEL = "vllm.v1.worker.sentinel.gpu_worker_sentinel"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass(frozen=True)
class ApiCheck:
    """Requirement that vLLM has a function, class or property, with certain parameters."""

    what: str  # the purpose that needs it, for messages
    where: str  # "module:name.name"
    needs: tuple[str, ...] = ()  # parameters that the function or class must take, or names that the property's code must use
    called_by: str | None = None  # "module:name.name" of the function that must call it while serving; None: not checked

    def missing(self) -> str | None:
        """Returns a part of a sentence on what vLLM lacks; None if the requirement is met."""
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
    """Returns True if code calls a function or method named `name`, or passes that name as a string to a call."""
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if name == called or any(isinstance(each, ast.Constant) and each.value == name for each in call.args):
            return True
    return False


def checks(what: str, *places: str) -> tuple[ApiCheck, ...]:
    """Returns the ApiChecks for one purpose.

    Args:
        what: the purpose, for messages.
        places: one string per check, "where(needs) by called_by", with the fields of `ApiCheck`; the last two are optional.
    """
    return tuple(_check(what, place) for place in places)


def _check(what: str, place: str) -> ApiCheck:
    """The check in one of the `places` of `checks`."""
    match = PLACE.fullmatch(place)
    assert match is not None, place
    where, needs, called_by = match.groups()
    return ApiCheck(what, where, tuple(needs.split(", ")) if needs else (), called_by)


def _runner_checks(runner: str) -> tuple[ApiCheck, ...]:
    """The checks of a model runner."""
    return checks(
        "forward passes",
        f"{runner}.execute_model(scheduler_output) by {GPU_WORKER}.execute_model",
        f"{runner}._dummy_run by {GPU_WORKER}.execute_dummy_batch",
        f"{runner}.sample_tokens by {GPU_WORKER}.sample_tokens",
        f"{runner}.capture_model by {GPU_WORKER}",
    )


def _balancer_checks(steps: str, registers: str) -> tuple[ApiCheck, ...]:
    """The checks of the load balancer of a model runner, which is stepped and told of models in these functions."""
    return checks(
        "placement by EPLB",
        f"{EPLB_STATE}.step(is_dummy, is_profile) by {steps}",
        f"{EPLB_STATE}.add_model(model, model_config) by {registers}",
    )


HOOK_API_CHECKS = checks("loading", WORKER)
API_CHECKS = (
    *checks(
        "loading",
        f"{WORKER} by {PROCESS}.__init__",
        f"{GPU_WORKER}.load_model by {PROCESS}.__init__",
    ),
    *checks(
        "configuration",
        "vllm.config:VllmConfig(model_config, parallel_config, compilation_config, additional_config)",
        "vllm.config:ParallelConfig(data_parallel_size, data_parallel_rank, enable_expert_parallel)",
        "vllm.config:ModelConfig(model, served_model_name, dtype)",
        "vllm.config:VllmConfig.use_v2_model_runner",
    ),
    *checks("warm-up", f"{GPU_WORKER}.compile_or_warm_up_model by vllm.v1.executor.abstract:Executor.compile_or_warm_up_model"),
    *checks("the end of a worker", f"vllm.v1.worker.worker_base:WorkerBase.shutdown by {PROCESS}.shutdown"),
    *checks(
        "placement",
        f"{EXPERTS}.__init__(layer_name, moe_config, expert_map_manager)",
        f"{EXPERTS}.register_oot(name)",
        "vllm.model_executor.custom_op:op_registry_oot.get",
        f"{MOE}.expert_map_manager:ExpertMapManager.expert_map(_expert_map)",
        f"{MOE}.expert_map_manager:ExpertMapManager.local_num_experts(_local_num_experts)",
        f"{LAYER_INDEX}(layer_name)",
    ),
    *checks("recording", f"{EXPERTS}.forward_modular(x, topk_weights, topk_ids) by {MOE_RUNNER}._apply_quant_method"),
    *checks(
        "all-to-all",
        f"{MANAGER}.__init__(cpu_group)",
        f"{MANAGER}.dispatch(hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors)"
        f" by {COMMUNICATOR}.dispatch",
        f"{MANAGER}.combine(hidden_states, is_sequence_parallel) by {COMMUNICATOR}.combine",
        f"{MANAGER}._get_comm_group(is_sequence_parallel)",
        f"{MANAGER}._get_sizes(num_local_tokens, comm_group) by {MANAGER}.dispatch",
        f"{GROUPS}:get_ep_group",
        f"{GROUPS}:get_tp_group",
        "vllm.config.compilation:CUDAGraphMode.__init__",
    ),
    *checks("platform", "vllm.platforms:current_platform.is_cpu"),
)
V1_API_CHECKS, V2_API_CHECKS = map(_runner_checks, RUNNERS.values())
V1_EPLB_API_CHECKS = _balancer_checks(f"{RUNNERS['V1']}.eplb_step", f"{RUNNERS['V1']}.load_model")
V2_EPLB_API_CHECKS = _balancer_checks(f"{CONTROLLER}.step", f"{CONTROLLER}.maybe_register_model")
SETTINGS_API_CHECKS = checks("checking settings", f"{CREATE_CONFIG}(usage_context)")
CPU_API_CHECKS = (
    *checks(
        "experts on the CPU",
        f"{MOE}.experts.cpu_moe:CPUUnquantizedExperts.apply(output, hidden_states, topk_weights, topk_ids, expert_map)",
    ),
    *checks(
        "collectives on the CPU",
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.all_gather(input_, dim)",
    ),
    *checks("torch.compile on the CPU", f"{MOE_RUNNER}._select_forward"),
)
DP_API_CHECKS = checks(  # where data-parallel engines wait for each other: `vllm serve`, and LLM in processes of torchrun
    "naming a lost rank",
    "vllm.config:ParallelConfig.sync_dp_state(dp_group, has_unfinished)"
    f" by {ENGINE}.core:DPEngineCoreProc._has_global_unfinished_reqs",
    "vllm.config:ParallelConfig.has_unfinished_dp(dp_group, has_unfinished)"
    f" by {ENGINE}.llm_engine:LLMEngine.has_unfinished_requests_dp",
)
STEP_API_CHECKS = checks(  # where workers wait for each other at the beginning of a pass: model runners V1 and V2
    "naming a stuck rank",
    "vllm.v1.worker.dp_utils:_synchronize_dp_ranks by vllm.v1.worker.dp_utils:coordinate_batch_across_dp",
    "vllm.v1.worker.gpu.dp_utils:sync_cudagraph_and_dp_padding by vllm.v1.worker.gpu.dp_utils:dispatch_cg_and_sync_dp",
)
RECORD_API_CHECKS = checks("recording", f"{CAPTURER}(max_num_batched_tokens, vllm_config)", f"{BIND_CAPTURER}(model, capturer)")
EPLB_API_CHECKS = checks(
    "placement by EPLB",
    "vllm.distributed.eplb.policy.default:DefaultEplbPolicy.rebalance_experts"
    f"(weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices) by {EPLB_STATE}.rearrange",
    "vllm.distributed.eplb.policy:EPLB_POLICIES.get",
    f"{EPLB_STATE}.update_mapping(model_config, expanded_physical_to_logical)",
    f"{EXPERTS}.weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)",
)
ADAPT_API_CHECKS = checks(
    "following the traffic",
    f"{EPLB_STATE}.rearrange(is_profile) by {EPLB_STATE}.step",
    f"{EPLB_MODULE}:rearrange_expert_weights_inplace by {EPLB_STATE}.rearrange",
    f"{EPLB_ASYNC}:transfer_layer by {EPLB_ASYNC}:transfer_run_periodically",
    f"{GROUPS}:get_eplb_group",
)
MAP_MOVES_API_CHECKS = checks("moves between forward passes", f"{EXPERTS}.get_expert_weights")
MOVE_API_CHECKS = checks(
    "moves in rounds",
    f"{MIGRATION_FLOW}(src_rank, dst_rank, expert_ids)",
    f"{EPLB_ASYNC}:schedule_migration_batches_for_layers(num_local_experts, old_indices, new_indices)",
    f"{EPLB_EXECUTE}:schedule_migration_batches(num_local_experts, old_indices, new_indices)",
    f"{EPLB_EXECUTE}:move_to_buffer(old_indices, new_indices, enable_migration_batching)",
)
PIECE_API_CHECKS = checks(
    "moves in pieces",
    f"{EPLB_STATE}.step(is_dummy, is_profile)",
    f"{EPLB_MODULE}:rearrange_expert_weights_inplace"
    "(old_global_expert_indices, new_global_expert_indices, expert_weights, expert_buffer)",
    f"{EPLB_MODULE}:_commit_eplb_maps_for_layer(model_state, new_physical_to_logical_map, layer)",
)
FAULT_API_CHECKS = checks(
    "going on without a lost rank",
    f"{SENTINEL}.__init__(engine, parallel_config)",
    f"{SENTINEL}.handle_command(client_idx, call_id, ft_args)",
    f"{SENTINEL}._push_status",
    f"{SENTINEL}.on_fault(exc)",
    f"{WORKER_SENTINEL}:FT_BACKEND_SET.__dir__",
    f"{WORKER_SENTINEL}:WorkerSentinel.__init__(worker)",
    f"{WORKER_SENTINEL}:WorkerSentinel._clean_worker_state",
    f"{GPU_WORKER}.handle_ft_command(ft_request)",
    "vllm.entrypoints.serve.fault_tolerance.api_router:_validate_payload(body)",
    f"{ENGINE}.utils:DPCoordinator.get_engine_socket_addresses",
    f"{ENGINE}.utils:DPCoordinator.get_stats_publish_address",
    f"{ENGINE}.coordinator:DPCoordinatorProc.run_coordinator"
    "(engine_count, front_publish_address, back_output_address, back_publish_address, zmq_addr_pipe)",
    "vllm.v1.worker.gpu_worker:init_worker_distributed_environment"
    "(vllm_config, rank, distributed_init_method, local_rank, backend)",
    f"{GROUPS}:_group_name_counter.__dir__",
    f"{GROUPS}:destroy_model_parallel",
    f"{GROUPS}:destroy_distributed_environment",
    f"{EPLB_MODULE}:EplbModelState"
    "(physical_to_logical_map_buffer, expert_load_pass_buffer, expert_load_window, pending_result, communicator)",
    "vllm.distributed.eplb.eplb_communicator:create_eplb_communicator"
    "(group_coordinator, backend, expert_weights, expert_buffer)",
    f"{MOE}.runner.moe_runner:MoERunner._set_moe_config(new_moe_config)",
    "vllm.utils:is_moe_layer",
)
JOIN_API_CHECKS = checks(
    "the return of a lost rank",
    f"{ENGINE}.utils:CoreEngineProcManager(handshake_address, client_handshake_address) by {ENGINE}.utils:launch_core_engines",
    f"{ENGINE}.utils:wait_for_engine_startup(handshake_socket, core_engines, launch) by {ENGINE}.utils:launch_core_engines",
    f"{ENGINE}.core:EngineCoreProc.run_engine_core",
    "vllm.config:ParallelConfig.stateless_init_dp_group(return_store)",
    "vllm.distributed.utils:init_gloo_process_group(group_rank, group_size, timeout)",
    f"{GROUPS}:in_the_same_node_as(pg, source_rank)",
)
RELOAD_API_CHECKS = checks(
    "reading lost experts",
    f"{RELOAD}:initialize_layerwise_reload(model)",
    f"{RELOAD}:finalize_layerwise_processing(model, model_config)",
    f"{EXPERTS}.load_weights(weights)",
    "vllm.model_executor.model_loader:get_model_loader(load_config)",
)
CPU_EPLB_API_CHECKS = checks(
    "EPLB on the CPU",
    "vllm.config.parallel:current_platform.is_cuda_alike",
    f"{EPLB_STATE}.__init__(parallel_config, device)",
    f"{EPLB_STATE}.start_async_loop",
    "vllm.model_executor.models.interfaces:get_mixture_of_experts_model",
    f"{MOE}.router.base_router:eplb_map_to_physical_and_record",
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


def lacks(checks: tuple[ApiCheck, ...]) -> Iterator[str]:
    """Yields a sentence if `check_api` raises BadInput."""
    try:
        check_api(checks)
    except BadInput as error:
        yield str(error)
