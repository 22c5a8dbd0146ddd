"""Wraps a worker's model runner, so that the plugin is called at forward passes, after loading and for commands."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from aurora.errors import BadInput
from aurora_vllm.rank_progress import RankProgress, naming_lost_ranks
from aurora_vllm.stuck_rank import ENDED, MOVES, NO_BALANCER, PLANS, READY, RESTS, STEP, WAITS
from aurora_vllm.vllm_internals.api_checks import MOE, ApiCheck, check_api, find, lacks, needed
from aurora_vllm.vllm_internals.cpu import register_with_eplb
from aurora_vllm.vllm_internals.patches import PatchedWorker, cuda_graphs, engine_alltoall, within

if TYPE_CHECKING:
    from aurora_vllm.traffic_recorder import ChoiceCounter, EngineFacts, KeptCounter
    from aurora_vllm.worker_integration import WorkerIntegration

LOG = logging.getLogger("vllm.aurora")
ROUTER_BIAS = "e_score_correction_bias"  # of all ranks' experts; vLLM keeps it beside this rank's weights


def patch_model_runner(worker: Any, patched: PatchedWorker, config: Any) -> None:
    """Wraps methods of a vLLM worker and its model runner.

    Args:
        worker: vLLM's worker; a method `aurora` for `collective_rpc` is added to it.
        patched: state that the patches share, with the integration.
        config: vLLM's configuration.
    """
    integration = patched.integration
    assert integration is not None
    runner = worker.model_runner
    execute, dummy, load = runner.execute_model, runner._dummy_run, worker.load_model
    warm_up, warm = worker.compile_or_warm_up_model, False

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **named: Any) -> Any:
        real_tokens = scheduler_output.total_num_scheduled_tokens if warm and not named.get("dummy_run") else 0
        with naming_lost_ranks(integration.files), integration.forward_pass(real_tokens) if real_tokens else nullcontext():
            return execute(scheduler_output, *args, **named)  # without tokens it calls `_dummy_run`, runs no pass, or warms up

    @functools.wraps(dummy)
    def dummy_run(*args: Any, **named: Any) -> Any:
        with naming_lost_ranks(integration.files), integration.forward_pass(0):
            return dummy(*args, **named)

    @functools.wraps(load)
    def load_model(*args: Any, **named: Any) -> Any:
        loaded = load(*args, **named)
        if config.parallel_config.enable_eplb and find("vllm.platforms:current_platform").is_cpu():
            register_with_eplb(runner, config)
        _begin_serving(runner.model, patched, config, getattr(runner, "eplb_state", None))
        return loaded

    if (sample := getattr(runner, "sample_tokens", None)) is not None:

        @functools.wraps(sample)
        def sample_tokens(*args: Any, **named: Any) -> Any:
            with naming_lost_ranks(integration.files):
                integration.progress.leave()
                sampled = sample(*args, **named)  # EPLB moves experts in it
                integration.progress.idle()
                return sampled

        runner.sample_tokens = sample_tokens

    @functools.wraps(warm_up)
    def compile_or_warm_up_model(*args: Any, **named: Any) -> Any:
        nonlocal warm
        warm = False  # the second model runner warms up by scheduled passes, whose tokens are nobody's
        warmed_up = warm_up(*args, **named)
        warm = True
        integration.progress.serve()
        return warmed_up

    if (capture := getattr(runner, "capture_model", None)) is not None:  # nothing may wait for the GPU during a capture
        runner.capture_model = within(lambda: integration.records.between_passes)(capture)
    watch_steps(integration.progress)
    runner.execute_model, runner._dummy_run, worker.load_model = execute_model, dummy_run, load_model
    worker.compile_or_warm_up_model = compile_or_warm_up_model
    worker.aurora = MethodType(lambda _self, *words: integration.records.command(*words), worker)
    worker.shutdown = MethodType(_ending(worker.shutdown, integration), worker)


def watch_steps(progress: RankProgress) -> None:
    """Patches vLLM to record in `progress` when this rank waits at the start of a pass, where ranks exchange token counts."""
    for check in needed("steps"):
        if check.missing() is None:
            run_within(check, lambda: progress.exchange[STEP])


def watch_balancer(balancer: Any) -> Callable[[], tuple[str, int]] | None:
    """Returns a function that returns (state of EPLB's background thread, number of layers whose moves it has begun).

    Returns None if there is no such thread, or if this vLLM fails the API checks.

    Args:
        balancer: vLLM's EplbState; None: EPLB is off.
    """
    if balancer is None or not balancer.is_async or any(lacks("balancer")):
        return None
    doing, begun = RESTS, 0

    @contextmanager
    def at(activity: str) -> Iterator[None]:
        nonlocal doing, begun
        doing, begun = activity, begun + (activity == MOVES)
        yield
        doing = RESTS

    plan, move = needed("balancer")
    run_within(plan, lambda: at(PLANS))
    run_within(move, lambda: at(MOVES))

    def state() -> tuple[str, int]:
        if (thread := balancer.async_worker) is None:
            return NO_BALANCER, 0
        models = balancer.model_states.values()
        activity = READY if any(model.pending_result is not None for model in models) else doing
        if activity == RESTS and any(model.rebalanced for model in models):
            activity = WAITS
        return activity if thread.is_alive() else ENDED, begun

    return state


def run_within(check: ApiCheck, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Makes the function of a module that a check is of run in a context manager."""
    setattr(find(f"{check.where.partition(':')[0]}:"), check.name, within(context)(find(check.where)))


def _ending(shutdown: Callable[[], None], integration: WorkerIntegration) -> Callable[[Any], None]:
    """Writes the records before the worker shuts down, as it does on Ctrl-C and SIGTERM."""

    @functools.wraps(shutdown)
    def end_and_shut_down(_self: Any) -> None:
        if integration.watchdog is not None:
            integration.watchdog.end()
        integration.records.end()
        shutdown()

    return end_and_shut_down


def _begin_serving(model: Any, patched: PatchedWorker, config: Any, balancer: Any = None) -> None:
    """Finds the loaded model's MoE layers, begins the integration's records, and to follow the traffic by EPLB's `balancer`."""
    integration = patched.integration
    assert integration is not None
    assert integration.status is not None
    patched.layers = [layer for layer in model.modules() if getattr(layer, "aurora_layer", None) is not None]
    apart = [layer for layer in model.modules() if hasattr(layer, "capture_fn") and hasattr(layer, "layer_id")]  # as MegaMoE's
    by_maps = not config.parallel_config.enable_eplb and integration.served.plan is not None
    sources = patched.layers or ([] if by_maps else apart)
    if not sources:
        integration.served.disable()
        integration.status.report_disabled("the model's experts are of a kind that the plugin does not know")
        return
    decoder_layers = {} if patched.layers else {number: layer.layer_id for number, layer in enumerate(apart)}
    for number, layer in enumerate(patched.layers):
        if (checkpoint := integration.served.checkpoint) is None:
            decoder_layers[number], layer.aurora_layer = layer.aurora_layer, number
        else:
            decoder_layers[layer.aurora_layer] = checkpoint.layers[layer.aurora_layer]
    unplanned = [source for source in sources if getattr(source, "planned_physical_P", None) is None]
    if integration.served.physical_LP is not None and patched.late_LP is not None:
        late = "follow the traffic from vLLM's placement" if integration.settings.adapt else "move to the plan's places then"
        LOG.info("aurora: experts are loaded together, so they stay until EPLB first rearranges them, and %s", late)
    elif integration.served.physical_LP is not None and unplanned:
        integration.status.report_degraded("vLLM has no EPLB for this model, so the plan places no experts")
    if integration.watchdog is not None:
        integration.watchdog.balancer = watch_balancer(balancer)
    facts = _engine_facts(config, integration, sources, model)
    if integration.settings.adapt and not integration.served.disabled and config.parallel_config.enable_eplb:
        if balancer is None or not balancer.model_states:
            integration.status.report_degraded(
                "adapt: vLLM has no EPLB for this model, so its experts do not follow the traffic"
            )
        else:
            from aurora_vllm.vllm_internals.expert_moves import follow_traffic

            follow_traffic(patched, balancer, facts, config.model_config.served_model_name)
    choices = None
    if integration.settings.record is not None:
        try:
            choices = _choice_counter(patched, config, model, decoder_layers, facts)
        except (BadInput, ValueError) as error:
            integration.status.report_degraded(f"nothing is recorded: {error}")
    engine = None
    if integration.served.order != "stock" and integration.settings.order in ("auto", "push"):
        most_tokens = config.scheduler_config.max_num_batched_tokens
        engine = engine_alltoall(patched, most_tokens, cuda_graphs(config)) if patched.layers else None
        if engine is None:
            integration.served.use_stock_alltoall()
    integration.begin_serving(facts, config.model_config.served_model_name, decoder_layers, choices, engine)
    if integration.settings.colocate is not None:

        def release_gpu(*_args: Any) -> None:  # what a hook returns takes the place of the answer
            integration.time_slices.release_gpu()

        model.register_forward_pre_hook(lambda *_: integration.hold_gpu())
        model.register_forward_hook(release_gpu, always_call=True)


def _choice_counter(
    patched: PatchedWorker, config: Any, model: Any, decoder_layers: dict[int, int], facts: EngineFacts
) -> ChoiceCounter | KeptCounter:
    """Binds the routers to a buffer that captured passes write too, on CPUs to what keeps their choices where that is enough.

    Raises:
        BadInput, ValueError: if this vLLM cannot.
    """
    from aurora_vllm.traffic_recorder import ChoiceCounter, KeptCounter

    check_api("record")
    if config.aux_output_config.enable_return_routed_experts:
        raise BadInput("--enable-return-routed-experts takes the routers' choices")
    runners = [runner for runner in model.modules() if hasattr(runner, "do_naive_dispatch_combine")]
    on_host = find("vllm.platforms:current_platform").is_cpu() and config.parallel_config.tensor_parallel_size == 1
    if on_host and {runner.layer_id for runner in runners if _gives_own_rows(runner)} == set(decoder_layers.values()):
        counter = KeptCounter(decoder_layers, facts.layers, facts.experts)
        for runner in runners:
            runner.router.set_capture_fn(counter.keeper(runner.layer_id))
        return counter
    module = find(f"{MOE}.routed_experts_capturer:")
    capturer = module.RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
    module.bind_routed_experts_capturer(model, capturer)
    patched.capturer = capturer
    return ChoiceCounter(capturer.device_buffer, decoder_layers, facts.layers, facts.experts)


def _gives_own_rows(runner: Any) -> bool:
    """Returns whether the router of a MoE layer gives the choices of this rank's rows, one tensor in each pass."""
    apart = runner.do_naive_dispatch_combine or runner._quant_method.is_monolithic
    return not apart and hasattr(runner.router, "set_capture_fn")


def _engine_facts(config: Any, integration: WorkerIntegration, layers: list[Any], model: Any) -> EngineFacts:
    """Sizes of this rank's model, as a profile counts them; `layers`: its experts, of the kind that vLLM or the model has."""
    from aurora_vllm.traffic_recorder import EngineFacts

    first, checkpoint = layers[0], integration.served.checkpoint
    shape = getattr(first, "moe_config", first)
    of_experts = [parameter for name, parameter in first.named_parameters() if name != ROUTER_BIAS]
    weights = of_experts or list(first.get_expert_weights())
    local = first.local_num_experts if shape is not first else first.num_local_experts
    expert_parameters = {id(parameter) for layer in layers for parameter in layer.parameters()}
    row_bytes = (first.hidden_size if shape is first else shape.hidden_dim) * config.model_config.dtype.itemsize
    decoder_layers = config.model_config.hf_text_config.num_hidden_layers
    return EngineFacts(
        model=Path(config.model_config.model).name,
        fingerprint="" if checkpoint is None else checkpoint.fingerprint,
        engine=f"vllm {find('vllm:__version__')}",
        kind=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        rank=integration.rank,
        ranks=integration.ranks,
        top_k=first.top_k,
        layers=len(layers) if checkpoint is None else len(checkpoint.layers),
        experts=shape.num_logical_experts,
        dispatch_bytes=row_bytes,
        combine_bytes=row_bytes,
        expert_bytes=sum(p.numel() * p.element_size() for p in weights) // local,
        other_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in expert_parameters),
        dense_layers=() if checkpoint is None else tuple(sorted(set(range(decoder_layers)) - set(checkpoint.layers))),
    )
