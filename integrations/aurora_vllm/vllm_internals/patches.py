"""What is put into vLLM: planned experts, the ordered all-to-all, and what watches the model runner."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora_vllm.agreement import agree
from aurora_vllm.lost_ranks import LivePeers, naming_the_dead
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals.api_checks import DP_API_CHECK, EPLB_API_CHECKS, LAYER_INDEX, MOE, check_api, find

if TYPE_CHECKING:
    from aurora.runtime.distributed.transport import Transport
    from aurora_vllm.traffic_recorder import EngineFacts
    from aurora_vllm.worker_integration import Slots, WorkerIntegration

LOG = logging.getLogger("vllm.aurora")  # among vLLM's own lines
AS_BEFORE = "vLLM places experts and sends tokens as it would without the plugin"


class Patches:
    """What stands between vLLM and a WorkerIntegration in one worker process."""

    def __init__(self, settings: Settings, config: Any, trouble: str | None) -> None:
        self._settings, self._config, self._trouble = settings, config, trouble
        self._engaged: WorkerIntegration | None = None
        self._roster: LivePeers | None = None
        self._group: Any = None
        self._layers: list[Any] = []

    def take(self) -> None:
        """Replace the classes that build experts and all-to-alls; they do vLLM's own until there is a WorkerIntegration."""
        hands = self
        routed = find(f"{MOE}.routed_experts:RoutedExperts")
        all2all = find("vllm.distributed.device_communicators.all2all:AgRsAll2AllManager")

        class PlannedExperts(routed):  # type: ignore[misc, valid-type]
            """A layer's experts where the plan has them."""

            def __init__(self, layer_name: str, params_dtype: Any, moe_config: Any, *args: Any, **named: Any) -> None:
                engaged, manager = hands._engaged, named.get("expert_map_manager", args[1] if len(args) > 1 else None)
                number = None if engaged is None else engaged.layer(find(LAYER_INDEX)(layer_name))
                if engaged is not None and manager is not None and (held := engaged.held(number)) is not None:
                    place(manager, moe_config, held)
                super().__init__(layer_name, params_dtype, moe_config, *args, **named)
                self.aurora_layer = number

            def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **named: Any) -> Any:
                if hands._engaged is None or self.aurora_layer is None:
                    return super().forward_modular(x, topk_weights, topk_ids, *args, **named)
                with hands._engaged.at(self.aurora_layer, topk_ids, self.moe_config.is_sequence_parallel):
                    return super().forward_modular(x, topk_weights, topk_ids, *args, **named)

        class OrderedAll2AllManager(all2all):  # type: ignore[misc, valid-type]
            """Aurora's all-to-all where a layer's choices are known and all expert-parallel ranks take part; else vLLM's."""

            def dispatch(
                self, hidden_states: Any, topk_weights: Any, topk_ids: Any, is_sequence_parallel: bool = False,
                extra_tensors: Any = None,
            ) -> Any:  # fmt: skip
                engaged = hands._engaged
                whole = self._get_comm_group(is_sequence_parallel).world_size == self.world_size
                if engaged is None or not engaged.exchanges or extra_tensors is not None or not whole:
                    with nullcontext() if engaged is None else engaged.time_slice.meeting():
                        return super().dispatch(
                            hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors=extra_tensors
                        )
                return engaged.dispatch(hidden_states, topk_weights, topk_ids, hands.slots)

            def combine(self, hidden_states: Any, is_sequence_parallel: bool = False) -> Any:
                engaged = hands._engaged
                if engaged is None or not engaged.under_way:
                    with nullcontext() if engaged is None else engaged.time_slice.meeting():
                        return super().combine(hidden_states, is_sequence_parallel)
                return engaged.combine(hidden_states)

            def allocate_combine_input(self, *args: Any, **named: Any) -> Any:
                if hands._engaged is None or not hands._engaged.under_way:
                    return super().allocate_combine_input(*args, **named)
                return None

            def combine_into_output(self, hidden_states: Any, output: Any, is_sequence_parallel: bool = False) -> Any:
                if hands._engaged is None or not hands._engaged.under_way:
                    return super().combine_into_output(hidden_states, output, is_sequence_parallel)
                return output.copy_(hands._engaged.combine(hidden_states))

        routed.register_oot(name="RoutedExperts")(PlannedExperts)
        setattr(find("vllm.distributed.device_communicators.all2all:"), "AgRsAll2AllManager", OrderedAll2AllManager)  # noqa: B010
        self._without_whole_graphs()

    def begin(self, worker: Any) -> None:
        """Agree with the other ranks on the plan, then watch the model runner."""
        from aurora_vllm.plan_fit import experts_in, read_checkpoint
        from aurora_vllm.worker_integration import WorkerIntegration

        parallel = self._config.parallel_config
        group = find("vllm.distributed.parallel_state:get_ep_group")() if parallel.enable_expert_parallel else None
        rank, ranks = (group.rank_in_group, group.world_size) if group is not None else (0, 1)
        folder = Path(self._config.model_config.model)
        experts = experts_in(folder)
        checkpoint = None if experts is None else read_checkpoint(folder, experts)
        tensor_parallel = find("vllm.distributed.parallel_state:get_tp_group")()
        cut = (tensor_parallel.rank_in_group, tensor_parallel.world_size)
        engaged = WorkerIntegration(self._settings, rank, ranks, checkpoint, experts, cut)
        trouble = self._trouble or engaged.trouble() or self._replicas(engaged) or self._turnless()
        mine = True
        if group is not None and ranks > 1:
            store = dist.distributed_c10d._get_default_store()
            key = f"aurora/{'-'.join(map(str, group.ranks))}"
            roster = LivePeers(store, key, rank, ranks)
            trouble, mine = agree(store, key, rank, ranks, engaged.word, trouble, self._settings.agree_s)
            self._roster = roster if roster.meet() else None
            if trouble is None and self._settings.colocate is not None:
                trouble, mine = self._colocate(engaged, store, key)
        if trouble is not None:
            if mine:
                LOG.warning("aurora: %s; %s", trouble, AS_BEFORE)
            engaged.stand_aside()
        if self._trouble is not None:
            return
        if group is not None:
            engaged.connect(functools.partial(_transport, group, engaged))
        self._engaged = engaged
        self._group = group
        self._watch(worker)

    def _turnless(self) -> str | None:
        """What keeps this server from taking turns with another."""
        parallel = self._config.parallel_config
        if self._settings.colocate is not None and not (parallel.enable_expert_parallel and parallel.data_parallel_size > 1):
            return "colocate: expected expert and data parallelism, found no all-to-all to take turns with"
        return None

    def _colocate(self, engaged: WorkerIntegration, store: Any, key: str) -> tuple[str | None, bool]:
        """Take this rank's place among the servers of the same name; as `agree`."""
        from aurora.runtime.process_port_arbiter import colocation_folder
        from aurora_vllm.time_slices import TimeSlices, meet

        settings, trouble, turnstile = self._settings, None, None
        finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        try:
            if self._roster is None or not self._roster.together:
                raise BadInput("colocate: expected all ranks on one machine")
            turnstile = meet(store, key, engaged.rank, colocation_folder(str(settings.colocate)), settings.agree_s, finish)
            engaged.time_slice = TimeSlices(turnstile, self._config.parallel_config.world_size == 1)
        except BadInput as error:
            trouble = str(error)
        heard = agree(store, f"{key}/turns", engaged.rank, engaged.ranks, engaged.word, trouble, settings.agree_s)
        if heard[0] is not None and turnstile is not None:
            turnstile.leave()
        return heard

    def slots(self, layer: int) -> Slots:
        """Which experts every rank holds in a layer, in the order of its weights: as the ranks tell each other."""
        from aurora.runtime.distributed.gloo import GlooTransport

        found = next(each for each in self._layers if each.aurora_layer == layer)
        local_E = found.expert_map.to("cpu", torch.int64)
        maps_GE = GlooTransport(self._group.cpu_group).gather(local_E).tolist()
        return tuple(
            tuple(expert for _, expert in sorted((local, expert) for expert, local in enumerate(map_E) if local >= 0))
            for map_E in maps_GE
        )

    def _watch(self, worker: Any) -> None:
        runner, engaged = worker.model_runner, self._engaged
        assert engaged is not None
        execute, dummy, load = runner.execute_model, runner._dummy_run, worker.load_model

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **named: Any) -> Any:
            real = 0 if named.get("dummy_run") else scheduler_output.total_num_scheduled_tokens
            with engaged.step(real), naming_the_dead(self._roster):
                return execute(scheduler_output, *args, **named)

        @functools.wraps(dummy)
        def dummy_run(*args: Any, **named: Any) -> Any:
            with engaged.step(0), naming_the_dead(self._roster):
                return dummy(*args, **named)

        @functools.wraps(load)
        def load_model(*args: Any, **named: Any) -> Any:
            loaded = load(*args, **named)
            self._begin_serving(runner)
            return loaded

        if DP_API_CHECK.missing() is None:
            self._watch_replicas()
        runner.execute_model, runner._dummy_run, worker.load_model = execute_model, dummy_run, load_model
        worker.aurora = MethodType(lambda _self, what, folder=None: engaged.command(what, folder), worker)

    def _watch_replicas(self) -> None:
        """Replicas ask each other for work between forward passes, and may lose each other there."""
        parallel = find(DP_API_CHECK.where.rpartition(".")[0])
        original, roster = parallel.has_unfinished_dp, self._roster

        @functools.wraps(original)
        def has_unfinished_dp(*args: Any, **named: Any) -> Any:
            with naming_the_dead(roster):
                return original(*args, **named)

        parallel.has_unfinished_dp = staticmethod(has_unfinished_dp)

    def _begin_serving(self, runner: Any) -> None:
        engaged, model = self._engaged, runner.model
        assert engaged is not None
        planned = find("vllm.model_executor.custom_op:op_registry_oot")["RoutedExperts"]
        self._layers = [each for each in model.modules() if isinstance(each, planned) and each.aurora_layer is not None]
        if not self._layers:
            LOG.warning("aurora: the model's experts are of a kind that the plugin does not know; it does nothing")
            engaged.stand_aside()
            return
        if engaged.checkpoint is None:
            for number, each in enumerate(self._layers):
                each.aurora_layer = number
        first = min(each.aurora_layer for each in self._layers)
        engaged.begin(_facts(self._config, engaged, self._layers, model), first)
        model.register_forward_pre_hook(lambda *_: engaged.compute())
        model.register_forward_hook(lambda *_: engaged.time_slice.rest(), always_call=True)

    def _replicas(self, engaged: WorkerIntegration) -> str | None:
        """Hand replicas to vLLM's own balancer; what keeps it from them."""
        if engaged.plan is None or (split := engaged.plan.models[0].placement).split_LG is None:
            return None
        parallel = self._config.parallel_config
        extra = sum(map(len, split.slots_LG[0])) - split.experts
        if not parallel.enable_eplb or parallel.eplb_config.num_redundant_experts != extra:
            wanted = f"--enable-eplb --eplb-config.num_redundant_experts {extra}"
            return f"the plan has {extra} replicas a layer, which vLLM holds with {wanted}"
        try:
            check_api(EPLB_API_CHECKS)
        except BadInput as error:
            return str(error)
        find("vllm.distributed.eplb.policy:EPLB_POLICIES")["default"] = planned_policy(split.slots_LG)
        return None

    def _without_whole_graphs(self) -> None:
        """Sizes that are known on the host cannot be captured in a CUDA graph."""
        compilation = self._config.compilation_config
        if self._settings.order != "stock" and self._config.parallel_config.enable_expert_parallel:
            compilation.cudagraph_mode = find("vllm.config.compilation:CUDAGraphMode").NONE


