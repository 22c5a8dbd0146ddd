"""Begins to serve a loaded model: finds its MoE layers, and what is recorded, followed and watched of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aurora.errors import BadInput
from aurora_vllm.stuck_rank import ENDED, MOVES, NO_BALANCER, READY, RESTS, STEP, WAITS
from aurora_vllm.vllm_internals.api_checks import MOE, check_api, find, lacks
from aurora_vllm.vllm_internals.expert_moves import TRANSFER
from aurora_vllm.vllm_internals.patches import PatchedWorker, engine_layers, within
from aurora_vllm.vllm_internals.replaced import replace

if TYPE_CHECKING:
    from aurora_vllm.traffic_recorder import ChoiceCounter, EngineFacts, KeptCounter
    from aurora_vllm.worker_integration import WorkerIntegration

LOG = logging.getLogger("vllm.aurora")
STEPS = "vllm.v1.worker.dp_utils:_synchronize_dp_ranks", "vllm.v1.worker.gpu.dp_utils:sync_cudagraph_and_dp_padding"
ROUTER_BIAS = "e_score_correction_bias"  # of all ranks' experts; vLLM keeps it beside this rank's weights


def watch_steps(integration: WorkerIntegration) -> None:
    """Patches vLLM to record when this rank waits at the start of a pass, where ranks exchange token counts."""
    for lack in lacks("steps"):
        LOG.warning("aurora: no watchdog where passes begin: %s", lack)
        return
    for where in STEPS:
        replace(where, within(lambda: integration.progress.exchange[STEP]))


def watch_balancer(patched: PatchedWorker, balancer: Any) -> Callable[[], tuple[str, int]] | None:
    """Returns a function that returns (state of EPLB's background thread, number of layers whose moves it has begun).

    Returns None if there is no such thread, and, with a warning, if this vLLM fails the API checks.

    Args:
        patched: state that the patches share.
        balancer: vLLM's EplbState; None: EPLB is off.
    """
    if balancer is None or not balancer.is_async:
        return None
    for lack in lacks("balancer"):
        LOG.warning("aurora: no watchdog of EPLB's background thread: %s", lack)
        return None
    begun = [0]

    @contextmanager
    def moves() -> Iterator[None]:
        begun[0] += 1
        patched.balancer_does = MOVES
        yield
        patched.balancer_does = RESTS

    replace(TRANSFER, within(moves))

    def state() -> tuple[str, int]:
        if (thread := balancer.async_worker) is None:
            return NO_BALANCER, 0
        models = balancer.model_states.values()
        activity = READY if any(model.pending_result is not None for model in models) else patched.balancer_does
        if activity == RESTS and any(model.rebalanced for model in models):
            activity = WAITS
        return activity if thread.is_alive() else ENDED, begun[0]

    return state


def begin_serving(model: Any, patched: PatchedWorker, config: Any, balancer: Any = None) -> None:
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
        integration.watchdog.balancer = watch_balancer(patched, balancer)
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
    engine = engine_layers(patched) if integration.served.order == "push" else None
    integration.begin_serving(facts, config.model_config.served_model_name, decoder_layers, choices, engine)


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