def place(manager: Any, moe_config: Any, held: tuple[int, ...]) -> None:
    """The experts `held` on this rank, before a layer makes and loads its weights. A rank without experts has room for one."""
    expert_map = torch.full_like(manager._expert_map, -1)
    expert_map[list(held)] = torch.arange(len(held), dtype=expert_map.dtype)
    manager._expert_map = expert_map
    manager._local_num_experts = moe_config.num_local_experts = max(1, len(held))


def planned_policy(slots_LG: tuple[Slots, ...]) -> Any:
    """An EPLB policy that always answers with the plan: physical expert p of a layer is the p-th slot, rank after rank."""
    default = find("vllm.distributed.eplb.policy.default:DefaultEplbPolicy")
    physical_LP = torch.tensor([[expert for held in layer for expert in held] for layer in slots_LG])

    class PlannedPolicy(default):  # type: ignore[misc, valid-type]
        @classmethod
        def rebalance_experts(cls, weight: Any, num_replicas: int, *_args: Any, **_named: Any) -> Any:
            assert physical_LP.shape == (len(weight), num_replicas)
            return physical_LP.clone()

    return PlannedPolicy


def _transport(group: Any, engaged: WorkerIntegration) -> Transport:
    from aurora.runtime.distributed.gloo import GlooTransport
    from aurora.runtime.distributed.nccl import NcclTransport

    cluster = None if engaged.plan is None else engaged.plan.cluster
    if torch.cuda.is_available():
        return NcclTransport(group.device_group, group.cpu_group, f"cuda:{torch.cuda.current_device()}")
    return GlooTransport(group.cpu_group, cluster)


def _facts(config: Any, engaged: WorkerIntegration, layers: list[Any], model: Any) -> EngineFacts:
    """Sizes of this rank's model, as a profile counts them."""
    from aurora_vllm.traffic_recorder import EngineFacts

    first = layers[0]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    expert_bytes = sum(p.numel() * p.element_size() for p in first.parameters()) // first.local_num_experts
    other_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    row_bytes = first.moe_config.hidden_dim * config.model_config.dtype.itemsize
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    checkpoint = engaged.checkpoint
    layers_in_all = len(layers) if checkpoint is None else len(checkpoint.layers)
    return EngineFacts(
        Path(config.model_config.model).name, "" if checkpoint is None else checkpoint.fingerprint,
        f"vllm {find('vllm:__version__')}", kind, engaged.rank, engaged.ranks, first.top_k, layers_in_all,
        first.global_num_experts, row_bytes, row_bytes, expert_bytes, other_bytes,
    )  # fmt: skip
